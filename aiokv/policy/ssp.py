"""Stale synchronous: each push is an update of its own, and who is too far ahead waits (Ho et al., 2013)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.asp import ASP
from aiokv.policy.base import Gate
from aiokv.policy.options import at_least

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank


class Lead(Gate):
    """Lets a rank read while it leads the slowest member by at most so many pushes."""

    def __init__(self, lead: int) -> None:
        self.lead = lead
        self.counts: dict[Rank, int] = {}
        self.slowest: dict[Rank, None] = {}
        """The members that have made the fewest pushes, ascending."""
        self._fewest = 0

    def advanced(self, rank: Rank, count: int, members: Sequence[Rank], now: float) -> bool:
        """Count a push; only when the last of the slowest has made it, others are free."""
        del now
        self.counts[rank] = count
        self.slowest.pop(rank, None)
        if not self.slowest:
            self.changed(members)
            return True
        return False

    def changed(self, members: Sequence[Rank]) -> None:
        """Look who is the slowest now."""
        self._fewest = min((self.counts.get(rank, 0) for rank in members), default=self._fewest)
        self.slowest = dict.fromkeys(rank for rank in members if self.counts.get(rank, 0) == self._fewest)

    def may_read(self, rank: Rank, members: Sequence[Rank]) -> bool:
        """Return True when the slowest member is not too far behind."""
        del members
        return self.counts.get(rank, 0) - self.lead <= self._fewest

    def waits_for(self, rank: Rank, members: Sequence[Rank]) -> list[Rank]:
        """Return the members that are too far behind."""
        least = self.counts.get(rank, 0) - self.lead
        return [other for other in members if self.counts.get(other, 0) < least]


@dataclass(frozen=True)
class SSP(ASP):
    """A worker that has made c pushes may read on only if every member has made at least c - staleness.

    So it may *start* step c + 1 only then. At the end of that step it leads by one more: papers differ by one here.
    With 0 all go in step, and each push still is an update of its own.

    Args:
        staleness: how far a worker may be ahead, in pushes.
    """

    name: ClassVar[str] = "ssp"
    staleness: int

    def __post_init__(self) -> None:
        at_least(self, "staleness", 0)

    def gate(self) -> Gate:
        """Return the rule for one chunk."""
        return Lead(self.staleness)


@dataclass(frozen=True)
class ESSP(SSP):
    """The same bound with eager reads (Dai et al., 2015).

    A worker that reads a key gets the value of each of its own clocks without waiting until it pulls: as soon as it may
    go on. Its next pull finds it there.
    """

    name: ClassVar[str] = "essp"
    sends_ahead: ClassVar[bool] = True
