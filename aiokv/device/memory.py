"""The memory of the devices: what is used, what is idle and used again, and how much there may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.device.records import Allocate, Deallocate, Effect
from aiokv.errors import DeviceMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.device.records import Buffer


class Memory:
    """Buffers on devices. An idle one is used again for what has its size; when memory is short, it is given back.

    Args:
        limits: for each device how many bytes all buffers together may have.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self.used = [0] * len(limits)
        """Bytes on each device of the buffers that are not idle."""
        self._limits = list(limits)
        self._idle: list[dict[int, list[Buffer]]] = [{} for _ in limits]
        self._idle_bytes = [0] * len(limits)
        self._places: dict[Buffer, tuple[int, int]] = {}
        self._last: Buffer = 0

    def new_number(self) -> Buffer:
        """Return the number of another buffer, wherever it is."""
        self._last += 1
        return self._last

    def check(self, device: int, nbytes: int) -> None:
        """Make sure that there is room for so many bytes more.

        Raises:
            DeviceMemoryError: there is not; says how much was wanted and how much is left.
        """
        # What was cut may have taken more.
        free = max(0, self._limits[device] - self.used[device])
        if nbytes > free:
            text = f"CUDA device {device} has {free} bytes left for buffers, and {nbytes} were wanted"
            raise DeviceMemoryError(text, expected=nbytes, got=free)

    def take(self, device: int, nbytes: int, effects: list[Effect]) -> Buffer:
        """Return a buffer with any content, for which there is room; put behind the effects what makes it."""
        self.used[device] += nbytes
        idle = self._idle[device].get(nbytes)
        if idle:
            self._idle_bytes[device] -= nbytes
            return idle.pop()
        while self.used[device] + self._idle_bytes[device] > self._limits[device] and self._idle_bytes[device]:
            effects.append(Deallocate(self._take_idle(device)))
        buffer = self.new_number()
        self._places[buffer] = device, nbytes
        effects.append(Allocate(buffer, device, nbytes))
        return buffer

    def _take_idle(self, device: int) -> Buffer:
        """Take out the largest idle buffer: the fewest calls make the most room."""
        sizes = self._idle[device]
        nbytes = max(size for size, buffers in sizes.items() if buffers)
        buffer = sizes[nbytes].pop()
        self._idle_bytes[device] -= nbytes
        del self._places[buffer]
        return buffer

    def give(self, buffer: Buffer, effects: list[Effect]) -> None:
        """Take a buffer back that nothing uses any longer; put behind the effects what gives it back to the system."""
        device, nbytes = self._places[buffer]
        self.used[device] -= nbytes
        if self.used[device] + self._idle_bytes[device] + nbytes > self._limits[device]:
            del self._places[buffer]
            effects.append(Deallocate(buffer))
            return
        self._idle_bytes[device] += nbytes
        self._idle[device].setdefault(nbytes, []).append(buffer)

    def is_here(self, buffer: Buffer) -> bool:
        """Tell whether a buffer is on a device."""
        return buffer in self._places

    def nbytes(self, buffer: Buffer) -> int:
        """Return how many bytes a buffer on a device has."""
        return self._places[buffer][1]

    # --- for tests ---

    def validate(self, held: Iterable[Buffer]) -> None:
        """Check that every buffer on a device is either held or idle.

        Raises:
            AssertionError: an invariant is broken.
        """
        idle = [buffer for sizes in self._idle for buffers in sizes.values() for buffer in buffers]
        here = [buffer for buffer in held if self.is_here(buffer)]
        assert sorted(here + idle) == sorted(self._places), "a buffer is lost, or held and idle"
        for device, limit in enumerate(self._limits):
            used = sum(nbytes for buffer in here for place, nbytes in [self._places[buffer]] if place == device)
            assert used == self.used[device], "bytes are counted wrong"
            assert used + self._idle_bytes[device] <= max(limit, used), "there is more than there may be"
