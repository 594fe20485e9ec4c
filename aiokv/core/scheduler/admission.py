"""How workers come to count while training goes on, and how they leave: the scheduler's part.

A worker that joins a running cluster is a member at once, but nobody waits for it. When it is ready (`Enter`), the
scheduler looks for a clock that nobody is beyond, and asks all servers and workers not to go beyond it for the moment
(`Boundary`). If all of them agree, a view says that the rank counts in all rounds after that clock: the same one for
all keys on all servers, and no round is lost. When all workers are past it, and have what they had pushed before, the
worker is told so (`Entered`): what it reads then is what the first of its rounds is computed from, since that can't be
made without it. One worker after the other is let in.

A worker that is about to leave (`PlanLeave`) is one more in the same row. Only the workers have to agree: no round
behind the boundary is made without it before there is a view, and it pushes nothing behind the boundary itself. The
view says that it counts up to there, and since nobody was told who pushes later, all are told the same.

Where a worker is lost for good, no round can be made any longer for which workers wait for each other; of the last ones
some parts may be there, and others never will. So nobody can be let in there any more; and who leaves goes at once.

Where the job waits because there are too few workers, no round can be made beyond the last one. Then the boundary is
that, whatever the workers have gone to, and the one that comes counts instead of one that is away.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aiokv.core.deadlines import Deadlines
from aiokv.core.effects import Effect, Log, Send
from aiokv.core.records import Record, field
from aiokv.core.scheduler.checkpoint_keeper import MOST_AHEAD
from aiokv.core.waiting import Wait
from aiokv.errors import AiokvError, CallTimeoutError, PolicyError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.core.roster import Roster
    from aiokv.types import Peer, Rank


class Party(Record):
    """A server or a worker that has to agree: over which connection it is reached, None: over none at the moment.

    `rank` is that of a worker, None for a server.
    """

    name: str
    peer: Peer | None
    rank: Rank | None = None


class Entrant(Record, eq=False):
    """A worker that wants to count, or that `leaves` and has said so with a request over a connection (`asked`).

    Its `clock` is the boundary that was asked for last; `fixed`: it is in a view. Where no worker `meets` others, in no
    key, nobody has to be past the boundary; and where that is known, they `go_on` even if there are too few of them.
    One that another scheduler has put into a view is `inherited` until the servers have said whether workers meet.
    """

    name: str
    rank: Rank
    waits: float = 0.0
    leaves: bool = False
    asked: tuple[Peer, int] = (-1, 0)
    clock: int = 0
    fixed: bool = False
    meets: bool = False
    go_on: bool = False
    inherited: bool = False
    silent: dict[str, None] = field(default_factory=dict)
    """Who has not said yet whether it can be."""
    passed: dict[Rank, None] = field(default_factory=dict)


class Verdict(Record):
    """What has become of an entrant: its rounds begin after a `clock`, it is `entered`, or it fails with an `error`.

    The rounds of one that `leaves` end with the clock; 0: it may go at once.
    """

    name: str
    clock: int = 0
    entered: bool = False
    error: AiokvError | None = None
    leaves: bool = False
    asked: tuple[Peer, int] = (-1, 0)


class Admissions:
    """The part of a `Membership` that lets workers join a running cluster, and leave it."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, bool], Entrant] = {}
        """By name, and whether they leave. The first one is being let in, or let go."""
        self._deadlines: Deadlines[str] = Deadlines()
        """Of those that are to be let in."""
        self._parties: Sequence[Party] = ()
        self._loss: AiokvError | None = None
        self._stuck = False
        self._newest = 0
        self._made = 0
        """The newest clock of an update."""
        self.told = 0
        """The newest clock of which a worker that contributes no more was told who counts in it."""
        self._asked = 0
        self._ahead = 1
        self.verdicts: deque[Verdict] = deque()
        """What is to be carried out before anything else."""

    @property
    def is_active(self) -> bool:
        """Whether somebody is to be let in, or let go."""
        return bool(self._waiting)

    @property
    def _first(self) -> Entrant | None:
        return next(iter(self._waiting.values()), None)

    @property
    def is_unsure(self) -> bool:
        """Whether a worker counts of which it is not known yet whether the others meet it."""
        return self._first is not None and self._first.inherited

    def deadline(self) -> float | None:
        """Return the time at which a worker has waited too long."""
        return self._deadlines.next()

    # --- who is there ---

    def enter(self, name: str, rank: Rank, timeout: float, now: float) -> list[Effect]:
        """Let a worker count from a boundary on, as soon as it is its turn. It may ask again."""
        self._deadlines.add(name, now + timeout)
        known = self._waiting.get((name, False))
        if known is None:
            return self._add(Entrant(name, rank, timeout))
        known.waits = timeout
        return []

    def inherit(self, name: str, rank: Rank, clock: int, timeout: float, now: float) -> None:
        """Go on with a worker that counts after a clock, as another scheduler has said, on which others rely.

        It has the time-out until it asks again.
        """
        self._deadlines.add(name, now + timeout)
        self._waiting[name, False] = Entrant(name, rank, timeout, clock=clock, fixed=True, inherited=True)
        self._asked = clock

    def leave(self, name: str, rank: Rank, asked: tuple[Peer, int], clock: int) -> list[Effect]:
        """Let a worker go behind a boundary, as soon as it is its turn. It has gone to a clock, and may ask again."""
        self._newest = max(self._newest, clock)
        known = self._waiting.get((name, True))
        if known is None:
            return self._add(Entrant(name, rank, leaves=True, asked=asked))
        known.asked = asked
        return []

    def _add(self, entrant: Entrant) -> list[Effect]:
        self._waiting[entrant.name, entrant.leaves] = entrant
        return self._begin() if len(self._waiting) == 1 else []

    def viewed(self, parties: Sequence[Party], loss: AiokvError | None, *, stuck: bool = False) -> list[Effect]:
        """Take note of who has to agree; what they have said before may not hold any longer.

        Args:
            parties: who is there.
            loss: says which workers are lost for good, if any are.
            stuck: no round can be made.
        """
        self._parties, self._loss, self._stuck = parties, loss, stuck
        return self._begin()

    def forget(self, name: str) -> list[Effect]:
        """Take out a worker that is gone."""
        first = self._first
        self._deadlines.discard(name)
        for leaves in (False, True):
            self._waiting.pop((name, leaves), None)
        if first is None or first.name != name:
            return []
        return self._begin() if first.fixed else self._call_off(first) + self._begin()

    def _call_off(self, entrant: Entrant) -> list[Effect]:
        peers = [party.peer for party in self._parties if party.peer is not None]
        return [Send(peer, 0, m.Boundary(0, entrant.rank)) for peer in peers] if entrant.clock else []

    # --- a boundary ---

    def _begin(self) -> list[Effect]:
        """Ask all for a boundary, or, once there is one, who is not past it."""
        entrant = self._first
        if entrant is None:
            return []
        if entrant.leaves and self._goes_at_once(entrant):
            return self._call_off(entrant) + self._plan(entrant, 0) + self._begin()
        if entrant.inherited:
            return self._ask_servers(entrant)
        if entrant.fixed and entrant.meets and self._loss is not None:
            return self._fail(entrant, self._loss)
        if entrant.fixed:
            late = [party for party in self._parties if self._is_late(entrant, party)]
            peers = [party.peer for party in late if party.peer is not None]
            asking: list[Effect] = [Send(peer, 0, m.Boundary(entrant.clock, entrant.rank)) for peer in peers]
            return asking + self._look(entrant)
        self._ahead = 1
        return self._ask(entrant)

    def _goes_at_once(self, entrant: Entrant) -> bool:
        """Tell whether no round is made any more, or none that waits for a worker that leaves."""
        counts = any(party.rank == entrant.rank for party in self._parties)
        return self._stuck or self._loss is not None or not counts

    def _ask(self, entrant: Entrant) -> list[Effect]:
        """Ask for a boundary a little ahead of all; twice as far whenever somebody was beyond it."""
        parties = [party for party in self._parties if self._is_asked(entrant, party)]
        peers = [party.peer for party in parties if party.peer is not None]
        entrant.silent = {}
        if len(peers) < len(parties):
            # Who is not reached at the moment is back soon, or is lost: either way there is news.
            return []
        if self._is_stuck(entrant):
            entrant.clock = max(1, self._made)
        else:
            self._asked = entrant.clock = max(self._newest, self.told, self._asked) + self._ahead
            self._ahead = min(2 * self._ahead, MOST_AHEAD)
        entrant.silent = {party.name: None for party in parties}
        return [Send(peer, 0, m.Boundary(entrant.clock, entrant.rank)) for peer in peers]

    def _ask_servers(self, entrant: Entrant) -> list[Effect]:
        """Ask whether workers meet, which another scheduler knew."""
        servers = [party for party in self._parties if party.rank is None]
        entrant.silent = {party.name: None for party in servers}
        peers = [party.peer for party in servers if party.peer is not None]
        return [Send(peer, 0, m.Boundary(entrant.clock, entrant.rank)) for peer in peers]

    def _is_asked(self, entrant: Entrant, party: Party) -> bool:
        return not entrant.leaves if party.rank is None else not self._is_stuck(entrant)

    def _is_stuck(self, entrant: Entrant) -> bool:
        """Tell whether no round can be made, so that it does not matter to what the workers have gone."""
        return self._stuck and not entrant.go_on

    def answered(self, name: str, answer: m.BoundaryClock, *, is_server: bool) -> list[Effect]:
        """Take note whether a node can be at the boundary that was asked for; ask for a later one if not."""
        self._newest = max(self._newest, answer.newest)
        self._made = max(self._made, answer.newest) if is_server else self._made
        entrant = self._first
        if entrant is not None and answer.clock == entrant.clock:
            entrant.meets = entrant.meets or answer.waits
            if entrant.inherited:
                return self._told_whether_it_meets(entrant, name)
        if entrant is None or entrant.fixed or answer.clock != entrant.clock or name not in entrant.silent:
            return []
        if answer.reason:
            return self._fail(entrant, PolicyError(f"{entrant.name} can't join: {answer.reason}"))
        if answer.newest > entrant.clock:
            return self._ask(entrant)
        del entrant.silent[name]
        if not entrant.silent:
            if entrant.leaves:
                return self._plan(entrant, entrant.clock)
            if entrant.meets and self._loss is not None:
                return self._fail(entrant, self._loss)
            if self._is_stuck(entrant) and not entrant.meets:
                entrant.go_on = True
                return self._ask(entrant)
            entrant.fixed = True
            self.verdicts.append(Verdict(entrant.name, entrant.clock))
        return []

    def _told_whether_it_meets(self, entrant: Entrant, name: str) -> list[Effect]:
        entrant.silent.pop(name, None)
        if entrant.silent:
            return []
        entrant.inherited = False
        return self._begin()

    def _plan(self, entrant: Entrant, clock: int) -> list[Effect]:
        """Let a worker go behind a clock, or at once. There will be a view if there is such a clock."""
        del self._waiting[entrant.name, True]
        self.verdicts.append(Verdict(entrant.name, clock, leaves=True, asked=entrant.asked))
        return []

    def passed(self, rank: Rank, clock: int) -> list[Effect]:
        """Take note that a worker is past a boundary."""
        entrant = self._first
        if entrant is None or not entrant.fixed or clock != entrant.clock:
            return []
        entrant.passed[rank] = None
        # Who has to be past it is not known before the servers have said whether workers meet.
        return [] if entrant.inherited else self._look(entrant)

    def _is_late(self, entrant: Entrant, party: Party) -> bool:
        return entrant.meets and party.rank is not None and party.rank not in entrant.passed

    def _look(self, entrant: Entrant) -> list[Effect]:
        if any(self._is_late(entrant, party) for party in self._parties):
            return []
        self._deadlines.discard(entrant.name)
        del self._waiting[entrant.name, False]
        self.verdicts.append(Verdict(entrant.name, entrant.clock, entered=True))
        text, facts = f"{entrant.name} counts from round {entrant.clock + 1} on", {"clock": entrant.clock}
        return [Log("info", text, "worker_joined", {"node": entrant.name, **facts})]

    def _fail(self, entrant: Entrant, error: AiokvError) -> list[Effect]:
        self.verdicts.append(Verdict(entrant.name, entrant.clock if entrant.fixed else 0, error=error))
        return self.forget(entrant.name)

    # --- time ---

    def expire(self, roster: Roster, now: float) -> list[Effect]:
        """Give up on a worker that has waited too long, and say for whom. The others are looked at when it is out."""
        effects: list[Effect] = []
        for name in self._deadlines.due(now):
            entrant = self._waiting[name, False]
            wait = self._wait(entrant, roster)
            effects += self._fail(entrant, CallTimeoutError(wait.late, ranks=wait.ranks))
        return effects

    def _wait(self, entrant: Entrant, roster: Roster) -> Wait:
        """Return for what an entrant waits."""
        what, first = f"{entrant.name} wants to count in rounds", self._first
        if entrant is not first:
            assert first is not None, "there is one at least"
            return Wait(what, f"{first.name} is let {'go' if first.leaves else 'in'} before it", entrant.waits)
        if entrant.fixed and not entrant.inherited:
            ranks = [party.rank for party in self._parties if self._is_late(entrant, party) and party.rank is not None]
            reason = f"rank {roster.labels(ranks)} has not come past round {entrant.clock}"
            return Wait(what, reason, entrant.waits, ranks, None, entrant.clock)
        absent = [party.name for party in self._parties if party.peer is None] or list(entrant.silent)
        return Wait(what, f"no answer from {', '.join(absent)}", entrant.waits)

    def waiting(self, roster: Roster, now: float) -> list[m.WaitingCall]:
        """Return for what every entrant waits."""
        times = self._deadlines.times()
        return [
            self._wait(entrant, roster).shown(entrant.rank, roster, due=due, now=now)
            for entrant, due in [(self._waiting[name, False], due) for name, due in times]
        ]

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert not self.verdicts, "they are carried out at once"
        assert self._deadlines.holds({name for name, leaves in self._waiting if not leaves})
        assert all(entrant is self._first for entrant in self._waiting.values() if entrant.clock)
