"""The driver of one state machine in simulated time: hands it stimuli, performs its effects, decides nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, assert_never

from aiokv.core import effects as fx
from aiokv.core import stimuli as st
from aiokv.core.effects import Apply, Complete, Fold, Send
from aiokv.core.server.copies.followed_calls import push_in
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m
from sim.ledger import Ledger
from sim.network import Closing, Packet, Pipe
from sim.process import Future
from sim.record import DivideRecord, LogRecord, UpdateRecord
from sim.standing import Standing
from sim.tokens import kept
from sim.trace import BATCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.effects import Effect
    from aiokv.core.server.coordinator import Coordinator
    from aiokv.core.stimuli import Stimulus
    from aiokv.errors import AiokvError
    from aiokv.types import Key, Peer, Slot, Version
    from sim.checks import Checks
    from sim.clock import Clock
    from sim.disk import Disk
    from sim.drops import Drops
    from sim.network import Address, Flights, Network
    from sim.record import Run
    from sim.saving import States
    from sim.service import Service
    from sim.timeline import Timeline
    from sim.tokens import Token
    from sim.trace import Trace

Call = (
    st.Join
    | st.Transfer
    | st.EnterBarrier
    | st.ConfigureOptimizer
    | st.ChangePolicy
    | st.ReportLoss
    | st.ReadRules
    | st.ReadState
    | st.Finish
    | st.GoOn
    | st.AskMembers
    | st.PlanLeave
    | st.Depart
)
"""The stimuli that a node's user makes, and whose end it waits for."""


class Machine(Protocol):
    """What `Coordinator`, `Session` and `Membership` have in common."""

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        ...

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        ...

    def validate(self) -> None:
        """Check the machine's invariants."""
        ...


@dataclass(slots=True)
class World:
    """What all nodes of a run share."""

    env: Clock
    network: Network
    trace: Trace
    run: Run
    service: Service
    timeline: Timeline
    states: States
    """How much there is to save."""
    disk: Disk
    """Where checkpoints lie."""
    checks: Checks | None = None
    """What is asked after every event whether all is well."""
    on_update: Callable[[UpdateRecord], None] = lambda update: None
    """Is called after every update of a chunk."""
    validated: int = 0
    """After so many events of its own a state machine checks itself, too; 0: never."""
    host: Callable[[Node, int, str], None] = lambda host, index, name: None
    """Starts a standby in the process of a node."""
    standing: Standing = field(init=False)
    """Which updates stand when servers may be lost."""
    divided: dict[tuple[Key, int], str] = field(default_factory=dict)
    """Which node has divided a chunk, so that one that takes its place need not say so again."""

    def __post_init__(self) -> None:
        self.standing = Standing(self._stands)

    def _stands(self, update: UpdateRecord) -> None:
        self.run.updates.append(update)
        if self.checks is not None:
            self.checks.on_update(update)
        self.on_update(update)


_COPIES: Final = (m.Replicate, m.Copy)
_LANDING: Final = frozenset((m.Push, m.PushBundle, *_COPIES, m.CopyPush, m.CopyContribution, m.Init, m.InitBundle))
"""Messages whose payload gets a slot."""


def _nbytes(payload: fx.Payload | None, states: States) -> int:
    match payload:
        case fx.CallMemory():
            return payload.stop - payload.start
        case (
            fx.StoredChunk() | fx.CallTensors() | fx.StoredRows() | fx.StoredSum() | fx.StoredSlots() | fx.StoredCopy()
        ):
            return payload.nbytes
        case fx.StoredChunks(chunks):
            return sum(chunk.nbytes for chunk in chunks)
        case fx.StoredState():
            return states.nbytes(payload)
        case None | fx.EncodedParts() | fx.StoredDifference():
            # Nothing is compressed in a simulation.
            return 0


Rare = fx.StartNode | fx.Snapshot | fx.DropSnapshots | fx.WriteSnapshots | fx.WriteManifest | fx.RemoveCheckpoints
"""Effects on the disk or the machine."""


