"""Work that is carried out elsewhere: what is not begun is dropped when somebody stops waiting for it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future


@contextlib.contextmanager
def cancelled_at_errors(futures: Iterable[Future[Any]]) -> Iterator[None]:
    """Cancel futures when the block ends with an error or is interrupted; an executor that closes waits for others."""
    try:
        yield
    except BaseException:
        for future in futures:
            future.cancel()
        raise
