"""What a server remembers of a chunk whose rounds are decided for all keys at once; see `core.decisions`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.chunk import Update
from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.core.chunk import Chunk, Contribution, Waiter
    from aiokv.core.decisions import Decisions
    from aiokv.core.roster import Roster
    from aiokv.policy import Token
    from aiokv.types import Rank, Round, Version

REMEMBERED_VERSIONS = 1024
"""Of how many versions is known which round has made them."""


class Undecided(Record, eq=False):
    """A contribution of whose step is not known in which round it is, and who waits for its answer."""

    contribution: Contribution
    waiter: Waiter


class OpenRounds(Record, eq=False):
    """The rounds of one chunk that are not made yet.

    Pushes of a key by one worker arrive in their order. So a step that has not come, although a later one of its worker
    has, will not come any more: its worker has not pushed this key in that step. A round that has nothing here at all
    makes no version.

    Attributes:
        decisions: what is known about the rounds of the chunk's group.
        first: the first round that is not made here.
        undecided: contributions by their step.
        updates: what has come for rounds that are closed.
        seen: the last clock of each rank.
        unsettled: each rank's pushes that are neither made nor dropped, by their number.
        made: which round has made a version.
    """

    decisions: Decisions
    first: Round
    made: dict[Version, Round]
    undecided: dict[Token, Undecided] = field(default_factory=dict)
    updates: dict[Round, Update] = field(default_factory=dict)
    seen: dict[Rank, int] = field(default_factory=dict)
    unsettled: dict[Rank, dict[int, None]] = field(default_factory=dict)

    def read(self, version: Version) -> Round:
        """Return the last round in a version; in one that is forgotten, the oldest that is not."""
        return self.made.get(version, next(iter(self.made.values())))

    def add(self, number: Round, contribution: Contribution) -> Update:
        """Enter a contribution to a closed round."""
        update = self.updates.setdefault(number, Update(0))
        tokens = self.decisions.rounds[number]
        contribution.place = next(
            place
            for place, token in enumerate(tokens)
            if (token.rank, token.clock) == (contribution.rank, contribution.clock)
        )
        update.add(contribution)
        return update

    def missing(self, number: Round, roster: Roster, group: tuple[Rank, ...]) -> list[Rank]:
        """Return the ranks whose steps of a closed round may still come here."""
        tokens = self.decisions.rounds.get(number, [])
        late = [token.rank for token in tokens if self.seen.get(token.rank, 0) < token.clock]
        if not late:
            return late
        members = roster.members_of(group)
        return [rank for rank in dict.fromkeys(late) if rank in members]

    def begin(self, number: Round, version: Version) -> Update | None:
        """Take out what makes a version; None: nothing has come for the round."""
        self.first = number + 1
        update = self.updates.pop(number, None)
        if update is None:
            return None
        update.version = version
        self.made[version] = number
        if len(self.made) > REMEMBERED_VERSIONS:
            del self.made[next(iter(self.made))]
        return update

    def enter(self, rank: Rank, clock: int, sequence: int) -> None:
        """Take note of a push."""
        self.seen[rank] = clock
        self.unsettled.setdefault(rank, {})[sequence] = None

    def settle(self, chunk: Chunk, contribution: Contribution) -> None:
        """Take note that a contribution is made, or dropped: reads of its rank wait no longer for it."""
        rank = contribution.rank
        unsettled = self.unsettled[rank]
        del unsettled[contribution.sequence]
        chunk.reflected[rank] = next(iter(unsettled), chunk.pushed[rank] + 1) - 1

    def waiting(self) -> Iterator[Update]:
        """Return what has come for rounds that are closed."""
        return iter(self.updates.values())
