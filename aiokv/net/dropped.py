"""What becomes of a client that its program has let go without closing it: it ends, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.net.link import AnyLink
    from aiokv.net.server import Server

FRAMES = 10
"""How many frames of the place where a client was made are kept."""

_ending: dict[asyncio.Task[None], None] = {}
"""Tasks that close servers whose clients are no more: a loop does not keep them."""


def where_made(loop: asyncio.AbstractEventLoop) -> traceback.StackSummary | None:
    """Return the calls that have led to whom is asking, in debug mode, as asyncio has them for its own objects."""
    if not loop.get_debug():
        return None
    frames = traceback.walk_stack(sys._getframe(1))
    stack = traceback.StackSummary.extract(frames, limit=FRAMES, lookup_lines=False)
    stack.reverse()
    return stack


def tell_of_dropped(
    client: object, text: str, loop: asyncio.AbstractEventLoop, made_at: traceback.StackSummary | None = None
) -> None:
    """Warn the programmer, and tell the loop's handler of exceptions, since such warnings are seldom shown.

    Args:
        client: what was dropped; with tracemalloc the warning says where it was made.
        text: what has become of it, and what to do.
        loop: in which it lived.
        made_at: where it was made, if that is known.
    """
    context: dict[str, Any] = {"message": text, "client": client}
    if made_at is not None:
        context["source_traceback"] = made_at
    loop.call_exception_handler(context)
    # Last, as it may be an error.
    warnings.warn(text, ResourceWarning, stacklevel=3, source=client)


def in_loop(loop: asyncio.AbstractEventLoop, work: Callable[..., None], *arguments: Any) -> None:
    """Do something in a loop, unless that is over; for finalizers, which any thread may call."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(work, *arguments)


def cut(
    timer: asyncio.Handle | None, tasks: list[asyncio.Task[None]], links: list[AnyLink], shard: Server | None
) -> None:
    """End what is left of a client: its connections, what opens others, and the server that it hosts."""
    if timer is not None:
        timer.cancel()
    for task in tasks:
        task.cancel()
    for link in links:
        link.abort()
    if shard is not None:
        task = asyncio.get_running_loop().create_task(shard.close())
        _ending[task] = None
        task.add_done_callback(_ending.pop)
