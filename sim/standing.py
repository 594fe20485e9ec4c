"""Which updates stand when a server may be lost: those that its standby has, or that it makes without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.types import Key, Version
    from sim.record import UpdateRecord

Place = tuple["Key", int]
"""Key and first element of a chunk."""


@dataclass(slots=True)
class Standing:
    """Holds updates back of which nobody may hear yet.

    Attributes:
        on_update: is told of each update that stands.
        made: the newest version of each chunk that does.
        copied: the newest version that has come to a standby.
        waiting: updates that a server makes, and that its standby does not have yet, by their version.
    """

    on_update: Callable[[UpdateRecord], None]
    made: dict[Place, Version] = field(default_factory=dict)
    copied: dict[Place, Version] = field(default_factory=dict)
    waiting: dict[Place, dict[Version, UpdateRecord]] = field(default_factory=dict)

    def make(self, update: UpdateRecord, *, waits: bool) -> None:
        """Take note of an update that a server makes, or has made; unless it `waits` for its standby, that stands."""
        place = (update.key, update.start)
        if not waits and place not in self.waiting:
            # It has never waited for a standby, so each version is to be made once.
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

    def _stand(self, place: Place, version: Version, now: float) -> None:
        waiting = self.waiting.get(place, {})
        for number in sorted(number for number in waiting if number <= version):
            update = waiting.pop(number)
            if number > self.made.get(place, 0):
                self.made[place], update.time = number, now
                self.on_update(update)

    def alone(self, node: str, now: float) -> None:
        """Take note that a server waits for no standby any longer."""
        for place, waiting in self.waiting.items():
            own = [number for number, update in waiting.items() if update.node == node]
            if own:
                self._stand(place, max(own), now)
