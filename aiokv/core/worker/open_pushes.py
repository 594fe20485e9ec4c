"""Pushes of a worker that are under way: how many of each key, and which may leave before which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.worker.parts import Pushed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.types import Key


class OpenPushes:
    """The pushes that are not answered. Those of a bundle stand under its first key."""

    def __init__(self) -> None:
        self._open: dict[Key, int] = {}
        """How many there are of each key."""
        self._floors: dict[Key, int] = {}
        """Their lowest priority."""

    def begin(self, key: Key, priority: int, messages: int) -> tuple[Pushed, int]:
        """Begin a push of so many messages, and say when they may leave: none overtakes an earlier one of its key."""
        self._open[key] = self._open.get(key, 0) + 1
        floor = self._floors.get(key)
        if floor is None or priority < floor:
            self._floors[key] = priority
            return Pushed(messages), priority
        return Pushed(messages), floor

    def end(self, key: Key) -> None:
        """Take out a push of a key."""
        left = self._open[key] - 1
        if left:
            self._open[key] = left
            return
        # Nothing of the key is under way, so there is nothing to overtake.
        del self._open[key]
        self._floors.pop(key, None)

    def divide(self, keys: Sequence[Key]) -> None:
        """Let those of a bundle be those of each of its keys."""
        first = keys[0]
        if first in self._open:
            self._floors.update(dict.fromkeys(keys, self._floors[first]))
            self._open.update(dict.fromkeys(keys, self._open[first]))

    def __bool__(self) -> bool:
        """Tell whether any push is under way."""
        return bool(self._open)

    def full(self, keys: Iterable[Key], most: int) -> Key | None:
        """Return the first of some keys of which so many are under way, if there is one."""
        for key in keys:
            if self._open.get(key, 0) >= most:
                return key
        return None
