"""A server's memory: slots where payloads land, and for every chunk an immutable value and its optimizer state.

The store carries out what it is told and decides nothing. A value that is being sent is never changed: an update writes
another buffer, and the old one is used again when its last reader is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.optim import SGD, Assign, Optimizer
from aiokv.store.pool import Pool

if TYPE_CHECKING:
    from aiokv.kernels import Backend
    from aiokv.types import Key, Slot, Version

Array = NDArray[Any]


@dataclass(slots=True, eq=False)
class Value:
    """One version of a chunk. `readers` are sends under way; the buffer is idle when it is retired and has none."""

    buffer: NDArray[np.uint8]
    version: Version
    readers: int = 0
    retired: bool = False


@dataclass(slots=True, eq=False)
class Stored:
    """A chunk: its current value and its optimizer state."""

    dtype: np.dtype[Any]
    value: Value
    momentum: Array | None = None


class ParameterStore:
    """All slots and chunks of one server.

    Args:
        backend: who does the arithmetic.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pool = Pool()
        self._slots: dict[Slot, NDArray[np.uint8]] = {}
        self._next_slot: Slot = 0
        self._chunks: dict[tuple[Key, int], Stored] = {}
        self._optimizer: Optimizer = Assign()

    @property
    def open_slots(self) -> int:
        """How many payloads have landed, or are landing, and are not used up."""
        return len(self._slots)

    def land(self, nbytes: int) -> tuple[Slot, memoryview]:
        """Return a new slot and its memory, to be filled."""
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        buffer = self._slots[slot] = self._pool.take(nbytes)
        return slot, buffer.data

    def free(self, slot: Slot) -> None:
        """Give a slot's memory back."""
        self._pool.give(self._slots.pop(slot))

    def install(self, key: Key, start: int, dtype: str, size: int, slot: Slot | None) -> None:
        """Make the slot's content version 0 of a new chunk of `size` elements."""
        kind = np.dtype(dtype)
        self._chunks[key, start] = Stored(kind, Value(self._take(slot, size * kind.itemsize), 0))

    def fold(self, target: Slot, source: Slot, dtype: str) -> None:
        """Add one slot to another and free it."""
        self._backend.accumulate(self._slots[target].view(dtype), self._slots[source].view(dtype))
        self.free(source)

    def split(self, slot: Slot, parts: list[tuple[Slot, int]]) -> None:
        """Cut a slot's content into new slots, given with their bytes, and free it."""
        whole = self._slots[slot]
        for (part, _), buffer in zip(parts, self._cut(whole, [nbytes for _, nbytes in parts]), strict=True):
            self._slots[part] = buffer
        self.free(slot)

    def divide(self, key: Key, start: int, parts: list[tuple[Key, int]]) -> None:
        """Make chunks of the keys that lie in one, given with their numbers of elements; it is no more."""
        whole = self._chunks.pop((key, start))
        sizes = [size * whole.dtype.itemsize for _, size in parts]
        values = self._cut(whole.value.buffer, sizes)
        for i, (name, size) in enumerate(parts):
            self._chunks[name, 0] = Stored(whole.dtype, Value(values[i], whole.value.version))
            if whole.momentum is not None:
                offset = sum(other for _, other in parts[:i])
                self._chunks[name, 0].momentum = whole.momentum[offset : offset + size].copy()
        self._retire(whole.value)

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

    def configure(self, optimizer: Optimizer) -> None:
        """Use this rule from the next `apply` on."""
        self._optimizer = optimizer

    def apply(self, key: Key, start: int, version: Version, slot: Slot | None) -> None:
        """Make `version` of a chunk out of its current value and the sum in `slot`; free the slot."""
        stored = self._chunks[key, start]
        total = self._take(slot, stored.value.buffer.nbytes)
        match self._optimizer:
            case Assign():
                new = total
            case SGD() as rule:
                new = self._pool.take(total.nbytes)
                self._sgd(stored, total, new, rule)
                self._pool.give(total)
            case _:
                raise NotImplementedError(f"no arithmetic for {self._optimizer!r}")
        self._retire(stored.value)
        stored.value = Value(new, version)

    def _sgd(self, stored: Stored, total: NDArray[np.uint8], new: NDArray[np.uint8], rule: SGD) -> None:
        weight = stored.value.buffer.view(stored.dtype)
        if rule.momentum and stored.momentum is None:
            stored.momentum = np.zeros_like(weight)
        self._backend.sgd(weight, total.view(stored.dtype), stored.momentum, new.view(stored.dtype), rule)

    def acquire(self, key: Key, start: int, version: Version) -> Value:
        """Return the value for sending; it stays as it is until `release`."""
        value = self._chunks[key, start].value
        assert value.version == version, "a value is sent in the same breath in which it was decided"
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

    def _take(self, slot: Slot | None, nbytes: int) -> NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8) if slot is None else self._slots.pop(slot)
