"""A server's memory: slots where payloads land, and for every chunk an immutable value and its optimizer state.

The store carries out what it is told and decides nothing. A value that is being sent is never changed: an update writes
another buffer, and the old one is used again when its last reader is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.store.pool import Pool

if TYPE_CHECKING:
    from aiokv.kernels import Backend
    from aiokv.optim import Optimizer
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
    """A chunk: its current value, what the optimizer keeps for it, and the number of updates with that."""

    dtype: np.dtype[Any]
    value: Value
    state: dict[str, Array] | None = None
    steps: int = 0


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
        offset = 0
        for i, (name, size) in enumerate(parts):
            part = self._chunks[name, 0] = Stored(whole.dtype, Value(values[i], whole.value.version))
            part.steps = whole.steps
            if whole.state is not None:
                part.state = {kept: array[offset : offset + size].copy() for kept, array in whole.state.items()}
            offset += size
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

    def dtypes(self) -> list[str]:
        """Return the dtypes of the values, each once."""
        return list(dict.fromkeys(stored.dtype.name for stored in self._chunks.values()))

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

    def apply(
        self, key: Key, start: int, version: Version, slot: Slot | None, rule: Optimizer, clock: int, divisor: int
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
        """
        stored = self._chunks[key, start]
        total = self._take(slot, stored.value.buffer.nbytes)
        weight = stored.value.buffer.view(stored.dtype)
        if stored.state is None:
            stored.state = self._backend.new_state(rule, weight)
        stored.steps += 1
        step = rule.step_for(key, count=stored.steps, num_update=max(clock, stored.steps))
        # The sum becomes the new value in its place.
        self._backend.update(rule, weight, total.view(stored.dtype), stored.state, step, offset=max(start, 0))
        self._retire(stored.value)
        stored.value = Value(total, version)

    def keep(self, key: Key, start: int, version: Version) -> None:
        """Let the current value be `version` too, because an update could not be made."""
        self._chunks[key, start].value.version = version

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
