"""More and more workers in a round: AdaSync (Dutta et al., 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from aiokv.policy.base import Decider, RoundPolicy
from aiokv.policy.kofn import FirstK
from aiokv.policy.options import at_least

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.policy.base import Token
    from aiokv.types import Rank, Round

SIZE: Final = -1
"""In the place of a rank: how many workers make a round."""


class Grown(FirstK):
    """Closes a round when as many steps have come as the losses want that workers have reported.

    Args:
        k: how many that is at first.
    """

    def __init__(self, k: int) -> None:
        super().__init__(self._wanted, distinct=True, fresh=False)
        self._k = k
        self._newest = k
        """How many the last losses wanted."""
        self._first: dict[Rank, float] = {}
        self._last: dict[Rank, float] = {}

    def reported(self, rank: Rank, loss: float) -> None:
        """Take note of a worker's loss; one that is not finite says nothing."""
        if math.isfinite(loss):
            self._first.setdefault(rank, loss)
            self._last[rank] = loss

    def _wanted(self, members: Sequence[Rank], number: Round) -> int:
        del number
        known = [rank for rank in members if rank in self._last]
        # The same workers at both times: they may have data of different difficulty.
        before, now = (math.fsum(losses[rank] for rank in known) for losses in (self._first, self._last))
        if known and before > 0.0:
            self._newest = len(members) if now <= 0.0 else _size(self._k, before / now, len(members))
        return min(len(members), self._newest)

    def known(self) -> dict[Rank, int]:
        """Return how many workers make a round."""
        return {SIZE: self._newest}

    def resume(
        self, number: Round, last: Sequence[Token], known: Mapping[Rank, int], accepted: Sequence[Token] = ()
    ) -> None:
        """Go on from that number of workers: the losses that come from now on are compared with the first of them."""
        super().resume(number, last, known, accepted)
        self._k = self._newest = known.get(SIZE, self._k)


def _size(k: int, fallen: float, most: int) -> int:
    """Return k sqrt(`fallen`), rounded up, from 1 to `most`; a ratio may be too large for a number of workers."""
    return math.ceil(max(1.0, min(float(most), k * math.sqrt(fallen))))


@dataclass(frozen=True)
class AdaSync(RoundPolicy):
    """`KAsync` whose k grows as the loss falls: k_t = ceil(k sqrt(F_0 / F_t)), at least one and at most all workers.

    F_t is the mean of the last losses that workers have reported (`report_loss`), F_0 that of the first ones. Without
    any, k workers make a round.

    Args:
        k: how many workers make the first rounds.
    """

    name: ClassVar[str] = "adasync"
    k: int

    def __post_init__(self) -> None:
        at_least(self, "k", 1)

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return Grown(self.k)
