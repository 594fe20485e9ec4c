"""The calls of a worker about keys and their values: they create, change and read them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.arrays import Arguments, Keys, digest_of, exchanging, named, receiving, sending
from aiokv.core import stimuli as st
from aiokv.core.keys import check_same_spec
from aiokv.core.tables import check_sparse
from aiokv.operations.base import SLOW
from aiokv.operations.members import MemberOperations
from aiokv.sparse import (
    RowSparse,
    aligned,
    is_sparse,
    pulling,
    pulling_rows,
    refuse_sparse,
    sending_rows,
    sparse_nbytes,
    sparse_spec,
)
from aiokv.staging import stage
from aiokv.training.guard import Guard
from aiokv.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiokv.codec import Codec as PushCodec
    from aiokv.types import Key


class ValueOperations(MemberOperations):
    """The part of `Operations` that deals with keys and values."""

    _guard: Guard = Guard()
    """Refuses to push what must not be."""

    async def init(
        self,
        key: Keys,
        value: Any = None,
        *,
        policy: str | None = None,
        group: Iterable[int] = (),
        timeout: float | None = None,
    ) -> None:
        """Create keys. Every worker of their group calls it; the root's values win, the others wait for them.

        The root is the group's first rank. The same value a second time is no error, and changes nothing.

        Args:
            key: one key, a list of keys, or a dict of keys and arrays, or row-sparse values (see `init_rows`).
            value: the array of the one key, or the list of theirs.
            policy: how pushes become updates: "bsp", "asp", or "sum" for rounds as of bsp whose value is the sum of
                the pushes, whatever update rule is set; the worker's own when not given.
            group: the ranks whose pushes make a round; all when not given. Other ranks can only read the keys.
            timeout: seconds.

        Raises:
            AlreadyInitializedError: the key was initialised with another value before.
            SpecMismatchError: the root's value has another shape or dtype.
            PolicyError: unknown policy, or the root's is another one.
            MembershipError: this worker is not in the group, or the root's group is another one.
        """
        options = st.KeyOptions(policy or "", tuple(group))
        await self._init(await self._sending(key, value, lists=False), options, timeout)

    async def init_rows(
        self,
        key: Key,
        shape: tuple[int, ...],
        dtype: Any = "float32",
        *,
        rows: RowSparse | None = None,
        initializer: Mapping[str, Any] | None = None,
        lazy: bool = True,
        policy: str | None = None,
        group: Iterable[int] = (),
        timeout: float | None = None,
    ) -> None:
        """Create a row-sparse key: a table whose rows take memory when they are used, however many there are.

        It is pushed with `RowSparse` values and read with `row_sparse_pull`. `init` with a `RowSparse` does the same
        with what is the default here. See `init` for the rest.

        Args:
            key: the key.
            shape: of the whole table; rows lie along its first dimension.
            dtype: of its elements.
            rows: rows that begin with these values.
            initializer: how all other rows begin: `{"name": "zeros"}`, or `{"name": "normal", "scale": 0.01,
                "seed": 0}`, or "uniform" in the place of "normal"; see `aiokv.initializers`. "zeros" when not given.
            lazy: an update changes only rows that got a gradient. Otherwise the rule sees a gradient of 0 for every
                other row that was given or pushed before, so that momentum and weight decay go on.
            policy: as in `init`.
            group: as in `init`.
            timeout: seconds.

        Raises:
            ConfigError: the initializer can't be.
            SpecMismatchError: shape and dtype can't be, or are not those of `rows`.
        """
        value = RowSparse.empty(shape, dtype) if rows is None else rows
        check_same_spec(key, TensorSpec(tuple(shape), np.dtype(dtype).name), value.spec)
        options = st.KeyOptions(policy or "", tuple(group), lazy=lazy, initializer=initializer or {})
        await self._init(await self._sending(key, value), options, timeout)

    async def _sending(self, key: Keys, value: Any, *, lists: bool = True) -> Arguments:
        keys, values = named(key, value)
        sparse = [(name, each) for name, each in zip(keys, values, strict=True) if is_sparse(each)]
        if not sparse:
            return sending(key, value, lists=lists)
        bounds = [self._session.row_bounds(name, sparse_spec(name, each)) for name, each in sparse]
        nbytes = SLOW if self._merger.devices else sum(sparse_nbytes(each) for _, each in sparse)
        return await self._prepare(functools.partial(sending_rows, keys, values, bounds, self._merger), nbytes)

    async def _init(self, arguments: Arguments, options: st.KeyOptions, timeout: float | None) -> None:
        await self._merge(arguments)
        if self.rank == min(options.group, default=0):
            nbytes = sum(source.nbytes for source in arguments.sources)
            options.digests = await self._compute(lambda: tuple(map(digest_of, arguments.sources)), nbytes)
        seconds = self._seconds(timeout)
        transfer = st.Operation.INIT, arguments.tensors, seconds
        rows = arguments.rows
        await self._call(lambda call: st.Transfer(call, *transfer, options=options, rows=rows), arguments)

    async def broadcast(
        self, key: Keys, value: Any = None, out: Any = None, *, priority: int = 0, timeout: float | None = None
    ) -> Any:
        """Create keys, and receive the root's values. The arguments and errors are those of `init` and `pull`.

        Args:
            key: one key, a list of keys, or a dict of keys and arrays.
            value: the array of the one key, or the list of theirs.
            out: the array to receive into, or a list or dict of them as the keys are; new arrays when not given.
            priority: as in `push`.
            timeout: seconds, for each of both.

        Returns:
            The array, or a list of the arrays in the order of the keys.
        """
        refuse_sparse("broadcast", *named(key, value))
        arguments = exchanging(key, value, out, lists=False)
        await self.init(key, value, timeout=timeout)
        arguments.sources, arguments.lists = [], {}
        await self._fetch(st.Operation.PULL, arguments, timeout, priority)
        return arguments.finish()

    async def delete(self, *keys: Key, timeout: float | None = None) -> None:
        """Forget keys, values and all. Every worker calls it with the same keys, and waits for the others.

        Calls for these keys that are still pending end with a `KeyDeletedError`. Afterwards the keys can be
        initialised again, with another shape too.

        Raises:
            BarrierTimeoutError: names the ranks that did not come.
        """
        seconds = self._seconds(timeout)
        names = list(keys)
        # Nobody uses the keys between the two barriers.
        await self.barrier(f"aiokv: delete {names!r}", timeout=timeout)
        await self._call(lambda call: st.DeleteKeys(call, names, seconds))
        await self.barrier(f"aiokv: deleted {names!r}", timeout=timeout)

    async def push(
        self, key: Keys, value: Any = None, *, priority: int = 0, timeout: float | None = None
    ) -> dict[Key, str]:
        """Contribute to the keys' next update.

        In sync it returns when the round is closed, in async when the update is applied; see `docs/policies.md`.

        Args:
            key: one key, a list of keys, or a dict of keys and arrays.
            value: the array of the one key, or the list of theirs. For a row-sparse key a `RowSparse` or a SciPy CSR
                matrix; one without rows takes part in the round too.
            priority: calls of a higher one go first; the bytes of lower ones go on behind them.
            timeout: seconds.

        Returns:
            The keys to which the contribution does not count, and why: "late", "stale" or "evicted". Only policies that
            drop some have them; see also `dropped`.

        Raises:
            UnknownKeyError: the key is not initialised.
            SpecMismatchError: another shape or dtype than the key has.
        """
        result = await self._transfer(st.Operation.PUSH, await self._sending(key, value), timeout, priority)
        return result or {}

    async def pull(self, key: Keys, out: Any = None, *, priority: int = 0, timeout: float | None = None) -> Any:
        """Read the keys, at a round at least as new as this worker's last push of each.

        Args:
            key: one key, a list of keys, or a dict of keys and the arrays to receive into.
            out: the array of the one key, or the list of theirs; new ones when not given.
            priority: as in `push`.
            timeout: seconds.

        Returns:
            The array, or a list of the arrays in the order of the keys.

        Raises:
            UnknownKeyError: the key is not initialised.
            SpecMismatchError: `out` has another shape or dtype than the key, or can't be written.
        """
        arguments = receiving(key, out, self._dense_spec)
        await self._fetch(st.Operation.PULL, arguments, timeout, priority)
        return arguments.finish()

    async def wait_for_round(self, key: Key, newer_than: int | None = None, *, timeout: float | None = None) -> int:
        """Wait until a newer round of a key is closed, and its value made, than the one that this worker has read.

        A gradient that is computed at an older one may be one that nobody waits for any longer; see `docs/policies.md`.
        A wait that is cancelled costs nothing.

        Args:
            key: a key that this worker has initialised; of a tensor that is cut, its first part counts.
            newer_than: another round than the one that was read last, such as what this method has returned.
            timeout: seconds.

        Returns:
            The round. Where a policy does not decide rounds for all keys at once, it is the version of the value.

        Raises:
            UnknownKeyError: this worker has not initialised the key.
            RoundTimeoutError: there was none within `timeout`.
        """
        seconds = self._seconds(timeout)
        number: int = await self._call(lambda call: st.AwaitRound(call, key, newer_than, seconds))
        return number

    def _dense_spec(self, key: Key) -> TensorSpec | None:
        check_sparse(key, is_sparse=self._session.is_sparse(key), wanted=False)
        return self._session.spec(key)

    async def row_sparse_pull(
        self,
        key: Key | list[Key],
        out: Any = None,
        row_ids: Any = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Any:
        """Read some rows of a row-sparse key, at a round at least as new as this worker's last push of it.

        Args:
            key: one key, or a list of them.
            out: an array of the whole shape, or a list of such arrays that all get the same; rows that are not asked
                for become 0. None for a `RowSparse` of the rows. For a list of keys, a list with one of these for each.
            row_ids: whole numbers in any order and shape; each counts once. For a list of keys, a list with those of
                each.
            priority: as in `push`.
            timeout: seconds.

        Returns:
            `out`, or a `RowSparse` with the rows asked for, increasing; a list of them for a list of keys.

        Raises:
            UnknownKeyError: the key is not initialised.
            KeyUseError: row ids are missing, or `out` is and this worker has not initialised the key.
            SpecMismatchError: the key is dense, a row id is not in it, or `out` has another shape or dtype.
        """
        keys, outs, ids = aligned(key, out, row_ids) if isinstance(key, list) else ([key], [out], [row_ids])
        session = self._session
        pulls = [
            pulling_rows(name, into, wanted, session.spec(name), session.row_bounds)
            for name, into, wanted in zip(keys, outs, ids, strict=True)
        ]
        arguments = pulling(pulls)
        await self._fetch(st.Operation.PULL, arguments, timeout, priority)
        for pull, values in zip(pulls, arguments.targets, strict=True):
            pull.rows.values = values
            pull.finish()
        results = [pull.rows if into is None else into for pull, into in zip(pulls, outs, strict=True)]
        return results if isinstance(key, list) else results[0]

    async def pushpull(
        self, key: Keys, value: Any = None, *, out: Any = None, priority: int = 0, timeout: float | None = None
    ) -> Any:
        """Push, and receive the value that the update makes, in one round trip.

        Args:
            key: one key, a list of keys, or a dict of keys and arrays.
            value: the array of the one key, or the list of theirs.
            out: the array to receive into, or a list or dict of them as the keys are; may be the pushed ones. New
                arrays when not given.
            priority: as in `push`.
            timeout: seconds.

        Returns:
            The array, or a list of the arrays in the order of the keys.

        Raises:
            UnknownKeyError: a key is not initialised.
            SpecMismatchError: another shape or dtype than the key has.
        """
        refuse_sparse("pushpull", *named(key, value))
        arguments = exchanging(key, value, out)
        await self._fetch(st.Operation.PUSHPULL, arguments, timeout, priority)
        return arguments.finish()

    # --- inside ---

    async def _transfer(
        self, operation: st.Operation, arguments: Arguments, timeout: float | None, priority: int = 0
    ) -> Any:
        seconds = self._seconds(timeout)
        await self._ready(operation, arguments)
        transfer = operation, arguments.tensors, seconds, priority
        result = await self._call(lambda call: st.Transfer(call, *transfer, rows=arguments.rows), arguments)
        if arguments.ahead:
            ahead = arguments.ahead
            await self._use(arguments.receive_ahead, arguments.ahead_nbytes)
            self._reuse([array for array, _ in ahead])
        return result

    async def _fetch(self, operation: st.Operation, arguments: Arguments, timeout: float | None, priority: int) -> None:
        """Carry out a call that receives; at its end there is everything on the devices, too."""
        if not arguments.device_outs:
            await self._transfer(operation, arguments, timeout, priority)
            return
        staged = await self._prepare(functools.partial(stage, arguments, self._merger.devices), SLOW)
        try:
            await self._transfer(operation, arguments, timeout, priority)
        except BaseException:
            # Nobody writes to the arrays any longer when the call has ended.
            await self._use(staged.wait, SLOW)
            raise
        await self._use(staged.copy, SLOW)

    async def _merge(self, arguments: Arguments, codec: PushCodec | None = None, *, measures: bool = False) -> None:
        if arguments.lists:
            nbytes = SLOW if self._merger.devices else arguments.listed_nbytes
            await self._prepare(lambda: arguments.merge(self._merger, codec, measures=measures), nbytes)

    async def _ready(self, operation: st.Operation, arguments: Arguments) -> None:
        """Put together what a call sends, and refuse what must not be pushed."""
        pushes = operation in {st.Operation.PUSH, st.Operation.PUSHPULL}
        codec = self._session.compression.push
        # Dense keys that are sent with rows are not compressed.
        keeps = pushes and not arguments.rows
        await self._merge(arguments, codec if keeps else None, measures=pushes and self._guard.looks)
        if keeps and codec != self._session.compression.push:
            # It was changed meanwhile.
            await self._prepare(arguments.bring, SLOW)
        if self._guard.looks and pushes:
            nbytes = sum(source.nbytes for source in arguments.sources)
            norm = await self._prepare(lambda: self._guard.measure(arguments), nbytes)
            self._guard.admit(arguments.keys, norm)
