"""Which waiting entries are due: constant time to add and to remove, also with millions a minute."""

from __future__ import annotations

import math
from collections.abc import Hashable, Set
from typing import TypeVar

from aiokv.errors import ConfigError

K = TypeVar("K", bound=Hashable)


class Deadlines(dict[K, float]):
    """A table of entries with a time each, in the order in which they were added by `add`.

    A heap would keep the answered entries until their time has come; here they leave at once. The price: the next time
    is only a lower bound until `due` recomputes it, so a `Tick` may find nothing to do.
    """

    __slots__ = ("bound",)

    def __init__(self) -> None:
        super().__init__()
        self.bound = math.inf
        """A time before which nothing is due."""

    def holds(self, entries: Set[K]) -> bool:
        """Tell whether these entries are in it, and no others."""
        return self.keys() == entries

    def times(self) -> list[tuple[K, float]]:
        """Return all entries with their times, in the order in which they were added."""
        return list(self.items())

    def add(self, entry: K, time: float) -> None:
        """Put an entry in, or give it another time."""
        self[entry] = time
        if time < self.bound:  # noqa: PLR1730 - for every request, and `min` takes twice as long
            self.bound = time

    def discard(self, entry: K) -> None:
        """Take an entry out if it is there."""
        self.pop(entry, None)

    def next(self) -> float | None:
        """Return a time before which nothing is due; None when nothing waits."""
        return self.bound if self else None

    def due(self, now: float) -> list[K]:
        """Take out and return the entries whose time has come, in the order in which they were added."""
        if now < self.bound:
            return []
        late = [entry for entry, time in self.items() if time <= now]
        for entry in late:
            del self[entry]
        self.bound = min(self.values(), default=math.inf)
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
