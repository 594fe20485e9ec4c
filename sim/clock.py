"""Simulated time: SimPy's environment with a shorter way for each event, and calling something later."""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from simpy.core import EmptySchedule, Environment, StopSimulation
from simpy.events import NORMAL, URGENT, Event, EventPriority, Timeout

from sim.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.process import Activity

    Action = tuple[Callable[..., object], tuple[Any, ...]]
    """What is called, with which arguments."""

    Entry = tuple[float, int, int, Callable[..., object], tuple[Any, ...]]
    """Time, priority and number of something that is to happen, and what is called with which arguments."""


FEW: Final = 256
"""So many entries, at least, are put in order one by one."""


class Clock(Environment):
    """An environment in which everything happens in the same order as in SimPy's own, in less time.

    Most events are to happen at once. They stand in a line of their own: with thousands of workers, the heap of what is
    to happen later would be rearranged for each of them. What is to happen later at this moment comes first: it was put
    there at an earlier time, or is urgent.

    A heap of thousands of entries is in no cache when the next one is taken out. So it stays small: when there are too
    many in it, all are sorted, together with those that were sorted before.
    """

    now: float = 0.0
    """The time in seconds. SimPy's is a property, and every event reads it several times."""

    def __init__(self) -> None:
        super().__init__()
        self._at_once: deque[Action] = deque()
        self.soon: Callable[[Action], None] = self._at_once.append
        """Calls something at this time, after all that is to happen at once."""
        self._later: list[Entry] = []
        """A heap."""
        self._sorted: list[Entry] = []
        """The last one comes first."""
        self._next = math.inf
        """The earliest time of both."""
        self._most = FEW
        """So many may be in the heap."""

    def event(self) -> Event:
        """Return a new event, which somebody is to trigger."""
        # As of SimPy, which finds class and method anew each time.
        return Event(self)

    def timeout(self, delay: float = 0, value: Any = None) -> Timeout:
        """Return an event that happens after `delay` seconds, with a value."""
        return Timeout(self, delay, value)

    def process(self, generator: Activity) -> Process:  # type: ignore[override]
        """Return a process that begins at once."""
        return Process(self, generator)

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        """Let an event happen; of those at the same time, lower priorities come first, and then earlier calls of this.

        Args:
            event: is triggered already.
            priority: one of SimPy's.
            delay: seconds from now.
        """
        now = self.now
        if priority == NORMAL and now + delay == now:
            self._at_once.append((_happen, (event,)))
        else:
            self._enter((now + delay, priority, next(self._eid), _happen, (event,)))

    def after(self, delay: float, action: Callable[..., object], arguments: tuple[Any, ...] = ()) -> None:
        """Call something later; what is due at the same time happens in the order of these calls.

        It is as good as a callback of a `Timeout`, and takes a third of the time.

        Args:
            delay: seconds from now.
            action: is called.
            arguments: what it is called with.
        """
        if (time := self.now + delay) != self.now:
            # As `_enter`, which would be a call for each event.
            later = self._later
            heappush(later, (time, NORMAL, next(self._eid), action, arguments))
            if time < self._next:  # noqa: PLR1730 - for every event
                self._next = time
            if len(later) > self._most:
                self._order()
        else:
            self._at_once.append((action, arguments))

    def _enter(self, entry: Entry) -> None:
        later = self._later
        heappush(later, entry)
        if entry[0] < self._next:  # noqa: PLR1730 - for every entry, and `min` takes twice as long
            self._next = entry[0]
        if len(later) > self._most:
            self._order()

    def _order(self) -> None:
        """Empty the heap."""
        self._sorted += self._later
        self._sorted.sort(reverse=True)
        self._later.clear()
        self._most = max(FEW, len(self._sorted) // 2)

    def _take(self) -> Entry:
        """Take out what is next of all that is later."""
        later, ordered = self._later, self._sorted
        entry = heappop(later) if later and not (ordered and ordered[-1] < later[0]) else ordered.pop()
        first = later[0][0] if later else math.inf
        self._next = ordered[-1][0] if ordered and ordered[-1][0] < first else first
        return entry

    def peek(self) -> float:
        """Return the time of the next event; infinity when there is none."""
        if self._at_once:
            return self.now
        return self._next

    def step(self) -> None:
        """Let the next event happen.

        Raises:
            EmptySchedule: there is none.
        """
        if self._at_once and self._next > self.now:
            action, arguments = self._at_once.popleft()
        elif self._later or self._sorted:
            self.now, _, _, action, arguments = self._take()
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
        at_once, later, ordered = self._at_once, self._later, self._sorted
        if until is not None:
            if until.callbacks is None:
                return until.value
            until.callbacks.append(StopSimulation.callback)
        try:
            # As `step`; a call less for each event.
            while True:
                if at_once and self._next > self.now:
                    action, arguments = at_once.popleft()
                elif ordered:
                    self.now, _, _, action, arguments = self._take()
                elif later:
                    # As `_take`.
                    self.now, _, _, action, arguments = heappop(later)
                    self._next = later[0][0] if later else math.inf
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
