"""Launches in Numba's simulator, where each thread of a block is one of Python.

There the launching thread looks at all threads of a block in turns, and takes Python's lock from them to do so: a block
that meets ten times waits for hundreds of such turns. Here threads wait for each other, and nobody looks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.cuda.simulator import kernel

if TYPE_CHECKING:
    from collections.abc import Callable

simulated: Any = kernel
"""What Numba does not type."""


class Block(simulated.BlockManager):  # type: ignore[misc]
    """Runs the threads of one block; `syncthreads` waits until all that have not ended are there."""

    def run(self, grid_point: tuple[int, ...], *arguments: Any) -> None:
        """Run all threads, and raise what one of them has raised."""
        self._changed = threading.Condition()
        self._meetings = self._waiting = 0

        def run_one() -> None:
            try:
                self._f(*arguments)
            finally:
                self._leave()

        places = np.ndindex(*self._block_dim)
        threads = [_Thread(run_one, self, grid_point, place, self._debug) for place in places]
        self._running = len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for thread in threads:
            if thread.exception:
                error, where = thread.exception
                raise error.with_traceback(where)

    def meet(self) -> None:
        """Wait for all other threads."""
        with self._changed:
            meeting = self._meetings
            self._waiting += 1
            self._open_if_complete()
            self._changed.wait_for(lambda: self._meetings != meeting)

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._open_if_complete()

    def _open_if_complete(self) -> None:
        if self._waiting == self._running:
            self._meetings, self._waiting = self._meetings + 1, 0
            self._changed.notify_all()


class _Thread(simulated.BlockThread):  # type: ignore[misc]
    def syncthreads(self) -> None:
        self._manager.meet()


class InTurn:
    """A simulated kernel: the simulator refuses to run two at a time, so who launches another one waits.

    Args:
        kernel: to be launched.
    """

    _lock = threading.Lock()

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, configuration: tuple[Any, ...]) -> Callable[..., None]:
        def launch_it(*arguments: Any) -> None:
            with self._lock:
                numbas, simulated.BlockManager = simulated.BlockManager, Block
                try:
                    self._kernel[configuration](*arguments)
                finally:
                    simulated.BlockManager = numbas

        return launch_it
