"""Asynchronous: every contribution is an update of its own, applied in the order of arrival (MXNet `dist_async`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from aiokv.policy.base import ChunkPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank, Version


@dataclass(frozen=True)
class ASP(ChunkPolicy):
    """Each push makes the next version at once."""

    name: ClassVar[str] = "asp"
    per_push: ClassVar[bool] = True
    admits: ClassVar[bool] = True

    def version_of(self, *, sequence: int, newest: Version) -> Version:
        """Return the next version, whoever pushes."""
        return newest + 1

    def expected(self, *, version: Version, members: Sequence[Rank]) -> Sequence[Rank]:
        """Return nobody: an update waits for no one."""
        return ()
