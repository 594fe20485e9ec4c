"""Which waiting entries are due: constant time to add and to remove, also with millions a minute."""

from __future__ import annotations

import math
from collections.abc import Hashable, Set
from typing import Generic, TypeVar

from aiokv.errors import ConfigError

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """A table of entries with a time each, in the order in which they were added.

    A heap would keep the answered entries until their time has come; here they leave at once. The price: the next time
    is only a lower bound until `due` recomputes it, so a `Tick` may find nothing to do.
    """

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._bound = math.inf

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, entry: K) -> bool:
        return entry in self._times

    def holds(self, entries: Set[K]) -> bool:
        """Tell whether these entries are in it, and no others."""
        return self._times.keys() == entries

    def times(self) -> list[tuple[K, float]]:
        """Return all entries with their times, in the order in which they were added."""
        return list(self._times.items())

    def add(self, entry: K, time: float) -> None:
        """Put an entry in, or give it another time."""
        self._times[entry] = time
        if time < self._bound:  # noqa: PLR1730 - for every request, and `min` takes twice as long
            self._bound = time

    def discard(self, entry: K) -> None:
        """Take an entry out if it is there."""
        self._times.pop(entry, None)

    def next(self) -> float | None:
        """Return a time before which nothing is due; None when nothing waits."""
        return self._bound if self._times else None

    def due(self, now: float) -> list[K]:
        """Take out and return the entries whose time has come, in the order in which they were added."""
        if now < self._bound:
            return []
        late = [entry for entry, time in self._times.items() if time <= now]
        for entry in late:
            del self._times[entry]
        self._bound = min(self._times.values(), default=math.inf)
        return late


def check_timeout(seconds: float) -> None:
    """Refuse a time-out that would never come: nothing waits silently.

    Raises:
        ConfigError: it is infinite or not a number.
    """
    if not math.isfinite(seconds):
        raise ConfigError(
            f"a timeout is a finite number of seconds, got {seconds}", expected="finite", got=str(seconds)
        )


def earliest(*times: float | None) -> float | None:
    """Return the smallest of the times that are not None."""
    first = None
    for time in times:
        if time is not None and (first is None or time < first):
            first = time
    return first
