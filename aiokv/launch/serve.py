"""A scheduler or server as the main thing of its process: say where it listens, end at a signal, say why it ended."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Protocol, Self

from aiokv.launch.signals import END_AT_ONCE, handle_signals
from aiokv.launch.supervisor import EXIT_SIGNAL_BASE, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from aiokv.core.effects import Stop


class Node(Protocol):
    """What `Scheduler` and `Server` of `aiokv.net` have in common, as seen from here."""

    host: str
    port: int

    async def __aenter__(self) -> Self:
        """Begin to listen."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Stop listening."""

    async def wait_stopped(self) -> Stop:
        """Wait until the node's work is over."""

    def note(self, level: str, event: str, text: str, facts: dict[str, Any]) -> None:
        """Write a line for the operator, and count it."""

    def leave(self) -> bool:
        """Begin to leave in good order; return False if that is not possible."""


async def serve(node: Node, announce: Callable[[], None]) -> Outcome:
    """Run a node until its work is over or a signal asks it to end.

    A node that a signal ended has not done its work, so its exit code says so, as a shell would: 128 + the signal.
    There is no reason then: who sent the signal knows it. SIGTERM lets a server leave in good order first, if others
    can go on with what it has; a second signal does not wait for that, nor does `signals.END_AT_ONCE`, which counts as
    SIGTERM otherwise.

    Args:
        node: the node, not yet started.
        announce: called when it listens, when `host` and `port` are the real ones.
    """
    task = asyncio.current_task()
    assert task is not None, "serve is a coroutine of a task"
    received: list[int] = []

    def end(number: int) -> None:
        received.append(signal.SIGTERM if number == END_AT_ONCE else number)
        if number != signal.SIGTERM or len(received) > 1 or not node.leave():
            task.cancel()

    with handle_signals(end, END_AT_ONCE):
        try:
            async with node:
                announce()
                stop = await node.wait_stopped()
        except asyncio.CancelledError:
            if not received:
                raise
            return Outcome(EXIT_SIGNAL_BASE + received[0])
    if received and stop.failed:
        return Outcome(EXIT_SIGNAL_BASE + received[0], stop.reason)
    return Outcome(1 if stop.failed else 0, stop.reason)
