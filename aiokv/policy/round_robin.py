"""Workers take turns: round-robin synchronous parallel, R2SP (Chen et al., INFOCOM 2019)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import Closed, Decider, Decision, RoundPolicy, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.types import Rank, Round


class Turns(Decider):
    """Makes every step a round, in the order of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Rank = -1
        self._waiting: dict[Rank, deque[Token]] = {}
        self._gone: dict[Rank, None] = {}
        """Those who wait and have left: they are not waited for, but what they had pushed before counts."""

    def arrived(self, token: Token, read: Round, members: Sequence[Rank], now: float) -> list[Decision]:
        """Take in a step, and all others whose turn comes with it."""
        self._waiting.setdefault(token.rank, deque()).append(token)
        if members[bisect_right(members, token.rank) - 1 :][:1] != [token.rank]:
            self._gone[token.rank] = None
        return self._take(members)

    def changed(self, members: Sequence[Rank], now: float) -> list[Decision]:
        """Look who has left, and whose turn it is now."""
        here = frozenset(members)
        self._gone = dict.fromkeys(rank for rank in self._waiting if rank not in here)
        return self._take(members)

    def _take(self, members: Sequence[Rank]) -> list[Decision]:
        """Take all steps whose turn it is."""
        decisions: list[Decision] = []
        while self._waiting and (turn := self._turn(members)) in self._waiting:
            waiting = self._waiting[turn]
            self.round += 1
            decisions.append(Closed(self.round, [waiting.popleft()]))
            if not waiting:
                del self._waiting[turn]
                self._gone.pop(turn, None)
            self._last = turn
        return decisions

    def resume(
        self, number: Round, last: Sequence[Token], known: Mapping[Rank, int], accepted: Sequence[Token] = ()
    ) -> None:
        """Go on behind the last turn that another has given."""
        super().resume(number, last, known, accepted)
        self._last = next((token.rank for token in last), -1)

    def _turn(self, members: Sequence[Rank]) -> Rank:
        place = bisect_right(members, self._last)
        ranks = [*members[place : place + 1], *members[:1], *self._gone]
        return min(ranks, key=lambda rank: (rank <= self._last, rank))

    def missing(self, members: Sequence[Rank]) -> list[Rank]:
        """Return the one whose turn it is."""
        return [self._turn(members)] if members else []


@dataclass(frozen=True)
class RoundRobin(RoundPolicy):
    """Each push is an update of its own, made in the order of the ranks, so that updates come evenly spaced."""

    name: ClassVar[str] = "round_robin"
    in_turn: ClassVar[bool] = True

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return Turns()
