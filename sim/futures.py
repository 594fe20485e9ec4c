"""Work that is carried out elsewhere: it is dropped when somebody stops waiting for it."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from types import FrameType

T = TypeVar("T")


class Processes(ProcessPoolExecutor):
    """An executor of some processes, in which nothing begins after Ctrl-C.

    A terminal interrupts all processes. Python ends only what each is at, and lets it begin with what waits for it.
    """

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs, initializer=_listen)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Carry out a call in one of the processes."""
        return super().submit(_unless_interrupted, fn, *args, **kwargs)


class _State:
    """Of a process of an executor."""

    at_work = False
    interrupted = False


def _listen() -> None:
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    _State.interrupted = True
    # A process that ends while it waits for work would break the executor.
    if _State.at_work:
        raise KeyboardInterrupt


def _unless_interrupted(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    if _State.interrupted:
        raise KeyboardInterrupt
    _State.at_work = True
    try:
        return fn(*args, **kwargs)
    finally:
        _State.at_work = False


@contextlib.contextmanager
def cancelled_at_errors(futures: Iterable[Future[Any]]) -> Iterator[None]:
    """Cancel futures when the block ends with an error or is interrupted; an executor that closes waits for others."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise
