"""Asynchronous, without gradients that are too old: Ringmaster ASGD (Maranjyan et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import Closed, Decider, Decision, Dropped, RoundPolicy, Token
from aiokv.policy.options import at_least

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank, Round

STALE = "stale"


class Recent(Decider):
    """Makes every step a round that was computed from the values of less than so many rounds ago."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def arrived(self, token: Token, read: Round, members: Sequence[Rank], now: float) -> list[Decision]:
        """Take in a step, or drop it."""
        if self.round - read >= self._most:
            return [Dropped(token, STALE)]
        self.round += 1
        return [Closed(self.round, [token])]

    def missing(self, members: Sequence[Rank]) -> list[Rank]:
        """Return everybody: any step makes a round."""
        return list(members)


@dataclass(frozen=True)
class Ringmaster(RoundPolicy):
    """Each push is an update of its own if its staleness is below `r`; otherwise it is dropped.

    The paper's choice is r = max(1, ceil(sigma^2 / epsilon)), for gradients of variance sigma^2 and a wanted squared
    gradient norm of epsilon.

    Args:
        r: the smallest staleness that is too much, in updates.
    """

    name: ClassVar[str] = "ringmaster"
    r: int

    def __post_init__(self) -> None:
        at_least(self, "r", 1)

    @property
    def per_step(self) -> bool:
        """It is always so."""
        return True

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return Recent(self.r)
