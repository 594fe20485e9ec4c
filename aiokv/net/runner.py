"""Which event loop runs a program; the only place that mentions uvloop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


def loop_factory(loop: str = "auto") -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes a new event loop.

    Args:
        loop: "auto" (uvloop where it exists), "uvloop" or "asyncio".

    Raises:
        MissingExtraError: "uvloop" was asked for and is not installed.
    """
    if loop == "asyncio":
        return asyncio.new_event_loop
    try:
        import uvloop  # noqa: PLC0415 - not everywhere, and only programs that we run need it
    except ImportError:
        if loop == "uvloop":
            text = "loop 'uvloop' needs the package uvloop (pip install uvloop); it does not exist for Windows"
            raise MissingExtraError(text) from None
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T], *, loop: str = "auto") -> T:
    """Run a coroutine in a new event loop until it is done, as `asyncio.run` does. See `loop_factory` for `loop`."""
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        return runner.run(main)
