"""Barriers that look at a sample of the workers: probabilistic synchronous parallel (Wang et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from aiokv.policy.asp import ASP
from aiokv.policy.options import at_least
from aiokv.policy.ssp import Lead

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.policy.base import Gate
    from aiokv.types import Rank

_MASK: Final = 2**64 - 1


def mixed(number: int) -> int:
    """Return 64 bits that look random, the same everywhere for the same number (SplitMix64, Steele et al., 2014)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def sample(ranks: Sequence[Rank], size: int, seed: int) -> list[Rank]:
    """Return so many of the ranks, or all, in their order; drawn by the seed without replacement (Floyd, 1987)."""
    if size >= len(ranks):
        return list(ranks)
    places: dict[int, None] = {}
    for last in range(len(ranks) - size, len(ranks)):
        place = mixed(mixed(seed) ^ last) % (last + 1)
        places[last if place in places else place] = None
    return [ranks[place] for place in sorted(places)]


class SampledLead(Lead):
    """Lets a rank read while it leads none of those that it has drawn after its push by more than so many pushes."""

    def __init__(self, lead: int, size: int) -> None:
        super().__init__(lead)
        self._size = size
        self._drawn: dict[Rank, tuple[int, list[Rank]]] = {}

    def advanced(self, rank: Rank, count: int, members: Sequence[Rank], now: float) -> bool:
        """Count a push: whoever has drawn this rank may be free."""
        self.counts[rank] = count
        return True

    def may_read(self, rank: Rank, members: Sequence[Rank]) -> bool:
        """Return True when nobody of its sample is too far behind."""
        return not self.waits_for(rank, members)

    def waits_for(self, rank: Rank, members: Sequence[Rank]) -> list[Rank]:
        """Return those of its sample that are too far behind."""
        count = self.counts.get(rank, 0)
        drawn_at, drawn = self._drawn.get(rank, (-1, []))
        if drawn_at != count:
            # The number of the push and the rank are the seed: every server draws the same.
            drawn = sample([other for other in members if other != rank], self._size, count << 32 | rank)
            self._drawn[rank] = (count, drawn)
        behind = [other for other in drawn if self.counts.get(other, 0) < count - self.lead]
        return [other for other in behind if other in members]


@dataclass(frozen=True)
class PSSP(ASP):
    """A worker that has made c pushes may read on if each of `beta` others, drawn anew, has made c - staleness.

    Args:
        beta: how many are drawn; 0 is `ASP`, all of them are `SSP`.
        staleness: how far a worker may be ahead of them, in pushes.
    """

    name: ClassVar[str] = "pssp"
    beta: int
    staleness: int

    def __post_init__(self) -> None:
        at_least(self, "beta", 0)
        at_least(self, "staleness", 0)

    def gate(self) -> Gate:
        """Return the rule for one chunk."""
        return SampledLead(self.staleness, self.beta)


@dataclass(frozen=True)
class PBSP(ASP):
    """`PSSP` with staleness 0.

    Args:
        beta: how many others are drawn after each push.
    """

    name: ClassVar[str] = "pbsp"
    beta: int

    def __post_init__(self) -> None:
        at_least(self, "beta", 0)

    def gate(self) -> Gate:
        """Return the rule for one chunk."""
        return SampledLead(0, self.beta)
