"""A worker's decisions: which server gets which bytes, what a call still waits for, and why it failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from aiokv.core import stimuli as st
from aiokv.core.bundle import name_keys
from aiokv.core.deadlines import Deadlines, check_timeout, earliest
from aiokv.core.directory import Directory, Part, Tensors
from aiokv.core.effects import CallMemory, CallTensors, Complete, Connect, Disconnect, Effect, Fail, Log, Release, Send
from aiokv.core.joiner import REGISTER_REQUEST, Joiner, answer_time, retry_delay
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    ClosedError,
    ConfigError,
    ProtocolError,
    RoundTimeoutError,
    SchedulerLostError,
    ServerLostError,
    WorkerLostError,
    from_code,
)
from aiokv.optim import make_optimizer
from aiokv.policy import get_policy
from aiokv.types import SCHEDULER, Key, Peer, Rank, Role, TensorSpec
from aiokv.wire import messages as m

Operation = st.Operation
ErrorOf = Callable[[str], AiokvError]

MAX_PRIORITY = 1_000_000

COUNTED = (RoundTimeoutError.code, WorkerLostError.code)
"""Errors after which a push still counts in its round. A server that answers another one has not taken the push."""


@dataclass(slots=True, eq=False)
class Call:
    """A user's call that is not answered yet. `open` are the ids of the requests it still waits for."""

    number: int
    verb: str
    timeout: float
    open: dict[int, None] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=list)
    operation: Operation | None = None

    @property
    def what(self) -> str:
        """The call in words, for errors."""
        keys = name_keys(tuple(key for key, _ in self.tensors))
        return f"{self.verb} of {keys}" if self.operation else self.verb


@dataclass(slots=True, eq=False)
class Request:
    """A message that is not answered yet. It outlives its call when the caller stopped waiting."""

    call: int
    peer: Peer
    part: Part | None = None


