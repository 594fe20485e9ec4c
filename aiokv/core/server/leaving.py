"""How a process of servers ends while the others go on: it stays until they have what it had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Log, Send
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.joiner import Joiner

LEAVE_REQUEST = 2
"""Request id of the one `LeaveServer`."""


class Leaving:
    """The part of a `Coordinator` that ends it in good order.

    Args:
        joiner: this server's place in the cluster.
        stop: ends the node; is told why, and whether it is lost for the others.
    """

    def __init__(self, joiner: Joiner, stop: Callable[[str, bool], list[Effect]]) -> None:
        self._joiner = joiner
        self._stop = stop
        self.until: float | None = None
        """When `tick` wants to be called."""

    def begin(self, timeout: float, now: float) -> list[Effect]:
        """Ask whether this process may go."""
        if not self._joiner.is_registered:
            return self._stop("there is no scheduler that could give its place to another one", True)
        self.until = now + timeout
        text = f"{self._joiner.name} is to end, and stays until others serve what it has"
        return [Log("info", text), Send(SCHEDULER, LEAVE_REQUEST, m.LeaveServer())]

    def answered(self, message: m.Done | m.Error) -> list[Effect]:
        """Take in what the scheduler says."""
        self.until = None
        if isinstance(message, m.Error):
            return self._stop(message.message, True)
        return self._stop("others serve what it had", False)

    def scheduler_gone(self) -> list[Effect]:
        """Give up: nobody says any more who is to go on."""
        if self.until is None:
            return []
        self.until = None
        return self._stop("the scheduler is gone", True)

    def tick(self, now: float) -> list[Effect]:
        """Give up when it takes too long."""
        if self.until is None or now < self.until:
            return []
        self.until = None
        return self._stop("nobody has taken over in time what it serves", True)
