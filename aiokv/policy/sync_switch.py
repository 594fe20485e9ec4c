"""Synchronous at first, asynchronous later: Sync-Switch (Li et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import ChunkPolicy
from aiokv.policy.options import at_least, fraction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank, Version


@dataclass(frozen=True)
class SyncSwitch(ChunkPolicy):
    """The first part of a training in rounds as of `BSP`, the rest as of `ASP`.

    Args:
        fraction: of `steps`, how many are synchronous; from 0 to 1.
        steps: how many steps each worker makes.
    """

    name: ClassVar[str] = "sync_switch"
    per_push: ClassVar[bool] = True
    has_phases: ClassVar[bool] = True
    admits: ClassVar[bool] = True
    fraction: float
    steps: int

    def __post_init__(self) -> None:
        fraction(self, "fraction")
        at_least(self, "steps", 1)

    @property
    def rounds(self) -> int:
        """How many rounds are synchronous."""
        return round(self.fraction * self.steps)

    def is_in_step(self, version: Version) -> bool:
        """Tell whether a version is one of the rounds."""
        return version <= self.rounds

    def version_of(self, *, sequence: int, newest: Version) -> Version:
        """Return the round; behind the last one, the next version."""
        return sequence if self.is_in_step(sequence) else newest + 1

    def expected(self, *, version: Version, members: Sequence[Rank]) -> Sequence[Rank]:
        """Return all members for a round, nobody behind the last one."""
        return members if self.is_in_step(version) else ()
