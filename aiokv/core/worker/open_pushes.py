"""Pushes of a worker that are under way: how many of each key, and which may leave before which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.worker.parts import Pushed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.types import Key


class OpenPushes:
    """The pushes that are not answered. Those of a bundle stand under its first key."""

    __slots__ = ("_floors", "open")

    def __init__(self) -> None:
        self.open: dict[Key, int] = {}
        """How many there are of each key."""
        self._floors: dict[Key, int] = {}
        """Their lowest priority, unless that is 0."""

    def begin(self, key: Key, priority: int, messages: int) -> tuple[Pushed, int]:
        """Begin a push of so many messages, and say when they may leave: none overtakes an earlier one of its key."""
        count = self.open.get(key, 0)
        self.open[key] = count + 1
        if count or priority:
            floor = self._floors.get(key, 0) if count else priority
            priority = min(priority, floor)
            if priority:
                self._floors[key] = priority
            else:
                self._floors.pop(key, None)
        return Pushed(messages), priority

    def end(self, key: Key) -> None:
        """Take out a push of a key."""
        left = self.open[key] - 1
        if left:
            self.open[key] = left
            return
        # Nothing of the key is under way, so there is nothing to overtake.
        del self.open[key]
        if self._floors:
            self._floors.pop(key, None)

    def divide(self, keys: Sequence[Key]) -> None:
        """Let those of a bundle be those of each of its keys."""
        first = keys[0]
        if first in self.open:
            if first in self._floors:
                self._floors.update(dict.fromkeys(keys, self._floors[first]))
            self.open.update(dict.fromkeys(keys, self.open[first]))

    def full(self, keys: Iterable[Key], most: int) -> Key | None:
        """Return the first of some keys of which so many are under way, if there is one."""
        for key in keys:
            if self.open.get(key, 0) >= most:
                return key
        return None
