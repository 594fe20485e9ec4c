"""A server's decisions: which contributions make an update, when it is applied, and who is answered what."""

from __future__ import annotations

from aiokv.core.catalog import Catalog
from aiokv.core.chunk import Chunk, Contribution, Update, Waiter
from aiokv.core.deadlines import Deadlines, check_timeout, earliest
from aiokv.core.effects import (
    Apply,
    Configure,
    Disconnect,
    Effect,
    Free,
    Install,
    Log,
    Refuse,
    Send,
    Stop,
    StoredChunk,
)
from aiokv.core.joiner import REGISTER_REQUEST, Joiner
from aiokv.core.parked import ParkedInits, RequestName
from aiokv.core.roster import Roster
from aiokv.core.stimuli import Applied, Connected, ConnectFailed, Join, PeerLost, Received, Stimulus, Tick
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    MembershipError,
    OptimizerError,
    ProtocolError,
    RoundTimeoutError,
    SchedulerLostError,
    UnknownKeyError,
    from_code,
)
from aiokv.optim import Optimizer, make_optimizer
from aiokv.types import SCHEDULER, Peer, Rank, Role
from aiokv.wire import messages as m

MAX_OPEN_UPDATES = 1024
"""How far a worker may push ahead of the rounds that are closed, per chunk."""


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
        self._attaching: dict[RequestName, m.Attach] = {}
        self._initializing = ParkedInits()
        self._catalog = Catalog()
        self._optimizer: Optimizer | None = None
        self._waiters: dict[RequestName, Waiter] = {}
        self._deadlines: Deadlines[RequestName] = Deadlines()
        self._scheduler_lost = False
        self._stopped = False

    # --- the door ---

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        match stimulus:
            case Received():
                return self._received(stimulus, now)
            case Applied(key, start, version):
                return self._applied(self._catalog.chunks[key, start], version)
            case Tick():
                return self._tick(now)
            case PeerLost(peer, reason):
                return self._peer_lost(peer, reason)
            case Join(call, timeout):
                return self._joiner.join(call, timeout, now)
            case Connected(peer) if peer == SCHEDULER:
                return self._joiner.on_connected(now)
            case ConnectFailed(peer, reason, error) if peer == SCHEDULER:
                return self._joiner.on_connect_failed(reason, error, now)
            case _:
                raise TypeError(f"not a stimulus for a server: {stimulus!r}")

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        return earliest(self._deadlines.next(), self._joiner.deadline())

    # --- messages ---

    def _received(self, received: Received, now: float) -> list[Effect]:
        if received.peer == SCHEDULER:
            self._joiner.heard(now)
            return self._from_scheduler(received.request, received.message, now)
        try:
            return self._from_worker(received, now)
        except AiokvError as error:
            return [*_freed(received), Refuse(received.peer, received.request, error)]

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

    def _from_worker(self, received: Received, now: float) -> list[Effect]:
        peer, request, message = received.peer, received.request, received.message
        if (peer, request) in self._deadlines:
            raise ProtocolError(f"request id {request} is in use")
        if isinstance(message, (m.Attach, m.Init, m.Push, m.Pull)):
            check_timeout(message.timeout)
        match message:
            case m.Push():
                return self._push(received, message, now)
            case m.Pull():
                return self._pull(peer, request, message, now)
            case m.Init():
                return self._init(received, message, now)
            case m.SetOptimizer(name, params):
                return self._set_optimizer(peer, request, name, params)
            case m.Attach():
                return self._attach(peer, request, message, now)
            case _:
                reason = f"unexpected {type(message).__name__} from a worker"
                return [*_freed(received), Disconnect(peer, reason), *self._peer_lost(peer, reason)]

    # --- membership ---

    def _viewed(self, view: m.View, now: float) -> list[Effect]:
        if view.epoch <= self._roster.epoch:
            return []
        self._joiner.on_view(view, now)
        self._roster = Roster(view)
        effects = self._joiner.complete()
        for (peer, request), attach in list(self._attaching.items()):
            if attach.epoch <= view.epoch:
                del self._attaching[peer, request]
                self._deadlines.discard((peer, request))
                effects += self._answer_attach(peer, request, attach)
        effects += self._refuse_orphaned_inits()
        for chunk in self._catalog.chunks.values():
            for update in chunk.updates.values():
                effects += self._settle(chunk, update)
            effects += self._apply_next(chunk)
        return effects

    def _attach(self, peer: Peer, request: int, message: m.Attach, now: float) -> list[Effect]:
        if message.epoch > self._roster.epoch:
            # The worker has a view that has not reached this server yet.
            self._attaching[peer, request] = message
            self._deadlines.add((peer, request), now + message.timeout)
            return []
        return self._answer_attach(peer, request, message)

    def _answer_attach(self, peer: Peer, request: int, message: m.Attach) -> list[Effect]:
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

    def _peer_lost(self, peer: Peer, reason: str) -> list[Effect]:
        if peer == SCHEDULER:
            return self._scheduler_gone(reason)
        self._ranks.pop(peer, None)
        for name in [name for name in self._attaching if name[0] == peer]:
            del self._attaching[name]
            self._deadlines.discard(name)
        for name, _ in self._initializing.take_peer(peer):
            self._deadlines.discard(name)
        for waiter in [waiter for waiter in self._waiters.values() if waiter.peer == peer]:
            self._forget(waiter)
        return self._stop_when_alone()

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

    # --- keys and optimizer ---

    def _init(self, received: Received, message: m.Init, now: float) -> list[Effect]:
        peer, request = received.peer, received.request
        rank = self._rank_of(peer)
        if rank == 0:
            return self._create(received, message)
        if received.slot is not None:
            raise ProtocolError(f"key {message.key!r}: only rank 0 sends initial values, got some from rank {rank}")
        self._catalog.check_init(message)
        chunk = self._catalog.find(message.key, message.start)
        if chunk is not None:
            return [Send(peer, request, m.Done(chunk.version))]
        self._initializing.add((peer, request), message)
        self._deadlines.add((peer, request), now + message.timeout)
        return self._refuse_orphaned_inits()

    def _create(self, received: Received, message: m.Init) -> list[Effect]:
        if self._optimizer is not None:
            self._optimizer.check_dtype(message.key, message.dtype)
        chunk = self._catalog.create(message, received.nbytes)
        size = chunk.stop - chunk.start
        effects: list[Effect] = [Install(chunk.key, chunk.start, chunk.spec.dtype, size, received.slot)]
        effects.append(Send(received.peer, received.request, m.Done()))
        return effects + self._release_inits(chunk)

    def _release_inits(self, chunk: Chunk) -> list[Effect]:
        effects: list[Effect] = []
        for name, message in self._initializing.take_chunk(chunk.key, chunk.start):
            self._deadlines.discard(name)
            try:
                self._catalog.check_init(message)
                effects.append(Send(*name, m.Done()))
            except AiokvError as error:
                effects.append(Refuse(*name, error))
        return effects

    def _refuse_orphaned_inits(self) -> list[Effect]:
        root = self._roster.entry(0)
        if root is None or root.state == "alive":
            return []
        effects: list[Effect] = []
        for name, message in self._initializing.take_all():
            self._deadlines.discard(name)
            what = f"init of key {message.key!r}"
            if root.state == "lost":
                error: AiokvError = self._roster.loss([0], what, message.key)
            else:
                error = UnknownKeyError(f"{what}: rank {self._roster.label(0)} left without it", key=message.key)
            effects.append(Refuse(*name, error))
        return effects

    def _set_optimizer(
        self, peer: Peer, request: int, name: str, params: dict[str, bool | int | float | str]
    ) -> list[Effect]:
        self._rank_of(peer)
        optimizer = make_optimizer(name, params)
        effects: list[Effect] = []
        if self._optimizer is None:
            self._catalog.check_optimizer(optimizer)
            self._optimizer = optimizer
            effects.append(Configure(optimizer))
        elif self._optimizer != optimizer:
            raise OptimizerError(
                f"the servers have {self._optimizer}, not {optimizer}: set the same rule everywhere",
                expected=repr(self._optimizer),
                got=repr(optimizer),
            )
        return [*effects, Send(peer, request, m.Done())]

    # --- push and pull ---

    def _push(self, received: Received, message: m.Push, now: float) -> list[Effect]:
        peer, request, slot, nbytes = received.peer, received.request, received.slot, received.nbytes
        rank = self._rank_of(peer)
        chunk = self._catalog.lookup(message)
        if nbytes != chunk.nbytes:
            raise ProtocolError(f"key {chunk.key!r}: expected {chunk.nbytes} bytes, got {nbytes}")
        expected = chunk.pushed.get(rank, 0) + 1
        if message.sequence != expected:
            raise ProtocolError(f"key {chunk.key!r}: expected push {expected} of rank {rank}, got {message.sequence}")
        version = chunk.policy.version_of(sequence=message.sequence, newest=chunk.newest)
        if chunk.is_closed(version, rank):
            # Only a rank that has left can be late: nobody waits for it.
            text = f"key {chunk.key!r}: round {version} went on without rank {self._roster.label(rank)}"
            raise MembershipError(text, ranks=[rank], key=chunk.key, round=version)
        if version > chunk.version + MAX_OPEN_UPDATES:
            raise ProtocolError(
                f"key {chunk.key!r}: push for version {version}, but the chunk is at {chunk.version}; "
                f"at most {MAX_OPEN_UPDATES} may be open"
            )
        if not 0 <= message.read_version <= chunk.version:
            raise ProtocolError(f"key {chunk.key!r}: read version {message.read_version}, which is not made yet")
        update = chunk.updates.setdefault(version, Update(version))
        update.contributions[rank] = Contribution(rank, message.sequence, message.read_version, slot)
        chunk.pushed[rank] = message.sequence
        chunk.newest = max(chunk.newest, version)
        waiter = Waiter(peer, request, rank, chunk, message.timeout, version=version, want_value=message.want_value)
        update.waiters.append(waiter)
        self._park(waiter, now)
        return [*self._settle(chunk, update), *self._apply_next(chunk)]

    def _pull(self, peer: Peer, request: int, message: m.Pull, now: float) -> list[Effect]:
        rank = self._rank_of(peer)
        chunk = self._catalog.lookup(message)
        waiter = Waiter(peer, request, rank, chunk, message.timeout, at_least=message.at_least)
        if chunk.reflected.get(rank, 0) >= message.at_least:
            return [self._value(waiter)]
        chunk.pulls.append(waiter)
        self._park(waiter, now)
        update = chunk.awaited_update(waiter)
        return [] if update is None else self._refuse_lost(chunk, update)

    def _settle(self, chunk: Chunk, update: Update) -> list[Effect]:
        """Fold what may be folded, and refuse those who wait for an update that can't become complete."""
        return [*chunk.fold(update, self._roster.members), *self._refuse_lost(chunk, update)]

    def _apply_next(self, chunk: Chunk) -> list[Effect]:
        """Apply the next update if it is complete and none is being applied."""
        ready = chunk.updates.get(chunk.version + 1)
        if ready is None or chunk.applying or chunk.missing(ready, self._roster.members):
            return []
        chunk.applying = True
        behind = [chunk.version - ready.contributions[rank].read_version for rank in ready.folded]
        return [Apply(chunk.key, chunk.start, ready.version, ready.accumulator, list(ready.folded), behind)]

    def _refuse_lost(self, chunk: Chunk, update: Update) -> list[Effect]:
        if not self._roster.lost:
            return []
        lost = [rank for rank in chunk.missing(update, self._roster.members) if rank in self._roster.lost]
        if not lost:
            return []
        error = self._roster.loss(lost, f"key {chunk.key!r}, round {update.version}", chunk.key, update.version)
        stuck = list(update.waiters)
        stuck += [pull for pull in chunk.pulls if chunk.awaited_update(pull) is update]
        return [self._refuse(waiter, error) for waiter in stuck]

    def _applied(self, chunk: Chunk, version: int) -> list[Effect]:
        update = chunk.updates.pop(version)
        chunk.version = version
        chunk.applying = False
        for rank, contribution in update.contributions.items():
            chunk.reflected[rank] = contribution.sequence
        effects: list[Effect] = []
        for waiter in list(update.waiters):
            self._forget(waiter)
            effects.append(self._value(waiter) if waiter.want_value else self._done(waiter))
        for waiter in list(chunk.pulls):
            if chunk.reflected.get(waiter.rank, 0) >= waiter.at_least:
                self._forget(waiter)
                effects.append(self._value(waiter))
        return effects + self._apply_next(chunk)

    # --- waiting requests ---

    def _park(self, waiter: Waiter, now: float) -> None:
        self._waiters[waiter.peer, waiter.request] = waiter
        self._deadlines.add((waiter.peer, waiter.request), now + waiter.waits)

    def _forget(self, waiter: Waiter) -> None:
        self._waiters.pop((waiter.peer, waiter.request), None)
        self._deadlines.discard((waiter.peer, waiter.request))
        if waiter.at_least:
            waiter.chunk.pulls.remove(waiter)
            return
        update = waiter.chunk.updates.get(waiter.version)
        if update is not None:
            update.waiters.remove(waiter)

    def _refuse(self, waiter: Waiter, error: AiokvError) -> Effect:
        self._forget(waiter)
        return Refuse(waiter.peer, waiter.request, error)

    def _done(self, waiter: Waiter) -> Effect:
        return Send(waiter.peer, waiter.request, m.Done(waiter.chunk.version))

    def _value(self, waiter: Waiter) -> Effect:
        chunk = waiter.chunk
        payload = StoredChunk(chunk.key, chunk.start, chunk.version, chunk.nbytes)
        return Send(waiter.peer, waiter.request, m.Value(chunk.version), payload)

    def _tick(self, now: float) -> list[Effect]:
        effects = self._joiner.tick(now)
        if reason := self._joiner.silence(now):
            effects += [Disconnect(SCHEDULER, reason), *self._scheduler_gone(reason)]
        for name in self._deadlines.due(now):
            if name in self._waiters:
                waiter = self._waiters[name]
                effects.append(self._refuse(waiter, self._late(waiter)))
            elif name in self._initializing:
                init = self._initializing.take(name)
                effects.append(Refuse(*name, self._late_init(init)))
            else:
                attach = self._attaching.pop(name)
                text = f"the view of epoch {attach.epoch} did not reach {self._joiner.name} in {attach.timeout:g} s"
                effects.append(Refuse(*name, CallTimeoutError(text)))
        return effects

    def _late(self, waiter: Waiter) -> RoundTimeoutError:
        chunk = waiter.chunk
        update = chunk.awaited_update(waiter)
        version = update.version if update else chunk.version + 1
        missing = chunk.missing(update, self._roster.members) if update else [waiter.rank]
        reason = (
            f"no contribution from rank {self._roster.labels(missing)}" if missing else "its update is not applied yet"
        )
        return RoundTimeoutError(
            f"key {chunk.key!r}, round {version}: {reason} within {waiter.waits:.3g} s; what was pushed stays counted",
            ranks=missing,
            key=chunk.key,
            round=version,
        )

    def _late_init(self, message: m.Init) -> CallTimeoutError:
        return CallTimeoutError(
            f"key {message.key!r} was not initialized by rank {self._roster.label(0)} within {message.timeout:.3g} s",
            ranks=[0],
            key=message.key,
        )

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        for address, chunk in self._catalog.chunks.items():
            assert address == (chunk.key, chunk.start)
            assert all(version > chunk.version for version in chunk.updates)
            assert not chunk.applying or chunk.version + 1 in chunk.updates
            for update in chunk.updates.values():
                assert set(update.folded) <= set(update.contributions)
                assert update.folded == sorted(update.folded)
                assert all(self._waiters[w.peer, w.request] is w for w in update.waiters)
            for rank, reflected in chunk.reflected.items():
                assert reflected <= chunk.pushed[rank]
        named = set(self._waiters) | set(self._initializing) | set(self._attaching)
        assert all(name in self._deadlines for name in named)
        assert len(named) == len(self._deadlines)


def _freed(received: Received) -> list[Effect]:
    return [] if received.slot is None else [Free(received.slot)]
