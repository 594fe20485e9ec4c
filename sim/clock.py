"""Simulated time: SimPy's environment with a shorter way for each event, and calling something later."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from simpy.core import EmptySchedule, Environment, StopSimulation
from simpy.events import NORMAL, URGENT, Event, EventPriority

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(Environment):
    """An environment in which everything happens in the same order as in SimPy's own, in less time.

    Most events are to happen at once. They stand in a line of their own: with thousands of workers, the heap of what is
    to happen later would be rearranged for each of them.
    """

    now: float = 0
    """The time in seconds. SimPy's is a property, and every event reads it several times."""

    def __init__(self) -> None:
        super().__init__()
        self._at_once: deque[tuple[float, int, int, Event]] = deque()

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """Let an event happen; of those at the same time, lower priorities come first, and then earlier calls of this.

        Args:
            event: is triggered already.
            priority: one of SimPy's.
            delay: seconds from now.
        """
        entry = (self.now + delay, priority, next(self._eid), event)
        if not delay and priority == NORMAL:
            self._at_once.append(entry)
        else:
            heappush(self._queue, entry)

    def peek(self) -> float:
        """Return the time of the next event; infinity when there is none."""
        return self.now if self._at_once else super().peek()

    def step(self) -> None:
        """Let the next event happen.

        Raises:
            EmptySchedule: there is none.
        """
        at_once, queue = self._at_once, self._queue
        if at_once and not (queue and queue[0] < at_once[0]):
            self.now, _, _, event = at_once.popleft()
        elif queue:
            self.now, _, _, event = heappop(queue)
        else:
            raise EmptySchedule
        callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
        try:
            for callback in callbacks:
                callback(event)
        except StopSimulation:
            # The others are called when time goes on.
            event.callbacks = callbacks[callbacks.index(callback) + 1 :]
            self.schedule(event, EventPriority(URGENT - 1))
            raise
        if not event._ok and not event.defused:
            raise event._value


class _Call(Event):
    """An event that calls something: a `Timeout` which is made in half the time."""

    def __init__(self, env: Environment, delay: float, action: Callable[[Event], None]) -> None:
        self.env = env
        self.callbacks = [action]
        self._ok = True
        self._value = None
        env.schedule(self, NORMAL, delay)


def after(env: Environment, delay: float, action: Callable[[Event], None]) -> None:
    """Call `action` after `delay` seconds; what is due at the same time happens in the order of these calls.

    Args:
        env: the simulated time.
        delay: seconds from now.
        action: is called with the event, which says nothing.
    """
    _Call(env, delay, action)
