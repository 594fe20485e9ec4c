"""Rounds that wait only so long for the last ones (as torchft's lighthouse and Horovod's elastic mode for members)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import Closed, Decider, Decision, Dropped, RoundPolicy, Token
from aiokv.policy.kofn import LATE
from aiokv.policy.options import at_least

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.types import Rank, Round

EVICTED = "evicted"


class TimedRounds(Decider):
    """Closes a round when all have come for whom it waits, or after some time if enough have come.

    Rounds fence off who is evicted: whatever it computed before is late, and that is how it hears of it. A step from
    the values of the last round, which it can only have read afterwards, is its return.
    """

    def __init__(self, policy: Quorum) -> None:
        super().__init__()
        self._policy = policy
        self._open: dict[Rank, Token] = {}
        self._close_at: float | None = None
        self._is_late = False
        """That time is over."""
        self._strikes: dict[Rank, int] = {}
        """In how many rounds, one after the other, a rank was late."""

    def arrived(self, token: Token, read: Round, members: Sequence[Rank], now: float) -> list[Decision]:
        """Take in a step."""
        if token.rank in self._open:
            return [Dropped(token, LATE)]
        if read < self.round:
            return [Dropped(token, EVICTED if self._is_evicted(token.rank) else LATE)]
        if not self._open:
            self._close_at = now + self._policy.deadline
        self._open[token.rank] = token
        return self.changed(members, now)

    def changed(self, members: Sequence[Rank], now: float) -> list[Decision]:
        """Close the round if enough have come, and nobody is waited for or it is time."""
        if not self._open or self.needed(members) > 0 or (self._waited(members) and not self._is_late):
            return []
        self.round += 1
        for rank in members:
            self._strikes[rank] = 0 if rank in self._open else self._strikes.get(rank, 0) + 1
        closed = Closed(self.round, sorted(self._open.values()))
        self._open.clear()
        self._close_at, self._is_late = None, False
        return [closed]

    def deadline(self) -> float | None:
        """Return when the open round is closed, if it has enough then."""
        return None if self._is_late else self._close_at

    def due(self, members: Sequence[Rank], now: float) -> list[Decision]:
        """Close the round if enough have come; otherwise the next one that comes does."""
        self._is_late = self._is_late or (self._close_at is not None and now >= self._close_at)
        return self.changed(members, now)

    def known(self) -> dict[Rank, int]:
        """Return in how many rounds each rank was late."""
        return dict(self._strikes)

    def resume(
        self, number: Round, last: Sequence[Token], known: Mapping[Rank, int], accepted: Sequence[Token] = ()
    ) -> None:
        """Go on behind the last round that another has closed."""
        super().resume(number, last, known, accepted)
        self._strikes = dict(known)

    def _is_evicted(self, rank: Rank) -> bool:
        return 0 < self._policy.strikes <= self._strikes.get(rank, 0)

    def _waited(self, members: Sequence[Rank]) -> list[Rank]:
        return [rank for rank in members if rank not in self._open and not self._is_evicted(rank)]

    def missing(self, members: Sequence[Rank]) -> list[Rank]:
        """Return for whom the round waits; while fewer than k can come otherwise, for the evicted too."""
        waited = self._waited(members)
        return waited if len(waited) >= self.needed(members) else [one for one in members if one not in self._open]

    def needed(self, members: Sequence[Rank]) -> int:
        """Return how many more have to come."""
        return min(self._policy.k, len(members)) - len(self._open)


@dataclass(frozen=True)
class Quorum(RoundPolicy):
    """A round closes when all workers have come, or `deadline` after the first one if at least k have; later ones are
    dropped.

    A worker that was late too often is evicted: rounds wait for it no longer, and its late steps are dropped as
    "evicted", until a step of it from the values of the last round is in time. It stays a member of the cluster.

    Args:
        k: fewer workers never make a round; all of them if there are fewer.
        deadline: seconds after the first contribution.
        strikes: a worker that was late in so many rounds, one after the other, is evicted; 0: nobody is.
    """

    name: ClassVar[str] = "quorum"
    k: int
    deadline: float
    strikes: int = 0

    def __post_init__(self) -> None:
        at_least(self, "k", 1)
        at_least(self, "deadline", 0.0)
        at_least(self, "strikes", 0)

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return TimedRounds(self)
