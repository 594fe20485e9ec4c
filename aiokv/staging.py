"""Values that are for arrays on devices: they land in page-locked memory, and devices copy them from there."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from aiokv.list_sums import device_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.arrays import Arguments, Array

MAX_IDLE_BYTES = 1 << 30
"""What is given back beyond this is left to the garbage collector."""

MIN_BYTES = 1 << 12
"""Lengths are powers of two, from this one on: those of row-sparse values differ from call to call."""


class Device(Protocol):
    """What copies from the host's memory to one device."""

    def allocate(self, nbytes: int, /) -> Array:
        """Return page-locked memory of the host, uint8."""
        ...

    def writable(self, array: Any, /) -> Any:
        """Return what `start` takes of an array on the device. Raises SpecMismatchError: it can't be written."""
        ...

    def start(self, memory: Array, target: Any, rows: Array | None, /) -> None:
        """Begin to copy the whole target, or some rows of it: the others become zero."""
        ...

    def wait(self) -> None:
        """Return when all copies are there that were begun."""
        ...


@dataclass(slots=True, eq=False)
class Staged:
    """What one call receives for arrays on devices."""

    copies: list[tuple[Device, Array, Any, Array | None]] = field(default_factory=list)
    """Device, memory, where on the device its content is to go, and to which rows, if not to all."""
    memories: list[Array] = field(default_factory=list)

    def copy(self) -> None:
        """Copy everything, and return when it is there: all devices copy at the same time. Any thread may call it."""
        for device, memory, target, rows in self.copies:
            device.start(memory, target, rows)
        for device in dict.fromkeys(copy[0] for copy in self.copies):
            device.wait()


class Staging:
    """Makes memory ready for values, and keeps it for the next ones. Any thread may call it.

    Args:
        devices: those that this process sees, by their numbers.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._idle: dict[int, list[Array]] = {}
        self._lock = threading.Lock()
        self.idle_bytes = 0

    def begin(self, arguments: Arguments) -> Staged:
        """Let a call's values land where the devices copy from that are to get them.

        Raises:
            SpecMismatchError: an array can't be written, or lies where this store uses no device; nothing has changed.
        """
        staged = Staged()
        found = []
        for out in arguments.device_outs:
            device = device_of(arguments.keys[out.target], out.array, self._devices)
            found.append((out, device, device.writable(out.array.array)))
        places: dict[int, Array] = {}
        for out, device, target in found:
            like = arguments.targets[out.target]
            if out.target not in places:
                memory = self._take(like.nbytes, device)
                staged.memories.append(memory)
                places[out.target] = memory[: like.nbytes]
                arguments.targets[out.target] = places[out.target].view(like.dtype).reshape(like.shape)
            if out.array.nbytes:
                staged.copies.append((device, places[out.target], target, out.rows))
        return staged

    def give_back(self, staged: Staged) -> None:
        """Take back memory into which nothing comes any longer, and from which nobody copies."""
        with self._lock:
            for memory in staged.memories:
                if self.idle_bytes + memory.nbytes <= MAX_IDLE_BYTES:
                    self.idle_bytes += memory.nbytes
                    self._idle.setdefault(memory.nbytes, []).append(memory)

    def _take(self, nbytes: int, device: Device) -> Array:
        length = max(MIN_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if idle := self._idle.get(length):
                self.idle_bytes -= length
                return idle.pop()
        # To lock pages takes long: they are used again, and nobody waits for it here.
        return device.allocate(length)