class Node:
    """One node of the cluster.

    Args:
        world: what all nodes share.
        name: the node's name.
        machine: its state machine.
        address: where it listens; None: nowhere.
        flights: is told of the messages to and from the servers.
    """

    __slots__ = (
        "_accepted",
        "_attempts",
        "_call",
        "_calls",
        "_checks",
        "_deaf",
        "_decided",
        "_dialogue",
        "_env",
        "_flights",
        "_handle",
        "_handling",
        "_held",
        "_inbox",
        "_machine",
        "_pauses",
        "_pipes",
        "_store_free_at",
        "_timer",
        "_trace",
        "_unvalidated",
        "_validated",
        "_waited",
        "_waiting",
        "_works",
        "_world",
        "alive",
        "applying",
        "drops",
        "ended",
        "ledger",
        "name",
        "over",
        "read",
        "result",
        "server",
    )

    def __init__(
        self,
        world: World,
        name: str,
        machine: Machine,
        address: Address | None = None,
        flights: Flights | None = None,
    ) -> None:
        self.name = name
        self.alive = True
        self.over = world.env.event()
        """Happens when the node stops, or a fault ends it."""
        self.ended: float | None = None
        """When that was."""
        self._world = world
        self._env = world.env
        self._machine = machine
        self._handle = machine.handle
        self._inbox: list[Stimulus] = []
        """What comes while it handles something else; hardly ever anything."""
        self._handling = False
        self._pipes: dict[Peer, Pipe] = {}
        self._attempts: dict[Peer, object] = {}
        """The newest attempt to connect under each number."""
        self._accepted = 0
        self._calls: dict[int, Future] = {}
        self._call = 0
        self._timer: float | None = None
        self._store_free_at = 0.0
        self._trace = world.trace
        self._decided = world.trace.decided
        self._checks = world.checks
        self._dialogue = None if world.checks is None else world.checks.dialogue
        """Looks at the messages."""
        self._validated = world.validated
        self._unvalidated = 0
        self._works = world.service.takes_time
        self._flights = flights
        self._pauses = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._deaf = world.timeline.deaf.get(name, ())
        self.ledger = Ledger()
        self.drops: Drops | None = None
        """Watches what this server drops, if its policy may."""
        self.read: Version | None = None
        """The newest version that has arrived since somebody put None here."""
        self.result: Any = None
        """What came of the last call that has ended well."""
        self.server: Coordinator | None = None
        """The machine, if it is a server's."""
        self._waited = False
        """Whether the server has a standby for which answers wait."""
        self._held: deque[Callable[[], None]] = deque()
        """What sends answers that wait until the standby has what they say."""
        self.applying: dict[tuple[Key, int], list[Token]] = {}
        """The gradients of updates that are being made."""
        if address is not None:
            world.network.listen(address, self)

    @property
    def in_flight(self) -> list[Token]:
        """Gradients that have arrived and are in no update yet."""
        return self.ledger.remaining + [token for tokens in self.applying.values() for token in tokens]

    # --- the user's side ---

    @property
    def env(self) -> Clock:
        """The simulated time."""
        return self._env

    def new_call(self) -> int:
        """Return a number for a call."""
        self._call += 1
        return self._call

    def call(self, stimulus: Call) -> Future:
        """Begin a call; the future's value is None when the call succeeds, and the error when it fails."""
        future = self._calls[stimulus.call] = Future(self._env)
        if self._dialogue is not None:
            kind = type(stimulus)
            timeout = 0.0 if kind is st.PlanLeave else stimulus.timeout  # type: ignore[union-attr]
            self._dialogue.called(self.name, stimulus.call, kind.__name__, timeout, self._env.now)
        self.deliver(stimulus)
        return future

    def _returned(self, call: int, error: AiokvError | None) -> None:
        if self._dialogue is not None:
            self._dialogue.returned(self.name, call, self._env.now)
        self._calls.pop(call).finish(error)

    def stop(self, reason: str) -> None:
        """End the node: its connections close, and it takes in nothing more."""
        for peer in list(self._pipes):
            self._disconnect(peer, reason)
        self.freeze()

    def crash(self, reason: str) -> None:
        """End the node in the middle of what it sends."""
        for pipe in self._pipes.values():
            pipe.abort(reason)
        self.stop(reason)

    def freeze(self) -> None:
        """Let the node fall silent at once; its connections stay open."""
        self.alive = False
        self._inbox.clear()
        if self._dialogue is not None:
            self._dialogue.ended(self.name, self._env.now)
        if not self.over.triggered:
            self.ended = self._env.now
            self.over.succeed()

    def reset(self, other: str) -> None:
        """Let the connections to another node end, and to those in its process."""
        for pipe in [pipe for pipe in self._pipes.values() if pipe.target.name.partition("/")[0] == other]:
            pipe.reset("connection reset")

    def pause(self, duration: float) -> None:
        """Stop the node for a while; what arrives meanwhile is handled then."""
        self._pauses += 1
        self._env.after(duration, self._resume)

    def _resume(self) -> None:
        self._pauses -= 1
        while self._waiting and not self._pauses:
            self._waiting.popleft()()
        if self.alive and not self._pauses:
            self._set_timer(self._env.now)

    # --- the network's side ---

    def accept(self, pipe: Pipe) -> Peer:
        """Take the pipe to a node that connects, and return the number that it gets here."""
        peer = self._accepted
        self._accepted += 1
        self._attach(peer, pipe)
        return peer

    def _attach(self, peer: Peer, pipe: Pipe) -> None:
        self._pipes[peer] = pipe
        pipe.back.is_heard = True

    def _detach(self, peer: Peer) -> Pipe | None:
        pipe = self._pipes.pop(peer, None)
        if pipe is not None:
            pipe.back.is_heard = False
        return pipe

    def arrive(self, pipe: Pipe, item: Packet | Closing) -> None:
        """Take what came from a peer; what comes over a connection that is closed here is dropped."""
        if self._pauses:
            self._waiting.append(lambda: self.arrive(pipe, item))
            return
        if not self.alive or not pipe.is_heard:
            if type(item) is Closing:
                pipe.back.early = item
            return
        peer = pipe.peer
        if type(item) is not Packet:
            self._detach(peer)
            if self._dialogue is not None:
                self._dialogue.closed(self.name, peer, pipe.source, self._env.now)
            self.deliver(st.PeerLost(peer, item.reason))  # type: ignore[union-attr]
            return
        request, message, nbytes = item.request, item.message, item.nbytes
        # Types are not looked at by `isinstance`, which takes five times as long to say no.
        if self.drops is not None:
            self.drops.arrived(peer, request, message, pipe.source)
        if self._dialogue is not None:
            self._dialogue.arrived(self.name, peer, pipe.source, request, message, self._env.now)
        slot = None
        kind = type(message)
        if kind in _LANDING:
            slot = self._land(pipe.source, message, nbytes)
        elif kind is m.Value:
            # A worker asks again for parts that are older than others.
            version = message.version  # type: ignore[attr-defined]
            self.read = version if self.read is None else max(self.read, version)
        self.deliver(st.Received(peer, request, message, slot, nbytes))

    def _land(self, sender: str, message: m.Message, nbytes: int) -> Slot | None:
        """Give a payload a place, unless there is none."""
        token: Token | None
        if type(message) is m.Push or type(message) is m.PushBundle:
            token = (sender, message.sequence)
        elif isinstance(message, _COPIES):
            place = (message.key if isinstance(message, m.Replicate) else message.keys[0], message.start)
            self._world.standing.arrived(place, message.version, self._env.now)
            # What a primary sends is in its own ledger.
            token = None
        elif isinstance(message, m.CopyPush | m.CopyContribution):
            [worker] = [worker.name for worker in self._world.run.workers if worker.rank == message.rank]
            sequence = push_in(message).sequence if isinstance(message, m.CopyPush) else message.sequence
            token = (worker, sequence)
        else:
            token = (sender, 0)
        if not nbytes:
            return None
        if self._works:
            self._work(self._world.service.receive(nbytes))
        return self.ledger.land(token)

    # --- the state machine's side ---

    def deliver(self, stimulus: Stimulus) -> None:  # noqa: C901, PLR0912 - for every event, so that it calls little else
        """Hand a stimulus to the state machine and perform what it decides."""
        if not self.alive:
            return
        if self._handling:
            self._inbox.append(stimulus)
            return
        self._handling = True
        now, inbox = self._env.now, self._inbox
        while True:
            effects = self._handle(stimulus, now=now)
            if self.server is not None:
                self._look_at_copies(self.server, now)
            if effects:
                decided = self._decided
                decided.append((now, self.name, effects))
                if len(decided) >= BATCH:
                    self._trace.take_in()
                for effect in effects:
                    # Most are of these.
                    kind = type(effect)
                    if kind is Send:
                        self._send(effect)  # type: ignore[arg-type]
                    elif kind is Complete:
                        self.result = effect.result  # type: ignore[union-attr]
                        self._returned(effect.call, None)  # type: ignore[union-attr]
                    elif kind is Apply:
                        self._apply(effect)  # type: ignore[arg-type]
                    elif kind is Fold and not self._works:
                        self.ledger.fold(effect.target, effect.source)  # type: ignore[union-attr]
                    else:
                        self._perform(effect)
            if self._validated:
                self._unvalidated += 1
                if self._unvalidated >= self._validated:
                    self.validate()
            if not inbox:
                break
            stimulus = inbox.pop(0)
        self._handling = False
        wanted = self._machine.deadline()
        # Mostly there is an earlier one.
        if wanted is not None and ((timer := self._timer) is None or wanted < timer):
            self._set_timer(now)

    def _look_at_copies(self, server: Coordinator, now: float) -> None:
        """Take note when the server begins to wait for its standby, and when it does so no longer."""
        if server.waits_for_standby != self._waited:
            self._waited = not self._waited
            if not self._waited and server.serves:
                self._world.standing.alone(self.name, now)

    def validate(self) -> None:
        """Let the state machine check itself, if it is to do so at all.

        Raises:
            AssertionError: something does not hold that must.
        """
        if self._validated:
            self._unvalidated = 0
            self._machine.validate()

    def _perform(self, effect: Effect) -> None:  # noqa: C901, PLR0912, PLR0915 - one case for each effect, none of them decides
        match effect:
            # The frequent ones come first.
            case fx.Fold():
                self.ledger.fold(effect.target, effect.source)
                if self._works:
                    self._work(self._world.service.fold())
            case fx.Apply():
                self._apply(effect)
            case fx.Send():
                self._send(effect)
            case fx.Complete():
                self.result = effect.result
                self._returned(effect.call, None)
            case fx.Refuse(peer, request, error):
                self._send(fx.Send(peer, request, m.Error(error.code, error.message, error.details)))
            case fx.Combine(target, sources):
                for source in sources:
                    self.ledger.fold(target, source)
                    self._work(self._world.service.fold())
            case fx.Weigh() | fx.Compensate():
                self._work(self._world.service.fold())
            case fx.Norms():
                self._norms(effect)
            case fx.InstallRows() | fx.ApplyRows() | fx.JoinRows():
                raise NotImplementedError("the simulator's workloads have no row-sparse keys")
            case fx.Restore(peer, request, slot=slot):
                self.ledger.take(slot)
                self.deliver(st.Restored(peer, request))
            case fx.ReadCheckpoint() | fx.LoadSnapshots():
                raise NotImplementedError("the simulator's workloads load nothing")
            case fx.Install(slot=slot) | fx.Free(slot=slot) | fx.Skip(slot=slot):
                self.ledger.take(slot)
            case fx.Fail(call, error):
                self._returned(call, error)
            case fx.Connect(peer, host, port, delay):
                attempt = self._attempts[peer] = object()
                self._env.after(delay, self._connect, peer, (host, port), attempt)
            case fx.Disconnect(peer, reason):
                self._attempts.pop(peer, None)
                self._disconnect(peer, reason)
            case fx.Log(level, text):
                self._world.run.logs.append(LogRecord(self._env.now, self.name, level, text))
            case fx.Stop(reason, failed):
                self._world.run.logs.append(
                    LogRecord(self._env.now, self.name, "error" if failed else "info", f"stops: {reason}")
                )
                self.stop(reason)
            case fx.Split(slot, parts):
                self.ledger.split(slot, [part for part, _ in parts])
            case fx.Divide(key, start, parts):
                self._divide(key, start, [part for part, _ in parts])
            case fx.Release() | fx.Discard() | fx.Configure() | fx.Forget() | fx.Retire() | fx.Execute():
                # There is no memory to give back, no arithmetic to set up, and nobody sends commands.
                pass
            case fx.Encode() | fx.Settle() | fx.ForgetResiduals() | fx.Prepare() | fx.Decode() | fx.ForgetReplicas():
                raise NotImplementedError(f"a simulation compresses nothing: {effect!r}")
            case fx.KeepResiduals() | fx.WriteResiduals():
                raise NotImplementedError(f"a simulation compresses nothing: {effect!r}")
            case fx.Hold(answer):
                if self._dialogue is not None:
                    self._dialogue.held(self.name, answer.peer, answer.request, self._env.now)
                self._held.append(lambda: self._perform(answer))
            case fx.LetGo(count):
                for _ in range(count):
                    self._held.popleft()()
            case fx.Allocate() | fx.Deliver() | fx.Deallocate() | fx.Widen():
                # Nothing has memory, or a precision.
                pass
            case _:
                self._perform_rare(effect)

    def _perform_rare(self, effect: Rare) -> None:
        disk = self._world.disk
        match effect:
            case fx.StartNode(index, name):
                self._world.host(self, index, name)
            case fx.Snapshot():
                disk.hold(self.name, effect)
            case fx.DropSnapshots(clock):
                disk.drop(self.name, clock)
            case fx.WriteSnapshots():
                self._env.after(disk.seconds, self._wrote, disk.write(self.name, effect, self._env.now))
            case fx.WriteManifest(clock):
                disk.finish(effect)
                self.deliver(st.ManifestWritten(clock))
            case fx.RemoveCheckpoints(places):
                disk.remove(places)
            case _:
                assert_never(effect)

    def _wrote(self, written: st.PartWritten) -> None:
        if self._pauses:
            self._waiting.append(lambda: self._wrote(written))
        else:
            self.deliver(written)

    def _send(self, send: fx.Send) -> None:
        pipe = self._pipes.get(send.peer)
        if pipe is None:
            # The connection has just ended, and the state machine will be told.
            return
        message, payload = send.message, send.payload
        if self._deaf and isinstance(message, m.Heartbeat) and self._is_deaf():
            return
        if self.drops is not None:
            drop = self.drops.sent(send.peer, send.request, message, self._env.now)
            if drop is not None and self._checks is not None:
                self._checks.on_drop(drop)
        if self._dialogue is not None:
            to, now = pipe.target.name, self._env.now
            if pipe.back.is_closed:
                self._dialogue.unheard(self.name, send.peer, to, send.request, message, now)
            else:
                self._dialogue.sent(self.name, send.peer, to, send.request, message, payload, now)
        if payload is None:
            nbytes = 0
        elif type(payload) is fx.StoredChunk:
            nbytes = payload.nbytes
        else:
            nbytes = _nbytes(payload, self._world.states)
        pipe.send(Packet(send.request, message, nbytes), send.priority)

    def _is_deaf(self) -> bool:
        return any(begin <= self._env.now < end for begin, end in self._deaf)

    def _work(self, duration: float) -> float:
        """Give the server's arithmetic something to do, after all that it has to do already; return when it is done."""
        begin = max(self._env.now, self._store_free_at)
        paces = self._world.timeline.paces
        # A standby is on the machine of the server in whose process it is.
        pace = paces.get(self.name.partition("/")[0]) if paces else None
        self._store_free_at = begin + duration if pace is None else pace.finish(begin, duration)[0]
        return self._store_free_at

    def _apply(self, effect: fx.Apply) -> None:
        tokens = self.ledger.take(effect.slot)
        if self._waited and not self._holds_copy:
            self._world.standing.make(self._update(effect, tokens), waits=True)
        if not self._works and self._store_free_at <= self._env.now and not self._pauses:
            self._made(effect, tokens)
            return
        self.applying[effect.key, effect.start] = tokens
        done = self._work(self._world.service.apply())
        if done > self._env.now:
            self._env.after(done - self._env.now, self._applied, effect, tokens)
        else:
            self._applied(effect, tokens)

    def _applied(self, effect: fx.Apply, tokens: list[Token]) -> None:
        if not self.alive:
            return
        if self._pauses:
            self._waiting.append(lambda: self._applied(effect, tokens))
            return
        del self.applying[effect.key, effect.start]
        self._made(effect, tokens)

    def _made(self, effect: fx.Apply, tokens: list[Token]) -> None:
        if not self._holds_copy:
            self._world.standing.make(self._update(effect, tokens), waits=self._waited)
        self.deliver(st.Applied(effect.key, effect.start, effect.version))

    @property
    def _holds_copy(self) -> bool:
        return self.server is not None and self.server.holds_copy

    def _update(self, effect: fx.Apply, tokens: list[Token]) -> UpdateRecord:
        key, start, version = effect.key, effect.start, effect.version
        return UpdateRecord(self._env.now, key, start, version, effect.ranks, effect.staleness, kept(tokens), self.name)

    def _divide(self, key: Key, start: int, keys: list[Key]) -> None:
        run, checks = self._world.run, self._world.checks
        if self._holds_copy or self._world.divided.setdefault((key, start), self.name) != self.name:
            return
        division = DivideRecord(len(run.updates), key, start, keys)
        run.divisions.append(division)
        if checks is not None:
            checks.on_divide(division)

    def _norms(self, effect: fx.Norms) -> None:
        """Answer with zeros: a pass over the memory of the sum, and no arithmetic."""
        zeros = [(0.0,) * effect.rule.norm_counts[effect.phase]]
        normed = st.Normed(effect.key, effect.start, effect.version, effect.phase, zeros)
        done = self._work(self._world.service.fold())
        if done > self._env.now:
            self._env.after(done - self._env.now, self.deliver, normed)
        else:
            self.deliver(normed)

    # --- connections ---

    def _connect(self, peer: Peer, address: Address, attempt: object) -> None:
        if self.alive and self._attempts.get(peer) is attempt:
            self._world.network.connect(self, peer, address, lambda pipe: self._connected(peer, address, pipe, attempt))

    def _connected(self, peer: Peer, address: Address, pipe: Pipe | None, attempt: object) -> None:
        if self._pauses and self.alive:
            self._waiting.append(lambda: self._connected(peer, address, pipe, attempt))
        elif self._attempts.get(peer) is not attempt:
            if pipe is not None:
                pipe.close("it is wanted no longer")
        elif pipe is None:
            self.deliver(st.ConnectFailed(peer, f"nobody listens at {address[0]}:{address[1]}"))
        elif self.alive:
            self._attach(peer, pipe)
            if peer != SCHEDULER:
                for each in (pipe, pipe.back):
                    each.flights = self._flights if each.takes_time else None
            self.deliver(st.Connected(peer))
            if pipe.early is not None:
                self.arrive(pipe.back, pipe.early)
        else:
            pipe.close("the node that connected is gone")

    def _disconnect(self, peer: Peer, reason: str) -> None:
        pipe = self._detach(peer)
        if pipe is not None:
            if self._dialogue is not None:
                self._dialogue.closed(self.name, peer, pipe.target.name, self._env.now, by_itself=True)
            pipe.close(reason)

    # --- time ---

    def _set_timer(self, now: float) -> None:
        """See to it that the timer goes off when the state machine wants a tick, or earlier."""
        wanted = self._machine.deadline()
        if wanted is None or not self.alive or (self._timer is not None and self._timer <= wanted):
            return
        self._timer = wanted
        self._env.after(max(0.0, wanted - now), self._timer_off, wanted)

    def _timer_off(self, time: float) -> None:
        if time != self._timer:
            # An earlier one has taken its place.
            return
        self._timer = None
        if self._pauses:
            # It is set again at the end of the pause.
            return
        wanted = self._machine.deadline()
        if self.alive and wanted is not None and wanted <= self._env.now:
            self.deliver(st.Tick())
        else:
            # The wait is over, or `now` was rounded to just before its time.
            self._set_timer(self._env.now)
