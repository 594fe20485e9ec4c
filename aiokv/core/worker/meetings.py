"""Which barriers a worker has passed: a scheduler that is started again has to know, for those that others wait at.

A barrier opens for all at once, but a scheduler may end when it has told some of them and not the others. Who was told
has gone on, and does not come again. So each opening has a number, and whoever comes back says which openings it knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Send
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.types import Rank

MOST_KEPT = 64
"""So many barriers that were passed are remembered, of different names or groups: others may wait at one of them only
for as long as they take part in none of the later ones."""


class Meetings:
    """The part of a `Session` that remembers the barriers that its worker has passed."""

    def __init__(self) -> None:
        self._passed: dict[tuple[str, tuple[Rank, ...]], m.Opened] = {}
        """The last one of each name and group, those that were passed last behind the others."""
        self._before = 0
        """So many had been opened, of all, when the others began to wait for this worker."""
        self._is_counted = False

    def viewed(self, view: m.View, *, is_counted: bool) -> None:
        """Take note of how many barriers had been opened when the others began to wait for this worker."""
        if is_counted and not self._is_counted:
            self._before = view.barriers
        self._is_counted = is_counted

    def last(self, name: str, group: tuple[Rank, ...]) -> int:
        """Return the number of the last opening that this worker has passed, or could have passed, of a barrier."""
        passed = self._passed.get((name, tuple(sorted(group))))
        return self._before if passed is None else max(passed.number, self._before)

    def passed(self, barrier: m.Barrier, met: m.Met) -> None:
        """Take note that this worker is let through."""
        place = barrier.name, tuple(sorted(barrier.group))
        self._passed.pop(place, None)
        self._passed[place] = m.Opened(*place, met.number, met.said)
        if len(self._passed) > MOST_KEPT:
            del self._passed[next(iter(self._passed))]

    def tell(self) -> list[Effect]:
        """Tell a scheduler that may be another one."""
        return [Send(SCHEDULER, 0, opened) for opened in self._passed.values()]
