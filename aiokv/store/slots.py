"""The slots of a server's memory: where payloads land, and are decoded, summed and cut before they count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.codec.decoder import Decoder
from aiokv.errors import AiokvError, SumOverflowError
from aiokv.kernels.robust import combine
from aiokv.optim import PRECISIONS
from aiokv.store.pool import Pool
from aiokv.types import ROW_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.codec import Codec
    from aiokv.kernels import Backend
    from aiokv.types import Slot, Version

Array = NDArray[Any]

LOW = frozenset(np.dtype(dtype) for dtype, precision in PRECISIONS.items() if dtype not in {precision, "float64"})
"""Dtypes whose sums are made in float32."""


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


class Slots:
    """All slots of one server, by number.

    Args:
        backend: who does the arithmetic.
        pool: where buffers come from.
    """

    def __init__(self, backend: Backend, pool: Pool | None = None) -> None:
        self._backend = backend
        self._pool = pool or Pool()
        self._slots: dict[Slot, Landed] = {}
        self._next_slot: Slot = 0
        self._decoders: dict[Codec, Decoder] = {}

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

    def _take(self, slot: Slot | None, nbytes: int) -> Landed:
        return Landed(np.zeros(nbytes, np.uint8)) if slot is None else self._slots.pop(slot)

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

    def content(self, slot: Slot) -> bytes:
        """Return what lies in a slot, and free it."""
        content = self._slots[slot].buffer.tobytes()
        self.free(slot)
        return content

    def joined(self, slots: list[Slot]) -> memoryview:
        """Return what lies in slots, in the precision that it has, one after the other."""
        landed = [self._slots[slot] for slot in slots]
        parts = [each.buffer if each.wide is None else each.wide.view(np.uint8) for each in landed]
        return np.concatenate(parts).data

    def fold(self, target: Slot, source: Slot, dtype: str) -> None:
        """Add one slot to another and free it; low precisions are added in float32.

        A sum of integers that does not fit is an error when it is applied.
        """
        total, added = self._slots[target], self._slots[source]
        try:
            self._backend.accumulate(widened(total, dtype), _content(added, dtype))
        except SumOverflowError as error:
            total.error = error
        self.free(source)

    def weigh(self, slot: Slot, dtype: str, factor: float) -> None:
        """Multiply a slot's content, of floats; low precisions become float32."""
        content = widened(self._slots[slot], dtype)
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

    def widen(self, slot: Slot, dtype: str) -> None:
        """Take what has landed in a slot for a sum in float32 of elements that have a lower precision."""
        landed = self._slots[slot]
        landed.wide = landed.buffer.view(np.float32).copy()
        self._pool.give(landed.buffer)
        landed.buffer = self._pool.take(landed.wide.size * np.dtype(dtype).itemsize)

    def prepare(self, codec: Codec, backend: str) -> None:
        """Decode a codec's payloads with a backend from now on; all give the same bits."""
        self._decoders[codec] = Decoder(codec, backend=backend)

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

    def release(self, value: Value) -> None:
        """A send is over, in whatever way."""
        value.readers -= 1
        if value.retired and not value.readers:
            self._pool.give(value.buffer)

    def _retire(self, value: Value) -> None:
        value.retired = True
        if not value.readers:
            self._pool.give(value.buffer)

    def use(self, backend: Backend) -> None:
        """Let another backend do the arithmetic; all give the same bits."""
        self._backend = backend

    @property
    def backend(self) -> Backend:
        """Who does the arithmetic."""
        return self._backend


def _content(landed: Landed, dtype: Any) -> Array:
    """Return what is in a slot, in the precision that it has."""
    return landed.buffer.view(dtype) if landed.wide is None else landed.wide


def payload_lengths(codec: Codec, sizes: list[int], nbytes: int) -> list[int]:
    """Return how many bytes of a payload are of each tensor in it; of a single one it may be a part."""
    return [nbytes] if len(sizes) == 1 else [codec.whole_nbytes(size) for size in sizes]


def widened(landed: Landed, dtype: Any) -> Array:
    """Return the content as an array to add to: in float32 if it is of a lower precision."""
    if landed.wide is None and np.dtype(dtype) in LOW:
        landed.wide = landed.buffer.view(dtype).astype(np.float32)
    return landed.buffer.view(dtype) if landed.wide is None else landed.wide
