"""Simulated time: SimPy's environment with a shorter way for each event, and calling something later."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from simpy.core import EmptySchedule, Environment, StopSimulation
from simpy.events import NORMAL, URGENT, Event, EventPriority, Timeout

from sim.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    Entry = tuple[float, int, int, Callable[..., object], tuple[Any, ...]]
    """Time, priority and number of something that is to happen, and what is called with which arguments."""


class Clock(Environment):
    """An environment in which everything happens in the same order as in SimPy's own, in less time.

    Most events are to happen at once. They stand in a line of their own: with thousands of workers, the heap of what is
    to happen later would be rearranged for each of them.
    """

    now: float = 0
    """The time in seconds. SimPy's is a property, and every event reads it several times."""

    def __init__(self) -> None:
        super().__init__()
        self._at_once: deque[Entry] = deque()
        self._later: list[Entry] = []
        """A heap."""

    def event(self) -> Event:
        """Return a new event, which somebody is to trigger."""
        # As of SimPy, which finds class and method anew each time.
        return Event(self)

    def timeout(self, delay: float = 0, value: Any = None) -> Timeout:
        """Return an event that happens after `delay` seconds, with a value."""
        return Timeout(self, delay, value)

    def process(self, generator: Generator[Event | float, Any, Any]) -> Process:  # type: ignore[override]
        """Return a process that begins at once."""
        return Process(self, generator)

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """Let an event happen; of those at the same time, lower priorities come first, and then earlier calls of this.

        Args:
            event: is triggered already.
            priority: one of SimPy's.
            delay: seconds from now.
        """
        if not delay and priority == NORMAL:
            self._at_once.append((self.now + delay, NORMAL, next(self._eid), _happen, (event,)))
        else:
            heappush(self._later, (self.now + delay, priority, next(self._eid), _happen, (event,)))

    def after(self, delay: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call something later; what is due at the same time happens in the order of these calls.

        It is as good as a callback of a `Timeout`, and takes a third of the time.

        Args:
            delay: seconds from now.
            action: is called.
            *arguments: what it is called with.
        """
        if delay:
            heappush(self._later, (self.now + delay, NORMAL, next(self._eid), action, arguments))
        else:
            self._at_once.append((self.now + delay, NORMAL, next(self._eid), action, arguments))

    def peek(self) -> float:
        """Return the time of the next event; infinity when there is none."""
        if self._at_once:
            return self.now
        return self._later[0][0] if self._later else float("inf")

    def step(self) -> None:
        """Let the next event happen.

        Raises:
            EmptySchedule: there is none.
        """
        at_once, later = self._at_once, self._later
        if at_once and not (later and later[0] < at_once[0]):
            self.now, _, _, action, arguments = at_once.popleft()
        elif later:
            self.now, _, _, action, arguments = heappop(later)
        else:
            raise EmptySchedule
        action(*arguments)

    def run(self, until: Event | None = None) -> Any:  # type: ignore[override]
        """Let time go on.

        Args:
            until: up to this event, whose value is returned; None: until nothing is left to happen. Up to a time is up
                to a `timeout` here.

        Raises:
            RuntimeError: nothing is left, and the event has not happened.
        """
        at_once, later = self._at_once, self._later
        if until is not None:
            if until.callbacks is None:
                return until.value
            until.callbacks.append(StopSimulation.callback)
        try:
            # As `step`; a call less for each event.
            while True:
                if at_once and not (later and later[0][0] <= self.now and later[0] < at_once[0]):
                    self.now, _, _, action, arguments = at_once.popleft()
                elif later:
                    self.now, _, _, action, arguments = heappop(later)
                else:
                    break
                action(*arguments)
        except StopSimulation as stop:
            return stop.args[0]
        if until is not None:
            raise RuntimeError(f"nothing is left to happen, and {until!r} has not happened")
        return None


def _happen(event: Event) -> None:
    callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
    try:
        for callback in callbacks:
            callback(event)
    except StopSimulation:
        # The others are called when time goes on.
        event.callbacks = callbacks[callbacks.index(callback) + 1 :]
        event.env.schedule(event, EventPriority(URGENT - 1))
        raise
    if not event._ok and not event.defused:
        raise event._value
