"""More and more workers in a round: AdaSync (Dutta et al., 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import Decider, RoundPolicy
from aiokv.policy.kofn import FirstK
from aiokv.policy.options import at_least

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank, Round


@dataclass(frozen=True)
class AdaSync(RoundPolicy):
    """`KAsync` whose k grows as the loss falls: k_t = ceil(k sqrt(F_0 / F_t)), at most all workers.

    No server sees the loss F; it is taken to fall like F_t = F_0 / (1 + t / halving) with the rounds t. Workers that go
    by the loss that they measure set `KAsync` with another k from time to time; see `docs/policies.md`.

    Args:
        k: how many workers make the first rounds.
        halving: after how many rounds the loss is expected to be half of that at the start.
    """

    name: ClassVar[str] = "adasync"
    k: int
    halving: float

    def __post_init__(self) -> None:
        at_least(self, "k", 1)
        at_least(self, "halving", 1.0)

    def size(self, members: Sequence[Rank], number: Round) -> int:
        """Return how many workers make a round."""
        return min(len(members), math.ceil(self.k * math.sqrt(1.0 + (number - 1) / self.halving)))

    def decider(self) -> Decider:
        """Return what decides the rounds."""
        return FirstK(self.size, distinct=True, fresh=False)
