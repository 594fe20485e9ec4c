"""How a process of servers ends while the others go on: it stays until they have what it had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import earliest
from aiokv.core.effects import Effect, Log, Send
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.joiner import Joiner

LEAVE_REQUEST = 2
"""Request id of `LeaveServer`; there is one at a time."""

ASK_AGAIN = 1.0
"""Seconds until a scheduler that was away is asked again: the others may come back to it later than this server."""


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
        """When it ends in any case; None: it is not to end."""
        self._was_away = False
        """Whether there was no scheduler at some time since then."""
        self._ask_at: float | None = None
        """When the scheduler is asked again."""

    def deadline(self) -> float | None:
        """Return the time at which `tick` wants to be called."""
        return earliest(self.until, self._ask_at)

    def begin(self, timeout: float, now: float, *, is_of_use: bool) -> list[Effect]:
        """Ask whether this process may go; without a scheduler wait for one, if somebody needs what it has."""
        if not self._joiner.is_registered and not is_of_use:
            return self._stop("there is no scheduler that could give its place to another one", True)
        self.until, self._was_away = now + timeout, not self._joiner.is_registered
        text = f"{self._joiner.name} is to end, and stays until others serve what it has"
        return [Log("info", text), *self._ask()]

    def _ask(self) -> list[Effect]:
        self._ask_at = None
        return [Send(SCHEDULER, LEAVE_REQUEST, m.LeaveServer())] if self._joiner.is_registered else []

    def answered(self, message: m.Done | m.Error, now: float) -> list[Effect]:
        """Take in what the scheduler says."""
        if isinstance(message, m.Done):
            self.until = None
            return self._stop("others serve what it had", False)
        if self._was_away:
            self._ask_at = now + ASK_AGAIN
            return []
        self.until = None
        return self._stop(message.message, True)

    def scheduler_gone(self, *, is_of_use: bool) -> list[Effect]:
        """Wait for the scheduler, if somebody needs what this server has; it alone can say who is to go on."""
        if self.until is None:
            return []
        self._was_away, self._ask_at = True, None
        if is_of_use:
            return []
        self.until = None
        return self._stop("the scheduler is gone", True)

    def registered(self) -> list[Effect]:
        """Ask a scheduler that is there again: it may be another one."""
        return [] if self.until is None else self._ask()

    def tick(self, now: float) -> list[Effect]:
        """Ask again, or give up when it takes too long."""
        if self.until is not None and now >= self.until:
            self.until = self._ask_at = None
            return self._stop("nobody has taken over in time what it serves", True)
        return self._ask() if self._ask_at is not None and now >= self._ask_at else []
