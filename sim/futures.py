"""Work that is carried out elsewhere: it is dropped when somebody stops waiting for it."""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future


def processes(jobs: int) -> ProcessPoolExecutor:
    """Return an executor of so many processes, which Ctrl-C ends at once, whatever they are doing."""
    # Python's own handler would only end what a process is at, and let it begin with what waits for it.
    return ProcessPoolExecutor(jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))


@contextlib.contextmanager
def cancelled_at_errors(futures: Iterable[Future[Any]]) -> Iterator[None]:
    """Cancel futures when the block ends with an error or is interrupted; an executor that closes waits for others."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise
