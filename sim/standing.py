"""Which updates stand when a server may be lost: those that its standby has, or that it makes without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.types import Key, Version
    from sim.record import DivideRecord, UpdateRecord

Place = tuple["Key", int]
"""Key and first element of a chunk."""


@dataclass(slots=True)
class Standing:
    """Holds updates back of which nobody may hear yet, and that a chunk is divided until its updates stand.

    Attributes:
        on_update: is told of each update that stands.
        on_divide: is told of each division, once, when all updates before it stand.
        made: the newest version of each chunk that does.
        copied: the newest version that has come to a standby.
        waiting: updates that a server makes, and that its standby does not have yet, by their version.
        dividing: divisions of chunks, each behind an update that does not stand yet.
        divided: chunks that are no more; a server that takes another one's place says so again.
    """

    on_update: Callable[[UpdateRecord], None]
    on_divide: Callable[[DivideRecord], None]
    made: dict[Place, Version] = field(default_factory=dict)
    copied: dict[Place, Version] = field(default_factory=dict)
    waiting: dict[Place, dict[Version, UpdateRecord]] = field(default_factory=dict)
    dividing: dict[Place, tuple[Version, DivideRecord]] = field(default_factory=dict)
    divided: dict[Place, None] = field(default_factory=dict)

    def make(self, update: UpdateRecord, *, waits: bool) -> None:
        """Take note of an update that a server makes, or has made; unless it `waits` for its standby, that stands."""
        place = (update.key, update.start)
        if not waits and place not in self.waiting:
            # It has never waited for a standby, so each version is to be made once.
            self._stand_before(place, update.time)
            self.made[place] = update.version
            self.on_update(update)
            return
        # Of one that was made by a server that is lost nobody has heard.
        self.waiting.setdefault(place, {})[update.version] = update
        if not waits or update.version <= self.copied.get(place, 0):
            self._stand(place, update.version, update.time)

    def arrived(self, place: Place, version: Version, now: float) -> None:
        """Take note that a standby has all versions of a chunk up to one."""
        self.copied[place] = max(version, self.copied.get(place, 0))
        self._stand(place, version, now)

    def divide(self, division: DivideRecord, node: str) -> None:
        """Take note that a server has divided a chunk."""
        place = (division.key, division.start)
        if place in self.divided:
            return
        own = [number for number, update in self.waiting.get(place, {}).items() if update.node == node]
        self.dividing[place] = max(own, default=0), division
        self._divide(place)

    def _divide(self, place: Place) -> None:
        last, division = self.dividing.get(place, (0, None))
        if division is not None and self.made.get(place, 0) >= last:
            del self.dividing[place]
            self.divided[place] = None
            self.on_divide(division)

    def _stand_before(self, part: Place, now: float) -> None:
        """Let all updates stand of a chunk of which one is a part: a standby may have got the parts in its place."""
        for place, (last, division) in list(self.dividing.items()):
            if part[0] in division.keys and part[1] == 0:
                self._stand(place, last, now)

    def _stand(self, place: Place, version: Version, now: float) -> None:
        self._stand_before(place, now)
        waiting = self.waiting.get(place, {})
        for number in sorted(number for number in waiting if number <= version):
            update = waiting.pop(number)
            if number > self.made.get(place, 0):
                self.made[place], update.time = number, now
                self.on_update(update)
        self._divide(place)

    def alone(self, node: str, now: float) -> None:
        """Take note that a server waits for no standby any longer."""
        for place, waiting in self.waiting.items():
            own = [number for number, update in waiting.items() if update.node == node]
            if own:
                self._stand(place, max(own), now)
