"""Values that are for arrays on devices: they land in page-locked memory, and devices copy them from there.

A part of a value is copied when it has landed, while others are still coming.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiokv.list_sums import device_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiokv.arrays import Arguments, Array
    from aiokv.worker_device import Device

    Range = tuple[int, int]


@dataclass(slots=True, eq=False)
class Copies:
    """One tensor of a call: the memory where it lands, and for each array its device, what it is there, and its rows.

    `begun` are the parts, in bytes, whose copies have begun.
    """

    memory: Array
    arrays: list[tuple[Device, Any, Array | None]] = field(default_factory=list)
    begun: list[Range] = field(default_factory=list)

    @property
    def in_parts(self) -> bool:
        """Whether a part can be copied alone: rows have other places on the device than in memory."""
        return all(rows is None for _, _, rows in self.arrays)

    @property
    def left(self) -> list[Range]:
        """What is still to be copied. Even where no rows have come, the arrays' other rows become zero."""
        return gaps(joined(self.begun), self.memory.nbytes) if self.in_parts else [(0, self.memory.nbytes)]


@dataclass(slots=True, eq=False)
class Staged:
    """What one call receives for arrays on devices, by tensor. Any thread may call it."""

    tensors: dict[int, Copies] = field(default_factory=dict)
    _landed: deque[tuple[int, Range]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _error: Exception | None = None

    def landed(self, tensor: int, start: int, stop: int) -> bool:
        """Take note that a part of a tensor, in bytes, is there; tell whether `begin` has something to do."""
        copies = self.tensors.get(tensor)
        if copies is None or not copies.in_parts or start == stop:
            return False
        self._landed.append((tensor, (start, stop)))
        return True

    def begin(self) -> None:
        """Begin to copy what has landed. What goes wrong is said by `copy`."""
        with self._lock:
            parts: dict[int, list[Range]] = {}
            with contextlib.suppress(IndexError):
                while True:
                    tensor, part = self._landed.popleft()
                    parts.setdefault(tensor, []).append(part)
            self._start({tensor: joined(found) for tensor, found in parts.items()})

    def copy(self) -> None:
        """Copy what is left, and return when everything is there: all devices copy at the same time."""
        self.begin()
        with self._lock:
            self._start({number: each.left for number, each in self.tensors.items()})
        self.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when all copies are there that were begun, and begin no more of what has landed."""
        with self._lock:
            self._landed.clear()
            begun = [copies for copies in self.tensors.values() if copies.begun]
            for device in dict.fromkeys(device for copies in begun for device, _, _ in copies.arrays):
                device.wait()

    def _start(self, parts: dict[int, list[Range]]) -> None:
        try:
            for tensor, found in parts.items():
                copies = self.tensors[tensor]
                for start, stop in found:
                    copies.begun.append((start, stop))
                    for device, target, rows in copies.arrays:
                        device.start(copies.memory[start:stop], target, rows, start)
        except Exception as error:  # noqa: BLE001 - who waits for the call gets it
            self._error = self._error or error


def joined(parts: Sequence[Range]) -> list[Range]:
    """Return the same parts in their order, those that touch as one."""
    found: list[Range] = []
    for start, stop in sorted(parts):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def gaps(parts: Sequence[Range], end: int) -> list[Range]:
    """Return what is between parts, which do not touch, and before and after them."""
    return list(_gaps(parts, end))


def _gaps(parts: Sequence[Range], end: int) -> Iterator[Range]:
    place = 0
    for start, stop in (*parts, (end, end)):
        if place < start:
            yield place, start
        place = stop


def stage(arguments: Arguments, devices: Sequence[Device]) -> Staged:
    """Let a call's values land where the devices copy from that are to get them. Any thread may call it.

    Args:
        arguments: of the call.
        devices: those that this process sees, by their numbers.

    Raises:
        SpecMismatchError: an array can't be written, or lies where this store uses no device; nothing has changed.
    """
    staged = Staged()
    found = []
    for out in arguments.device_outs:
        device = device_of(arguments.keys[out.target], out.array, devices)
        found.append((out, device, device.writable(out.array.array)))
    for out, device, target in found:
        like = arguments.targets[out.target]
        if out.target not in staged.tensors:
            # To lock pages takes long: nobody waits for it here.
            memory = device.allocate(like.nbytes)
            staged.tensors[out.target] = Copies(memory)
            arguments.targets[out.target] = memory.view(like.dtype).reshape(like.shape)
        if out.array.nbytes:
            staged.tensors[out.target].arrays.append((device, target, out.rows))
    arguments.staged = staged
    return staged
