"""What is made of pushes to a chunk: an update, of contributions, and who waits for it."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.core.roster import Roster
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.types import Key, Peer, Rank, Round, Slot, Version


FEW = 16
"""So many places, at most, are taken out of a heap one by one."""


class Waiter(Record, eq=False):
    """A parked request about one or several chunks; answered when none is `left` to wait for.

    A push waits until its `updates` are applied, one for each chunk; a pull until push `at_least` of `rank` is in each.
    `rows` are the row ids that a pull of a row-sparse chunk wants. `dropped` says why a push is in no update. After all
    that, the chunks' gates may hold a read back: `held_since` is set while they do.

    Unless `before` is 0 it wants the value from which its rank's push of that number is computed.

    Unless `at_least_round` is 0 it also waits for that round, or version, of its only chunk. Who wants to know no more
    than that there is one has named `key`.
    """

    peer: Peer
    request: int
    rank: Rank
    waits: float
    chunks: list[Chunk]
    left: int
    priority: int = 0
    at_least: int = 0
    at_least_round: Round = 0
    before: int = 0
    key: Key | None = None
    want_value: bool = True
    rows: bytes = b""
    value_codec: int = 0
    dropped: str = ""
    held_since: float | None = None
    updates: tuple[Update, ...] = ()
    name: RequestName = (0, 0)
    """Peer and request."""


class Contribution(Record, eq=False, gc=False):
    """One rank's part of an update. `slot` is None once it is folded, and for a chunk without elements.

    `read` is the version that the rank had read, where that matters (see `Chunk.reads`). `place` is where it stands in
    the sum of its update: by the rank, or, in a round of several steps of one worker, by rank and clock. `nbytes` is
    how long it was when it came.
    """

    rank: Rank
    sequence: int
    read_version: Version
    clock: int
    slot: Slot | None
    place: int
    nbytes: int = 0
    read: Version | None = None


class Update(Record, eq=False):
    """An open update: what has arrived for one version of a chunk.

    Contributions are named by their place. `unfolded` is a heap of those that are there, but not in the sum. `expected`
    are the ranks, ascending, for which it waits by a `roster`; the first `reached` of them have contributed. `keeps` is
    set while it is applied, if the value that it replaces stays in the store.
    """

    version: Version
    contributions: dict[int, Contribution] = field(default_factory=dict)
    folded: list[int] = field(default_factory=list)
    unfolded: list[int] = field(default_factory=list)
    accumulator: Slot | None = None
    waiters: dict[Waiter, None] = field(default_factory=dict)
    keeps: bool = False
    roster: Roster | None = None
    expected: Sequence[Rank] = ()
    reached: int = 0

    @property
    def clock(self) -> int:
        """The clock of what is in it: it is the same for all workers, where these push in step."""
        return max([contribution.clock for contribution in self.contributions.values()])

    def add(self, contribution: Contribution) -> None:
        """Enter what a rank has pushed."""
        self.contributions[contribution.place] = contribution
        heappush(self.unfolded, contribution.place)

    def has(self, rank: Rank, sequence: int) -> bool:
        """Tell whether a push of a rank is in it."""
        return any((part.rank, part.sequence) == (rank, sequence) for part in self.contributions.values())

    def first_missing(self) -> Rank | None:
        """Return the lowest rank for which it waits; None: it is complete. No rank is looked at twice."""
        while self.reached < len(self.expected):
            rank = self.expected[self.reached]
            if rank not in self.contributions:
                return rank
            self.reached += 1
        return None

    def take(self, end: int | None) -> list[int]:
        """Take out and return the places below one that are not folded, ascending; None: all of them."""
        unfolded = self.unfolded
        if end is None:
            self.unfolded = []
            unfolded.sort()
            return unfolded
        ready: list[int] = []
        while unfolded and unfolded[0] < end:
            ready.append(heappop(unfolded))
            if len(ready) == FEW:
                # Thousands are in order sooner than they are taken out one by one, and in order they are a heap.
                unfolded.sort()
                rest = bisect_left(unfolded, end)
                ready += unfolded[:rest]
                del unfolded[:rest]
                break
        return ready

    def missing(self) -> list[Rank]:
        """Return the ranks for which it waits, ascending."""
        return [rank for rank in self.expected[self.reached :] if rank not in self.contributions]

    def waits_for(self, rank: Rank) -> bool:
        """Return True when the rank is missing."""
        place = bisect_left(self.expected, rank)
        if place == len(self.expected) or self.expected[place] != rank:
            return False
        return rank not in self.contributions

    def is_past(self, rank: Rank) -> bool:
        """Return True when the rank's turn is over: its contribution, or that of a higher rank, is in the sum."""
        return bool(self.folded) and rank <= self.folded[-1]
