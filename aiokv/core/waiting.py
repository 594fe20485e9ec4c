"""For what a request waits: the words that its error has when its time is over, and that are shown before that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record, field
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.roster import Roster
    from aiokv.types import Key, Rank, Round


class Wait(Record):
    """What waits, and for what: a reason, and the ranks that it is about.

    `seconds` is how long it may wait, all together.
    """

    what: str
    reason: str
    seconds: float
    ranks: list[Rank] = field(default_factory=list)
    key: Key | None = None
    round: Round | None = None

    @property
    def late(self) -> str:
        """What is said when its time is over."""
        return f"{self.what}: {self.reason} within {self.seconds:.3g} s"

    def shown(self, rank: Rank | None, roster: Roster, *, due: float, now: float) -> m.WaitingCall:
        """Return what is said of it before that.

        Args:
            rank: whose request it is, if that is known.
            roster: knows the names.
            due: when its time is over.
            now: the present time.
        """
        who = "" if rank is None else f"rank {roster.label(rank)}"
        waited = max(0.0, now - (due - self.seconds))
        return m.WaitingCall(who, self.what, self.reason, waited, tuple(self.ranks), self.key, self.round)
