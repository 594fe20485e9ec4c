"""How fast a node computes while its speed changes, and while it is stopped."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from sim.faults import Slow

Window = tuple[float, float, float]
"""From when to when a step takes how many times as long."""

FIRST_DRAWN: Final = 16
"""So many windows of a seeded process are drawn at first, and twice as many each time that they do not reach."""


class Pace:
    """The speed of one worker, or of one server's arithmetic, over time.

    Windows in which it is slow and pauses count exactly, also in the middle of a step. A ramp and a wandering factor
    are looked up when a step, or one piece of a server's work, begins.
    """

    def __init__(self, stream: random.Random) -> None:
        self.slow: list[Slow] = []
        self.pauses: list[tuple[float, float]] = []
        self.bursts: list[Iterator[Window]] = []
        """Windows that come at random, without end and each in their order; they are drawn as time goes on."""
        self._stream = stream
        self._drawn: list[Window] = []
        self._more = FIRST_DRAWN
        self._wander: dict[int, float] = {}
        self._changes: list[float] = []
        self._factors: list[float] = []
        self._drifts: list[tuple[int, Slow]] = []
        self._stops: list[tuple[float, float]] = []
        """From when to when it is stopped."""

    def finish(self, start: float, work: float) -> tuple[float, float]:
        """Return when work that begins now is done, and for how long the worker was stopped meanwhile.

        Args:
            start: the time.
            work: seconds that it takes at full speed.
        """
        if not self._factors:
            self._prepare()
        if self._drifts:
            work *= self._factor(start)
        now, paused = start, 0.0
        place = bisect.bisect_right(self._changes, start)
        while True:
            while place == len(self._changes) and self.bursts:
                self._prepare()
                place = bisect.bisect_right(self._changes, now)
            end = self._changes[place] if place < len(self._changes) else math.inf
            factor = self._factors[place]
            if now + work * factor <= end:
                return now + work * factor, paused
            if math.isinf(factor):
                paused += end - now
            else:
                work -= (end - now) / factor
            now = end
            place += 1

    def stopped(self, begin: float, end: float) -> float:
        """Return for how long the worker is stopped between two times."""
        if not self._factors:
            self._prepare()
        return math.fsum([max(0.0, min(end, last) - max(begin, first)) for first, last in self._stops])

    def _prepare(self) -> None:
        """Find the times at which the speed changes, and the factor before the first and after each of them.

        Those are known as far as windows were drawn of each process, and it draws more each time.
        """
        known = math.inf
        for burst in self.bursts:
            self._drawn += itertools.islice(burst, self._more)
            known = min(known, self._drawn[-1][0])
        self._more *= 2
        windows = [
            (fault.at, fault.at + fault.duration, fault.factor) for fault in self.slow if fault.shape == "window"
        ]
        windows += self._drawn
        windows += [(begin, end, math.inf) for begin, end in self.pauses]
        times = {time for begin, end, _ in windows for time in (begin, end)}
        self._changes = sorted(time for time in times if time <= known and time < math.inf)
        changes: dict[float, list[tuple[int, float]]] = {}
        for number, (begin, end, _) in enumerate(windows):
            changes.setdefault(begin, []).append((number, 1))
            changes.setdefault(end, []).append((number, -1))
        active: dict[int, float] = {}
        self._drifts = [(number, fault) for number, fault in enumerate(self.slow) if fault.shape != "window"]
        self._factors = [1.0]
        for time in self._changes:
            for number, change in changes[time]:
                if change > 0:
                    active[number] = windows[number][2]
                else:
                    active.pop(number, None)
            self._factors.append(math.prod(active.values()))
        ends = [*self._changes[1:], math.inf]
        windows_at = zip(self._changes, ends, self._factors[1:], strict=True) if self._changes else ()
        self._stops = [(begin, end) for begin, end, factor in windows_at if math.isinf(factor)]

    def _factor(self, now: float) -> float:
        """Return the factor of ramps and wandering speeds, for a step that begins now."""
        factor = 1.0
        for number, fault in self._drifts:
            if fault.shape == "ramp" and now >= fault.at:
                factor *= 1.0 + (fault.factor - 1.0) * min(1.0, (now - fault.at) / fault.duration)
            elif fault.shape == "ar1" and _covers(fault, now):
                before = self._wander.get(number)
                if before is None:
                    wander = self._stream.gauss(0.0, fault.sd)
                else:
                    fresh = math.sqrt(1.0 - fault.persistence**2)
                    wander = fault.persistence * before + fresh * self._stream.gauss(0.0, fault.sd)
                self._wander[number] = wander
                factor *= fault.factor * math.exp(wander)
        return factor


def _covers(fault: Slow, now: float) -> bool:
    return fault.at <= now < fault.at + fault.duration
