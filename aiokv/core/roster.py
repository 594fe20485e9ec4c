"""What a member reads out of the view: who counts, who is lost, and how to name them."""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from aiokv.errors import MembershipError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiokv.types import Key, Rank, Version
    from aiokv.wire.messages import Boundary, ServerEntry, StandbyEntry, View, WorkerEntry


COUNTED = ("alive", "away", "lost")
"""States of workers for which rounds and barriers wait."""

LEADER = 0
"""Index of the server that decides what one has to decide for all."""

EXPECTED = ("alive", "away", "finished", "joining")
"""States of workers from which more may come."""

IN_ROUNDS = (*COUNTED, "joining")
"""States of workers that count in rounds after some clock, though not at barriers yet."""


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which worker-2 comes before worker-10, and no two names are equal."""
    parts = re.split(r"([0-9]+)", name)
    order = [(1, 0, part) for part in parts]
    # Numbers are compared as text without zeros in front, the longer one being larger: a peer may send any digits.
    order[1::2] = [(0, len(digits), digits) for digits in (part.lstrip("0") for part in parts[1::2])]
    return [*order, (0, 0, name)]


class Roster:
    """The workers of a view, by rank.

    Tables are made when they are first asked for: a worker hardly ever asks, and in a large cluster there are many.

    Args:
        view: the view; None: there is none yet.
        boundary: says that another rank may count after a clock. It is taken to do so until it is known.
    """

    def __init__(self, view: View | None = None, boundary: Boundary | None = None) -> None:
        self._view = view
        self.epoch = view.epoch if view else 0
        self._entries = view.workers if view else ()
        self.respawns = view is not None and view.on_worker_loss == "respawn"
        """Whether a lost worker's place is kept for the next process of its name."""
        self.world = (view.declared if view else 0) or len(self._entries)
        """How many workers the cluster was declared with."""
        self._boundary = boundary
        self._groups: dict[tuple[Rank, ...], list[Rank]] = {}

    def bounded(self, boundary: Boundary | None) -> Roster:
        """Return the same workers, with another rank that may count after a clock."""
        return Roster(self._view, boundary)

    @cached_property
    def _workers(self) -> dict[Rank, WorkerEntry]:
        return {entry.rank: entry for entry in self._entries}

    @cached_property
    def members(self) -> list[Rank]:
        """Ranks for which rounds and barriers wait: alive, away or lost."""
        return sorted(entry.rank for entry in self._entries if entry.state in COUNTED)

    @cached_property
    def lost(self) -> list[Rank]:
        """Ranks of the members that are lost."""
        return sorted(entry.rank for entry in self._entries if entry.state == "lost")

    @cached_property
    def newcomers(self) -> dict[Rank, int]:
        """The clock after which ranks count in rounds that have not done so from the beginning, by rank."""
        since = {entry.rank: entry.since for entry in self._entries if entry.since and entry.state in IN_ROUNDS}
        if self._boundary is not None:
            since[self._boundary.rank] = self._boundary.clock
        return since

    @cached_property
    def leavers(self) -> dict[Rank, int]:
        """The clock up to which members count in rounds that are about to leave, by rank."""
        return {entry.rank: entry.until for entry in self._entries if entry.until and entry.state in COUNTED}

    @cached_property
    def varies(self) -> bool:
        """Whether others count in the rounds of some clocks than in those of others."""
        return bool(self.newcomers or self.leavers)

    def members_after(self, clock: int, group: tuple[Rank, ...]) -> list[Rank]:
        """Return the members of a group that count in the round of a clock, ascending.

        Those are among them that are joining, if they will count by then.
        """
        here = {rank for rank in self.members if self.newcomers.get(rank, 0) < clock}
        here.update(rank for rank, since in self.newcomers.items() if since < clock)
        here.difference_update(rank for rank, until in self.leavers.items() if until < clock)
        return sorted(here.intersection(group) if group else here)

    def pushing(self, clock: int) -> list[Rank]:
        """Return who pushes with a clock, ascending, as all are told: those too that had planned to leave behind it."""
        gone = [entry.rank for entry in self._entries if entry.state == "left" and entry.until >= clock]
        return sorted([*self.members_after(clock, ()), *gone])

    @cached_property
    def evicted(self) -> list[Rank]:
        """Ranks of the workers without whom the others have gone on."""
        return sorted(entry.rank for entry in self._entries if entry.state == "evicted")

    def rank_of(self, name: str) -> Rank:
        """Return the rank of a worker that is in the view. Ranks are given out by name, so few names are looked at.

        Who has joined later may be anywhere.
        """
        order = natural_order(name)
        place = bisect_left(self._entries, order, hi=self.world, key=lambda entry: natural_order(entry.name))
        likely = self._entries[place : place + 1]
        return next(entry.rank for entry in chain(likely, self._entries) if entry.name == name)

    def entry(self, rank: Rank) -> WorkerEntry | None:
        """Return a worker's entry."""
        # Mostly they stand in the order of ranks. A table of all for each of many workers would be large.
        if 0 <= rank < len(self._entries) and self._entries[rank].rank == rank:
            return self._entries[rank]
        return self._workers.get(rank)

    def is_member(self, rank: Rank) -> bool:
        """Return True when rounds wait for a rank."""
        entry = self._workers.get(rank)
        return entry is not None and entry.state in COUNTED

    def is_pushing(self, rank: Rank) -> bool:
        """Return True when more may come of a rank: rounds wait for it, or it joins and is not to be waited for yet."""
        return self.is_member(rank) or rank in self.newcomers

    def members_of(self, group: tuple[Rank, ...]) -> list[Rank]:
        """Return the members that are in a group, ascending; an empty one is that of all workers."""
        if not group:
            return self.members
        members = self._groups.get(group)
        if members is None:
            here = frozenset(group)
            members = self._groups[group] = [rank for rank in self.members if rank in here]
        return members

    def check_group(self, group: Sequence[Rank]) -> tuple[Rank, ...]:
        """Return a group as it is kept: in order, each rank once, and empty when it is all workers.

        Raises:
            MembershipError: a rank does not exist.
        """
        if not group:
            return ()
        for rank in group:
            if rank not in self._workers:
                last = len(self._workers) - 1
                raise MembershipError(f"a group with rank {rank}, but ranks are 0 to {last}", ranks=[rank])
        ranks = tuple(sorted(set(group)))
        # All who are there from the beginning are everybody, also those who will join.
        return () if ranks[: self.world] == tuple(range(self.world)) else ranks

    def reason(self, rank: Rank) -> str:
        """Return why a worker of the view is not alive."""
        return self._workers[rank].reason

    def label(self, rank: Rank) -> str:
        """Return a rank with its name, for messages."""
        entry = self._workers.get(rank)
        return f"{rank} ({entry.name})" if entry else str(rank)

    def labels(self, ranks: Sequence[Rank]) -> str:
        """Return ranks with their names, for messages."""
        return ", ".join(self.label(rank) for rank in ranks)

    def loss(self, ranks: Sequence[Rank], what: str, key: Key | None = None, version: Version = 0) -> WorkerLostError:
        """Return the error for a wait that can't end because these ranks are lost."""
        reasons = "; ".join(f"rank {self.label(rank)}: {self.reason(rank)}" for rank in ranks)
        details = {} if key is None else {"key": key, "round": version}
        return WorkerLostError(f"{what} can't complete: workers lost: {reasons}", ranks=list(ranks), **details)


def standbys_of(server: ServerEntry) -> Iterator[StandbyEntry]:
    """Yield what a view says of the standbys of a server, each behind the one whose it is."""
    entry = server.standby
    while entry is not None:
        yield entry
        entry = entry.standby
