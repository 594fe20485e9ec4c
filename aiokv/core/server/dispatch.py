"""What workers ask of a server, and in which order: some of it comes behind what they have pushed before."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from aiokv.core.deadlines import check_timeout
from aiokv.core.effects import Effect, Refuse, freed
from aiokv.core.server.control import Asked
from aiokv.core.server.exchanges import Requested
from aiokv.core.server.once import ONCE
from aiokv.errors import AiokvError, ProtocolError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.deadlines import Deadlines
    from aiokv.core.server.answers import Answers, AnyPush
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.control import Control
    from aiokv.core.server.decoding import Decoding
    from aiokv.core.server.exchanges import Exchanges
    from aiokv.core.server.once import Once
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.policy_changes import PolicyChanges
    from aiokv.core.server.rounds.whole_calls import WholeCalls
    from aiokv.core.server.views import Views
    from aiokv.core.server.worker_links import WorkerLinks
    from aiokv.core.stimuli import Received
    from aiokv.types import Key, Peer, Rank

PARKABLE = (
    *(m.Push, m.PushBundle, m.Pull, m.PullBundle, m.PushRows, m.PullRows),
    *(m.Init, m.InitBundle, m.InitRows, m.SetPolicy, m.AwaitRound, m.Attach, m.AttachServer, m.AttachStandby),
)
"""Requests that may have to wait."""

DECIDED = ""
"""Stands for all keys whose rounds are decided at once."""

READS = (m.Pull, m.PullBundle, m.PullRows, m.AwaitRound)

BEHIND_PUSHES = (*READS, m.SetPolicy, m.Delete, *get_args(Asked))
"""Requests that mean what was pushed before them, or change what is made of it."""


class Dispatch:
    """The part of a `Coordinator` that finds out who is to do what is asked.

    Args:
        workers: those that have said who they are.
        answers: has the members of the newest view that counts.
        deadlines: where requests that wait are entered, under peer and request id.
        catalog: the server's keys.
        exchanges: who deals with requests about keys.
        control: who deals with what holds for all of them.
        changes: who lets keys go over to other policies.
        once: knows what must not be done twice.
        whole: who lets the pushes of a call count together.
        decoding: who has payloads decoded.
        views: who takes over a view when all is decided that has to be.
        others: answers what no worker asks.
    """

    def __init__(
        self,
        workers: WorkerLinks,
        answers: Answers,
        deadlines: Deadlines[RequestName],
        catalog: Catalog,
        exchanges: Exchanges,
        control: Control,
        changes: PolicyChanges,
        once: Once,
        whole: WholeCalls,
        decoding: Decoding,
        views: Views,
        others: Callable[[Received, float], list[Effect]],
    ) -> None:
        self._workers = workers
        self._answers = answers
        self._deadlines = deadlines
        self._catalog = catalog
        self._exchanges = exchanges
        self._control = control
        self._changes = changes
        self._once = once
        self._whole = whole
        self._decoding = decoding
        self._views = views
        self._others = others

    def received(self, received: Received, now: float) -> list[Effect]:
        """Do what somebody asks, or say why not."""
        try:
            return self._asked(received, now)
        except AiokvError as error:
            return [*freed(received.slot), Refuse(received.peer, received.request, error)]

    def _asked(self, received: Received, now: float) -> list[Effect]:
        peer, request, message = received.peer, received.request, received.message
        if (peer, request) in self._deadlines:
            raise ProtocolError(f"request id {request} is in use")
        if isinstance(message, PARKABLE):
            check_timeout(message.timeout)
        match message:
            case m.Push() | m.PushBundle() if message.codec:
                self._rank_of(peer)
                return self._decoding.begin(received, message)
            case m.Push() | m.PushBundle() | m.PushRows() if message.whole is not None:
                return self._keep_aside(received, message, now)
            case m.Push() | m.PushBundle() | m.PushRows():
                roster = self._answers.roster
                return self._exchanges.requested(received, self._workers.rank_of(peer, roster), roster, now)
            case _ if self._whole and isinstance(message, READS):
                return self._from_worker(received, now)
            case _ if isinstance(message, Requested):
                roster = self._answers.roster
                return self._exchanges.requested(received, self._workers.rank_of(peer, roster), roster, now)
            case m.Attach() | m.AttachServer() | m.Sums() | m.Arrived() | m.GetRounds() | m.Gathered():
                return self._others(received, now)
            case _:
                return self._from_worker(received, now)

    def _rank_of(self, peer: Peer) -> Rank:
        return self._workers.rank_of(peer, self._answers.roster)

    # --- behind pushes ---

    def _from_worker(self, received: Received, now: float) -> list[Effect]:
        """Do what a worker asks besides pushes and pulls, behind what it has pushed before."""
        message = received.message
        if isinstance(message, BEHIND_PUSHES):
            check_timeout(message.timeout)
            rank = self._rank_of(received.peer)
            if self._whole.comes_behind(received, rank, message.timeout, now):
                return []
        return self._carry_out(received, now)

    def after_pushes(self, received: Received, now: float) -> list[Effect]:
        """Do what a worker has asked that had to wait for what it had pushed."""
        try:
            return self._carry_out(received, now)
        except AiokvError as error:
            return [Refuse(received.peer, received.request, error)]

    def _carry_out(self, received: Received, now: float) -> list[Effect]:
        peer, message = received.peer, received.message
        if isinstance(message, ONCE):
            before = self._once.asked(peer, received.request, self._rank_of(peer), message)
            if before is not None:
                return before
        match message:
            case m.SetPolicy():
                return self._changes.asked(received, message, self._rank_of(peer), now)
            case m.Switched():
                self._rank_of(peer)
                return self._changes.switched(peer, received.request, message)
            case m.Delete():
                return self._about_keys(received, now) + self._changes.deleted()
            case _ if isinstance(message, READS):
                return self._about_keys(received, now)
            case _ if isinstance(message, Asked):
                return self._control.asked(received, message, self._rank_of(peer), self._answers.roster)
            case _:
                return self._others(received, now)

    def _about_keys(self, received: Received, now: float) -> list[Effect]:
        rank = self._rank_of(received.peer)
        return self._exchanges.requested(received, rank, self._answers.roster, now)

    # --- calls that count as a whole ---

    def _keep_aside(self, received: Received, message: AnyPush, now: float) -> list[Effect]:
        rank = self._rank_of(received.peer)
        keys = self._keys_of(message)
        worker = self._answers.roster.entry(rank)
        assert worker is not None, "it is attached"
        if isinstance(message, m.PushBundle):
            dtype = self._catalog.bundle(message.bundle).specs[0].dtype
        else:
            dtype = message.dtype
        return self._views.settled(self._whole.push(received, message, keys, dtype, worker, now), now)

    def _keys_of(self, message: AnyPush) -> tuple[Key, ...]:
        """Return the keys whose pushes have to stay in their order with this one."""
        if isinstance(message, m.PushBundle):
            return self._catalog.bundle(message.bundle).keys
        chunk = self._catalog.find(message.key, message.start)
        # Whoever waits for a round goes by the order of all steps of a worker, whatever keys are in them.
        return (message.key, DECIDED) if chunk is not None and chunk.policy.decides else (message.key,)

    def enter(self, received: Received, rank: Rank, now: float) -> list[Effect]:
        """Let a push count, whether somebody is there to be told so or not."""
        try:
            effects = self._exchanges.requested(received, rank, self._answers.roster, now)
        except AiokvError as error:
            effects = [*freed(received.slot), Refuse(received.peer, received.request, error)]
        if received.peer not in self._workers:
            effects += self._exchanges.forget_peer(received.peer)
        return effects
