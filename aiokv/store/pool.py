"""Buffers that are used again: fresh memory costs page faults, which cost more than copying."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

MAX_IDLE_BYTES = 256 * 1024 * 1024


class Pool:
    """Idle buffers by size. Not for threads: one owner, one loop.

    Args:
        max_idle_bytes: what is given back beyond this is left to the garbage collector.
        make: makes a buffer of so many bytes.
    """

    def __init__(
        self, max_idle_bytes: int = MAX_IDLE_BYTES, make: Callable[[int], NDArray[np.uint8]] | None = None
    ) -> None:
        self._make = make or _make
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}
        self._max_idle_bytes = max_idle_bytes
        self.idle_bytes = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a buffer of exactly `nbytes` with any content."""
        idle = self._idle.get(nbytes)
        if not idle:
            return self._make(nbytes)
        self.idle_bytes -= nbytes
        return idle.pop()

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Take a buffer back that nobody uses any longer."""
        if self.idle_bytes + buffer.nbytes > self._max_idle_bytes:
            return
        self.idle_bytes += buffer.nbytes
        self._idle.setdefault(buffer.nbytes, []).append(buffer)


def _make(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)
