"""The calls of a worker, as its user makes them, whatever carries them out."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from aiokv import checkpoints, reseeding, snapshot
from aiokv.arrays import Arguments, Keys, digest_of, exchanging, named, receiving, sending
from aiokv.cluster_reading import read_residuals
from aiokv.codec.formats import warm_up
from aiokv.commands import plain
from aiokv.commands.registry import check_name
from aiokv.core import stimuli as st
from aiokv.core.compression import make_compression
from aiokv.core.keys import check_same_spec
from aiokv.core.merging import Merging
from aiokv.core.rows import check_sparse
from aiokv.errors import CodecError, CommandError, ConfigError
from aiokv.groups import Group
from aiokv.guard import Guard
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
from aiokv.types import Tally, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.codec import Codec as PushCodec
    from aiokv.compressing import Compressor
    from aiokv.core.session import Session
    from aiokv.list_sums import Merger
    from aiokv.reseeding import Reseeded
    from aiokv.residual_journal import ResidualJournal
    from aiokv.types import Key

T = TypeVar("T")

CAPABILITIES = {"optimizer": True}
"""What a store may be asked about -> whether all stores of this package can do it."""

PROFILE_ACTIONS = ("start", "stop", "resume", "dump")

Codec = str | Mapping[str, Any] | None
"""A codec by its name, or as a dict of `type` and parameters; None: none."""

SLOW: Final = 1 << 30
"""Stands for the bytes of a computation that takes seconds."""


class Operations(ABC):
    """What a worker can do.

    Every call takes one key with its array, a list of keys with a list of arrays, or a dict of them, and `timeout` in
    seconds (default: `Config.call_timeout`). Where a key has one array it may have a list of them, one for each device:
    what is pushed is their sum, made in the order of the list, low precisions in float32; what is received goes to all
    of them. Arrays may lie on the devices that the store uses; see `docs/device.md`. Many calls may be in flight at
    once. A call that is cancelled or times out gives its arrays back at once; what it pushed still counts. Do not
    change an array while a call uses it.

    All methods raise:
        ClosedError: the client is not connected.
        CallTimeoutError: the deadline passed; the message names the missing ranks, key and round, or node.
        WorkerLostError, ServerLostError, SchedulerLostError: a member that the call needs is gone.
    """

    _session: Session
    _guard: Guard = Guard()
    """Refuses to push what must not be."""
    _merger: Merger
    """Sums the arrays that a call gives for one key."""
    _compressor: Compressor

    _most_bytes = sys.maxsize
    """How long a message can be."""

    _checkpoint_folder = ""
    _journal: ResidualJournal | None = None
    """Where it is kept what compression has left of gradients, for who takes this worker's place."""
    """Where files have to be that are saved and loaded; empty: anywhere."""

    @abstractmethod
    async def _call(self, make: Callable[[int], st.Stimulus], arguments: Arguments | None = None) -> Any:
        """Give a call to the session, under a number, and return its result when it is over."""

    @abstractmethod
    def _seconds(self, timeout: float | None) -> float:
        """Return how long a call may take."""

    async def _compute(self, function: Callable[[], T], nbytes: int) -> T:
        """Return what a function over so many bytes returns; carriers with an event loop do not let it wait."""
        del nbytes
        return function()

    async def _use(self, function: Callable[[], T], nbytes: int) -> T:
        """As `_compute`, for what reads or writes the caller's arrays: it has ended when this has, cancelled or not."""
        return await self._compute(function, nbytes)

    async def _prepare(self, function: Callable[[], T], nbytes: int) -> T:
        """Compute what a call sends: as `_use`, but of two calls the one that began first goes first."""
        return await self._use(function, nbytes)

    # --- who we are ---

    @property
    def rank(self) -> int:
        """This worker's rank, 0 <= rank < num_workers."""
        return self._session.rank

    @property
    def num_workers(self) -> int:
        """How many workers the cluster was declared with."""
        return self._session.num_workers

    @property
    def num_dead_nodes(self) -> int:
        """How many workers and servers are lost, as far as this worker knows."""
        return self._session.num_lost

    @property
    def dropped(self) -> dict[str, int]:
        """How many contributions of this worker to a key count nowhere, by reason: "late" or "stale"."""
        return self._session.dropped

    @property
    def reconnects(self) -> int:
        """How often a connection to a server has ended and was made again; nothing is lost by that."""
        return self._session.reconnects

    @property
    def torn_reads(self) -> int:
        """How many calls of this worker have got values of several rounds; see `docs/policies.md`."""
        return self._session.torn_reads

    @property
    def uses_devices(self) -> bool:
        """Whether arrays may lie on CUDA devices: `device="cuda"`."""
        return bool(self._merger.devices)

    def group(self, ranks: Iterable[int]) -> Group:
        """Return some of the workers, to give them keys and barriers of their own.

        Raises:
            MembershipError: no ranks, or one twice.
        """
        return Group(self, tuple(sorted(ranks)))

    def is_capable(self, name: str) -> bool:
        """Say whether this store can do something; "optimizer": update by a rule.

        Raises:
            ConfigError: there is no such capability.
        """
        if name not in CAPABILITIES:
            known = ", ".join(CAPABILITIES)
            raise ConfigError(f"unknown capability {name!r}; known: {known}", expected=known, got=repr(name))
        return CAPABILITIES[name]

    # --- values ---

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
            The keys to which the contribution does not count, and why: "late" or "stale". Only policies that drop some
            have them; see also `dropped`.

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

    async def barrier(self, name: str = "", *, group: Iterable[int] = (), timeout: float | None = None) -> None:
        """Wait until every worker of a group has called it with this name. Ranks are counted, not calls.

        Args:
            name: any text.
            group: the ranks that are waited for; all when not given.
            timeout: seconds.

        Raises:
            BarrierTimeoutError: names the ranks that did not come; the barrier can be used again.
            MembershipError: this worker is not in the group.
        """
        seconds = self._seconds(timeout)
        ranks = tuple(group)
        await self._call(lambda call: st.EnterBarrier(call, name, seconds, ranks))

    async def finish(self, *, timeout: float | None = None) -> None:
        """Say that this worker has no more batches: no round and no barrier waits for it from now on.

        The pushes that were called before still count. It stays a member and can still read. What a mean is over then
        is said by `reduction` of `set_optimizer`.
        """
        seconds = self._seconds(timeout)
        await self._call(lambda call: st.Finish(call, seconds))

    async def resume_step(self, *, timeout: float | None = None) -> int:
        """Return how many steps this worker has made already, and go on from there: 0 in a new job.

        For a process that takes the place of a lost one (`on_worker_loss = "respawn"`), that goes on with a checkpoint
        (`aiokv run --resume`), or that joins a running job (`max_workers`): there it returns how many steps the others
        have made, and they wait for this worker from the next one on. Its program begins as it always does, up to its
        `init`, and then asks:

            for step in range(await kv.resume_step(), steps):
                ...

        What is read before the first push is what that step was computed from. In sync rounds the step is made again
        with the same bits, and what had been pushed of it counts once. Only a worker that pushes all its keys in every
        step, and waits for that before the next step, can go on.

        Raises:
            UnknownKeyError: no key is initialised.
            MembershipError: this worker has pushed already, or who was in its place has pushed some keys more often.
            PolicyError: a key has a policy with which nobody can join a running job.
            CallTimeoutError: the others have not come to the end of a step in time; names them.
            DataError: what compression had left of this worker's gradients is damaged in the checkpoint.
        """
        seconds = self._seconds(timeout)
        step = int(await self._call(lambda call: st.GoOn(call, seconds)))
        await self._resume_compression(step)
        return step

    async def members(self, step: int, *, timeout: float | None = None) -> list[int]:
        """Return the ranks that push in a step, counted from 0; ascending.

        Where workers join while training goes on, a worker asks before each of its steps, and all are told the same: so
        they can deal out the step's data. So it is where a worker leaves that has called `plan_leave`. One that is
        lost, or leaves without that, counts until the others hear of it.

        Raises:
            CallTimeoutError: a worker is about to join, or to leave, and the scheduler did not say in time whether it
                does.
        """
        seconds = self._seconds(timeout)
        ranks: list[int] = await self._call(lambda call: st.AskMembers(call, step, seconds))
        return ranks

    async def plan_leave(self) -> None:
        """Say that this worker is about to leave; returns at once.

        From one of the next steps on `members` leaves this worker out: for all workers from the same step on. Until
        then it goes on as before; then it calls `leave`. So the others never wait for it, and no data is split with it
        that it does not see::

            for step in range(start, steps):
                if kv.rank not in await kv.members(step):
                    break
                ...
            await kv.leave()

        A push of a later step is refused with a `MembershipError`. Where nobody relies on this worker, or nobody could
        push any longer, it is left out at once: under `asp` and alike, when workers are lost, and with less than
        `min_workers` without it.
        """
        await self._call(st.PlanLeave)

    async def tallies(self, *, timeout: float | None = None) -> dict[int, Tally]:
        """Return what became of every worker's contributions so far, by rank: staleness, what was dropped, waits."""
        seconds = self._seconds(timeout)
        answers = await self._call(lambda call: st.ReadTallies(call, seconds))
        totals: dict[int, Tally] = {}
        for rank, one in (pair for answer in answers for pair in answer.ranks.items()):
            total = totals.setdefault(rank, Tally())
            total.applied += one.applied
            total.waited += one.waited
            total.duplicates += one.duplicates
            for counts, more in ((total.dropped, one.dropped), (total.staleness, one.staleness)):
                for name, count in more.items():
                    counts[name] = counts.get(name, 0) + count
        return dict(sorted(totals.items()))

    # --- update rule ---

    async def set_optimizer(
        self,
        /,
        name: str,
        *,
        reduction: str = "sum",
        staleness_rate: str = "1",
        timeout: float | None = None,
        **params: Any,
    ) -> None:
        """Set the servers' update rule, for all keys. Every worker may call it with the same rule.

        Without a rule the servers assign: the new value is the sum of a round's pushes, in async the last push.

        Args:
            name: of the rule, such as "assign", "sgd" or "adam"; see `aiokv.optim`.
            reduction: "sum" of the contributions; "mean": that divided by their number; "mean_of_world": by the number
                of workers of the key's group, or of the whole cluster, whether they still contribute or not; "median"
                or "trimmed_mean" of each element: one worker that is far off does little harm.
            staleness_rate: what each contribution is multiplied by before that: "1", "1/max(1,tau)" or "1/(1+tau)",
                where tau is how many versions old the value is that it was computed from. Under "bsp" it is 0. For
                keys of floats.
            timeout: seconds.
            params: the rule's parameters.

        Raises:
            OptimizerError: unknown rule, reduction or staleness rate, wrong parameter, a key that can't be updated
                so, or another rule is set.
        """
        seconds, merging = self._seconds(timeout), Merging(reduction, staleness_rate)
        await self._call(lambda call: st.ConfigureOptimizer(call, name, params, seconds, merging))

    async def change_optimizer(
        self, /, *, since: int | None = None, timeout: float | None = None, **params: Any
    ) -> int:
        """Change parameters of the update rule, from one round on, the same on all servers.

        Every worker may call it, with the same values and at the same place of its program.

        Args:
            since: the first round that the change is for; the next one that this worker pushes when not given. A
                round is counted by the most pushes of any key that a contributor has made.
            timeout: seconds.
            params: new values of `learning_rate`, `wd`, `rescale_grad`, `clip_gradient`, `lr_mult`, `wd_mult` or
                `schedule`.

        Returns:
            The first round that the change is for.

        Raises:
            OptimizerError: no rule is set, a wrong parameter, or the round is over already.
        """
        seconds = self._seconds(timeout)
        first: int = await self._call(lambda call: st.AdjustOptimizer(call, params, since, seconds))
        return first

    async def set_learning_rate(
        self, learning_rate: float, *, since: int | None = None, timeout: float | None = None
    ) -> int:
        """Change the learning rate, from one round on, the same on all servers. See `change_optimizer`."""
        return await self.change_optimizer(since=since, timeout=timeout, learning_rate=learning_rate)

    # --- policies ---

    async def set_policy(self, policy: str, *keys: Key, timeout: float | None = None) -> None:
        """Let keys follow another synchronisation policy. Every worker of their group calls it before the same step.

        What was pushed before follows the old policy, which waits for nobody any longer who has called this; what is
        pushed afterwards follows the new one, which counts anew. It returns when all servers have the new policy.
        Other calls of the keys that this worker makes meanwhile wait for it. After an error the servers may go over
        all the same once the others call; until this worker has called it again, its pushes of the keys are refused.

        Args:
            policy: its text, such as "asp" or "ssp:3"; see `docs/policies.md`.
            keys: those that change; all of this worker's that are not of policy "sum" when none is given.
            timeout: seconds.

        Raises:
            PolicyError: unknown policy, another worker asks for another one, or it is to or from "sum".
            OptimizerError: the update rule can't be used under it.
            UnknownKeyError: this worker has not initialised a key.
            MembershipError: this worker is not in a key's group.
            BarrierTimeoutError: names the ranks that did not call it.
        """
        seconds = self._seconds(timeout)
        await self._call(lambda call: st.ChangePolicy(call, policy, list(keys), seconds))

    # --- the servers themselves ---

    async def send_command_to_servers(
        self, name: str, params: Any = None, *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Let every server run a command. See `aiokv.commands`.

        It is sent behind the pushes that were made before, and not repeated: what a command does is done once.

        Args:
            name: of the command, such as "statistics".
            params: its parameters: a dict, a `msgspec.Struct`, or nothing.
            timeout: seconds.

        Returns:
            What it has returned, by the servers' numbers.

        Raises:
            CommandError: unknown command, wrong parameter, or it failed on a server.
        """
        check_name(name)
        data = {} if params is None else plain(name, params)
        seconds = self._seconds(timeout)
        answers = await self._call(lambda call: st.SendCommand(call, name, data, seconds))
        return [answers[index] for index in sorted(answers)]

    async def profile_servers(
        self, action: str, *, path: str = "profile.json", timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Let the servers record what they do, and write it down as traces for Chrome's viewer.

        Args:
            action: "start" a recording, "stop" it for a while, "resume" it, or "dump" it.
            path: for "dump": where on the servers' machines; server 0 writes "server0_profile.json" beside it.
            timeout: seconds.

        Returns:
            For each server what it says, such as the path of its file.

        Raises:
            CommandError: unknown action, or a file can't be written.
        """
        if action not in PROFILE_ACTIONS:
            known = ", ".join(PROFILE_ACTIONS)
            raise CommandError(f"unknown action {action!r}; known: {known}", expected=known, got=repr(action))
        params = {"path": path} if action == "dump" else {}
        return await self.send_command_to_servers(f"profiler.{action}", params, timeout=timeout)

    # --- compression ---

    async def set_gradient_compression(
        self, compression: Codec, /, *, pull_compression: Codec = None, timeout: float | None = None, **params: Any
    ) -> None:
        """Compress what this worker pushes from now on. Every worker calls it with the same arguments.

        Every key of floats is compressed, whatever its size; others are sent as they are. What a push did not say is
        added to the next push of that key; after turning compression off too. Workers do not wait for each other:
        compressed pushes and plain ones may make one round.

        Args:
            compression: a codec's name, such as "2bit", or `{"type": "2bit", "threshold": 0.5}`; None: none. See
                `aiokv.codec`.
            pull_compression: the same for what is pulled: it is sent as compressed difference to what this worker
                has. A value is exact only when it has not changed for a number of pulls. Takes a copy of the model on
                the worker, and one for each worker on the servers.
            timeout: seconds.
            params: the codec's parameters, besides those in the dict.

        Raises:
            CodecError: unknown codec, wrong parameter, or another worker has set another one.
        """
        push = _read_codec(compression, params)
        pull = _read_codec(pull_compression, {})
        made = make_compression(*push, *pull)
        for codec in (made.push, made.pull):
            if codec is not None:
                await self._compute(functools.partial(warm_up, codec, backend=self._compressor.backend), SLOW)
        seconds = self._seconds(timeout)
        await self._call(lambda call: st.ConfigureCompression(call, *push, *pull, seconds))

    async def compression_state(self) -> dict[Key, dict[str, Any]]:
        """Return what a checkpoint needs of this worker's compression: for each key, residual, step and codec.

        Arrays are copies; all else is None, int, float, str or dict. Wait for the pushes before.
        """
        kept = list(self._compressor.kept.items())
        return {key: await self._compute(each.state, SLOW if each.device else each.nbytes) for key, each in kept}

    async def restore_compression_state(self, state: Mapping[Key, Mapping[str, Any]]) -> None:
        """Go on as the worker of this rank would have that the state is from. Wait for all pushes before.

        Without compression, what is left goes with the next push of each key.

        Raises:
            SpecMismatchError, CodecError: the state is none. Nothing has changed.
        """
        rank, restored = self.rank, self._compressor.restored
        kept = {}
        for key, each in state.items():
            kept[key] = await self._compute(functools.partial(restored, key, each, rank), SLOW)
        self._compressor.kept.update(kept)
        await self._call(lambda call: st.RestoreResiduals(call, list(state), self._seconds(None)))

    async def _resume_compression(self, step: int) -> None:
        """Go on with what compression had left of this worker's gradients: in a checkpoint, or where it was kept.

        Args:
            step: this worker's number of steps so far. If it is another one than the checkpoint's, with which the job
                has begun, the worker has taken the place of one of this job.

        Raises:
            DataError: the checkpoint is damaged.
        """
        place, state = self._session.resumed_from, {}
        if place:
            read = functools.partial(read_residuals, place, self.rank, step, self._checkpoint_folder)
            state = await self._compute(read, SLOW)
        if self._journal is not None:
            keys = [record.key for record in self._session.records]
            kept = await self._compute(functools.partial(self._journal.begin, keys, self.rank, step), SLOW)
            state = state or kept
        if state:
            await self.restore_compression_state(state)

    # --- saving ---

    async def save(
        self,
        url: checkpoints.Url,
        *,
        keys: checkpoints.Keys = None,
        facts: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Write weights, optimizer state and update rule to one file. Every worker calls it, and waits for the others.

        Rank 0 does the work, a few parts of tensors at a time; nobody pushes meanwhile. The file is written aside and
        then gets its name, so that there is always a whole one. It is a safetensors file with a checksum. A worker that
        compresses writes what is left of its gradients beside it, to `url` and ".rank" and its rank.

        Args:
            url: a path, or an address that fsspec knows, such as "s3://bucket/name".
            keys: one key, or those that are saved; all when not given.
            facts: what else is to be kept, as JSON, such as the epoch; those of rank 0.
            timeout: seconds, for each wait of a worker for the others, and for each exchange with the servers.

        Raises:
            DataError: a file can't be written, or somebody has pushed meanwhile. It is raised on all workers, as are
                the others below, and the file of before is still there.
            UnknownKeyError: a key is not initialised.
            ConfigError: the scheduler's `chunk_bytes` makes chunks that are too large for a message with their state,
                or there are too many facts.
            BarrierTimeoutError: names the ranks that did not come.
            MembershipError: rank 0 has finished, and does not come.
            CallTimeoutError: another worker's caller has cancelled its call.
        """
        await checkpoints.save(self, url, keys, self._seconds(timeout), weights=True, facts=facts)

    async def load(
        self,
        url: checkpoints.Url,
        *,
        keys: checkpoints.Keys = None,
        check: Callable[[dict[str, Any]], object] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Go on with what `save` has written, in this cluster or another one, with any number of servers and workers.

        Every worker calls it, and waits for the others; rank 0 does the work. Keys that are not initialised are made as
        they were, others that are not in the file stay as they are. The update rule of the file is set too, with the
        changes of its parameters, and schedules go on where they were. Values that were pulled before are those of
        before. Compression goes on with what was left; see `aiokv.residuals` for another number of workers.

        Args:
            url: as for `save`.
            keys: one key, or those that are loaded; all in the file when not given.
            check: is called with the facts on every worker; when it raises, nothing has changed.
            timeout: as for `save`.

        Returns:
            The facts that `save` was given.

        Raises:
            DataError: a file is missing, damaged or not one of `save`; nothing has changed. It is raised on all
                workers, as are the others below.
            UnknownKeyError: a key is not in the file, or its values are not and it is not initialised either; nothing
                has changed.
            SpecMismatchError: of a key in the file; nothing has changed.
            MembershipError: a key that is not initialised belongs to ranks that there are not, or rank 0 does not come;
                nothing has changed.
            OptimizerError: another update rule is set; nothing has changed.
            ConfigError: as for `save`.
            BarrierTimeoutError, CallTimeoutError: as for `save`.
        """
        return await checkpoints.load(self, url, keys, self._seconds(timeout), weights=True, check=check)

    async def save_optimizer_states(
        self, url: checkpoints.Url, *, keys: checkpoints.Keys = None, timeout: float | None = None
    ) -> None:
        """Write what `save` writes, without the weights."""
        await checkpoints.save(self, url, keys, self._seconds(timeout), weights=False, facts=None)

    async def load_optimizer_states(
        self, url: checkpoints.Url, *, keys: checkpoints.Keys = None, timeout: float | None = None
    ) -> None:
        """Go on with the optimizer state of a file, of `save` too; the weights stay. See `load`."""
        await checkpoints.load(self, url, keys, self._seconds(timeout), weights=False, check=None)

    async def reseed(self, values: Mapping[Any, Any], step: int, *, timeout: float | None = None) -> Reseeded:
        """Go on in a new cluster after all servers of the one before were lost, with the weights that workers have.

        Every worker calls it, and waits for the others, in the place of `init`. The keys are made, with the weights of
        the rank that has made the most steps, which all workers then read. Rounds and schedules go on behind that
        step. The state of the update rule begins anew, which is logged as a warning; set the rule as in a new job.

        Args:
            values: this worker's weights, as a dict of arrays; what the servers have is read into them.
            step: how many steps this worker has made: of so many rounds the weights are. 0 in a new process.
            timeout: seconds, for each wait of a worker for the others, and for each exchange with the servers.

        Returns:
            The step after which the job goes on, and the rank whose weights these are.

        Raises:
            SpecMismatchError: the keys are there, and others.
            BarrierTimeoutError, CallTimeoutError: as for `save`.
        """
        return await reseeding.reseed(self, values, step, self._seconds(timeout))

    async def update_counts(self, *, timeout: float | None = None) -> dict[Key, int]:
        """Return how many updates each key has seen with its optimizer state: the t of Adam, for the last of them.

        Of all keys that this worker has initialised.
        """
        return await snapshot.count_updates(self, self._seconds(timeout))

    # --- inside ---

    async def _transfer(
        self, operation: st.Operation, arguments: Arguments, timeout: float | None, priority: int = 0
    ) -> Any:
        seconds = self._seconds(timeout)
        await self._ready(operation, arguments)
        transfer = operation, arguments.tensors, seconds, priority
        return await self._call(lambda call: st.Transfer(call, *transfer, rows=arguments.rows), arguments)

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


def _read_codec(given: Codec, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a codec's name, empty for none, and its parameters.

    Raises:
        CodecError: it is neither a name, nor a dict with one, nor None.
    """
    named: dict[str, Any] = {"type": given} if isinstance(given, str) else {}
    if isinstance(given, Mapping):
        named = dict(given)
    name = named.pop("type", "")
    expected = 'a name, or a dict with one under "type", or None'
    if not isinstance(name, str) or (bool(name) != (given is not None)) or (not name and params):
        raise CodecError(f"compression must be {expected}, got {given!r} and {dict(params)}", expected=expected)
    return name, named | dict(params)
