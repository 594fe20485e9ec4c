"""A server's decisions: which contributions make an update, when it is applied, and who is answered what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.compression import Codecs
from aiokv.core.deadlines import Deadlines, earliest
from aiokv.core.effects import Disconnect, Effect, Log, Refuse, Report, freed
from aiokv.core.joiner import REGISTER_REQUEST, Joiner
from aiokv.core.rules import Rules
from aiokv.core.server.answers import Answers
from aiokv.core.server.boundaries import Boundaries
from aiokv.core.server.catalog import Catalog
from aiokv.core.server.cluster_checkpoints import Checkpoints
from aiokv.core.server.connections import Connections
from aiokv.core.server.consulting import Consulting, Neighbourhood
from aiokv.core.server.control import Control
from aiokv.core.server.copies.copying import Copying
from aiokv.core.server.copies.replication import Replication
from aiokv.core.server.copies.standby import COPIED, Standby
from aiokv.core.server.creation import Creation
from aiokv.core.server.decoding import Decoding
from aiokv.core.server.dispatch import Dispatch
from aiokv.core.server.exchanges import Exchanges
from aiokv.core.server.leaving import LEAVE_REQUEST
from aiokv.core.server.lifetime import Lifetime
from aiokv.core.server.neighbours import Neighbours
from aiokv.core.server.once import Once
from aiokv.core.server.policy_changes import PolicyChanges
from aiokv.core.server.resuming import Resuming
from aiokv.core.server.rounds.deciding import Deciding
from aiokv.core.server.rounds.making import Making
from aiokv.core.server.rounds.norms import Norms
from aiokv.core.server.rounds.rounds import Rounds
from aiokv.core.server.rounds.rows import Tables
from aiokv.core.server.rounds.steps import Steps
from aiokv.core.server.rounds.tallies import Tallies
from aiokv.core.server.rounds.whole_calls import WholeCalls
from aiokv.core.server.saving import Saving, restored
from aiokv.core.server.views import Views
from aiokv.core.server.waits import Waits
from aiokv.core.server.worker_links import WorkerLinks
from aiokv.core.stimuli import (
    Applied,
    CheckpointRead,
    Connected,
    ConnectFailed,
    Decoded,
    Depart,
    Executed,
    Join,
    NodeEnded,
    Normed,
    PartWritten,
    PeerLost,
    Received,
    Restored,
    SnapshotsLoaded,
    Stimulus,
    Tick,
)
from aiokv.errors import AiokvError, OtherSettingsError, from_code
from aiokv.types import SCHEDULER, STANDBY, Peer, Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.server.parked import RequestName


class Coordinator:
    """The state machine of one server. `handle` is the only door that changes it.

    Args:
        joiner: this server's place in the cluster.
    """

    def __init__(self, joiner: Joiner) -> None:
        if joiner.role is not Role.SERVER:
            raise ValueError(f"a coordinator joins as a server, not as a {joiner.role}")
        self._joiner = joiner
        deadlines: Deadlines[RequestName] = Deadlines()
        self._deadlines = deadlines
        workers, once = self._workers, self._once = WorkerLinks(), Once()
        neighbours: Neighbourhood = Neighbours(joiner)
        self._neighbours = neighbours
        self.tallies = tallies = Tallies()
        """What became of contributions."""

        # What is known, and who makes updates of it.
        catalog, rules, codecs = Catalog(), Rules(), Codecs()
        self._catalog, self._rules = catalog, rules
        creation = Creation(catalog, rules, deadlines)
        norms = self._norms = Norms(catalog, neighbours)
        deciding = self._deciding = Deciding(neighbours)
        answers = self._answers = Answers(deadlines, codecs, tallies)
        checkpoints = self._checkpoints = Checkpoints(catalog, rules, deciding)
        making = Making(rules, tallies, checkpoints)
        steps = self._steps = Steps(deciding, answers, making, tallies)
        rounds = self._rounds = Rounds(answers, making, steps, norms, tallies)

        # Who deals with what is asked.
        resuming = self._resuming = Resuming(catalog, rules, deciding, rounds.begin)
        saving = Saving(catalog, rules, creation)
        boundaries = self._boundaries = Boundaries(catalog, checkpoints)
        control = self._control = Control(joiner, catalog, rules, codecs, saving, tallies, checkpoints, deciding)
        tables = Tables(catalog, creation, rounds)
        keepers = (catalog, creation, rounds, answers, tables, norms, saving, boundaries, checkpoints)
        exchanges = self._exchanges = Exchanges(*keepers, deadlines, again=self._received)
        makers = (rounds, steps, deciding, answers, making, rules)
        changes = self._changes = PolicyChanges(catalog, *makers, deadlines, exchanges.divide_all)
        whole = self._whole = WholeCalls(neighbours, deadlines, self._enter, self._after_pushes)
        self._decoding = Decoding(catalog, codecs, rounds.new_slot)

        # This node among the others.
        known = (catalog, rules, codecs)
        told = (joiner, *known, resuming, norms, deciding, whole)
        replication = self._replication = Replication(
            *(joiner, catalog, rules, resuming, checkpoints, rounds, deciding, whole),
            copying=lambda alone: self._follow(Copying(*told, alone=alone)),
            alone=self._follow_no_more,
            standby=lambda: Standby(joiner, *known, answers, exchanges, norms, tallies, self._give_up),
            stop=lambda reason: self._lifetime.stop(reason, failed=False),
        )
        self._lifetime = Lifetime(joiner, workers, replication)
        reached = (joiner, workers, neighbours, once, answers, deadlines, resuming, replication, self._lifetime)
        connections = self._connections = Connections(*reached, forget=self._forget_peer)
        waiting = (creation, changes, deciding, steps, rounds, whole)
        views = self._views = Views(joiner, answers, boundaries, catalog, *waiting, replication, connections)
        asking = (norms, deciding, steps, whole, making, exchanges)
        self._consulting = Consulting(neighbours, catalog, answers, *asking, views)
        doing = (exchanges, control, changes, once, whole, self._decoding, views)
        self._dispatch = Dispatch(workers, answers, deadlines, catalog, *doing, others=self._from_others)
        keeping = (answers, rounds, creation, exchanges, changes, whole, connections)
        self._waits = Waits(deadlines, workers, *keeping, views)

    def _follow(self, copying: Copying) -> Copying:
        """Have those tell it who change what is not seen in effects."""
        self._changes.on_change = self._boundaries.on_change = copying.renew
        self._norms.on_total = copying.totalled
        self._deciding.on_decided = copying.decided
        self._steps.on_drop, self._steps.on_keep = copying.dropped, copying.contributed
        self._steps.is_kept = copying.has_contributions
        self._whole.copy, self._whole.on_settled = copying.copy, copying.settled
        return copying

    def _follow_no_more(self) -> None:
        self._changes.on_change = self._norms.on_total = self._deciding.on_decided = None
        self._steps.on_drop = self._steps.on_keep = self._steps.is_kept = None
        self._whole.copy = self._whole.on_settled = None

    @property
    def serves(self) -> bool:
        """Whether the newest view says so, and all is here."""
        return self._replication.serves

    @property
    def holds_copy(self) -> bool:
        """Whether this node has, or is to have, a copy of what another server has."""
        return self._replication.holds_copy

    @property
    def waits_for_standby(self) -> bool:
        """Whether nobody is answered before a standby has what the answer says."""
        twin = self._replication.twin
        return isinstance(twin, Copying) and twin.waits

    # --- the door ---

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        if self._replication.is_replaced:
            return _in_vain(stimulus)
        effects = self._handle(stimulus, now)
        if self._changes.ending:
            effects += self._changes.go_on(now)
        if self._checkpoints.unmade:
            effects += self._checkpoints.go_on()
        if self._once.open:
            effects = self._once.watch(effects)
        twin = self._replication.twin
        return effects if twin is None else self._watched(twin, effects, now)

    def _watched(self, twin: Copying | Standby, effects: list[Effect], now: float) -> list[Effect]:
        """Add what concerns the other node that has, or is to have, the same."""
        if isinstance(twin, Copying):
            if twin.calls.there:
                effects += self._views.copied(twin.calls.there, now)
            if twin.contributions.there:
                effects += self._rounds.advance(twin.contributions.take(), now)
            return twin.watch(effects)
        effects = twin.watch(effects, now)
        taken = self._replication.take_over(now)
        if not taken:
            return effects
        effects += self._views.settled(taken, now) + self._connections.let_in(now)
        now_twin = self._replication.twin
        return now_twin.watch(effects) if isinstance(now_twin, Copying) else effects

    def _handle(self, stimulus: Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case Received() | PeerLost() if self._decoding.behind and self._decoding.hold(stimulus):
                return []
            case Received():
                return self._received(stimulus, now)
            case Applied() | Normed() | Restored() | PartWritten() | CheckpointRead() | SnapshotsLoaded():
                return self._stored(stimulus, now)
            case Decoded():
                return self._decoded(stimulus, now)
            case Executed():
                return [self._control.executed(stimulus)]
            case NodeEnded(name):
                self._lifetime.ended(name, now)
                return []
            case Tick():
                return self._tick(now)
            case Join(call, timeout):
                return self._joiner.join(call, timeout, now)
            case Depart(_, timeout):
                return self._lifetime.leaving.begin(timeout, now, is_of_use=self._lifetime.is_of_use)
            case _:
                return self._link_event(stimulus, now)

    def _link_event(self, stimulus: Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case PeerLost(peer, reason, error) if peer == SCHEDULER:
                return self._joiner.refused(error) or self._scheduler_gone(reason, now)
            case PeerLost(peer, reason):
                self._workers.ended(peer)
                return self._peer_lost(peer, reason, now)
            case Connected(peer) if peer == SCHEDULER:
                registers = self._joiner.on_connected(now)
                self._lifetime.look_around(now)
                return registers
            case ConnectFailed(peer, reason, error) if peer == SCHEDULER:
                return self._joiner.on_connect_failed(reason, error, now)
            case Connected(peer) | ConnectFailed(peer) if peer < STANDBY:
                return self._replication.linked(stimulus)
            case Connected(peer) if peer < SCHEDULER:
                return self._neighbours.connected(peer, now)
            case ConnectFailed(peer, reason, error) if peer < SCHEDULER:
                return self._neighbours.connect_failed(peer, reason)
            case _:
                raise TypeError(f"not a stimulus for a server: {stimulus!r}")

    def _peer_lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        if peer < STANDBY:
            return self._replication.lost(peer, reason, now)
        if peer < SCHEDULER:
            return self._neighbours.ended(peer, reason, now)
        return self._connections.lost(peer, now)

    def _forget_peer(self, peer: Peer) -> list[Effect]:
        """Nobody is there any longer to answer over a connection."""
        self._deciding.forget_peer(peer)
        self._whole.forget_peer(peer)
        self._changes.forget_peer(peer)
        self._norms.forget_peer(peer)
        return self._exchanges.forget_peer(peer)

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        if self._replication.is_replaced:
            return None
        deadlines, due = self._deadlines, self._joiner.due
        # After every stimulus, so not by `earliest`, and nobody is asked who waits for nothing.
        first = due if not deadlines or (due is not None and due < deadlines.bound) else deadlines.bound
        decides = self._deciding.deadline()
        if decides is not None or self._neighbours.links:
            first = earliest(first, self._neighbours.deadline(), decides)
        twin, lifetime = self._replication.twin, self._lifetime
        if twin is not None or lifetime.alone_since is not None or lifetime.leaving.until is not None:
            first = earliest(first, lifetime.alone_until, lifetime.leaving.deadline(), self._replication.deadline())
        return first

    def _tick(self, now: float) -> list[Effect]:
        effects = self._joiner.tick(now)
        if reason := self._joiner.silence(now):
            effects += [Disconnect(SCHEDULER, reason), *self._scheduler_gone(reason, now)]
        effects += self._lifetime.tick(now)
        effects += self._consulting.due(now)
        effects += self._steps.decided(self._deciding.due(self._answers.roster, now), now)
        effects += self._replication.due(now)
        return effects + self._waits.due(now)

    # --- the store ---

    def _stored(
        self,
        stimulus: Applied | Normed | Restored | PartWritten | CheckpointRead | SnapshotsLoaded,
        now: float,
    ) -> list[Effect]:
        """The store has done something."""
        twin = self._replication.twin
        # First what is for every update.
        if isinstance(stimulus, Applied):
            chunk = self._catalog.chunks[stimulus.key, stimulus.start]
            if stimulus.error is not None and isinstance(twin, Copying):
                twin.renew(chunk)
            return self._exchanges.applied(chunk, stimulus, now)
        if isinstance(stimulus, Restored):
            held = twin if stimulus.peer == STANDBY else None
            return held.restored(stimulus) if isinstance(held, Standby) else [restored(stimulus)]
        if isinstance(stimulus, PartWritten):
            return self._checkpoints.written(stimulus)
        if isinstance(stimulus, CheckpointRead | SnapshotsLoaded):
            return self._resumed(stimulus, now)
        return self._consulting.measured(stimulus, now)

    def _resumed(self, stimulus: CheckpointRead | SnapshotsLoaded, now: float) -> list[Effect]:
        """Go on with a checkpoint, and let the workers in when it is loaded."""
        effects: list[Effect] = []
        if isinstance(stimulus, CheckpointRead):
            effects = self._resuming.read(stimulus)
        else:
            self._resuming.loaded(stimulus)
        error = self._resuming.error
        if error is None:
            self._checkpoints.resumed(self._rules.newest)
            return effects + self._connections.let_in(now)
        effects += self._connections.refuse(error)
        return effects + self._give_up(f"the checkpoint can't be loaded: {error}")

    def _decoded(self, decoded: Decoded, now: float) -> list[Effect]:
        push, behind = self._decoding.end(decoded.target)
        if decoded.error is None:
            effects = self._received(push, now)
        else:
            effects = [Refuse(push.peer, push.request, decoded.error)]
        for stimulus in behind:
            effects += self._handle(stimulus, now)
        return effects

    def _give_up(self, reason: str) -> list[Effect]:
        return self._lifetime.stop(reason, failed=True)

    # --- messages ---

    def _received(self, received: Received, now: float) -> list[Effect]:
        peer = received.peer
        if peer > SCHEDULER:
            return self._dispatch.received(received, now)
        if peer == SCHEDULER:
            self._joiner.heard(now)
            return self._from_scheduler(received.request, received.message, now)
        if peer < STANDBY:
            return self._replication.told(peer, received.request, received.message, now)
        return self._consulting.answered(peer, received.request, received.message, now)

    def _enter(self, received: Received, rank: int, now: float) -> list[Effect]:
        return self._dispatch.enter(received, rank, now)

    def _after_pushes(self, received: Received, now: float) -> list[Effect]:
        return self._dispatch.after_pushes(received, now)

    def _from_others(self, received: Received, now: float) -> list[Effect]:
        """Answer what no worker asks, or who says that it is one."""
        peer, request, message = received.peer, received.request, received.message
        twin = self._replication.twin
        match message:
            case m.Sums() | m.Arrived() | m.GetRounds() | m.Gathered():
                effects = self._consulting.asked(peer, request, message, now)
                if effects is not None:
                    return effects
            case m.Attach() | m.AttachServer() | m.AttachStandby():
                return self._connections.attach(peer, request, message, now)
            case m.GetWaiting():
                return [Report(peer, request, self._waits.shown(now))]
            case _ if isinstance(message, COPIED) and isinstance(twin, Standby):
                return twin.received(received, now)
        reason = f"unexpected {type(message).__name__} from a worker"
        return [*freed(received.slot), *self._connections.cut(peer, reason, now)]

    # --- the scheduler ---

    def _from_scheduler(self, request: int, message: m.Message, now: float) -> list[Effect]:
        match message:
            case m.View():
                return self._viewed(message, now)
            case m.Heartbeat():
                return []
            case m.GetView():
                return self._joiner.tell_view()
            case m.Stop(reason):
                return self._lifetime.stop(reason, failed=False)
            case m.Error(code, text, details) if request == REGISTER_REQUEST:
                return self._refused(from_code(code, text, details))
            case m.Done() | m.Error() if request == LEAVE_REQUEST:
                return self._lifetime.leaving.answered(message, now)
            case m.HostStandby(index, name):
                return self._lifetime.host(index, name)
            case m.Boundary():
                return self._views.bounded(message, now)
            case m.CheckpointAt() | m.CheckpointRest() | m.CheckpointDropped():
                return self._checkpoints.told(message)
            case _:
                reason = f"unexpected {type(message).__name__} from the scheduler"
                return [Disconnect(SCHEDULER, reason), *self._scheduler_gone(reason, now)]

    def _refused(self, error: AiokvError) -> list[Effect]:
        if self._joiner.joining:
            return self._joiner.fail(error)
        if isinstance(error, OtherSettingsError):
            return self._joiner.cannot_return(error, "serves its workers until they leave")
        return self._give_up(error.message)

    def _viewed(self, view: m.View, now: float) -> list[Effect]:
        was_registered = self._joiner.is_registered
        is_news = self._joiner.on_view(view, now)
        self._lifetime.look_around(now)
        effects = [] if was_registered else self._lifetime.leaving.registered()
        if not is_news:
            # The scheduler is there again; had the boundary come about, there would be a newer one.
            return effects + self._views.unbound(now)
        effects += self._consulting.viewed(view, now) + self._connections.cut_strangers(now)
        return effects + self._views.viewed(view, now)

    def _scheduler_gone(self, reason: str, now: float) -> list[Effect]:
        if self._lifetime.is_over:
            return []
        reconnects = self._joiner.on_lost(reason)
        self._lifetime.look_around(now)
        if given_up := self._lifetime.leaving.scheduler_gone(is_of_use=self._lifetime.is_of_use):
            return given_up
        does = "has not joined yet" if self._joiner.joining else "serves its workers until they leave"
        text = f"the scheduler at {self._joiner.address} is gone: {reason}; {self._joiner.name} {does}, looks for it"
        log = Log("warning", text, "scheduler_gone", {"reason": reason})
        return [log, *self._checkpoints.scheduler_gone(), *reconnects]

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        for address, chunk in self._catalog.chunks.items():
            assert address == (chunk.key, chunk.start)
        named = self._rounds.validate(self._catalog.chunks.values())
        self._norms.validate()
        self._whole.validate()
        if isinstance(self._replication.twin, Copying):
            self._replication.twin.validate()
        assert self._waits.are_all(named)


def _in_vain(stimulus: Stimulus) -> list[Effect]:
    """Return what is to be done of what comes when another node serves, until the driver has closed this one.

    Nothing counts here any longer, and nobody is answered: who has asked asks the other one.
    """
    match stimulus:
        case Received(slot=slot):
            return freed(slot)
        case Connected(peer):
            return [Disconnect(peer, "another node serves its part of the keys by now")]
        case _:
            return []
