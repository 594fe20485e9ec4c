"""Barriers: calls that wait until every worker of a group is there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiokv.core.deadlines import Deadlines
from aiokv.core.effects import Effect, Refuse, Send
from aiokv.core.waiting import Wait
from aiokv.errors import BarrierTimeoutError, MembershipError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.roster import Roster
    from aiokv.types import Peer, Rank

Place = tuple[str, tuple["Rank", ...]]
"""A barrier: its name, and the group whose it is; an empty one is that of all workers."""


MOST_KNOWN = 4096
"""So many barriers are remembered, at most, that another scheduler has opened."""


@dataclass(slots=True, eq=False)
class Arrival:
    """A call that waits at a barrier."""

    place: Place
    peer: Peer
    request: int
    rank: Rank
    waits: float
    said: dict[str, Any] | None
    after: int


class Barriers:
    """All calls that wait at barriers. Ranks are counted, not calls: a worker that asks twice is one worker."""

    def __init__(self) -> None:
        self._arrivals: dict[tuple[Peer, int], Arrival] = {}
        self._waiting: Deadlines[tuple[Peer, int]] = Deadlines()
        self._gave_up: dict[Place, dict[Rank, None]] = {}
        """Ranks that had come and waited too long, while others still wait there for whom they both waited."""
        self.opened = 0
        """How many have been opened."""
        self._known: dict[Place, m.Opened] = {}
        """What workers have passed before this scheduler was there: others may still wait to be let through."""

    def deadline(self) -> float | None:
        """Return the time at which a call has waited too long."""
        return self._waiting.next()

    def arrive(self, peer: Peer, request: int, rank: Rank, message: m.Barrier, roster: Roster, now: float) -> None:
        """Enter a call.

        Raises:
            MembershipError: the rank is not in the group, or the group has ranks that do not exist.
        """
        group = roster.check_group(message.group)
        if group and rank not in group:
            raise MembershipError(f"barrier {message.name!r} of ranks {list(group)}: rank {rank} is none of them")
        arrival = Arrival((message.name, group), peer, request, rank, message.timeout, message.said, message.after)
        self._arrivals[peer, request] = arrival
        self._waiting.add((peer, request), now + message.timeout)

    def release(self, roster: Roster) -> list[Effect]:
        """Answer at the barriers where everybody is, or was before; refuse where somebody is lost."""
        effects = self._let_through()
        for place in dict.fromkeys(arrival.place for arrival in self._arrivals.values()):
            absent = self._absent(place, roster)
            lost = [rank for rank in absent if rank in roster.lost]
            if absent and not lost:
                continue
            self._gave_up.pop(place, None)
            arrivals = [arrival for arrival in self._arrivals.values() if arrival.place == place]
            if not lost:
                self.opened += 1
                self._known.pop(place, None)
            answer = m.Met(_said(arrivals), self.opened)
            for arrival in arrivals:
                self._take_out(arrival)
                if lost:
                    effects.append(Refuse(arrival.peer, arrival.request, roster.loss(lost, f"barrier {place[0]!r}")))
                else:
                    effects.append(Send(arrival.peer, arrival.request, answer))
        return effects

    def told(self, passed: m.Opened, roster: Roster) -> None:
        """Take note of a barrier that a worker has passed, of another scheduler perhaps.

        Raises:
            MembershipError: its group has ranks that do not exist.
        """
        place = passed.name, roster.check_group(passed.group)
        known = self._known.pop(place, passed)
        self._known[place] = max(known, passed, key=lambda each: each.number)
        self.opened = max(self.opened, passed.number)
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _let_through(self) -> list[Effect]:
        """Answer those that wait at a barrier which another scheduler has opened, and has not told them so."""
        effects: list[Effect] = []
        for arrival in list(self._arrivals.values()):
            known = self._known.get(arrival.place)
            if known is not None and arrival.after < known.number:
                self._take_out(arrival)
                effects.append(Send(arrival.peer, arrival.request, m.Met(known.said, known.number)))
        return effects

    def _take_out(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.peer, arrival.request]
        self._waiting.discard((arrival.peer, arrival.request))

    def _absent(self, place: Place, roster: Roster) -> list[Rank]:
        here = {arrival.rank for arrival in self._arrivals.values() if arrival.place == place}
        return [rank for rank in roster.members_of(place[1]) if rank not in here]

    def forget_peer(self, peer: Peer) -> None:
        """Take out the calls of a connection that is over."""
        for name in [name for name in self._arrivals if name[0] == peer]:
            del self._arrivals[name]
            self._waiting.discard(name)
        self._forget_empty()

    def _forget_empty(self) -> None:
        waited_at = {arrival.place for arrival in self._arrivals.values()}
        self._gave_up = {place: ranks for place, ranks in self._gave_up.items() if place in waited_at}

    def expire(self, roster: Roster, now: float) -> list[Effect]:
        """Refuse the calls that have waited too long, and say for whom."""
        late = [self._arrivals[name] for name in self._waiting.due(now)]
        # All that is late is looked at before any is taken out: each is told the same missing ranks.
        effects: list[Effect] = [Refuse(each.peer, each.request, self._late(each, roster)) for each in late]
        for arrival in late:
            del self._arrivals[arrival.peer, arrival.request]
            self._gave_up.setdefault(arrival.place, {})[arrival.rank] = None
        self._forget_empty()
        return effects

    def _late(self, arrival: Arrival, roster: Roster) -> BarrierTimeoutError:
        wait = self._wait(arrival, roster)
        return BarrierTimeoutError(wait.late, ranks=wait.ranks)

    def waiting(self, roster: Roster, now: float) -> list[m.WaitingCall]:
        """Return for whom every call waits."""
        return [
            self._wait(self._arrivals[name], roster).shown(self._arrivals[name].rank, roster, due=due, now=now)
            for name, due in self._waiting.times()
        ]

    def _wait(self, arrival: Arrival, roster: Roster) -> Wait:
        # Who came, and gave up a moment ago, is not who was waited for, unless all the others are here.
        gave_up = self._gave_up.get(arrival.place, {})
        absent = self._absent(arrival.place, roster)
        absent = [rank for rank in absent if rank not in gave_up] or absent
        what = f"barrier {arrival.place[0]!r}"
        return Wait(what, f"rank {roster.labels(absent)} did not arrive", arrival.waits, absent)

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert all(name in self._waiting for name in self._arrivals)
        assert len(self._arrivals) == len(self._waiting)


def _said(arrivals: list[Arrival]) -> tuple[tuple[Rank, dict[str, Any]], ...]:
    """Return what all who have met are told; of a worker that has asked twice, the last word counts."""
    said = {arrival.rank: arrival.said for arrival in arrivals if arrival.said is not None}
    return tuple(sorted(said.items()))
