"""Rounds of the first K: backup workers (Chen et al., 2016), K-sync to K-batch-async (Dutta et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import Closed, Decider, Decision, Dropped, RoundPolicy, Token
from aiokv.policy.options import at_least

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.types import Rank, Round

LATE = "late"


class FirstK(Decider):
    """Closes a round when enough steps have come.

    Args:
        size: how many make a round, given the members and the round.
        distinct: each rank counts once in a round; another step of it waits for the next one.
        fresh: only steps that were computed from the values of the last round count; others are dropped.
    """

    def __init__(self, size: Callable[[Sequence[Rank], Round], int], *, distinct: bool, fresh: bool) -> None:
        super().__init__()
        self._size = size
        self._distinct = distinct
        self._fresh = fresh
        self._open: list[Token] = []
        self._here: set[Rank] = set()
        """Whose steps these are."""
        self._next: list[tuple[Token, Round]] = []

    def arrived(self, token: Token, read: Round, members: Sequence[Rank], now: float) -> list[Decision]:
        """Take in a step, and close the round if it was the last one that it needed."""
        if self._fresh and read < self.round:
            return [Dropped(token, LATE)]
        if self._distinct and token.rank in self._here:
            self._next.append((token, read))
            return []
        self._open.append(token)
        self._here.add(token.rank)
        return self.changed(members, now)

    def changed(self, members: Sequence[Rank], now: float) -> list[Decision]:
        """Close the round if it has enough; with fewer members fewer may do, and without any what is there."""
        if not self._open or (members and len(self._open) < self._size(members, self.round + 1)):
            return []
        return self._close(members, now)

    def _close(self, members: Sequence[Rank], now: float) -> list[Decision]:
        self.round += 1
        decisions: list[Decision] = [Closed(self.round, sorted(self._open))]
        self._open.clear()
        self._here.clear()
        waiting, self._next = self._next, []
        for token, read in waiting:
            decisions += self.arrived(token, read, members, now)
        return decisions

    def resume(
        self, number: Round, last: Sequence[Token], known: Mapping[Rank, int], accepted: Sequence[Token] = ()
    ) -> None:
        """Go on with the round that another had open."""
        super().resume(number, last, known, accepted)
        self._open = list(accepted)
        self._here = {token.rank for token in accepted}

    def missing(self, members: Sequence[Rank]) -> list[Rank]:
        """Return who may still come."""
        return [rank for rank in members if not self._distinct or rank not in self._here]

    def needed(self, members: Sequence[Rank]) -> int:
        """Return how many more have to come."""
        more = self._size(members, self.round + 1) - len(self._open)
        return more if self._distinct else min(more, 1)


@dataclass(frozen=True)
class KSync(RoundPolicy):
    """A round is the first k workers that come with a gradient computed at the last one; later ones are dropped.

    With k = N it is `BSP`.

    Args:
        k: how many workers make a round; all of them if there are fewer.
    """

    name: ClassVar[str] = "k_sync"
    k: int

    def __post_init__(self) -> None:
        at_least(self, "k", 1)

    @property
    def per_step(self) -> bool:
        """Whether one is enough."""
        return self.k == 1

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return FirstK(lambda members, _: min(self.k, len(members)), distinct=True, fresh=True)


@dataclass(frozen=True)
class Backup(RoundPolicy):
    """The slowest workers of each round are dropped: `KSync` with k = N - spare, whatever N becomes.

    Args:
        spare: how many are dropped.
    """

    name: ClassVar[str] = "backup"
    spare: int

    def __post_init__(self) -> None:
        at_least(self, "spare", 0)

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return FirstK(lambda members, _: max(1, len(members) - self.spare), distinct=True, fresh=True)


@dataclass(frozen=True)
class KBatchSync(RoundPolicy):
    """A round is the first k gradients computed at the last one, whoever made them; later ones are dropped.

    A worker whose push has arrived goes on at once, with the same values while the round is open. Also known as
    Rennala SGD (Tyurin and Richtarik, 2023).

    Args:
        k: how many gradients make a round.
    """

    name: ClassVar[str] = "k_batch_sync"
    waits: ClassVar[bool] = False
    k: int

    def __post_init__(self) -> None:
        at_least(self, "k", 1)

    @property
    def per_step(self) -> bool:
        """Whether one is enough."""
        return self.k == 1

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return FirstK(lambda _, __: self.k, distinct=False, fresh=True)


@dataclass(frozen=True)
class KAsync(RoundPolicy):
    """A round is the first k workers that come, however old their gradients are; nothing is dropped.

    Args:
        k: how many workers make a round; all of them if there are fewer. With 1 it is `ASP`.
    """

    name: ClassVar[str] = "k_async"
    k: int

    def __post_init__(self) -> None:
        at_least(self, "k", 1)

    @property
    def per_step(self) -> bool:
        """Whether one is enough."""
        return self.k == 1

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return FirstK(lambda members, _: min(self.k, len(members)), distinct=True, fresh=False)


@dataclass(frozen=True)
class KBatchAsync(RoundPolicy):
    """Every k-th gradient closes a round, whoever made them and however old they are; nothing is dropped.

    A worker whose push has arrived goes on at once. With k = N/n it is n-softsync (Zhang et al., 2015).

    Args:
        k: how many gradients make a round. With 1 it is `ASP`.
    """

    name: ClassVar[str] = "k_batch_async"
    waits: ClassVar[bool] = False
    k: int

    def __post_init__(self) -> None:
        at_least(self, "k", 1)

    @property
    def per_step(self) -> bool:
        """Whether one is enough."""
        return self.k == 1

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return FirstK(lambda _, __: self.k, distinct=False, fresh=False)
