"""Stale synchronous with a bound that follows the speeds: DSSP (Zhao et al., ICDCS 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.asp import ASP
from aiokv.policy.options import at_least
from aiokv.policy.ssp import Lead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.policy.base import Gate
    from aiokv.types import Rank


class DynamicLead(Lead):
    """Lets the fastest member go ahead for as many pushes more as its wait is then predicted to be the shortest."""

    def __init__(self, lower: int, upper: int) -> None:
        super().__init__(lower)
        self._upper = upper
        self._most = 0
        """The most pushes of a member."""
        self._credit: dict[Rank, int] = {}
        self._times: dict[Rank, tuple[float, float]] = {}
        """When each rank has pushed the last time but one, and the last time."""
        self._free: dict[Rank, int] = {}
        """Up to which push a rank may read whatever the lead is."""

    def advanced(self, rank: Rank, count: int, members: Sequence[Rank], now: float) -> bool:
        """Count a push, and decide about the read after it."""
        free = super().advanced(rank, count, members, now)
        self._most = max(self._most, count)
        self._times[rank] = (self._times.get(rank, (now, now))[1], now)
        if self._credit.get(rank, 0) > 0:
            self._credit[rank] -= 1
            self._free[rank] = count
        elif count == self._most and not super().may_read(rank, members):
            more = self._more(rank)
            if more:
                # The read after this push is the first of them.
                self._credit[rank] = more - 1
                self._free[rank] = count
        return free

    def changed(self, members: Sequence[Rank]) -> None:
        """Look who is the slowest and the fastest now."""
        super().changed(members)
        self._most = max((self.counts.get(rank, 0) for rank in members), default=0)

    def may_read(self, rank: Rank, members: Sequence[Rank]) -> bool:
        """Return True when the slowest member is not too far behind, or the rank may go ahead."""
        return self._is_free(rank) or super().may_read(rank, members)

    def waits_for(self, rank: Rank, members: Sequence[Rank]) -> list[Rank]:
        """Return the members that are too far behind."""
        return [] if self._is_free(rank) else super().waits_for(rank, members)

    def _is_free(self, rank: Rank) -> bool:
        return self._free.get(rank, -1) >= self.counts.get(rank, 0)

    def _more(self, rank: Rank) -> int:
        """Return after how many further pushes the rank meets a push of the slowest member most closely."""
        slow = next(iter(self.slowest), -1)
        if slow not in self._times:
            return 0
        (before, last), (slow_before, slow_last) = self._times[rank], self._times[slow]
        own, other = last - before, slow_last - slow_before
        if other <= 0.0:
            return 0

        def wait(more: int) -> float:
            arrives = last + more * own
            return -(arrives - slow_last) % other

        # When that is used up the published rule chooses again as if nothing had been; here the upper bound stays one.
        most = self._upper + 1 - (self.counts[rank] - self.counts[slow])
        return min(range(max(0, most) + 1), key=lambda more: (wait(more), more))


@dataclass(frozen=True)
class DSSP(ASP):
    """A bound between `lower` and `upper`: beyond the lower one, the fastest worker goes on while waiting is predicted
    to be longer than going on.

    Args:
        lower: every worker may be that many pushes ahead.
        upper: and none more than that.
    """

    name: ClassVar[str] = "dssp"
    lower: int
    upper: int

    def __post_init__(self) -> None:
        at_least(self, "lower", 0)
        at_least(self, "upper", self.lower)

    def gate(self) -> Gate:
        """Return the rule for one chunk."""
        return DynamicLead(self.lower, self.upper)
