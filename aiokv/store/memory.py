"""A server's memory: slots where payloads land, and for every chunk an immutable value and its optimizer state.

The store carries out what it is told and decides nothing. A value that is being sent is never changed: an update writes
another buffer, and the old one is used again when its last reader is done.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.codec.decoder import Decoder
from aiokv.errors import AiokvError, SumOverflowError
from aiokv.kernels.robust import combine
from aiokv.optim import PRECISIONS, Assign
from aiokv.store.pieces import cut_state, new_state, steps_for, sums_of_squares, update
from aiokv.store.pool import Pool
from aiokv.store.replicas import Replicas
from aiokv.store.states import IDS, VALUE, checked_state, only, parts_of, piece_of, rows_of
from aiokv.store.table import Table
from aiokv.types import ROW_ID_BYTES, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from aiokv.codec import Codec
    from aiokv.initializers import Initializer
    from aiokv.kernels import Backend
    from aiokv.optim import Norms, Optimizer
    from aiokv.types import Key, Peer, Slot, TensorSpec, Version

Array = NDArray[Any]

LOW = frozenset(np.dtype(dtype) for dtype, precision in PRECISIONS.items() if dtype not in {precision, "float64"})
"""Dtypes whose sums are made in float32."""


MAX_STALENESS = 1000
"""What is staler is counted under this number, so that the histogram stays small."""


@dataclass(slots=True, eq=False)
class Value:
    """One version of a chunk. `readers` are sends under way; the buffer is idle when it is retired and has none."""

    buffer: NDArray[np.uint8]
    version: Version
    readers: int = 0
    retired: bool = False


@dataclass(slots=True, eq=False)
class Landed:
    """What lies in a slot: the bytes as they came, or a sum, in a higher precision than they have (`wide`).

    `error` says why the sum could not be made; `divided` is True when it has been divided. `lent` is how many sends of
    it are under way: it is not changed then. What is used up meanwhile is a `value`, or is `idle` after the last send.
    """

    buffer: NDArray[np.uint8]
    wide: Array | None = None
    error: AiokvError | None = None
    divided: bool = False
    lent: int = 0
    value: Value | None = None
    idle: bool = False


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


class ParameterStore:
    """All slots and chunks of one server.

    Args:
        backend: who does the arithmetic.
        pool: where buffers come from.
    """

    def __init__(self, backend: Backend, pool: Pool | None = None) -> None:
        self._backend = backend
        self._pool = pool or Pool()
        self._slots: dict[Slot, Landed] = {}
        self._next_slot: Slot = 0
        self._chunks: dict[tuple[Key, int], Stored] = {}
        self._tables: dict[tuple[Key, int], Table] = {}
        self.staleness: Counter[int] = Counter()
        """How many versions old a contribution was -> how many of those were applied, one for each chunk."""
        self._decoders: dict[Codec, Decoder] = {}
        self.replicas = Replicas()
        """What peers have of values that they receive compressed."""

    @property
    def open_slots(self) -> int:
        """How many payloads have landed, or are landing, and are not used up."""
        return len(self._slots)

    @property
    def landed_bytes(self) -> int:
        """How many bytes those payloads take."""
        return sum(landed.buffer.nbytes for landed in self._slots.values())

    def has(self, slot: Slot) -> bool:
        """Tell whether a slot's payload is not used up."""
        return slot in self._slots

    def land(self, nbytes: int) -> tuple[Slot, memoryview]:
        """Return a new slot and its memory, to be filled."""
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        buffer = self._pool.take(nbytes)
        self._slots[slot] = Landed(buffer)
        return slot, buffer.data

    def free(self, slot: Slot) -> None:
        """Give a slot's memory back."""
        self._give(self._slots.pop(slot))

    def _give(self, landed: Landed) -> None:
        """Use what has landed no longer, except for sends that are under way."""
        if landed.lent:
            landed.idle = True
        else:
            self._pool.give(landed.buffer)

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

    def nbytes(self, slots: list[Slot]) -> int:
        """Return how many bytes lie in slots."""
        return sum(self._slots[slot].buffer.nbytes for slot in slots)

    def make_room(self, slot: Slot, nbytes: int) -> None:
        """Make a new slot with any content."""
        self._slots[slot] = Landed(self._pool.take(nbytes))

    def join_rows(self, slot: Slot, parts: list[Slot], row_bytes: int) -> None:
        """Put the rows of some slots, which stay, into one that has room for them.

        It may run in a thread, while nothing else is done with the slots.
        """
        buffers = [self._slots[part].buffer for part in parts]
        middles = [buffer.nbytes // (ROW_ID_BYTES + row_bytes) * ROW_ID_BYTES for buffer in buffers]
        ids = [buffer[:middle] for buffer, middle in zip(buffers, middles, strict=True)]
        values = [buffer[middle:] for buffer, middle in zip(buffers, middles, strict=True)]
        np.concatenate([*ids, *values], out=self._slots[slot].buffer)

    def row_ids(self, slot: Slot, count: int) -> NDArray[np.int64]:
        """Return the row ids at the beginning of a slot; none when it is too short for so many."""
        buffer = self._slots[slot].buffer
        return buffer[: count * ROW_ID_BYTES if 0 <= count * ROW_ID_BYTES <= buffer.nbytes else 0].view(np.int64)

    def fold(self, target: Slot, source: Slot, dtype: str) -> None:
        """Add one slot to another and free it; low precisions are added in float32.

        A sum of integers that does not fit is an error when it is applied.
        """
        total, added = self._slots[target], self._slots[source]
        try:
            self._backend.accumulate(_widened(total, dtype), _content(added, dtype))
        except SumOverflowError as error:
            total.error = error
        self.free(source)

    def weigh(self, slot: Slot, dtype: str, factor: float) -> None:
        """Multiply a slot's content, of floats; low precisions become float32."""
        content = _widened(self._slots[slot], dtype)
        # A gradient that overflows shows it in its values.
        with np.errstate(all="ignore"):
            np.multiply(content, content.dtype.type(factor), out=content)

    def combine(self, target: Slot, sources: list[Slot], dtype: str, reduction: str) -> None:
        """Put what a reduction makes of several slots into the first of them, and free the others."""
        landed = self._slots[target]
        arrays = [_content(self._slots[slot], dtype) for slot in (target, *sources)]
        combined = combine(arrays, reduction)
        if np.dtype(dtype) in LOW:
            landed.wide = combined
        else:
            arrays[0][:] = combined
        for slot in sources:
            self.free(slot)

    def split(self, slot: Slot, parts: list[tuple[Slot, int]]) -> None:
        """Cut a slot's content into new slots, given with their bytes, and free it."""
        whole = self._slots[slot]
        offset, elements = 0, sum(nbytes for _, nbytes in parts)
        for (part, nbytes), buffer in zip(parts, self._cut(whole.buffer, [nbytes for _, nbytes in parts]), strict=True):
            self._slots[part] = Landed(buffer, error=whole.error)
            if whole.wide is not None:
                start, stop = (whole.wide.size * position // elements for position in (offset, offset + nbytes))
                self._slots[part].wide = whole.wide[start:stop].copy()
            offset += nbytes
        self.free(slot)

    def prepare(self, codec: Codec, backend: str) -> None:
        """Decode a codec's payloads with a backend from now on; all give the same bits."""
        self._decoders[codec] = Decoder(codec, backend=backend)
        self.replicas.prepare(codec, backend)

    def decode(self, slot: Slot | None, target: Slot, codec: Codec, dtype: str, sizes: list[int]) -> None:
        """Make a slot of the values that a payload says, low precisions in float32, and free the payload's.

        Args:
            slot: the payload; None if it has no bytes.
            target: the new slot.
            codec: of the payload, prepared before.
            dtype: of the values.
            sizes: elements of each of the tensors that it says, one after the other; of a single one it may be a part.

        Raises:
            ProtocolError: the payload is malformed; there is no new slot.
        """
        payload = np.empty(0, np.uint8) if slot is None else self._slots[slot].buffer
        decoder, kind = self._decoders[codec], np.dtype(dtype)
        landed = Landed(self._pool.take(sum(sizes) * kind.itemsize))
        values: Array = landed.buffer.view(kind)
        if kind in LOW:
            values = landed.wide = np.empty(values.size, np.float32)
        offset = first = 0
        try:
            for size, nbytes in zip(sizes, payload_lengths(codec, sizes, payload.nbytes), strict=True):
                decoder.decode_into(payload[offset : offset + nbytes].data, values[first : first + size])
                offset, first = offset + nbytes, first + size
        except AiokvError:
            self._pool.give(landed.buffer)
            raise
        finally:
            if slot is not None:
                self.free(slot)
        self._slots[target] = landed

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

    def _cut(self, whole: NDArray[np.uint8], sizes: list[int]) -> list[NDArray[np.uint8]]:
        """Copy neighbouring parts of a buffer into buffers of their own."""
        parts = []
        offset = 0
        for nbytes in sizes:
            part = self._pool.take(nbytes)
            part[:] = whole[offset : offset + nbytes]
            offset += nbytes
            parts.append(part)
        return parts

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

    def use(self, backend: Backend) -> None:
        """Let another backend do the arithmetic; all give the same bits."""
        self._backend = backend

    @property
    def backend(self) -> Backend:
        """Who does the arithmetic."""
        return self._backend

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
            total = _widened(landed, stored.dtype)
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

    def lend(self, slot: Slot) -> tuple[memoryview, Callable[[], None]]:
        """Return what lies in a slot, in the precision that it has, and what is to be called when that is sent."""
        landed = self._slots[slot]
        if landed.wide is not None:
            return landed.wide.view(np.uint8).copy().data, lambda: None
        landed.lent += 1
        return landed.buffer.data, partial(self._returned, landed)

    def _returned(self, landed: Landed) -> None:
        """A send of what had landed is over."""
        landed.lent -= 1
        if landed.value is not None:
            self.release(landed.value)
        elif landed.idle and not landed.lent:
            self._pool.give(landed.buffer)

    def joined(self, slots: list[Slot]) -> memoryview:
        """Return what lies in slots, one after the other."""
        return np.concatenate([self._slots[slot].buffer for slot in slots]).data

    def widen(self, slot: Slot, dtype: str) -> None:
        """Take what has landed in a slot for a sum in float32 of elements that have a lower precision."""
        landed = self._slots[slot]
        landed.wide = landed.buffer.view(np.float32).copy()
        self._pool.give(landed.buffer)
        landed.buffer = self._pool.take(landed.wide.size * np.dtype(dtype).itemsize)

    def content(self, slot: Slot) -> bytes:
        """Return what lies in a slot, and free it."""
        content = self._slots[slot].buffer.tobytes()
        self.free(slot)
        return content

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

    def release(self, value: Value) -> None:
        """A send is over, in whatever way."""
        value.readers -= 1
        if value.retired and not value.readers:
            self._pool.give(value.buffer)

    def _retire(self, value: Value) -> None:
        value.retired = True
        if not value.readers:
            self._pool.give(value.buffer)

    def _take(self, slot: Slot | None, nbytes: int) -> Landed:
        return Landed(np.zeros(nbytes, np.uint8)) if slot is None else self._slots.pop(slot)


def _content(landed: Landed, dtype: Any) -> Array:
    """Return what is in a slot, in the precision that it has."""
    return landed.buffer.view(dtype) if landed.wide is None else landed.wide


def payload_lengths(codec: Codec, sizes: list[int], nbytes: int) -> list[int]:
    """Return how many bytes of a payload are of each tensor in it; of a single one it may be a part."""
    return [nbytes] if len(sizes) == 1 else [codec.whole_nbytes(size) for size in sizes]


def _widened(landed: Landed, dtype: Any) -> Array:
    """Return the content as an array to add to: in float32 if it is of a lower precision."""
    if landed.wide is None and np.dtype(dtype) in LOW:
        landed.wide = landed.buffer.view(dtype).astype(np.float32)
    return landed.buffer.view(dtype) if landed.wide is None else landed.wide
