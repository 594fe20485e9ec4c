"""Whose weights a new cluster begins with when all servers of the one before are lost, and workers still have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.types import Rank


def bringer(steps: Mapping[Rank, int]) -> Rank:
    """Return the rank with the most steps, the lowest of several: what it has read has all that the others have read.

    Args:
        steps: how many steps each rank has made, that have come.
    """
    return max(sorted(steps), key=lambda rank: steps[rank])
