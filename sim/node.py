"""The driver of one state machine in simulated time: hands it stimuli, performs its effects, decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

from aiokv.core import effects as fx
from aiokv.core import stimuli as st
from aiokv.core.effects import Apply, Complete, Fold, Send
from aiokv.wire import messages as m
from sim.connections import Connected
from sim.network import Packet
from sim.process import Future
from sim.record import LogRecord
from sim.store import LANDING, Store, nbytes_of
from sim.trace import BATCH

if TYPE_CHECKING:
    from aiokv.core.effects import Effect
    from aiokv.core.server.coordinator import Coordinator
    from aiokv.core.stimuli import Stimulus
    from aiokv.errors import AiokvError
    from aiokv.types import Version
    from sim.clock import Clock
    from sim.drops import Drops
    from sim.network import Address, Closing, Flights, Pipe
    from sim.world import Machine, World

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


Rare = fx.StartNode | fx.Snapshot | fx.DropSnapshots | fx.WriteSnapshots | fx.WriteManifest | fx.RemoveCheckpoints
"""Effects on the disk or the machine."""


class Node(Connected):
    """One node of the cluster.

    Args:
        world: what all nodes share.
        name: the node's name.
        machine: its state machine.
        address: where it listens; None: nowhere.
        flights: is told of the messages to and from the servers.
    """

    __slots__ = (
        "_call",
        "_calls",
        "_deaf",
        "_decided",
        "_handle",
        "_handling",
        "_inbox",
        "_machine",
        "_timer",
        "_unvalidated",
        "_validated",
        "drops",
        "ended",
        "over",
        "read",
        "result",
        "server",
        "store",
    )

    def __init__(
        self,
        world: World,
        name: str,
        machine: Machine,
        address: Address | None = None,
        flights: Flights | None = None,
    ) -> None:
        super().__init__(world, name, address, flights)
        self.over = world.env.event()
        """Happens when the node stops, or a fault ends it."""
        self.ended: float | None = None
        """When that was."""
        self._machine = machine
        self._handle = machine.handle
        self._handling = False
        self._inbox: list[Stimulus] | None = None
        """What comes while it handles something else; hardly ever anything."""
        self._calls: dict[int, Future] = {}
        self._call = 0
        self._timer: float | None = None
        self._decided = world.trace.decided
        self._validated = world.validated
        self._unvalidated = 0
        self._deaf = world.timeline.deaf.get(name, ())
        self.store = Store(world, self)
        self.drops: Drops | None = None
        """Watches what this server drops, if its policy may."""
        self.read: Version | None = None
        """The newest version that has arrived since somebody put None here."""
        self.result: Any = None
        """What came of the last call that has ended well."""
        self.server: Coordinator | None = None
        """The machine, if it is a server's that may be a copy of another one, or have one."""

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
        self._inbox = None
        if self._dialogue is not None:
            self._dialogue.ended(self.name, self._env.now)
        if not self.over.triggered:
            self.ended = self._env.now
            self.over.succeed()

    def pause(self, duration: float) -> None:
        """Stop the node for a while; what arrives meanwhile is handled then."""
        self._pauses += 1
        self._env.after(duration, self._resume)

    def _resume(self) -> None:
        self._pauses -= 1
        while self._waiting and not self._pauses:
            self._waiting.pop(0)()
        if self.alive and not self._pauses:
            self._set_timer(self._env.now)

    # --- the network's side ---

    def arrive(self, pipe: Pipe, item: Packet | Closing) -> None:
        """Take what came from a peer; what comes over a connection that is closed here is dropped."""
        if self._pauses:
            self._waiting.append(lambda: self.arrive(pipe, item))
            return
        if not self.alive or not pipe.is_heard:
            if type(item) is not Packet:
                pipe.back.early = item  # type: ignore[assignment]
            return
        if type(item) is not Packet:
            self._closed(pipe, item)  # type: ignore[arg-type]
            return
        peer = pipe.peer
        request, message, nbytes = item.request, item.message, item.nbytes
        # Types are not looked at by `isinstance`, which takes five times as long to say no.
        if self.drops is not None:
            self.drops.arrived(peer, request, message, pipe.source)
        if self._dialogue is not None:
            self._dialogue.arrived(self.name, peer, pipe.source, request, message, self._env.now)
        slot = None
        kind = type(message)
        if kind in LANDING:
            slot = self.store.land(pipe.source, message, nbytes)
        elif kind is m.Value:
            # A worker asks again for parts that are older than others.
            version = message.version  # type: ignore[attr-defined]
            self.read = version if self.read is None else max(self.read, version)
        self.deliver(st.Received(peer, request, message, slot, nbytes))

    # --- the state machine's side ---

    def deliver(self, stimulus: Stimulus) -> None:  # noqa: C901, PLR0912 - for every event, so that it calls little else
        """Hand a stimulus to the state machine and perform what it decides."""
        if not self.alive:
            return
        if self._handling:
            if self._inbox is None:
                self._inbox = []
            self._inbox.append(stimulus)
            return
        self._handling = True
        now = self._env.now
        while True:
            effects = self._handle(stimulus, now=now)
            if self.server is not None:
                self.store.look_at_copies(self.server, now)
            if effects:
                decided = self._decided
                decided.append((now, self.name, effects))
                if len(decided) >= BATCH:
                    self._world.trace.take_in()
                for effect in effects:
                    # Most are of these.
                    kind = type(effect)
                    if kind is Send:
                        self._send(effect)  # type: ignore[arg-type]
                    elif kind is Complete:
                        self.result = effect.result  # type: ignore[union-attr]
                        self._returned(effect.call, None)  # type: ignore[union-attr]
                    elif kind is Apply:
                        self.store.apply(effect)  # type: ignore[arg-type]
                    elif kind is Fold:
                        self.store.fold(effect.target, effect.source)  # type: ignore[union-attr]
                    else:
                        self._perform(effect)
            if self._validated:
                self._unvalidated += 1
                if self._unvalidated >= self._validated:
                    self.validate()
            if not self._inbox:
                break
            stimulus = self._inbox.pop(0)
        self._handling = False
        wanted = self._machine.deadline()
        # Mostly there is an earlier one.
        if wanted is not None and ((timer := self._timer) is None or wanted < timer):
            self._set_timer(now)

    @property
    def holds_copy(self) -> bool:
        """Whether it is a server that has what another one serves."""
        return self.server is not None and self.server.holds_copy

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
            case fx.Fold():
                self.store.fold(effect.target, effect.source)
            case fx.Apply():
                self.store.apply(effect)
            case fx.Send():
                self._send(effect)
            case fx.Complete():
                self.result = effect.result
                self._returned(effect.call, None)
            case fx.Refuse(peer, request, error):
                self._send(fx.Send(peer, request, m.Error(error.code, error.message, error.details)))
            case fx.Combine():
                self.store.combine(effect)
            case fx.Weigh() | fx.Compensate():
                self.store.compute()
            case fx.Norms():
                self.store.norms(effect)
            case fx.InstallRows() | fx.ApplyRows() | fx.JoinRows():
                raise NotImplementedError("the simulator's workloads have no row-sparse keys")
            case fx.Restore(peer, request, slot=slot):
                self.store.ledger.take(slot)
                self.deliver(st.Restored(peer, request))
            case fx.ReadCheckpoint() | fx.LoadSnapshots():
                raise NotImplementedError("the simulator's workloads load nothing")
            case fx.Install(slot=slot) | fx.Free(slot=slot) | fx.Skip(slot=slot):
                self.store.ledger.take(slot)
            case fx.Fail(call, error):
                self._returned(call, error)
            case fx.Connect():
                self._connect(effect)
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
                self.store.ledger.split(slot, [part for part, _ in parts])
            case fx.Divide():
                self.store.divide(effect)
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
                self.store.hold(lambda: self._perform(answer))
            case fx.LetGo(count):
                self.store.let_go(count)
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
                self._env.after(disk.seconds, self._wrote, (disk.write(self.name, effect, self._env.now),))
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
            if drop is not None and self._world.checks is not None:
                self._world.checks.on_drop(drop)
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
            nbytes = nbytes_of(payload, self._world.states)
        pipe.send(Packet(send.request, message, nbytes), send.priority)

    def _is_deaf(self) -> bool:
        return any(begin <= self._env.now < end for begin, end in self._deaf)

    # --- time ---

    def _set_timer(self, now: float) -> None:
        """See to it that the timer goes off when the state machine wants a tick, or earlier."""
        wanted = self._machine.deadline()
        if wanted is None or not self.alive or (self._timer is not None and self._timer <= wanted):
            return
        self._timer = wanted
        self._env.after(max(0.0, wanted - now), self._timer_off, (wanted,))

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
