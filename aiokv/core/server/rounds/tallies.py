"""What became of each worker's contributions, and how long its reads were held back: counted on every server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank


EXACT = 1024
"""From this staleness on counts are put together: that of a worker which pushes and never reads grows without end."""


def bucket(staleness: int) -> int:
    """Return under which staleness a contribution is counted: its own, or from `EXACT` on the power of 2 below."""
    return staleness if staleness < EXACT else 1 << staleness.bit_length() - 1


class Tallies:
    """Counts by rank. In lockstep there is nothing to count: every contribution is made, and none is stale."""

    def __init__(self) -> None:
        self._ranks: dict[Rank, m.RankTally] = {}

    def _of(self, rank: Rank) -> m.RankTally:
        tally = self._ranks.get(rank)
        if tally is None:
            tally = self._ranks[rank] = m.RankTally()
        return tally

    def applied(self, ranks: Sequence[Rank], staleness: Sequence[int]) -> None:
        """Count the contributions of an update."""
        for rank, behind in zip(ranks, staleness, strict=True):
            # As `_of` and `bucket`; it is for every push.
            tally = self._ranks.get(rank) or self._of(rank)
            tally.applied += 1
            counted = behind if behind < EXACT else bucket(behind)
            tally.staleness[counted] = tally.staleness.get(counted, 0) + 1

    def dropped(self, rank: Rank, reason: str) -> None:
        """Count a contribution that is in no update."""
        tally = self._of(rank)
        tally.dropped[reason] = tally.dropped.get(reason, 0) + 1

    def repeated(self, rank: Rank) -> None:
        """Count a contribution that has come again."""
        self._of(rank).duplicates += 1

    def waited(self, rank: Rank, seconds: float) -> None:
        """Count how long a read was held back."""
        self._of(rank).waited += seconds

    def answer(self) -> m.Tally:
        """Return all counts."""
        return m.Tally(dict(sorted(self._ranks.items())))
