"""A server's memory: its slots, and for every chunk an immutable value and its optimizer state.

The store carries out what it is told and decides nothing. A value that is being sent is never changed: an update writes
another buffer, and the old one is used again when its last reader is done.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import AiokvError, SumOverflowError
from aiokv.optim import Assign
from aiokv.store.pieces import cut_state, new_state, steps_for, sums_of_squares, update
from aiokv.store.replicas import Replicas
from aiokv.store.slots import LOW, Landed, Slots, Value, widened
from aiokv.store.states import BEFORE, IDS, VALUE, check_like, checked_state, only, parts_of, piece_of, rows_of
from aiokv.store.table import Table
from aiokv.types import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from aiokv.codec import Codec
    from aiokv.initializers import Initializer
    from aiokv.kernels import Backend
    from aiokv.optim import Norms, Optimizer
    from aiokv.store.pool import Pool
    from aiokv.store.slots import Array
    from aiokv.types import Key, Peer, Slot, TensorSpec, Version

MAX_STALENESS = 1000
"""What is staler is counted under this number, so that the histogram stays small."""


@dataclass(slots=True, eq=False)
class Stored:
    """A chunk: its current value, what the optimizer keeps for it, and the number of updates with that.

    `pieces` are the keys that lie in it, `earlier` the values before that somebody may refer to.
    """

    dtype: np.dtype[Any]
    value: Value
    pieces: list[Piece]
    state: dict[str, Array] | None = None
    steps: int = 0
    earlier: dict[Version, Value] = field(default_factory=dict)


@dataclass(slots=True)
class Parts:
    """For each key in a chunk, its value and state, and the number of updates; or why they could not be had."""

    arrays: list[dict[str, Array]]
    updates: int
    error: AiokvError | None
    release: Callable[[], None]


class ParameterStore(Slots):
    """All slots and chunks of one server.

    Args:
        backend: who does the arithmetic.
        pool: where buffers come from.
    """

    def __init__(self, backend: Backend, pool: Pool | None = None) -> None:
        super().__init__(backend, pool)
        self._chunks: dict[tuple[Key, int], Stored] = {}
        self._tables: dict[tuple[Key, int], Table] = {}
        self.staleness: Counter[int] = Counter()
        """How many versions old a contribution was -> how many of those were applied, one for each chunk."""
        self.replicas = Replicas()
        """What peers have of values that they receive compressed."""

    def install(
        self, key: Key, start: int, dtype: str, size: int, slot: Slot | None, pieces: Sequence[Piece] = ()
    ) -> None:
        """Make the slot's content version 0 of a new chunk of `size` elements.

        Args:
            key: the chunk's key.
            start: its first element.
            dtype: of the elements.
            size: their number.
            slot: where they have landed; None for zeros.
            pieces: the keys in the chunk, when there are several, or rows have more than one element.
        """
        kind = np.dtype(dtype)
        value = Value(self._take(slot, size * kind.itemsize).buffer, 0)
        self._chunks[key, start] = Stored(kind, value, list(pieces) or [Piece(key, start, size)])

    def install_rows(
        self,
        key: Key,
        start: int,
        spec: TensorSpec,
        initializer: Initializer,
        slot: Slot | None,
        *,
        lazy: bool,
    ) -> None:
        """Make version 0 of a row-sparse chunk; the rows in the slot, which is freed, have values. See `Table`."""
        table = self._tables[key, start] = Table(key, start, spec, initializer, lazy=lazy)
        if slot is not None:
            table.set(*table.parse(self._slots[slot].buffer))
            self.free(slot)

    def prepare(self, codec: Codec, backend: str) -> None:
        """Decode a codec's payloads with a backend from now on; all give the same bits."""
        super().prepare(codec, backend)
        self.replicas.prepare(codec, backend)

    def difference(self, key: Key, start: int, version: Version, peer: Peer, codec: Codec | None) -> memoryview:
        """Return what brings a peer's replica of a chunk up to date: see `aiokv.store.replicas`.

        Raises:
            NotFiniteError: the value has a NaN or an infinity.
        """
        stored = self._chunks[key, start]
        assert stored.value.version == version, "a value is sent in the same breath in which it was decided"
        return self.replicas.difference(key, start, peer, stored.value.buffer.view(stored.dtype), codec)

    def divide(self, key: Key, start: int, parts: list[tuple[Key, int]]) -> None:
        """Make chunks of the keys that lie in one, given with their numbers of elements; it is no more."""
        self.replicas.forget_chunk(key, start)
        whole = self._chunks.pop((key, start))
        sizes = [size * whole.dtype.itemsize for _, size in parts]
        rows = {piece.key: piece.row_size for piece in whole.pieces}
        pieces = [Piece(name, 0, size, rows.get(name, 1)) for name, size in parts]
        versions = [*whole.earlier.values(), whole.value]
        states = None if whole.state is None else cut_state(whole.state, pieces)
        values = {value.version: self._cut(value.buffer, sizes) for value in versions}
        for i, piece in enumerate(pieces):
            earlier = {version: Value(cuts[i], version) for version, cuts in values.items()}
            value = earlier.pop(whole.value.version)
            part = self._chunks[piece.key, 0] = Stored(whole.dtype, value, [piece], None, whole.steps, earlier)
            if states is not None:
                part.state = {name: array.copy() for name, array in states[i].items()}
        for value in versions:
            self._retire(value)

    def forget(self, key: Key, start: int) -> None:
        """Drop a chunk."""
        self.replicas.forget_chunk(key, start)
        if self._tables.pop((key, start), None) is not None:
            return
        stored = self._chunks.pop((key, start))
        for value in [*stored.earlier.values(), stored.value]:
            self._retire(value)

    def dtypes(self) -> list[str]:
        """Return the dtypes of the values, each once."""
        names = [stored.dtype.name for stored in self._chunks.values()]
        return list(dict.fromkeys(names + [table.dtype.name for table in self._tables.values()]))

    def reset_states(self) -> None:
        """Forget what rules have kept so far."""
        for stored in self._chunks.values():
            stored.state, stored.steps = None, 0
        for table in self._tables.values():
            table.forget_state()

    def norms(
        self,
        key: Key,
        start: int,
        slot: Slot | None,
        rule: Optimizer,
        phase: int,
        clock: int,
        divisor: int,
        gathered: Sequence[Norms],
    ) -> list[tuple[float, ...]]:
        """Return the sums of squares that a phase before an update needs, for each key in the chunk.

        Args:
            phase: 0, then 1, and so on.
            gathered: for each phase before, the sums of all of each key.
            key, start, slot, rule, clock, divisor: as in `apply`. The slot stays.
        """
        stored = self._chunks[key, start]
        landed = self._take(None, 0) if slot is None else self._slots[slot]
        weight = stored.value.buffer.view(stored.dtype)
        steps = steps_for(rule, stored.pieces, stored.steps + 1, clock)
        total, state = self._prepare(stored, landed, rule, divisor)
        return sums_of_squares(self._backend, rule, phase, stored.pieces, steps, weight, total, state, gathered)

    def compensate(self, slot: Slot, dtype: str, key: Key, start: int, read: Version, lamda: float) -> None:
        """Make of a gradient computed at the version `read` of a chunk about that at its value; see `Backend`.

        Low precisions become float32.
        """
        stored = self._chunks[key, start]
        weight, before = (value.buffer.view(stored.dtype) for value in (stored.value, stored.earlier[read]))
        self._backend.compensate(widened(self._slots[slot], dtype), weight, before, lamda)

    def apply(
        self,
        key: Key,
        start: int,
        version: Version,
        slot: Slot | None,
        rule: Optimizer,
        clock: int,
        divisor: int,
        norms: Sequence[Norms] = (),
        read: Version | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """Make `version` of a chunk out of its current value and the sum in `slot`; free the slot.

        Args:
            key: the chunk's key.
            start: its first element.
            version: the number of the new value.
            slot: the sum of the contributions.
            rule: makes the new value.
            clock: what the rule's schedule looks at.
            divisor: the sum is divided by it first.
            norms: for each phase of the rule, the sums of squares of all of each key.
            read: the version that the contributor had read; then the value that is replaced stays until it is retired.
            keep: it stays in any case.

        Raises:
            SumOverflowError: the sum does not fit. Then, and if a rule of a user's own raises, the chunk stays as it
                is, and the slot is free.
            OptimizerError: the rule can't make the update.
        """
        stored = self._chunks[key, start]
        landed = self._take(slot, stored.value.buffer.nbytes)
        if landed.error is not None:
            self._give(landed)
            raise type(landed.error)(f"key {key!r}: {landed.error}", key=key, round=version)
        if divisor > 1 or landed.wide is not None or not isinstance(rule, Assign):
            if landed.lent:
                landed = self._copied(landed, stored.dtype, divisor)
            self._update(stored, landed, rule, clock, divisor, norms, read)
        # The sum became the new value in its place, or is it.
        stored.steps += 1
        if read is None and not keep:
            self._retire(stored.value)
        else:
            stored.earlier[stored.value.version] = stored.value
        stored.value = Value(landed.buffer, version, readers=landed.lent)
        landed.value = stored.value

    def _copied(self, lent: Landed, dtype: np.dtype[Any], divisor: int) -> Landed:
        """Return a sum to be changed in the place of one that is being sent; divided, where that takes no longer."""
        own = Landed(self._pool.take(lent.buffer.nbytes), divided=lent.divided)
        if divisor > 1 and not lent.divided and dtype not in LOW:
            with np.errstate(all="ignore"):
                np.divide(lent.buffer.view(dtype), divisor, out=own.buffer.view(dtype))
            own.divided = True
        else:
            own.buffer[:] = lent.buffer
        self._give(lent)
        return own

    def _update(
        self,
        stored: Stored,
        landed: Landed,
        rule: Optimizer,
        clock: int,
        divisor: int,
        norms: Sequence[Norms],
        read: Version | None,
    ) -> None:
        """Write the new value where the sum has landed."""
        weight = stored.value.buffer.view(stored.dtype)
        steps = steps_for(rule, stored.pieces, stored.steps + 1, clock)
        total, state = self._prepare(stored, landed, rule, divisor)
        out = None if landed.wide is None else landed.buffer.view(stored.dtype)
        seen = None
        if read is not None and read != stored.value.version:
            seen = stored.earlier[read].buffer.view(stored.dtype)
        update(self._backend, rule, stored.pieces, steps, weight, total, state, out=out, norms=norms, read=seen)

    def _prepare(self, stored: Stored, landed: Landed, rule: Optimizer, divisor: int) -> tuple[Array, dict[str, Array]]:
        """Return the sum as a rule takes it, divided once, and what the rule keeps."""
        weight = stored.value.buffer.view(stored.dtype)
        if stored.state is None:
            stored.state = new_state(self._backend, rule, weight, stored.pieces)
        total = landed.buffer.view(stored.dtype)
        if divisor > 1 or landed.wide is not None:
            total = widened(landed, stored.dtype)
        if divisor > 1 and not landed.divided:
            # A gradient that overflows shows it in its values.
            with np.errstate(all="ignore"):
                np.divide(total, divisor, out=total)
            landed.divided = True
        return total, stored.state

    def skip(self, key: Key, start: int, version: Version, slot: Slot | None) -> None:
        """Let the current value be `version` too, and free the sum that was to make another one."""
        if slot is not None:
            self.free(slot)
        self.keep(key, start, version)

    def retire(self, key: Key, start: int, versions: Sequence[Version]) -> None:
        """Forget values before the current one."""
        stored = self._chunks[key, start]
        for version in versions:
            self._retire(stored.earlier.pop(version))

    def apply_rows(
        self,
        key: Key,
        start: int,
        version: Version,
        slots: list[Slot],
        rule: Optimizer,
        clock: int,
        divisor: int,
        factors: Sequence[float] = (),
        *,
        keep: bool = False,
    ) -> None:
        """Make `version` of a row-sparse chunk out of the sum of the rows in the slots, which stay. See `apply`.

        If there are `factors`, the values of each slot are multiplied by its own one first. With `keep` the value
        before can still be read, until the next update.

        It may run in a thread, while nothing else is done with the chunk or with the slots.
        """
        table = self._tables[key, start]
        try:
            pushes = [table.parse(self._slots[slot].buffer) for slot in slots]
            table.apply(pushes, rule, clock, divisor, self._backend, factors, keep=keep)
            table.version = version
        except SumOverflowError as error:
            raise SumOverflowError(f"key {key!r}: {error}", key=key, round=version) from None

    def get_rows(self, key: Key, start: int, version: Version, rows: bytes) -> Array:
        """Return a copy of some rows of a row-sparse chunk, of its value or of the one before; `rows` are their ids."""
        table, ids = self._tables[key, start], np.frombuffer(rows, np.int64)
        return table.get(ids) if version == table.version else table.get_before(version, ids)

    def count_updated(self, key: Key, start: int, slots: list[Slot]) -> int:
        """Return how many rows at most `apply_rows` reads."""
        table = self._tables[key, start]
        return table.count_updated(sum(table.parse(self._slots[slot].buffer)[0].size for slot in slots))

    def table(self, key: Key, start: int) -> Table:
        """Return the rows of a row-sparse chunk."""
        return self._tables[key, start]

    def count_staleness(self, staleness: list[int]) -> None:
        """Take the contributions of an update into the histogram."""
        for versions in staleness:
            self.staleness[min(versions, MAX_STALENESS)] += 1

    def saved(
        self, key: Key, start: int, version: Version, name: Key, first: int, wanted: Collection[str] = ()
    ) -> tuple[dict[str, Array], int]:
        """Return what is saved of a key in a chunk: arrays, and the first row that is left.

        Args:
            key: the chunk's key.
            start: its first element.
            version: of its value.
            name: which of the keys in it.
            first: the first row, of a row-sparse chunk.
            wanted: names of arrays; all when there are none.
        """
        if (key, start) in self._tables:
            table = self._tables[key, start]
            assert table.version == version, "a state is read in the same breath in which it was decided"
            return rows_of(table, first, wanted)
        stored = self._chunks[key, start]
        assert stored.value.version == version, "a state is read in the same breath in which it was decided"
        return only(piece_of(stored, name), wanted), -1

    def is_table(self, key: Key, start: int) -> bool:
        """Tell whether a chunk is row-sparse."""
        return (key, start) in self._tables

    def hold(self, key: Key, start: int, version: Version, then: Callable[[Parts], None]) -> None:
        """Have all that is kept of a chunk, as it is now, and give it to a function; it stays so until it is released.

        The value is used as it is, since nobody changes it; state is copied.
        """
        value, stored = self.acquire(key, start, version), self._chunks[key, start]
        copied = None if stored.state is None else {name: array.copy() for name, array in stored.state.items()}
        then(Parts(parts_of(replace(stored, state=copied)), stored.steps, None, lambda: self.release(value)))

    def described(self, key: Key, start: int, name: Key) -> dict[str, tuple[str, int]]:
        """Return dtype and number of elements of each array that `saved` has of a key in a chunk."""
        if (key, start) in self._tables:
            ids, arrays = self._tables[key, start].saved()
            arrays = {IDS: ids} | arrays
        else:
            arrays = piece_of(self._chunks[key, start], name)
        return {name: (array.dtype.name, array.size) for name, array in arrays.items()}

    def steps(self, key: Key, start: int) -> int:
        """Return the number of updates that the state of a chunk has seen."""
        return self._tables[key, start].steps if (key, start) in self._tables else self._chunks[key, start].steps

    def restore(self, key: Key, start: int, first: int, saved: dict[str, Array], steps: int, rule: Optimizer) -> None:
        """Put what was saved in the place of a chunk's value and state. The version stays.

        Args:
            key: the chunk's key.
            start: its first element, or row.
            first: the first row of a row-sparse chunk that is given; the rows before were, unless it is `start`.
            saved: by name; what is not there, stays.
            steps: the number of updates with the state.
            rule: it keeps the state.

        Raises:
            DataError: it can't be this chunk's; nothing has changed.
        """
        if (key, start) in self._tables:
            self._tables[key, start].restore(saved, steps, rule, self._backend, anew=first == start)
            return
        stored = self._chunks[key, start]
        value, state = checked_state(key, saved, stored, rule, self._backend)
        buffer = self._pool.take(stored.value.buffer.nbytes)
        buffer.view(stored.dtype)[:] = value
        self._retire(stored.value)
        stored.value = Value(buffer, stored.value.version)
        stored.state, stored.steps = state, steps

    def whole(self, key: Key, start: int, version: Version) -> dict[str, Array]:
        """Return all that is kept of a chunk: its value, and what the rule keeps for it; not copies."""
        if (key, start) in self._tables:
            ids, arrays = self._tables[key, start].saved()
            order = np.argsort(ids)
            return {name: array[order] for name, array in ({IDS: ids} | arrays).items()}
        stored = self._chunks[key, start]
        assert stored.value.version == version, "a chunk is copied in the same breath in which it was decided"
        return {VALUE: stored.value.buffer.view(stored.dtype)} | (stored.state or {})

    def before(self, key: Key, start: int, version: Version) -> dict[str, Array]:
        """Return the value of a version that is kept, or the rows that had another one in it; with -1 nothing."""
        if version < 0:
            return {}
        if (key, start) in self._tables:
            return self._tables[key, start].before(version)
        stored = self._chunks[key, start]
        return {BEFORE: stored.earlier[version].buffer.view(stored.dtype)}

    def restore_before(self, key: Key, start: int, version: Version, saved: dict[str, Array]) -> None:
        """Keep the value of an earlier version, as of `before`.

        Raises:
            DataError: it can't be this chunk's; nothing has changed.
        """
        if (key, start) in self._tables:
            self._tables[key, start].restore_before(version, saved)
            return
        stored = self._chunks[key, start]
        check_like(key, saved, {BEFORE: stored.value.buffer.view(stored.dtype)})
        buffer = self._pool.take(stored.value.buffer.nbytes)
        buffer.view(stored.dtype)[:] = saved[BEFORE]
        stored.earlier[version] = Value(buffer, version)

    def keep(self, key: Key, start: int, version: Version) -> None:
        """Let the current value be `version` too, because an update could not be made."""
        if (key, start) in self._tables:
            self._tables[key, start].version = version
            return
        self._chunks[key, start].value.version = version

    def acquire(self, key: Key, start: int, version: Version) -> Value:
        """Return a value for sending, the current one or one that is kept; it stays as it is until `release`."""
        stored = self._chunks[key, start]
        value = stored.value if stored.value.version == version else stored.earlier[version]
        value.readers += 1
        return value
