"""A server's decisions: which contributions make an update, when it is applied, and who is answered what."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import msgspec

from aiokv.core.answers import Answers
from aiokv.core.boundaries import Boundaries
from aiokv.core.catalog import Catalog
from aiokv.core.cluster_checkpoints import Checkpoints
from aiokv.core.compression import Codecs, Decoding, check_length
from aiokv.core.control import Asked, Control
from aiokv.core.copying import Copying
from aiokv.core.creation import Creation
from aiokv.core.deadlines import Deadlines, check_timeout, earliest
from aiokv.core.decisions import Deciding, Question
from aiokv.core.effects import (
    Decode,
    Disconnect,
    Effect,
    Log,
    Refuse,
    Report,
    Send,
    StartNode,
    Stop,
    freed,
)
from aiokv.core.exchanges import Exchanges, Requested
from aiokv.core.joiner import REGISTER_REQUEST, Joiner
from aiokv.core.leaving import LEAVE_REQUEST, Leaving
from aiokv.core.making import Making
from aiokv.core.neighbours import Neighbours
from aiokv.core.norms import Norms, Outcome
from aiokv.core.once import ONCE, Once
from aiokv.core.policy_changes import PolicyChanges
from aiokv.core.resuming import Resuming
from aiokv.core.roster import Roster
from aiokv.core.rounds import Rounds
from aiokv.core.rows import Tables
from aiokv.core.rules import Rules
from aiokv.core.saving import Saving, restored
from aiokv.core.standby import COPIED, Standby
from aiokv.core.steps import Steps
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
from aiokv.core.tallies import Tallies
from aiokv.core.waiting import Wait
from aiokv.core.whole_calls import WholeCall, WholeCalls
from aiokv.core.worker_links import WorkerLinks
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    MembershipError,
    ProtocolError,
    StaleEpochError,
    from_code,
)
from aiokv.types import SCHEDULER, STANDBY, Key, Peer, Rank, Role, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.chunk import Chunk
    from aiokv.core.neighbours import Failed
    from aiokv.core.parked import RequestName


PARKABLE = (
    *(m.Push, m.PushBundle, m.Pull, m.PullBundle, m.PushRows, m.PullRows),
    *(m.Init, m.InitBundle, m.InitRows, m.SetPolicy, m.AwaitRound, m.Attach, m.AttachServer, m.AttachStandby),
)
"""Requests that may have to wait."""

KEEPS_COPY = 60.0
"""Seconds for which a standby stays without a server and without a scheduler."""

DECIDED = ""
"""Stands for all keys whose rounds are decided at once."""

READS = (m.Pull, m.PullBundle, m.PullRows, m.AwaitRound)

BEHIND_PUSHES = (*READS, m.SetPolicy, m.Delete, *get_args(Asked))
"""Requests that mean what was pushed before them, or change what is made of it."""


AnyAttach = m.Attach | m.AttachServer | m.AttachStandby


class Coordinator:
    """The state machine of one server. `handle` is the only door that changes it.

    Args:
        joiner: this server's place in the cluster.
        on_host: whether its values are in the host's memory; others can't be copied to a standby.
    """

    def __init__(self, joiner: Joiner, *, on_host: bool = True) -> None:
        if joiner.role is not Role.SERVER:
            raise ValueError(f"a coordinator joins as a server, not as a {joiner.role}")
        self._joiner = joiner
        self._on_host = on_host
        self._roster = Roster()
        self._workers = WorkerLinks()
        self._once = Once()
        self._attaching: dict[RequestName, AnyAttach] = {}
        self._catalog = Catalog()
        self._rules = Rules()
        self._deadlines: Deadlines[RequestName] = Deadlines()
        self._creation = Creation(self._catalog, self._rules, self._deadlines)
        self._neighbours: Neighbours[Chunk | Question | WholeCall] = Neighbours(joiner)
        self._norms = Norms(self._catalog, self._neighbours)
        self._deciding = Deciding(self._neighbours)
        self._codecs = Codecs()
        self._decoding = Decoding()
        self.tallies = tallies = Tallies()
        """What became of contributions."""
        self._answers = Answers(self._deadlines, self._codecs, tallies)
        self._checkpoints = Checkpoints(self._catalog, self._rules)
        self._making = Making(self._rules, tallies, self._checkpoints)
        self._steps = Steps(self._deciding, self._answers, self._making, tallies)
        self._rounds = Rounds(self._answers, self._making, self._steps, self._norms, tallies)
        self._resuming = Resuming(self._catalog, self._rules, self._rounds.begin)
        tables = Tables(self._catalog, self._creation, self._rounds)
        saving = Saving(self._catalog, self._rules, self._creation)
        bounds = self._boundaries = Boundaries(self._catalog, self._checkpoints)
        self._control = Control(joiner, self._catalog, self._rules, self._codecs, saving, tallies)
        shared = (self._catalog, self._creation, self._rounds, self._answers, tables, self._norms, saving)
        self._exchanges = Exchanges(*shared, bounds, self._checkpoints, self._deadlines, again=self._received)
        makers = (self._rounds, self._steps, self._deciding, self._answers, self._making, self._rules)
        self._changes = PolicyChanges(self._catalog, *makers, self._deadlines, self._exchanges.divide_all)
        self._whole = WholeCalls(self._neighbours, self._deadlines, self._enter, self._after_pushes)
        self._leaving = Leaving(joiner, lambda reason, failed: self._stop(reason, failed=failed))
        self._hosted: dict[str, None] = {}
        """Names of the standbys in this process."""
        self._twin: Copying | Standby | None = None
        """What deals with this server's standby; or, of a standby, with what it is to have."""
        self.serves = False
        """Whether the newest view says so, and all is here."""
        self._had_none = False
        """Whether there was no standby, so that answers do not wait for one that is new."""
        self._alone_since: float | None = None
        """Since when neither the scheduler nor a worker is connected."""
        self._stopped = False

    @property
    def holds_copy(self) -> bool:
        """Whether this node has, or is to have, a copy of what another server has."""
        return isinstance(self._twin, Standby)

    @property
    def waits_for_standby(self) -> bool:
        """Whether nobody is answered before a standby has what the answer says."""
        return isinstance(self._twin, Copying) and self._twin.waits

    # --- the door ---

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        effects = self._handle(stimulus, now)
        if self._changes.ending:
            effects += self._changes.go_on(now)
        if self._checkpoints.unmade:
            effects += self._checkpoints.go_on()
        if self._once.open:
            effects = self._once.watch(effects)
        return effects if self._twin is None else self._watched(effects, now)

    def _watched(self, effects: list[Effect], now: float) -> list[Effect]:
        """Add what concerns the other node that has, or is to have, the same."""
        twin = self._twin
        if isinstance(twin, Copying):
            return twin.watch(effects + self._copied_calls(twin, now) if twin.there else effects)
        assert twin is not None, "there is one"
        effects = twin.watch(effects, now)
        return effects if twin.place is None or not twin.is_idle else effects + self._take_over(twin.place, now)

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
                del self._hosted[name]
                self._look_around(now)
                return []
            case Tick():
                return self._tick(now)
            case Join(call, timeout):
                return self._joiner.join(call, timeout, now)
            case Depart(_, timeout):
                return self._leaving.begin(timeout, now)
            case _:
                return self._link_event(stimulus, now)

    def _link_event(self, stimulus: Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case PeerLost(peer, reason):
                self._workers.ended(peer)
                return self._peer_lost(peer, reason, now)
            case Connected(peer) if peer == SCHEDULER:
                registers = self._joiner.on_connected(now)
                self._look_around(now)
                return registers
            case ConnectFailed(peer, reason, error) if peer == SCHEDULER:
                return self._joiner.on_connect_failed(reason, error, now)
            case Connected(peer) | ConnectFailed(peer) if peer < STANDBY:
                return self._standby_link(stimulus)
            case Connected(peer) if peer < SCHEDULER:
                return self._neighbours.connected(peer, now)
            case ConnectFailed(peer, reason, error) if peer < SCHEDULER:
                return self._neighbours.connect_failed(peer, reason)
            case _:
                raise TypeError(f"not a stimulus for a server: {stimulus!r}")

    def _stored(
        self,
        stimulus: Applied | Normed | Restored | PartWritten | CheckpointRead | SnapshotsLoaded,
        now: float,
    ) -> list[Effect]:
        """The store has done something."""
        # First what is for every update.
        if isinstance(stimulus, Applied):
            chunk = self._catalog.chunks[stimulus.key, stimulus.start]
            if stimulus.error is not None and isinstance(self._twin, Copying):
                self._twin.renew(chunk)
            return self._exchanges.applied(chunk, stimulus, now)
        if isinstance(stimulus, Restored):
            held = self._twin if stimulus.peer == STANDBY else None
            return held.restored(stimulus) if isinstance(held, Standby) else [restored(stimulus)]
        if isinstance(stimulus, PartWritten):
            return self._checkpoints.written(stimulus)
        if isinstance(stimulus, CheckpointRead | SnapshotsLoaded):
            return self._resumed(stimulus, now)
        chunk = self._catalog.chunks[stimulus.key, stimulus.start]
        return self._go_on(self._norms.measured(chunk, stimulus, now), now)

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        deadlines, due = self._deadlines, self._joiner.due
        # After every stimulus, so not by `earliest`, and nobody is asked who waits for nothing.
        first = due if not deadlines or (due is not None and due < deadlines.bound) else deadlines.bound
        decides = self._deciding.deadline()
        if decides is not None or self._neighbours.links:
            first = earliest(first, self._neighbours.deadline(), decides)
        if self._twin is not None or self._alone_since is not None or self._leaving.until is not None:
            copying = self._twin.deadline() if isinstance(self._twin, Copying) else None
            first = earliest(first, self._alone_until, self._leaving.until, copying)
        return first

    # --- messages ---

    def _received(self, received: Received, now: float) -> list[Effect]:
        if received.peer == SCHEDULER:
            self._joiner.heard(now)
            return self._from_scheduler(received.request, received.message, now)
        if received.peer < SCHEDULER:
            return self._from_neighbour(received.peer, received.request, received.message, now)
        try:
            return self._from_peer(received, now)
        except AiokvError as error:
            return [*freed(received.slot), Refuse(received.peer, received.request, error)]

    def _from_scheduler(self, request: int, message: m.Message, now: float) -> list[Effect]:
        match message:
            case m.View():
                return self._viewed(message, now)
            case m.Heartbeat():
                return []
            case m.GetView():
                return self._joiner.tell_view()
            case m.Stop(reason):
                return self._stop(reason, failed=False)
            case m.Error(code, text, details) if request == REGISTER_REQUEST:
                error = from_code(code, text, details)
                return self._joiner.fail(error) if self._joiner.joining else self._stop(error.message, failed=True)
            case m.Done() | m.Error() if request == LEAVE_REQUEST:
                return self._leaving.answered(message)
            case m.HostStandby(index, name):
                return self._host(index, name)
            case m.Boundary():
                return self._bounded(message, now)
            case _:
                return self._told_of_checkpoint(message, now)

    def _told_of_checkpoint(self, message: m.Message, now: float) -> list[Effect]:
        match message:
            case m.CheckpointAt(clock):
                return self._checkpoints.asked(clock)
            case m.CheckpointRest(clock):
                return self._checkpoints.rest(clock)
            case m.CheckpointDropped(clock):
                return self._checkpoints.dropped(clock)
            case _:
                reason = f"unexpected {type(message).__name__} from the scheduler"
                return [Disconnect(SCHEDULER, reason), *self._scheduler_gone(reason, now)]

    def _from_peer(self, received: Received, now: float) -> list[Effect]:
        peer, request, message = received.peer, received.request, received.message
        if (peer, request) in self._deadlines:
            raise ProtocolError(f"request id {request} is in use")
        if isinstance(message, PARKABLE):
            check_timeout(message.timeout)
        match message:
            case m.Push() | m.PushBundle() if message.codec:
                return self._decode(received, message)
            case m.Push() | m.PushBundle() | m.PushRows() if message.whole is not None:
                return self._keep_aside(received, message, now)
            case m.Push() | m.PushBundle() | m.PushRows():
                return self._exchanges.requested(received, self._workers.rank_of(peer, self._roster), self._roster, now)
            case _ if self._whole and isinstance(message, READS):
                return self._from_worker(received, now)
            case _ if isinstance(message, Requested):
                return self._exchanges.requested(received, self._rank_of(peer), self._roster, now)
            case m.Attach() | m.AttachServer():
                return self._attach(peer, request, message, now)
            case m.Sums():
                return self._go_on(self._norms.asked(peer, request, message), now)
            case m.Arrived() | m.GetRounds() if self._neighbours.caller(peer) is not None:
                return self._steps.decided(self._deciding.asked((peer, request), message, self._roster, now), now)
            case m.Gathered() if (index := self._neighbours.caller(peer)) is not None:
                return self._decided_calls(self._whole.asked(peer, request, message, index, now), now)
            case _:
                return self._from_worker(received, now)

    def _from_worker(self, received: Received, now: float) -> list[Effect]:
        """Do what a worker asks besides pushes and pulls, behind what it has pushed before."""
        peer, message = received.peer, received.message
        if isinstance(message, BEHIND_PUSHES):
            check_timeout(message.timeout)
            if self._whole.comes_behind(received, self._rank_of(peer), message.timeout, now):
                return []
        return self._carry_out(received, now)

    def _after_pushes(self, received: Received, now: float) -> list[Effect]:
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
            case _ if isinstance(message, READS):
                return self._exchanges.requested(received, self._rank_of(peer), self._roster, now)
            case m.Delete():
                deleted = self._exchanges.requested(received, self._rank_of(peer), self._roster, now)
                return deleted + self._changes.deleted()
            case _ if isinstance(message, Asked):
                return self._asked(received, message)
            case _:
                return self._from_stranger(received, now)

    def _from_stranger(self, received: Received, now: float) -> list[Effect]:
        """Answer what no worker asks."""
        peer, message = received.peer, received.message
        if isinstance(message, m.GetWaiting):
            return [Report(peer, received.request, self._waiting(now))]
        if isinstance(message, m.AttachStandby):
            return self._attach(peer, received.request, message, now)
        if isinstance(message, COPIED) and isinstance(self._twin, Standby):
            return self._twin.received(received, now)
        return [*freed(received.slot), *self._cut(peer, f"unexpected {type(message).__name__} from a worker", now)]

    def _asked(self, received: Received, message: Asked) -> list[Effect]:
        effects = self._control.asked(received, message, self._rank_of(received.peer), self._roster)
        if isinstance(message, m.PutRules):
            return self._checkpoints.loaded(message.clock) + effects
        return effects

    # --- membership ---

    def _viewed(self, view: m.View, now: float) -> list[Effect]:
        if not self._joiner.on_view(view, now):
            # The scheduler is there again; had the boundary come about, there would be a newer one.
            return self._unbound(now)
        effects = self._go_on(self._norms.viewed(view), now)
        effects += self._unanswered(*self._neighbours.viewed(now), now)
        for stranger in self._neighbours.strangers():
            effects += self._cut(stranger, "it is no server of the view any longer", now)
        return effects + self._decided_calls(self._whole.viewed(view, now), now)

    def _decided_calls(self, effects: list[Effect], now: float) -> list[Effect]:
        """Let the workers of the newest view count, as soon as it is known what counts of those that it takes out."""
        view = self._joiner.view
        if self._whole.is_resuming and not self._whole.is_open:
            effects = effects + self._whole.resumed(now) + self._let_in(now)
        if view is None or view.epoch == self._roster.epoch or self._whole.is_open:
            return effects
        return effects + self._adopt(view, now)

    def _bounded(self, boundary: m.Boundary, now: float) -> list[Effect]:
        """Agree to let nothing be made beyond a boundary, or say why not."""
        effects = self._unbound(now)
        view = self._joiner.view
        answer = self._boundaries.asked(boundary, 0 if view is None else view.epoch)
        if self._boundaries.announced is not None:
            self._roster = self._answers.roster = self._roster.bounded(boundary)
        return effects if answer is None else [*effects, Send(SCHEDULER, 0, answer)]

    def _unbound(self, now: float) -> list[Effect]:
        """Go on beyond the boundary that was agreed to: it does not come about."""
        if self._boundaries.announced is None:
            return []
        self._boundaries.announced = None
        self._roster = self._answers.roster = self._roster.bounded(None)
        return self._rounds.advance(self._catalog.chunks.values(), now)

    def _adopt(self, view: m.View, now: float) -> list[Effect]:
        self._roster = self._answers.roster = Roster(view, self._boundaries.left_after(view.epoch))
        effects = self._joiner.complete()
        effects += self._fence(now)
        effects += self._take_place(view, now)
        effects += self._let_in(now)
        effects += self._creation.roster_changed(self._roster) + self._changes.viewed()
        effects += self._steps.decided(self._deciding.changed(self._roster, now), now)
        return effects + self._rounds.advance(self._catalog.chunks.values(), now)

    def _take_place(self, view: m.View, now: float) -> list[Effect]:
        """Serve a part of the keys, or hold a copy of one, as a view says."""
        entry = self._joiner.entry_of(view)
        if entry is None:
            if self.serves:
                self._twin, self.serves = None, False
                return self._stop("another node serves its part of the keys by now", failed=False)
            if self._twin is None and any(_holds(each, self._joiner.name) for each in view.servers):
                known = (
                    self._catalog,
                    self._rules,
                    self._codecs,
                    self._answers,
                    self._exchanges,
                    self._norms,
                    self.tallies,
                )
                self._twin = Standby(self._joiner, *known, lambda reason: self._stop(reason, failed=True))
            return []
        if isinstance(self._twin, Standby):
            # It takes over when all is done that has come.
            self._twin.place = entry
            peer, reason = self._twin.peer, "its standby has taken its place"
            return [] if peer is None else [Disconnect(peer, reason), *self._peer_lost(peer, reason, now)]
        self.serves = True
        effects = self._resuming.viewed(view, entry.index)
        self._checkpoints.viewed(view, entry.index)
        return effects + self._look_for_standby(entry, now)

    def _look_for_standby(self, entry: m.ServerEntry, now: float) -> list[Effect]:
        """Have a standby filled, if the view has one."""
        if not isinstance(self._twin, Copying):
            if entry.standby is None:
                self._had_none = True
                return []
            known = (self._joiner, self._catalog, self._rules, self._codecs, self._resuming, self._norms)
            decided = (self._deciding, self._whole)
            self._twin = Copying(*known, *decided, alone=self._had_none, on_host=self._on_host)
            self._changes.on_change = self._boundaries.on_change = self._twin.renew
            self._norms.on_total = self._twin.totalled
            self._deciding.on_decided, self._steps.on_drop = self._twin.decided, self._twin.dropped
            self._whole.copy, self._whole.on_settled = self._twin.copy, self._twin.settled
        effects = self._twin.viewed(entry, now)
        if entry.standby is None:
            twin, self._twin, self._changes.on_change, self._had_none = self._twin, None, None, True
            self._norms.on_total = self._deciding.on_decided = self._steps.on_drop = None
            self._whole.copy = self._whole.on_settled = None
            effects += self._copied_calls(twin, now)
        return effects

    def _copied_calls(self, twin: Copying, now: float) -> list[Effect]:
        """Go on with calls whose pushes the standby has, or that have none to wait for any longer."""
        effects: list[Effect] = []
        while twin.there:
            effects += self._decided_calls(self._whole.copied(twin.there.pop(0), now), now)
        return effects

    def _take_over(self, entry: m.ServerEntry, now: float) -> list[Effect]:
        """Serve what this node had a copy of."""
        view = self._joiner.view
        assert view is not None, "it says so"
        assert isinstance(self._twin, Standby), "it was one"
        self._twin.rounds.take_over(self._deciding, self._catalog.chunks.values())
        calls = self._twin.calls
        self._twin, self.serves, self._had_none = None, True, True
        self._catalog.complete_bundles()
        self._resuming.skip(view, entry.index)
        passed = self._checkpoints.taken_over(view, entry.index, self._rules.newest)
        for chunk in self._catalog.chunks.values():
            self._rounds.begin(chunk)
        text = f"{self._joiner.name} serves the part of server {entry.index} from now on"
        log = Log("warning", text, "failover", {"server": entry.index, "node": self._joiner.name})
        effects = [log, *passed, *self._look_for_standby(entry, now)]
        effects += self._decided_calls(calls.take_over(self._whole, now), now)
        return effects + self._let_in(now)

    @property
    def _is_filling(self) -> bool:
        """Whether workers wait, because the values are not here yet, or another node has them in the newest view."""
        waits = self._resuming.is_busy or self._whole.is_resuming
        return waits or (self._joiner.view is not None and not self.serves)

    def _standby_link(self, stimulus: Connected | ConnectFailed) -> list[Effect]:
        if not isinstance(self._twin, Copying):
            return [Disconnect(stimulus.peer, "there is no standby")]
        if isinstance(stimulus, Connected):
            return self._twin.connected(stimulus.peer)
        return self._twin.connect_failed(stimulus.peer, stimulus.reason)

    def _let_in(self, now: float) -> list[Effect]:
        """Answer those who have said who they are before that could be known, or before their values were there."""
        effects: list[Effect] = []
        for (peer, request), attach in list(self._attaching.items()):
            if attach.epoch <= self._roster.epoch and (isinstance(attach, m.AttachStandby) or not self._is_filling):
                del self._attaching[peer, request]
                self._deadlines.discard((peer, request))
                effects += self._answer_attach(peer, request, attach, now)
        return effects

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
            return effects + self._let_in(now)
        for name in self._attaching:
            self._deadlines.discard(name)
            effects.append(Refuse(*name, error))
        self._attaching.clear()
        return [*effects, *self._stop(f"the checkpoint can't be loaded: {error}", failed=True)]

    def _attach(self, peer: Peer, request: int, message: AnyAttach, now: float) -> list[Effect]:
        if self._resuming.error is not None:
            return [Refuse(peer, request, self._resuming.error)]
        if message.epoch > self._roster.epoch or (self._is_filling and not isinstance(message, m.AttachStandby)):
            # The other side has a view that has not reached this server yet, or the values are not here.
            if any(other == peer for other, _ in self._attaching):
                raise MembershipError("who it is was said on this connection already, and is not known yet")
            self._attaching[peer, request] = message
            self._deadlines.add((peer, request), now + message.timeout)
            return []
        return self._answer_attach(peer, request, message, now)

    def _answer_attach(self, peer: Peer, request: int, message: AnyAttach, now: float) -> list[Effect]:
        if isinstance(message, m.AttachStandby):
            if isinstance(self._twin, Standby):
                return self._twin.attach(peer, request, message)
            text = f"{self._joiner.name} is nobody's standby"
            return [Refuse(peer, request, StaleEpochError(text, server=message.index))]
        if isinstance(message, m.AttachServer):
            if self._neighbours.entry(message) is None:
                text = f"{message.name} (server {message.index}) is not an alive server of epoch {self._roster.epoch}"
                return [Refuse(peer, request, MembershipError(text, server=message.index))]
            effects: list[Effect] = [Send(peer, request, m.Done())]
            for older in self._neighbours.attach(peer, message):
                effects += self._cut(older, "its server has connected again", now)
            return effects
        error = self._workers.refusal(message, self._roster)
        if error is not None:
            return [Refuse(peer, request, error)]
        before = self._workers.attach(peer, message)
        self._once.attached(message.rank, message.incarnation)
        self._alone_since = None
        effects = [Send(peer, request, m.Done())]
        if before is not None:
            effects += self._cut(before, "its worker has connected again", now)
        return effects

    def _cut(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Close a connection. What still comes over it must not count."""
        return [Disconnect(peer, reason), *self._peer_lost(peer, reason, now)]

    def _fence(self, now: float) -> list[Effect]:
        """Take nothing any more from processes in whose place the view has later ones; tell them so."""
        effects: list[Effect] = []
        for peer, error in self._workers.fence(self._roster):
            waiting = [name for name in self._deadlines if name[0] == peer]
            effects += self._peer_lost(peer, "a later process has its place", now)
            effects += [Refuse(*name, error) for name in waiting]
        return effects

    def _rank_of(self, peer: Peer) -> Rank:
        return self._workers.rank_of(peer, self._roster)

    # --- calls that count as a whole ---

    def _keep_aside(self, received: Received, message: m.Push | m.PushBundle | m.PushRows, now: float) -> list[Effect]:
        rank = self._rank_of(received.peer)
        keys = self._keys_of(message)
        worker = self._roster.entry(rank)
        assert worker is not None, "it is attached"
        if isinstance(message, m.PushBundle):
            dtype = self._catalog.bundle(message.bundle).specs[0].dtype
        else:
            dtype = message.dtype
        return self._decided_calls(self._whole.push(received, message, keys, dtype, worker, now), now)

    def _keys_of(self, message: m.Push | m.PushBundle | m.PushRows) -> tuple[Key, ...]:
        """Return the keys whose pushes have to stay in their order with this one."""
        if isinstance(message, m.PushBundle):
            return self._catalog.bundle(message.bundle).keys
        chunk = self._catalog.find(message.key, message.start)
        # Whoever waits for a round goes by the order of all steps of a worker, whatever keys are in them.
        return (message.key, DECIDED) if chunk is not None and chunk.policy.decides else (message.key,)

    def _enter(self, received: Received, rank: Rank, now: float) -> list[Effect]:
        """Let a push count, whether somebody is there to be told so or not."""
        try:
            effects = self._exchanges.requested(received, rank, self._roster, now)
        except AiokvError as error:
            effects = [*freed(received.slot), Refuse(received.peer, received.request, error)]
        if received.peer not in self._workers:
            effects += self._exchanges.forget_peer(received.peer)
        return effects

    def _peer_lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        if peer == SCHEDULER:
            return self._scheduler_gone(reason, now)
        if peer < SCHEDULER:
            return self._neighbour_gone(peer, reason, now)
        if isinstance(self._twin, Standby):
            self._twin.forget_peer(peer)
        self._workers.forget_peer(peer)
        self._once.forget_peer(peer)
        for name in [name for name in self._attaching if name[0] == peer]:
            del self._attaching[name]
            self._deadlines.discard(name)
        self._deciding.forget_peer(peer)
        self._whole.forget_peer(peer)
        self._changes.forget_peer(peer)
        effects = self._exchanges.forget_peer(peer)
        self._norms.forget_peer(peer)
        self._neighbours.forget_caller(peer)
        self._look_around(now)
        return effects

    def _scheduler_gone(self, reason: str, now: float) -> list[Effect]:
        if self._stopped:
            return []
        reconnects = self._joiner.on_lost(reason)
        self._look_around(now)
        if given_up := self._leaving.scheduler_gone():
            return given_up
        does = "has not joined yet" if self._joiner.joining else "serves its workers until they leave"
        text = f"the scheduler at {self._joiner.address} is gone: {reason}; {self._joiner.name} {does}, looks for it"
        log = Log("warning", text, "scheduler_gone", {"reason": reason})
        return [log, *self._checkpoints.scheduler_gone(), *reconnects]

    def _host(self, index: int, name: str) -> list[Effect]:
        """Start a standby in this process, unless that was asked for before."""
        if name in self._hosted or self._stopped:
            return []
        self._hosted[name] = None
        return [StartNode(index, name)]

    def _look_around(self, now: float) -> None:
        """Take note since when nobody is there for whom this server, or another one of its process, could be of use."""
        view = self._joiner.view
        # A standby is of use as long as its primary is.
        serves = view is not None and any(entry.name in self._hosted for entry in view.servers)
        holds = isinstance(self._twin, Standby) and self._twin.peer is not None
        of_use = bool(self._workers) or serves or holds
        is_alone = self._joiner.joined and not self._joiner.connected and not of_use
        self._alone_since = (self._alone_since if self._alone_since is not None else now) if is_alone else None

    @property
    def _alone_until(self) -> float | None:
        view = self._joiner.view
        if self._alone_since is None or view is None or self._stopped:
            return None
        # What a standby has may be the only copy by now, until the scheduler is there again and says so.
        patience = KEEPS_COPY if isinstance(self._twin, Standby) else 0.0
        return self._alone_since + max(view.death_timeout, patience)

    def _stop_when_alone(self, now: float) -> list[Effect]:
        until = self._alone_until
        if until is None or now < until:
            return []
        return self._stop("the scheduler is gone and no worker is connected", failed=True)

    def _stop(self, reason: str, *, failed: bool) -> list[Effect]:
        if self._stopped:
            return []
        self._stopped = True
        self._joiner.leave()
        return [Stop(reason, failed=failed)]

    # --- other servers ---

    def _from_neighbour(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        if peer < STANDBY:
            return self._twin.received(peer, request, message, now) if isinstance(self._twin, Copying) else []
        if peer not in self._neighbours:
            return []
        try:
            about, effects = self._neighbours.answered(peer, request, message, now)
        except ProtocolError as error:
            return [Disconnect(peer, error.message), *self._neighbours.ended(peer, error.message, now)]
        if about is None:
            return effects
        if isinstance(about, Question):
            return self._steps.decided(self._deciding.answered(about, message), now)
        if isinstance(about, WholeCall):
            return self._decided_calls(self._whole.answered(about, message, now), now)
        return self._go_on(self._norms.answered(about, message), now)

    def _neighbour_gone(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        if peer < STANDBY:
            return self._twin.lost(peer, reason, now) if isinstance(self._twin, Copying) else []
        return self._neighbours.ended(peer, reason, now)

    def _unanswered(
        self, effects: list[Effect], failed: Failed[Chunk | Question | WholeCall], now: float
    ) -> list[Effect]:
        """Go on without answers that can't come."""
        for about, error in failed:
            if isinstance(about, Question):
                effects += self._steps.decided(self._deciding.refused(about, error), now)
            elif isinstance(about, WholeCall):
                effects += self._decided_calls(self._whole.link_lost(about, now), now)
            else:
                effects += self._go_on(self._norms.refused(about, error), now)
        return effects

    def _go_on(self, outcome: Outcome, now: float) -> list[Effect]:
        """Go on with the updates of chunks that have their norms, or do without."""
        effects = outcome.effects
        for ready in outcome.ready:
            chunk, result = ready.chunk, ready.result
            if chunk.pending is None:
                # Its key was deleted meanwhile.
                continue
            if not isinstance(result, AiokvError):
                effects += self._making.normed(chunk, result)
                continue
            effects += self._making.skip(chunk)
            effects += self._exchanges.applied(chunk, Applied(chunk.key, chunk.start, chunk.version + 1, result), now)
        return effects

    # --- compressed pushes ---

    def _decode(self, received: Received, message: m.Push | m.PushBundle) -> list[Effect]:
        """Have a payload decoded; until that is done, what else comes over the connection waits."""
        peer, request = received.peer, received.request
        self._rank_of(peer)
        codec = self._codecs.find(message.codec)
        if isinstance(message, m.Push):
            self._catalog.lookup(message)
            key, dtype, sizes = message.key, message.dtype, [message.stop - message.start]
        else:
            bundle = self._catalog.bundle(message.bundle)
            key, dtype, sizes = bundle.keys[0], bundle.specs[0].dtype, [spec.size for spec in bundle.specs]
        codec.check_dtype(key, dtype)
        check_length(codec, sizes, received.nbytes)
        target = self._rounds.new_slot()
        nbytes = TensorSpec((sum(sizes),), dtype).nbytes
        self._decoding.begin(Received(peer, request, msgspec.structs.replace(message, codec=0), target, nbytes))
        return [Decode(received.slot, target, codec, dtype, sizes)]

    def _decoded(self, decoded: Decoded, now: float) -> list[Effect]:
        push, behind = self._decoding.end(decoded.target)
        if decoded.error is None:
            effects = self._received(push, now)
        else:
            effects = [Refuse(push.peer, push.request, decoded.error)]
        for stimulus in behind:
            effects += self._handle(stimulus, now)
        return effects

    def _waiting(self, now: float) -> m.Waiting:
        """Return for what every request that is not answered waits."""
        calls = []
        for name, due in self._deadlines.times():
            wait = self._wait(name)
            rank = self._workers.find(name[0])
            calls.append(wait.shown(rank, self._roster, due=due, now=now))
        return m.Waiting(self._roster.epoch, tuple(calls))

    def _wait(self, name: RequestName) -> Wait:
        if name in self._answers:
            return self._rounds.wait(name)
        if name in self._creation:
            return self._creation.wait(name, self._roster)
        if name in self._exchanges:
            return self._exchanges.wait(name)
        if name in self._changes:
            return self._changes.wait(name)
        if name in self._whole:
            return self._whole.wait(name)
        attach = self._attaching[name]
        what = f"{attach.name} at {self._joiner.name}"
        if not self.serves:
            return Wait(what, "it does not serve its part of the keys yet", attach.timeout)
        if self._resuming.is_busy:
            return Wait(what, "the checkpoint is not loaded yet", attach.timeout)
        return Wait(what, f"the view of epoch {attach.epoch} is not here yet", attach.timeout)

    def _tick(self, now: float) -> list[Effect]:
        effects = self._joiner.tick(now)
        if reason := self._joiner.silence(now):
            effects += [Disconnect(SCHEDULER, reason), *self._scheduler_gone(reason, now)]
        effects += self._stop_when_alone(now) + self._leaving.tick(now)
        effects += self._unanswered(*self._neighbours.due(now), now)
        effects += self._steps.decided(self._deciding.due(self._roster, now), now)
        if isinstance(self._twin, Copying):
            effects += self._twin.due(now)
        for name in self._deadlines.due(now):
            effects += self._expire(name, now)
        return effects

    def _expire(self, name: RequestName, now: float) -> list[Effect]:
        """Refuse a request whose time has come."""
        if name in self._answers:
            return [self._rounds.expire(name, now)]
        if name in self._creation:
            return [self._creation.expire(name, self._roster)]
        if name in self._exchanges:
            return [self._exchanges.expire(name)]
        if name in self._changes:
            return [self._changes.expire(name)]
        if name in self._whole:
            return self._decided_calls(self._whole.expire(name, now), now)
        attach = self._attaching.pop(name, None)
        if attach is None:
            return []
        text = f"{self._joiner.name} did not begin to serve its part of the keys in {attach.timeout:g} s"
        if self._resuming.is_busy:
            text = f"{self._joiner.name} has not loaded its part of the checkpoint in {attach.timeout:g} s"
        elif attach.epoch > self._roster.epoch:
            text = f"the view of epoch {attach.epoch} did not reach {self._joiner.name} in {attach.timeout:g} s"
        return [Refuse(*name, CallTimeoutError(text))]

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
        if isinstance(self._twin, Copying):
            self._twin.validate()
        named.update(self._creation, self._exchanges, self._changes, self._whole, self._attaching)
        assert self._deadlines.holds(named)


def _holds(entry: m.ServerEntry, name: str) -> bool:
    """Tell whether a node is to have a copy of what a server has."""
    return entry.standby is not None and entry.standby.name == name
