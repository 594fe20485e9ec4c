"""For what the requests wait that a server has not answered, and which of them have waited too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.deadlines import Deadlines
    from aiokv.core.effects import Effect
    from aiokv.core.server.answers import Answers
    from aiokv.core.server.connections import Connections
    from aiokv.core.server.creation import Creation
    from aiokv.core.server.exchanges import Exchanges
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.policy_changes import PolicyChanges
    from aiokv.core.server.rounds.rounds import Rounds
    from aiokv.core.server.rounds.whole_calls import WholeCalls
    from aiokv.core.server.views import Views
    from aiokv.core.server.worker_links import WorkerLinks
    from aiokv.core.waiting import Wait


class Waits:
    """The part of a `Coordinator` that knows who keeps which request.

    Args:
        deadlines: all requests that wait, under peer and request id.
        workers: those that have said who they are.
        answers, rounds, creation, exchanges, changes, whole, connections: those who keep some.
        views: who takes over a view when all is decided that has to be.
    """

    def __init__(
        self,
        deadlines: Deadlines[RequestName],
        workers: WorkerLinks,
        answers: Answers,
        rounds: Rounds,
        creation: Creation,
        exchanges: Exchanges,
        changes: PolicyChanges,
        whole: WholeCalls,
        connections: Connections,
        views: Views,
    ) -> None:
        self._deadlines = deadlines
        self._workers = workers
        self._answers = answers
        self._rounds = rounds
        self._creation = creation
        self._exchanges = exchanges
        self._changes = changes
        self._whole = whole
        self._connections = connections
        self._views = views

    def shown(self, now: float) -> m.Waiting:
        """Return for what every request that is not answered waits."""
        roster = self._answers.roster
        calls = []
        for name, due in self._deadlines.times():
            rank = self._workers.find(name[0])
            calls.append(self._wait(name).shown(rank, roster, due=due, now=now))
        return m.Waiting(roster.epoch, tuple(calls))

    def _wait(self, name: RequestName) -> Wait:
        if name in self._answers:
            return self._rounds.wait(name)
        if name in self._creation:
            return self._creation.wait(name, self._answers.roster)
        if name in self._exchanges:
            return self._exchanges.wait(name)
        if name in self._changes:
            return self._changes.wait(name)
        if name in self._whole:
            return self._whole.wait(name)
        return self._connections.wait(name)

    def due(self, now: float) -> list[Effect]:
        """Refuse the requests whose time has come."""
        return [effect for name in self._deadlines.due(now) for effect in self._expire(name, now)]

    def _expire(self, name: RequestName, now: float) -> list[Effect]:
        if name in self._answers:
            return [self._rounds.expire(name, now)]
        if name in self._creation:
            return [self._creation.expire(name, self._answers.roster)]
        if name in self._exchanges:
            return [self._exchanges.expire(name)]
        if name in self._changes:
            return [self._changes.expire(name)]
        if name in self._whole:
            return self._views.settled(self._whole.expire(name, now), now)
        return self._connections.expire(name)

    def are_all(self, named: set[RequestName]) -> bool:
        """Tell whether nothing else has a time than what somebody keeps, and what `named` has."""
        kept = {*named, *self._creation, *self._exchanges, *self._changes, *self._whole, *self._connections}
        return self._deadlines.holds(kept)
