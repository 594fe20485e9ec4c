"""Bulk synchronous: a round closes when every member has contributed.

MXNet calls it `dist_sync`, but counts requests; here ranks are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import ChunkPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank, Version


@dataclass(frozen=True)
class BSP(ChunkPolicy):
    """Push number r of every rank belongs to round r; the round makes version r."""

    name: ClassVar[str] = "bsp"
    in_step: ClassVar[bool] = True
    admits: ClassVar[bool] = True

    def version_of(self, *, sequence: int, newest: Version) -> Version:
        """Return the round, whatever is open."""
        return sequence

    def expected(self, *, version: Version, members: Sequence[Rank]) -> Sequence[Rank]:
        """Return all members."""
        return members


@dataclass(frozen=True)
class Sum(BSP):
    """An all-reduce: in the rounds of `BSP`, and the value is the sum of the round whatever update rule is set."""

    name: ClassVar[str] = "sum"
    keeps_sum: ClassVar[bool] = True
