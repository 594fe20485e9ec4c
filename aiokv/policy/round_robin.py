"""Workers take turns: round-robin synchronous parallel, R2SP (Chen et al., INFOCOM 2019)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import Closed, Decider, Decision, RoundPolicy, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank, Round


class Turns(Decider):
    """Makes every step a round, in the order of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Rank = -1
        self._waiting: dict[Rank, deque[Token]] = {}

    def arrived(self, token: Token, read: Round, members: Sequence[Rank], now: float) -> list[Decision]:
        """Take in a step, and all others whose turn comes with it."""
        self._waiting.setdefault(token.rank, deque()).append(token)
        return self.changed(members, now)

    def changed(self, members: Sequence[Rank], now: float) -> list[Decision]:
        """Take all steps whose turn it is."""
        decisions: list[Decision] = []
        while self._waiting and (turn := self._turn(members)) in self._waiting:
            waiting = self._waiting[turn]
            self.round += 1
            decisions.append(Closed(self.round, [waiting.popleft()]))
            if not waiting:
                del self._waiting[turn]
            self._last = turn
        return decisions

    def _turn(self, members: Sequence[Rank]) -> Rank:
        # One that has left is not waited for, but what it had pushed before counts.
        ranks = sorted({*members, *self._waiting})
        return next((rank for rank in ranks if rank > self._last), ranks[0])

    def missing(self, members: Sequence[Rank]) -> list[Rank]:
        """Return the one whose turn it is."""
        return [self._turn(members)] if members else []


@dataclass(frozen=True)
class RoundRobin(RoundPolicy):
    """Each push is an update of its own, made in the order of the ranks, so that updates come evenly spaced."""

    name: ClassVar[str] = "round_robin"

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return Turns()