def check_priority(priority: object) -> None:
    """Refuse what is no priority.

    Raises:
        ConfigError: not a whole number within the limits.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        expected = f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ConfigError(f"priority must be {expected}, got {priority!r}", expected=expected, got=repr(priority))


class Session:
    """The state machine of one worker. `handle` is the only door that changes it.

    Args:
        joiner: this worker's place in the cluster.
        policy: name of the synchronisation policy of the keys that it initialises ("bsp", "asp").

    Raises:
        PolicyError: unknown policy.
    """

    def __init__(self, joiner: Joiner, *, policy: str) -> None:
        if joiner.role is not Role.WORKER:
            raise ValueError(f"a session joins as a worker, not as a {joiner.role}")
        self.policy = get_policy(policy).name
        self._joiner = joiner
        self._rank: Rank = -1
        self._servers: dict[Peer, m.ServerEntry] = {}
        self._attached: dict[Peer, bool] = {}
        self._attempts: dict[Peer, int] = {}
        self._lost: dict[Peer, str] = {}
        self._next_request = REGISTER_REQUEST + 1
        self._calls: dict[int, Call] = {}
        self._requests: dict[int, Request] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._directory = Directory(self.policy)
        self._closed = False

    # --- read only ---

    @property
    def rank(self) -> Rank:
        """This worker's rank; -1 before it has joined."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """How many workers the cluster was declared with; 0 before this one has joined."""
        return len(self._joiner.view.workers) if self._joiner.view else 0

    @property
    def pending(self) -> int:
        """How many requests are not answered yet."""
        return len(self._requests)

    def spec(self, key: Key) -> TensorSpec | None:
        """Return shape and dtype of a key that this worker has initialised."""
        return self._directory.spec(key)

    def landing(self, request: int, nbytes: int) -> CallMemory | CallTensors | None:
        """Return where the payload of an answer belongs; None when nobody waits for it any longer."""
        pending = self._requests.get(request)
        if pending is None or pending.part is None or pending.call not in self._calls:
            return None
        return pending.part.receives if pending.part.nbytes == nbytes else None

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        return earliest(self._deadlines.next(), self._joiner.deadline())

    # --- the door ---

    def handle(self, stimulus: st.Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        match stimulus:
            case st.Received(peer, request, message, _, nbytes):
                return self._received(peer, request, message, nbytes, now)
            case st.Transfer():
                return self._transfer(stimulus, now)
            case st.EnterBarrier(call, name, timeout):
                return self._barrier(call, name, timeout, now)
            case st.ConfigureOptimizer(call, name, params, timeout):
                return self._set_optimizer(call, name, params, timeout, now)
            case st.Cancel(call):
                return self._cancel(call)
            case st.Depart(call, timeout):
                return self._depart(call, timeout, now)
            case _:
                return self._link_event(stimulus, now)

    def _link_event(self, stimulus: st.Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case st.Join(call, timeout):
                return self._joiner.join(call, timeout, now)
            case st.Connected(peer) if not self._joiner.joining:
                return [Disconnect(peer, "the join is over")]
            case st.Connected(peer):
                return self._joiner.on_connected(now) if peer == SCHEDULER else self._attach(peer, now)
            case st.ConnectFailed(peer, reason, error):
                if peer == SCHEDULER:
                    return self._joiner.on_connect_failed(reason, error, now)
                return self._retry(peer, reason) if error is None else self._joiner.fail(error)
            case st.PeerLost(peer, reason):
                return self._link_lost(peer, reason)
            case st.Tick():
                return self._tick(now)
            case _:
                raise TypeError(f"not a stimulus for a worker: {stimulus!r}")

    # --- joining ---

    def _viewed(self, view: m.View, now: float) -> list[Effect]:
        first = self._joiner.view is None
        self._joiner.on_view(view, now)
        if first:
            self._rank = next(entry.rank for entry in view.workers if entry.name == self._joiner.name)
            self._servers = {entry.index: entry for entry in view.servers}
            self._directory.settle(view)
            return [Connect(entry.index, entry.host, entry.port) for entry in view.servers]
        effects: list[Effect] = []
        for entry in view.servers:
            self._servers[entry.index] = entry
            if entry.state == "lost" and entry.index not in self._lost:
                effects += [Disconnect(entry.index, entry.reason), *self._server_gone(entry.index, entry.reason)]
        return effects

    def _attach(self, peer: Peer, now: float) -> list[Effect]:
        view = self._joiner.view
        assert view is not None, "servers are known from the view only"
        left = answer_time(max(0.0, self._joiner.join_by - now))
        message = m.Attach(self._rank, self._joiner.name, self._joiner.incarnation, view.epoch, left)
        request = self._new_request(Request(-1, peer))
        return [Send(peer, request, message)]

    def _retry(self, peer: Peer, reason: str) -> list[Effect]:
        if not self._joiner.joining:
            return []
        entry = self._servers[peer]
        attempt = self._attempts[peer] = self._attempts.get(peer, 0) + 1
        effects: list[Effect] = [Connect(peer, entry.host, entry.port, delay=retry_delay(attempt))]
        if attempt == 1:
            effects.append(Log("warning", f"{self._joiner.name} waits for {self._label(peer)}: {reason}"))
        return effects

    def _label(self, peer: Peer) -> str:
        if peer == SCHEDULER:
            return f"the scheduler at {self._joiner.address}"
        entry = self._servers[peer]
        return f"server {peer} ({entry.name} at {entry.host}:{entry.port})"

    # --- calls ---

    def _new_request(self, request: Request) -> int:
        number = self._next_request
        self._next_request += 1
        self._requests[number] = request
        return number

    def _open_call(self, call: Call, now: float) -> None:
        self._calls[call.number] = call
        self._deadlines.add(call.number, now + call.timeout)

    def _check_ready(self, call: Call) -> None:
        check_timeout(call.timeout)
        if self._closed or not self._joiner.joined:
            raise ClosedError(f"{call.what}: this worker is {'closed' if self._closed else 'not connected'}")
        for peer, reason in self._lost.items():
            raise self._server_error(peer, reason, call.what)

    def _transfer(self, stimulus: st.Transfer, now: float) -> list[Effect]:
        call = Call(stimulus.call, stimulus.operation.value, stimulus.timeout, tensors=stimulus.tensors)
        call.operation = stimulus.operation
        try:
            self._check_ready(call)
            check_priority(stimulus.priority)
            call.tensors = self._directory.check(stimulus.tensors)
        except AiokvError as error:
            return [Fail(call.number, error)]
        self._open_call(call, now)
        wait = answer_time(call.timeout)
        if call.operation is Operation.INIT:
            parts = self._directory.init(call.number, call.tensors, wait, values=self._rank == 0)
        else:
            priority = stimulus.priority
            parts = self._directory.exchange(call.number, call.operation, call.tensors, wait, priority)
        effects: list[Effect] = []
        for part in parts:
            number = self._new_request(Request(call.number, part.peer, part))
            call.open[number] = None
            effects.append(Send(part.peer, number, part.message, part.sends, part.priority))
        return effects or self._complete(call)

    def _barrier(self, number: int, name: str, timeout: float, now: float) -> list[Effect]:
        call = Call(number, f"barrier {name!r}", timeout)
        try:
            self._check_ready(call)
            if not self._joiner.connected:
                raise self._scheduler_error("it is not connected")
        except AiokvError as error:
            return [Fail(number, error)]
        self._open_call(call, now)
        request = self._new_request(Request(number, SCHEDULER))
        call.open[request] = None
        return [Send(SCHEDULER, request, m.Barrier(name, answer_time(timeout)))]

    def _set_optimizer(
        self, number: int, name: str, params: Mapping[str, bool | int | float | str], timeout: float, now: float
    ) -> list[Effect]:
        call = Call(number, f"set_optimizer {name!r}", timeout)
        try:
            self._check_ready(call)
            make_optimizer(name, params)
        except AiokvError as error:
            return [Fail(number, error)]
        self._open_call(call, now)
        effects: list[Effect] = []
        for peer in self._servers:
            request = self._new_request(Request(number, peer))
            call.open[request] = None
            # Like a push of no special priority, so that it does not overtake those that were made before.
            message = m.SetOptimizer(name, dict(params), answer_time(timeout))
            effects.append(Send(peer, request, message, None, 0))
        return effects

    # --- answers ---

    def _received(self, peer: Peer, request: int, message: m.Message, nbytes: int, now: float) -> list[Effect]:
        if peer == SCHEDULER:
            self._joiner.heard(now)
            if request <= REGISTER_REQUEST:
                return self._from_scheduler(message, now)
        return self._answered(peer, request, message, nbytes)

    def _from_scheduler(self, message: m.Message, now: float) -> list[Effect]:
        match message:
            case m.View():
                return self._viewed(message, now)
            case m.Heartbeat():
                return []
            case m.Error(code, text, details) if self._joiner.joining:
                return self._joiner.fail(from_code(code, text, details))
            case _:
                return self._cut(SCHEDULER, f"unexpected {type(message).__name__}")

    def _answered(self, peer: Peer, request: int, message: m.Message, nbytes: int) -> list[Effect]:
        if not isinstance(message, (m.Done, m.Bundled, m.Value, m.Error)):
            return self._cut(peer, f"unexpected {type(message).__name__}")
        pending = self._requests.get(request)
        if pending is None or pending.peer != peer:
            return self._cut(peer, f"an answer to request {request}, which was not asked")
        del self._requests[request]
        if pending.call == -1:
            return self._attach_answered(peer, message)
        part = pending.part
        if part is not None:
            self._directory.answered(part)
        if part is not None and isinstance(message, m.Error) and part.pushes and message.code not in COUNTED:
            self._directory.take_back(part)
        if part is not None and part.bundle is not None and isinstance(message, m.Bundled):
            self._directory.bundled(part.bundle, message.bundle)
        call = self._calls.get(pending.call)
        if call is None:
            return []
        call.open.pop(request)
        if isinstance(message, m.Error):
            return self._fail(call, from_code(message.code, message.message, message.details))
        expected = part.nbytes if part is not None else 0
        if expected != nbytes:
            text = f"{call.what}: {self._label(peer)} answered {nbytes} bytes where {expected} were asked for"
            return self._fail(call, ProtocolError(text))
        if part is not None and isinstance(message, m.Value):
            self._directory.received(part, message.version)
        return [] if call.open else self._complete(call)

    def _attach_answered(self, peer: Peer, message: m.Message) -> list[Effect]:
        if isinstance(message, m.Error):
            return self._joiner.fail(from_code(message.code, message.message, message.details))
        self._attached[peer] = True
        return self._joiner.complete() if len(self._attached) == len(self._servers) else []

    def _complete(self, call: Call) -> list[Effect]:
        del self._calls[call.number]
        self._deadlines.discard(call.number)
        if call.operation is Operation.INIT:
            self._directory.initialized(call.tensors)
        return [Complete(call.number)]

    def _release(self, call: Call) -> Release:
        """Forget a call before all its requests are answered; they stay known until they are."""
        del self._calls[call.number]
        self._deadlines.discard(call.number)
        pending = [(number, self._requests[number]) for number in call.open]
        receiving = [(request.peer, number) for number, request in pending if request.part and request.part.receives]
        return Release(call.number, receiving)

    def _fail(self, call: Call, error: AiokvError) -> list[Effect]:
        return [self._release(call), Fail(call.number, error)]

    def _cancel(self, number: int) -> list[Effect]:
        call = self._calls.get(number)
        return [] if call is None else [self._release(call)]

    # --- losses ---

    def _cut(self, peer: Peer, reason: str) -> list[Effect]:
        """Close a connection over which nonsense came; it is as good as lost."""
        return [Disconnect(peer, reason), *self._link_lost(peer, reason)]

    def _link_lost(self, peer: Peer, reason: str) -> list[Effect]:
        return self._scheduler_gone(reason) if peer == SCHEDULER else self._server_gone(peer, reason)

    def _server_error(self, peer: Peer, reason: str, what: str) -> ServerLostError:
        entry = self._servers[peer]
        address = f"{entry.host}:{entry.port}"
        return ServerLostError(f"{what}: {self._label(peer)} is lost: {reason}", server=peer, address=address)

    def _scheduler_error(self, reason: str) -> SchedulerLostError:
        return SchedulerLostError(f"{self._label(SCHEDULER)} is gone: {reason}", address=self._joiner.address)

    def _server_gone(self, peer: Peer, reason: str) -> list[Effect]:
        self._lost[peer] = reason
        effects = self._joiner.fail(self._server_error(peer, reason, "join"))
        return effects + self._fail_requests_to(peer, lambda what: self._server_error(peer, reason, what))

    def _scheduler_gone(self, reason: str) -> list[Effect]:
        self._joiner.on_lost()
        error = self._scheduler_error(reason)
        if self._joiner.joining:
            return self._joiner.fail(error)
        effects: list[Effect] = []
        if not self._closed:
            effects.append(Log("warning", f"{error}; {self._joiner.name} goes on without barriers"))
        return effects + self._fail_requests_to(SCHEDULER, lambda what: self._scheduler_error(f"{reason}; {what}"))

    def _fail_requests_to(self, peer: Peer, error_of: ErrorOf) -> list[Effect]:
        concerned: dict[int, Call] = {}
        for number, request in list(self._requests.items()):
            if request.peer != peer:
                continue
            del self._requests[number]
            if request.part is not None:
                self._directory.answered(request.part)
            call = self._calls.get(request.call)
            if call is not None:
                call.open.pop(number)
                concerned[call.number] = call
        effects: list[Effect] = []
        for call in concerned.values():
            effects += self._fail(call, error_of(call.what))
        return effects

    def _tick(self, now: float) -> list[Effect]:
        joining = self._joiner.joining
        absent = [self._label(peer) for peer in self._servers if joining and peer not in self._attached]
        effects = self._joiner.tick(now, " and ".join(absent))
        if reason := self._joiner.silence(now):
            effects += self._cut(SCHEDULER, reason)
        for number in self._deadlines.due(now):
            call = self._calls[number]
            silent = dict.fromkeys(self._requests[request].peer for request in call.open)
            names = " and ".join(self._label(peer) for peer in silent)
            text = f"{call.what}: no answer from {names} within {call.timeout:.3g} s"
            effects += self._fail(call, CallTimeoutError(text, server=list(silent)))
        return effects

    # --- leaving ---

    def _depart(self, number: int, timeout: float, now: float) -> list[Effect]:
        if self._closed:
            return [Complete(number)]
        effects = self._joiner.fail(ClosedError("join: the worker was closed while it was joining"))
        for call in list(self._calls.values()):
            effects += self._fail(call, ClosedError(f"{call.what}: the worker was closed while the call was pending"))
        self._closed = True
        if not self._joiner.joined or not self._joiner.connected:
            return [*effects, Complete(number)]
        call = Call(number, "leave", timeout)
        self._open_call(call, now)
        request = self._new_request(Request(number, SCHEDULER))
        call.open[request] = None
        return [*effects, Send(SCHEDULER, request, m.Leave())]

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        for number, call in self._calls.items():
            assert number == call.number
            assert number in self._deadlines
            assert call.open, "a call without open requests is complete"
            assert all(self._requests[request].call == number for request in call.open)
        assert len(self._calls) == len(self._deadlines)
        assert all(request < self._next_request for request in self._requests)
