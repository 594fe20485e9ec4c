"""A worker's calls that are not over, and until when each of them waits."""

from __future__ import annotations

import math

from aiokv.core.worker.call import Call


class OpenCalls(dict[int, Call]):
    """The calls under their numbers, in the order in which they were entered.

    It is as `Deadlines`, but the time stands in the call: with thousands of workers a table more is not in a cache. So
    the next time is only a lower bound here, too, until `due` recomputes it.
    """

    __slots__ = ("bound",)

    def __init__(self) -> None:
        super().__init__()
        self.bound = math.inf
        """A time before which nothing is due."""

    def enter(self, call: Call, until: float) -> None:
        """Put a call in, which waits until a time."""
        self[call.number] = call
        call.until = until
        if until < self.bound:  # noqa: PLR1730 - for every call, and `min` takes twice as long
            self.bound = until

    def left(self, number: int, now: float) -> float | None:
        """Return the seconds that a call still waits; None: it is over."""
        call = self.get(number)
        return None if call is None else max(0.0, call.until - now)

    def due(self, now: float) -> list[Call]:
        """Return the calls whose time has come, in their order; they are to be ended."""
        if now < self.bound:
            return []
        late = [call for call in self.values() if call.until <= now]
        for call in late:
            call.until = -math.inf
        self.bound = min((call.until for call in self.values() if call.until > now), default=math.inf)
        return late
