"""What a synchronisation policy answers. One small class a rule; no I/O, no clock, no arrays."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Rank, Version


class Policy(abc.ABC):
    """Says to which update a contribution belongs and when that update is complete.

    A policy is asked about one chunk at a time and keeps no state of its own: what it needs is passed in, so that the
    same answers come from a server over TCP and from one in the simulator.
    """

    name: ClassVar[str]
    keeps_sum: ClassVar[bool] = False
    """The sum of the contributions becomes the value, whatever update rule is set."""

    per_push: ClassVar[bool] = False
    """Each push is an update of its own, in an order that may differ from chunk to chunk."""

    @abc.abstractmethod
    def version_of(self, *, sequence: int, newest: Version) -> Version:
        """Return the version that a rank's push number `sequence` helps to make.

        Args:
            sequence: the rank's pushes of this key, counted from 1.
            newest: the largest version that is made or being made of the chunk.
        """

    @abc.abstractmethod
    def expected(self, *, version: Version, members: Sequence[Rank]) -> Sequence[Rank]:
        """Return the ranks for which an update waits, ascending; it is complete when each of them has contributed.

        It is asked once for an update and a view, not at every contribution: with many workers that would be most of
        a server's time.

        Args:
            version: the version that the update makes.
            members: ranks of the current view that have not left, ascending; may be returned as it is.
        """
