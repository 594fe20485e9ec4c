"""A server's decisions: which contributions make an update, when it is applied, and who is answered what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.commands import make_command
from aiokv.core.bundle import Bundle, divide
from aiokv.core.catalog import Catalog
from aiokv.core.compression import Codecs, Decoding, check_length
from aiokv.core.creation import Creation
from aiokv.core.cuts import check_cut
from aiokv.core.deadlines import Deadlines, check_timeout, earliest
from aiokv.core.effects import (
    Configure,
    Decode,
    Disconnect,
    Effect,
    Execute,
    Forget,
    Log,
    Prepare,
    Refuse,
    Send,
    Stop,
    freed,
)
from aiokv.core.joiner import REGISTER_REQUEST, Joiner
from aiokv.core.neighbours import Neighbours
from aiokv.core.norms import Norms, Outcome
from aiokv.core.parked import Parked
from aiokv.core.roster import Roster
from aiokv.core.rounds import Rounds
from aiokv.core.rows import Tables
from aiokv.core.rules import Rules, check_reduction
from aiokv.core.saving import Saving, restored
from aiokv.core.stimuli import (
    Applied,
    Connected,
    ConnectFailed,
    Decoded,
    Executed,
    Join,
    Normed,
    PeerLost,
    Received,
    Restored,
    Stimulus,
    Tick,
)
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    KeyDeletedError,
    MembershipError,
    ProtocolError,
    SchedulerLostError,
    UnknownKeyError,
    from_code,
)
from aiokv.optim import make_optimizer
from aiokv.types import SCHEDULER, Key, Peer, Rank, Role, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.chunk import Chunk
    from aiokv.core.parked import RequestName
    from aiokv.optim import Optimizer


PARKABLE = (
    *(m.Attach, m.AttachServer, m.Init, m.InitBundle, m.Push, m.PushBundle, m.Pull, m.PullBundle),
    *(m.InitRows, m.PushRows, m.PullRows),
)
"""Requests that may have to wait."""


class Coordinator:
    """The state machine of one server. `handle` is the only door that changes it.

    Args:
        joiner: this server's place in the cluster.
    """

    def __init__(self, joiner: Joiner) -> None:
        if joiner.role is not Role.SERVER:
            raise ValueError(f"a coordinator joins as a server, not as a {joiner.role}")
        self._joiner = joiner
        self._roster = Roster()
        self._ranks: dict[Peer, Rank] = {}
        self._attaching: dict[RequestName, m.Attach | m.AttachServer] = {}
        self._catalog = Catalog()
        self._rules = Rules()
        self._deadlines: Deadlines[RequestName] = Deadlines()
        self._creation = Creation(self._catalog, self._rules, self._deadlines)
        self._early: Parked[Received] = Parked()
        self._neighbours: Neighbours[Chunk] = Neighbours(joiner)
        self._norms = Norms(self._catalog, self._neighbours)
        self._codecs = Codecs()
        self._decoding = Decoding()
        self._rounds = Rounds(self._deadlines, self._rules, self._norms, self._codecs)
        self._tables = Tables(self._catalog, self._creation, self._rounds)
        self._saving = Saving(self._catalog, self._rules)
        self._scheduler_lost = False
        self._stopped = False

    # --- the door ---

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        match stimulus:
            case Received() | PeerLost() if self._decoding.hold(stimulus):
                return []
            case Received():
                return self._received(stimulus, now)
            case Applied() | Normed() | Restored():
                return self._stored(stimulus, now)
            case Decoded():
                return self._decoded(stimulus, now)
            case Executed(peer, request, outcome):
                return [_answer_command(peer, request, outcome)]
            case Tick():
                return self._tick(now)
            case Join(call, timeout):
                return self._joiner.join(call, timeout, now)
            case _:
                return self._link_event(stimulus, now)

    def _link_event(self, stimulus: Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case PeerLost(peer, reason):
                return self._peer_lost(peer, reason, now)
            case Connected(peer) if peer == SCHEDULER:
                return self._joiner.on_connected(now)
            case ConnectFailed(peer, reason, error) if peer == SCHEDULER:
                return self._joiner.on_connect_failed(reason, error, now)
            case Connected(peer) if peer < SCHEDULER:
                return self._neighbours.connected(peer, now)
            case ConnectFailed(peer, reason, error) if peer < SCHEDULER:
                return self._neighbours.connect_failed(peer, reason)
            case _:
                raise TypeError(f"not a stimulus for a server: {stimulus!r}")

    def _stored(self, stimulus: Applied | Normed | Restored, now: float) -> list[Effect]:
        """The store has done something."""
        if isinstance(stimulus, Restored):
            return [restored(stimulus)]
        chunk = self._catalog.chunks[stimulus.key, stimulus.start]
        if isinstance(stimulus, Applied):
            return self._applied(chunk, stimulus, now)
        return self._go_on(self._norms.measured(chunk, stimulus, now), now)

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        return earliest(self._deadlines.next(), self._joiner.deadline(), self._neighbours.deadline())

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
            case m.Stop(reason):
                return self._stop(reason, failed=False)
            case m.Error(code, text, details) if request == REGISTER_REQUEST:
                return self._joiner.fail(from_code(code, text, details))
            case _:
                reason = f"unexpected {type(message).__name__} from the scheduler"
                return [Disconnect(SCHEDULER, reason), *self._scheduler_gone(reason)]

    def _from_peer(self, received: Received, now: float) -> list[Effect]:
        peer, request, message = received.peer, received.request, received.message
        if (peer, request) in self._deadlines:
            raise ProtocolError(f"request id {request} is in use")
        if isinstance(message, PARKABLE):
            check_timeout(message.timeout)
        match message:
            case m.Push() | m.PushBundle() if message.codec:
                return self._decode(received, message)
            case m.Push() | m.Pull():
                return self._exchange(received, message, now)
            case m.PushBundle() | m.PullBundle():
                return self._exchange_bundle(received, message, now)
            case m.Init() | m.InitBundle():
                return self._init(received, message, now)
            case m.InitRows() | m.PushRows() | m.PullRows():
                return self._exchange_rows(received, message, now)
            case m.Delete():
                return self._delete(received, message, now)
            case m.Attach() | m.AttachServer():
                return self._attach(peer, request, message, now)
            case m.Sums():
                return self._go_on(self._norms.asked(peer, request, message), now)
            case _:
                return self._control(received, now)

    def _control(self, received: Received, now: float) -> list[Effect]:
        """Do what a worker asks of the server, besides pushes and pulls."""
        peer, request, message = received.peer, received.request, received.message
        match message:
            case m.SetOptimizer() | m.ChangeOptimizer() | m.GetRules() | m.PutRules():
                return self._use_rules(received, message)
            case m.GetState() | m.PutState():
                return self._exchange_state(received, message)
            case m.SetCompression():
                new = self._codecs.set(message, self._rank_of(peer), self._roster)
                return [*map(Prepare, new), Send(peer, request, m.Done())]
            case m.Command(name, params):
                return self._execute(peer, request, name, params)
            case _:
                reason = f"unexpected {type(message).__name__} from a worker"
                return [*freed(received.slot), Disconnect(peer, reason), *self._peer_lost(peer, reason, now)]

    # --- membership ---

    def _viewed(self, view: m.View, now: float) -> list[Effect]:
        if view.epoch <= self._roster.epoch:
            return []
        self._joiner.on_view(view, now)
        self._roster = self._rounds.roster = Roster(view)
        effects = self._joiner.complete()
        for (peer, request), attach in list(self._attaching.items()):
            if attach.epoch <= view.epoch:
                del self._attaching[peer, request]
                self._deadlines.discard((peer, request))
                effects += self._answer_attach(peer, request, attach)
        effects += self._creation.roster_changed(self._roster)
        effects += self._go_on(self._norms.viewed(view), now)
        for gone, reason in self._neighbours.gone():
            effects += [Disconnect(gone, reason), *self._neighbour_gone(gone, reason, now)]
        return effects + self._rounds.advance(self._catalog.chunks.values())

    def _attach(self, peer: Peer, request: int, message: m.Attach | m.AttachServer, now: float) -> list[Effect]:
        if message.epoch > self._roster.epoch:
            # The other side has a view that has not reached this server yet.
            self._attaching[peer, request] = message
            self._deadlines.add((peer, request), now + message.timeout)
            return []
        return self._answer_attach(peer, request, message)

    def _answer_attach(self, peer: Peer, request: int, message: m.Attach | m.AttachServer) -> list[Effect]:
        if isinstance(message, m.AttachServer):
            if self._neighbours.entry(message) is None:
                text = f"{message.name} (server {message.index}) is not an alive server of epoch {self._roster.epoch}"
                return [Refuse(peer, request, MembershipError(text, server=message.index))]
            self._norms.attach(peer, message.index)
            return [Send(peer, request, m.Done())]
        entry = self._roster.entry(message.rank)
        if entry is None or (entry.name, entry.incarnation, entry.state) != (
            message.name,
            message.incarnation,
            "alive",
        ):
            text = f"{message.name} (rank {message.rank}) is not an alive member of epoch {self._roster.epoch}"
            return [Refuse(peer, request, MembershipError(text, ranks=[message.rank]))]
        self._ranks[peer] = message.rank
        return [Send(peer, request, m.Done())]

    def _rank_of(self, peer: Peer) -> Rank:
        rank = self._ranks.get(peer)
        if rank is None:
            raise MembershipError("this connection has not said which worker it is")
        if rank in self._roster.lost:
            # The others were told that it is lost: what a worker that comes to again sends must change nothing.
            text = f"rank {self._roster.label(rank)} was declared lost: {self._roster.reason(rank)}"
            raise MembershipError(text, ranks=[rank])
        return rank

    def _peer_lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        if peer == SCHEDULER:
            return self._scheduler_gone(reason)
        if peer < SCHEDULER:
            return self._neighbour_gone(peer, reason, now)
        self._ranks.pop(peer, None)
        for name in [name for name in self._attaching if name[0] == peer]:
            del self._attaching[name]
            self._deadlines.discard(name)
        self._creation.forget_peer(peer)
        for name, _ in self._early.take_peer(peer):
            self._deadlines.discard(name)
        effects = self._rounds.forget_peer(peer) + self._tables.forget_peer(peer)
        effects += self._go_on(self._norms.forget_peer(peer, reason), now)
        return effects + self._stop_when_alone()

    def _scheduler_gone(self, reason: str) -> list[Effect]:
        self._joiner.on_lost()
        self._scheduler_lost = True
        if self._stopped:
            return []
        error = SchedulerLostError(
            f"the scheduler at {self._joiner.address} is gone: {reason}", address=self._joiner.address
        )
        if self._joiner.joining:
            return self._joiner.fail(error)
        text = f"{error}; {self._joiner.name} serves its workers until they leave"
        return [Log("warning", text), *self._stop_when_alone()]

    def _stop_when_alone(self) -> list[Effect]:
        if self._scheduler_lost and not self._ranks:
            return self._stop("the scheduler is gone and no worker is connected", failed=True)
        return []

    def _stop(self, reason: str, *, failed: bool) -> list[Effect]:
        if self._stopped:
            return []
        self._stopped = True
        return [Stop(reason, failed=failed)]

    # --- other servers ---

    def _from_neighbour(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        if peer not in self._neighbours:
            return []
        try:
            chunk, effects = self._neighbours.answered(peer, request, message)
        except ProtocolError as error:
            return [Disconnect(peer, error.message), *self._neighbour_gone(peer, error.message, now)]
        if chunk is None:
            return effects
        return self._go_on(self._norms.answered(chunk, message), now)

    def _neighbour_gone(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for chunk, error in self._neighbours.end(peer, reason):
            effects += self._go_on(self._norms.refused(chunk, error), now)
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
                effects += self._rounds.normed(chunk, result)
                continue
            effects += self._rounds.skip(chunk)
            effects += self._applied(chunk, Applied(chunk.key, chunk.start, chunk.version + 1, result), now)
        return effects

    # --- optimizer ---

    def _use_rules(
        self, received: Received, message: m.SetOptimizer | m.ChangeOptimizer | m.GetRules | m.PutRules
    ) -> list[Effect]:
        self._rank_of(received.peer)
        match message:
            case m.SetOptimizer():
                return self._set_optimizer(received.peer, received.request, message)
            case m.ChangeOptimizer(since, params):
                return self._change_optimizer(received.peer, received.request, since, params)
            case m.GetRules():
                return self._saving.read_rules(received)
            case _:
                rule = self._make_rule(message) if message.name else None
                return self._saving.write_rules(received, message, rule)

    def _set_optimizer(self, peer: Peer, request: int, message: m.SetOptimizer) -> list[Effect]:
        rule = self._make_rule(message)
        is_new = self._rules.set(rule, message.name, message.params, message.reduction)
        effects: list[Effect] = [Configure(rule)] if is_new else []
        return [*effects, Send(peer, request, m.Done())]

    def _make_rule(self, message: m.SetOptimizer | m.PutRules) -> Optimizer:
        """Return a rule that can update all keys that are here."""
        check_reduction(message.reduction)
        rule = make_optimizer(message.name, message.params)
        for key, dtype in self._catalog.dtypes():
            self._rules.check_dtype(key, dtype, rule, message.reduction)
            if self._catalog.is_sparse(key):
                self._rules.check_table(key, message.reduction)
        self._catalog.check_tables(rule)
        for chunk in self._catalog.chunks.values():
            if chunk.is_dense:
                check_cut(rule, chunk.key, chunk.spec, chunk.start, chunk.stop, chunk.policy)
        return rule

    def _exchange_state(self, received: Received, message: m.GetState | m.PutState) -> list[Effect]:
        self._rank_of(received.peer)
        chunk = self._catalog.lookup_state(message)
        if chunk.applying:
            chunk.held.append(received)
            return []
        if isinstance(message, m.GetState):
            return self._saving.read(received, message, chunk)
        if received.slot is None:
            raise ProtocolError(f"{chunk.label}: a state without a payload")
        effects: list[Effect] = []
        bundle = self._catalog.bundle_of(message.key)
        if bundle is not None:
            # Keys that come from elsewhere may have been updated a different number of times.
            effects = self._divide(bundle)
            chunk = self._catalog.lookup_state(message)
        return effects + self._saving.write(received, message, chunk, received.slot)

    def _change_optimizer(self, peer: Peer, request: int, since: int, params: dict[str, Any]) -> list[Effect]:
        rule = self._rules.changed(since, params)
        for key, dtype in self._catalog.dtypes():
            self._rules.check_dtype(key, dtype, rule)
        self._rules.change(since, params, rule)
        return [Send(peer, request, m.Done())]

    # --- commands ---

    def _execute(self, peer: Peer, request: int, name: str, params: dict[str, Any]) -> list[Effect]:
        self._rank_of(peer)
        view = self._joiner.view
        assert view is not None, "workers are known from the view only"
        (index,) = [entry.index for entry in view.servers if entry.name == self._joiner.name]
        return [Execute(peer, request, make_command(name, params), index)]

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
            effects += self.handle(stimulus, now=now)
        return effects

    # --- push and pull ---

    def _init(self, received: Received, message: m.Init | m.InitBundle, now: float) -> list[Effect]:
        effects = self._creation.init(received, message, self._rank_of(received.peer), self._roster, now)
        keys, start = ((message.key,), message.start) if isinstance(message, m.Init) else (message.keys, 0)
        return effects + self._wake(keys, start, now)

    def _wait_for_key(self, received: Received, message: m.Pull | m.PullRows, now: float) -> list[Effect]:
        """Let a worker read a key before its root has made it. A push that early is a mistake."""
        self._catalog.check_key(message.key)
        name = (received.peer, received.request)
        self._early.add(name, received, message.key, message.start)
        self._deadlines.add(name, now + message.timeout)
        return []

    def _wake(self, keys: tuple[Key, ...], start: int, now: float) -> list[Effect]:
        """Look again at what has waited for keys, if they are there."""
        effects: list[Effect] = []
        for key in keys:
            if self._catalog.find(key, start) is not None:
                for name, early in self._early.take_place(key, start):
                    self._deadlines.discard(name)
                    effects += self._received(early, now)
        return effects

    def _exchange_rows(
        self, received: Received, message: m.InitRows | m.PushRows | m.PullRows, now: float
    ) -> list[Effect]:
        rank = self._rank_of(received.peer)
        if isinstance(message, m.PullRows) and message.key not in self._catalog:
            return self._wait_for_key(received, message, now)
        effects = self._tables.received(received, message, rank, self._roster, now)
        return effects + self._wake((message.key,), message.start, now) if isinstance(message, m.InitRows) else effects

    def _exchange(self, received: Received, message: m.Push | m.Pull, now: float) -> list[Effect]:
        rank = self._rank_of(received.peer)
        missing = self._catalog.find(message.key, message.start) is None and not self._catalog.is_sparse(message.key)
        if missing and isinstance(message, m.Pull):
            return self._wait_for_key(received, message, now)
        chunk = self._catalog.lookup(message)
        effects: list[Effect] = []
        bundle = self._catalog.bundle_of(message.key)
        if bundle is not None:
            # Somebody uses a key of a bundle alone.
            if chunk.applying:
                chunk.held.append(received)
                return []
            effects = self._divide(bundle)
            chunk = self._catalog.lookup(message)
        return effects + self._carry_out(received, message, rank, [chunk], now)

    def _exchange_bundle(self, received: Received, message: m.PushBundle | m.PullBundle, now: float) -> list[Effect]:
        rank = self._rank_of(received.peer)
        bundle = self._catalog.bundle(message.bundle)
        if bundle.chunk is not None:
            return self._carry_out(received, message, rank, [bundle.chunk], now)
        effects: list[Effect] = []
        for key in bundle.keys:
            other = self._catalog.bundle_of(key)
            if other is None:
                continue
            if other.chunk is not None and other.chunk.applying:
                other.chunk.held.append(received)
                return effects
            effects += self._divide(other)
        chunks = [self._catalog.chunks[key, 0] for key in bundle.keys]
        return effects + self._carry_out(received, message, rank, chunks, now)

    def _carry_out(
        self,
        received: Received,
        message: m.Push | m.Pull | m.PushBundle | m.PullBundle,
        rank: Rank,
        chunks: list[Chunk],
        now: float,
    ) -> list[Effect]:
        try:
            if isinstance(message, (m.Push, m.PushBundle)):
                return self._rounds.push(received, message, rank, chunks, now)
            return self._rounds.pull(received, message, rank, chunks, now)
        except AiokvError as error:
            # Caught here too, because what was divided for it stays divided.
            return [*freed(received.slot), Refuse(received.peer, received.request, error)]

    def _divide(self, bundle: Bundle) -> list[Effect]:
        whole = bundle.chunk
        assert whole is not None, "a bundle is divided once"
        self._rounds.replicas.forget_chunk(whole.key, whole.start)
        chunks, effects = divide(bundle, self._rounds.new_slot)
        self._catalog.replace(bundle, chunks)
        return effects

    def _delete(self, received: Received, message: m.Delete, now: float) -> list[Effect]:
        self._rank_of(received.peer)
        here = [key for key in message.keys if key in self._catalog]
        effects: list[Effect] = []
        for key in here:
            bundle = self._catalog.bundle_of(key)
            if bundle is None:
                continue
            if bundle.chunk is not None and bundle.chunk.applying:
                bundle.chunk.held.append(received)
                return effects
            effects += self._divide(bundle)
        applying = [chunk for (key, _), chunk in self._catalog.chunks.items() if key in here and chunk.is_busy]
        if applying:
            applying[0].held.append(received)
            return effects
        for key in here:
            error = KeyDeletedError(f"key {key!r} was deleted while the call was pending", key=key)
            for chunk in self._catalog.remove(key):
                effects += [*self._rounds.remove(chunk, error), Forget(chunk.key, chunk.start)]
            effects += self._norms.remove(key)
        return [*effects, Send(received.peer, received.request, m.Done())]

    def _applied(self, chunk: Chunk, applied: Applied, now: float) -> list[Effect]:
        held, chunk.held = chunk.held, []
        effects = self._rounds.applied(chunk, applied.version, applied.error, go_on=not held)
        if not held:
            return effects
        # No further update begins before these are looked at.
        bundle = self._catalog.bundle_of(chunk.key)
        keys = (chunk.key,) if bundle is None else bundle.keys
        if bundle is not None:
            effects += self._divide(bundle)
        for received in held:
            effects += self._received(received, now)
        left = [other for other in self._catalog.chunks.values() if other.key in keys]
        return effects + self._rounds.advance(left)

    def _tick(self, now: float) -> list[Effect]:
        effects = self._joiner.tick(now)
        if reason := self._joiner.silence(now):
            effects += [Disconnect(SCHEDULER, reason), *self._scheduler_gone(reason)]
        for peer, reason in self._neighbours.due(now):
            effects += [Disconnect(peer, reason), *self._neighbour_gone(peer, reason, now)]
        for name in self._deadlines.due(now):
            if name in self._rounds:
                effects.append(self._rounds.expire(name))
            elif name in self._creation:
                effects.append(self._creation.expire(name, self._roster))
            elif name in self._early:
                effects.append(self._expire_early(name))
            else:
                attach = self._attaching.pop(name)
                text = f"the view of epoch {attach.epoch} did not reach {self._joiner.name} in {attach.timeout:g} s"
                effects.append(Refuse(*name, CallTimeoutError(text)))
        return effects

    def _expire_early(self, name: RequestName) -> Effect:
        message = self._early.take(name).message
        assert isinstance(message, m.Pull | m.PullRows), "only pulls wait for a key"
        text = f"key {message.key!r} is not initialized, and nobody did it within {message.timeout:.3g} s"
        return Refuse(*name, UnknownKeyError(text, key=message.key))

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
        named |= set(self._creation) | set(self._early) | set(self._attaching)
        assert all(name in self._deadlines for name in named)
        assert len(named) == len(self._deadlines)


def _answer_command(peer: Peer, request: int, outcome: dict[str, Any] | AiokvError) -> Effect:
    if isinstance(outcome, AiokvError):
        return Refuse(peer, request, outcome)
    return Send(peer, request, m.CommandResult(outcome))
