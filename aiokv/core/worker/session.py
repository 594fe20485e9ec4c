"""A worker's decisions: which server gets which bytes, what a call still waits for, and why it failed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aiokv.core import stimuli as st
from aiokv.core.deadlines import earliest
from aiokv.core.effects import (
    CallBuffer,
    CallMemory,
    CallTensors,
    Disconnect,
    Effect,
    Encode,
    Fail,
    Log,
    Replica,
)
from aiokv.core.joiner import REGISTER_REQUEST, Joiner
from aiokv.core.keys import check_key
from aiokv.core.server_links import ServerLinks
from aiokv.core.tables import check_table
from aiokv.core.worker.attaching import Attaching
from aiokv.core.worker.calls import Calls
from aiokv.core.worker.control_calls import ControlCall, ControlCalls
from aiokv.core.worker.directory import Directory
from aiokv.core.worker.farewell import Farewell
from aiokv.core.worker.participation import Participation, PlaceCall
from aiokv.core.worker.passing import Passing
from aiokv.core.worker.standing import Standing
from aiokv.core.worker.step_calls import StepCall, StepCalls
from aiokv.errors import AiokvError, ClosedError, ConfigError, OtherSettingsError, ProtocolError, from_code
from aiokv.policy import get_policy
from aiokv.types import SCHEDULER, Key, Peer, Rank, Role, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.compression import Compression

ANSWERS = (
    m.Value,
    m.Done,
    m.Error,
    m.Bundled,
    m.CommandResult,
    m.State,
    m.RulesState,
    m.Met,
    m.Tally,
    m.Reached,
    m.Pushes,
    m.Entered,
)
"""The only messages by which requests are answered."""

_STEP_ANSWERS = frozenset((m.Value, m.Done))
"""Those of pushes and pulls that went well."""

UserCall = StepCall | PlaceCall | ControlCall
"""What a user asks of its worker, which is refused where it can't be done."""

MAX_OPEN_PUSHES = 16
"""How many pushes of one key may be under way unless another number is given."""


class Session:
    """The state machine of one worker. `handle` is the only door that changes it.

    Args:
        joiner: this worker's place in the cluster.
        policy: text of the synchronisation policy of the keys that it initialises, such as "bsp" or "ssp:3".
        max_open_pushes: how many pushes of one key may be under way. Calls that would push more of it wait, and with
            them later ones of that key, so that a server holds at most so many contributions of a worker.
        call_timeout: seconds that its calls wait if they are told nothing else. It does not join a cluster whose
            `death_timeout` is as long.

    Raises:
        PolicyError: unknown policy, or a wrong option.
    """

    __slots__ = (
        "_attaching",
        "_call_timeout",
        "_calls",
        "_control",
        "_crossing",
        "_directory",
        "_due",
        "_farewell",
        "_is_steady",
        "_joiner",
        "_links",
        "_participation",
        "_passing",
        "_replies",
        "_standing",
        "_step_calls",
        "policy",
    )

    def __init__(
        self,
        joiner: Joiner,
        *,
        policy: str,
        max_open_pushes: int = MAX_OPEN_PUSHES,
        call_timeout: float = math.inf,
    ) -> None:
        if joiner.role is not Role.WORKER:
            raise ValueError(f"a session joins as a worker, not as a {joiner.role}")
        self.policy = str(get_policy(policy))
        self._call_timeout = call_timeout
        self._joiner = joiner
        self._links = ServerLinks(joiner.name)
        self._directory = Directory(self.policy)
        self._standing = Standing(joiner, self._links, self._directory)
        self._calls = Calls(self._directory, self._standing.label, self._links.outage, max_open_pushes=max_open_pushes)
        self._replies = self._calls.replies
        self._passing = Passing(self._calls)
        self._participation = Participation(joiner.name, self._standing, self._calls, self._directory)
        self._crossing = self._participation.crossing
        self._attaching = Attaching(joiner, self._standing, self._links, self._calls, self._participation)
        self._control = ControlCalls(self._standing, self._links, self._calls, self._directory, self._participation)
        self._farewell = Farewell(
            joiner, self._standing, self._calls, self._passing, self._participation, self._directory
        )
        self._step_calls = StepCalls(self._standing, self._calls, self._directory, self._participation)
        self._is_steady = False
        """Whether nothing has to be looked at but pushes and pulls, and their answers. These do not change that."""
        self._due: float | None = None
        """When its place in the cluster wants a `Tick`."""

    # --- read only ---

    @property
    def rank(self) -> Rank:
        """This worker's rank; -1 before it has joined."""
        return self._participation.rank

    @property
    def num_workers(self) -> int:
        """How many workers the cluster was declared with; 0 before this one has joined."""
        return self._participation.roster.world

    @property
    def resumed_from(self) -> str:
        """The folder of the checkpoint with which the servers have begun; empty: with nothing."""
        view = self._joiner.view
        return view.resume if view else ""

    @property
    def num_lost(self) -> int:
        """How many workers and servers are lost."""
        return len(self._participation.roster.lost) + len(self._links.lost)

    @property
    def clock(self) -> int:
        """The most pushes of any key that this worker has made."""
        return self._directory.counts.clock

    @property
    def pushes(self) -> int:
        """The most pushes of a key, with those that others made before this worker joined."""
        return self._directory.counts.most

    @property
    def since(self) -> int:
        """The clock after which this worker counts in rounds; 0: from the beginning, or that is not known yet."""
        return self._participation.since

    @property
    def pending(self) -> int:
        """How many requests are not answered yet."""
        return len(self._calls.requests)

    def spec(self, key: Key) -> TensorSpec | None:
        """Return shape and dtype of a key that this worker has initialised."""
        return self._directory.keys.spec(key)

    @property
    def dropped(self) -> dict[str, int]:
        """How many contributions of this worker to a key count nowhere, by reason."""
        return dict(self._replies.dropped)

    @property
    def torn_reads(self) -> int:
        """How many calls have got values that are not of one round, because rounds were made faster than read."""
        return self._replies.torn_reads

    @property
    def reads_ahead(self) -> int:
        """How many values pulls have got that servers had been asked for ahead of them."""
        return self._calls.ahead.served

    @property
    def reconnects(self) -> int:
        """How often a connection to a server has ended and was made again."""
        return self._links.reconnects

    @property
    def compression(self) -> Compression:
        """How this worker compresses."""
        return self._calls.compression

    def is_sparse(self, key: Key) -> bool:
        """Return True when this worker has initialised the key as a row-sparse one."""
        return self._directory.keys.is_sparse(key)

    def row_bounds(self, key: Key, spec: TensorSpec) -> list[int]:
        """Return the first row of each chunk of a row-sparse key, in their order.

        Raises:
            ClosedError: this worker has not joined.
            KeyUseError: the key or the spec can't be.
        """
        if not self._links.servers:
            raise ClosedError(f"rows of key {key!r}: this worker is not connected")
        check_table(check_key(key), spec)
        return [chunk.start for chunk in self._directory.layout.place_rows(check_key(key), spec)]

    @property
    def records(self) -> list[st.KeyRecord]:
        """The keys that this worker has initialised, and how."""
        return self._directory.keys.records

    def state_parts(self, record: st.KeyRecord) -> list[tuple[int, int]]:
        """Return first element, or row, and the end of each chunk of a key."""
        return self._directory.layout.parts(record)

    def check_group(self, group: tuple[Rank, ...]) -> None:
        """Refuse a group of ranks that are not in the cluster.

        Raises:
            MembershipError: names them.
        """
        self._participation.roster.check_group(group)

    def landing(self, request: int, nbytes: int) -> CallMemory | CallTensors | CallBuffer | Replica | None:
        """Return where the payload of an answer belongs; None when nobody waits for it any longer."""
        return self._replies.landing(request, nbytes)

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        calls, due = self._calls.open, self._due
        # After every stimulus, so not by `earliest`.
        first = due if not calls or (due is not None and due < calls.bound) else calls.bound
        if self._is_steady:
            return first
        until = self._farewell.until
        if not self._crossing.deadlines and until is None:
            return first
        return earliest(first, self._crossing.deadlines.next(), until)

    # --- the door ---

    def handle(self, stimulus: st.Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        if self._is_steady:
            # With thousands of workers nothing of them is in a cache: a step is to touch as little as may be.
            kind = type(stimulus)
            if kind is st.Transfer and stimulus.operation is not st.Operation.INIT:  # type: ignore[union-attr]
                try:
                    return self._step_calls.transfer(stimulus, now, is_allowed=True)  # type: ignore[arg-type]
                except AiokvError as error:
                    # Nothing has changed.
                    return [Fail(stimulus.call, error)]  # type: ignore[union-attr]
            if kind is st.Received and stimulus.peer != SCHEDULER and type(stimulus.message) in _STEP_ANSWERS:  # type: ignore[union-attr, operator]
                return self._step_answered(stimulus, now)  # type: ignore[arg-type]
        return self._look_around(self._handle(stimulus, now), now)

    def _step_answered(self, received: st.Received, now: float) -> list[Effect]:
        try:
            return self._replies.answered(received.peer, received.request, received.message, received.nbytes, now)
        except ProtocolError as error:
            return self._look_around(self._cut(received.peer, error.message), now)

    def _look_around(self, effects: list[Effect], now: float) -> list[Effect]:
        """Do what is to be done besides what a stimulus has asked for."""
        if self._passing.is_active:
            effects = self._pass_clocks(effects)
        if self._crossing.watched:
            effects += self._crossing.look(self._directory.counts.clock)
        if self._farewell.until is not None:
            effects += self._farewell.look(now)
        self._is_steady, self._due = self._find_steady(), self._joiner.due
        self._calls.look()
        return self._links.passing(effects) if self._links.down else effects

    def _find_steady(self) -> bool:
        crossing, participation = self._crossing, self._participation
        asks = participation.going_on is not None or participation.planning is not None
        leaves = self._farewell.until is not None or crossing.watched or crossing.deadlines
        changes = self._passing.is_active or self._control.changing is not None
        return self._step_calls.may_begin and not (asks or leaves or changes or self._links.down)

    def _handle(self, stimulus: st.Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case st.Received():
                return self._received(stimulus.peer, stimulus.request, stimulus.message, stimulus.nbytes, now)
            case st.Transfer():
                return self._called(stimulus, now)
            case st.Encoded(call, error):
                return self._calls.encoded(call, error)
            case st.Cancel(call):
                self._crossing.forget(call)
                return self._calls.cancel(call)
            case st.Depart():
                return self._farewell.depart(stimulus, now)
            case _ if isinstance(stimulus, UserCall):
                return self._called(stimulus, now)
            case _:
                return self._link_event(stimulus, now)

    def _called(self, stimulus: UserCall, now: float) -> list[Effect]:
        try:
            if isinstance(stimulus, StepCall):
                return self._step_calls.called(stimulus, now)
            if isinstance(stimulus, PlaceCall):
                return self._participation.called(stimulus, now)
            return self._control.called(stimulus, now)
        except AiokvError as error:
            # Nothing has changed.
            return [Fail(stimulus.call, error)]

    def _pass_clocks(self, effects: list[Effect]) -> list[Effect]:
        """Look whether a clock of the cluster's checkpoints is passed."""
        keeping: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Encode):
                keys = [key for _, key, _ in effect.tensors]
                keeping += self._passing.keep(keys, self._directory.counts.next_clock(keys))
        return [*keeping, *effects, *self._passing.pushed(self._directory.counts.clock)]

    def _link_event(self, stimulus: st.Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case st.Join(call, timeout):
                return self._joiner.join(call, timeout, now)
            case st.Connected(peer) if peer == SCHEDULER:
                return self._joiner.on_connected(now)
            case st.ConnectFailed(peer, reason, error) if peer == SCHEDULER:
                return self._joiner.on_connect_failed(reason, error, now)
            case st.PeerLost(peer, reason, error) if peer == SCHEDULER:
                return self._joiner.refused(error) or self._scheduler_gone(reason)
            case st.PartWritten():
                return self._passing.written(stimulus)
            case st.Tick():
                return self._tick(now)
            case st.Connected() | st.ConnectFailed() | st.PeerLost():
                return self._attaching.event(stimulus, now)
            case _:
                raise TypeError(f"not a stimulus for a worker: {stimulus!r}")

    # --- joining ---

    def _viewed(self, view: m.View, now: float) -> list[Effect]:
        first, was_registered = self._joiner.view is None, self._joiner.is_registered
        is_news = self._joiner.on_view(view, now)
        effects: list[Effect] = []
        if not was_registered:
            self._calls.outage = None
        if not first and not was_registered:
            back = Log("info", f"{self._joiner.name} is back at the scheduler")
            tells = [*self._calls.meetings.tell(), *self._participation.tell(view)]
            effects = [back, *tells, *self._calls.ask_scheduler_again(now)]
        if not is_news:
            return effects
        if first and view.death_timeout >= self._call_timeout:
            return self._refuse_timeouts(view.death_timeout)
        self._passing.viewed(view)
        effects += self._participation.viewed(view, first=first)
        if not first:
            return effects + self._attaching.viewed(view, now)
        self._directory.layout.settle(view)
        self._calls.whole = view.on_worker_loss == "shrink"
        return self._attaching.begin(view, now)

    def _refuse_timeouts(self, death_timeout: float) -> list[Effect]:
        """Do not join: this worker's calls would give up before anybody is counted as lost."""
        rule = "death_timeout < call_timeout"
        got = f"death_timeout = {death_timeout:g} at the scheduler, call_timeout = {self._call_timeout:g} here"
        text = f"time-outs contradict each other: {rule} must hold, got {got}; set them alike for all nodes"
        return self._joiner.fail(ConfigError(text, expected=rule, got=got))

    # --- answers ---

    def _received(self, peer: Peer, request: int, message: m.Message, nbytes: int, now: float) -> list[Effect]:
        if peer == SCHEDULER:
            self._joiner.heard(now)
            if request <= REGISTER_REQUEST:
                return self._from_scheduler(message, now)
        return self._answered(peer, request, message, nbytes, now)

    def _from_scheduler(self, message: m.Message, now: float) -> list[Effect]:
        match message:
            case m.View():
                return self._viewed(message, now)
            case m.Heartbeat():
                return []
            case m.GetView():
                return self._joiner.tell_view()
            case m.CheckpointAt(clock):
                return self._passing.asked(clock, self._calls.encodings.newest_clock)
            case m.Boundary():
                return self._participation.bounded(message)
            case m.Error(code, text, details):
                return self._refused(from_code(code, text, details))
            case _:
                return self._cut(SCHEDULER, f"unexpected {type(message).__name__}")

    def _answered(self, peer: Peer, request: int, message: m.Message, nbytes: int, now: float) -> list[Effect]:
        if not isinstance(message, ANSWERS):
            return self._cut(peer, f"unexpected {type(message).__name__}")
        participation, control = self._participation, self._control
        try:
            if self._links.down and peer in self._links.down:
                return self._attaching.answered(peer, request, message, now)
            if request == participation.planning and peer == SCHEDULER:
                return participation.planned(peer, request)
            # Not by `isinstance`, which takes five times as long to say no.
            if type(message) is m.Entered:
                return participation.entered(peer, request, now)
            effects = self._replies.answered(peer, request, message, nbytes, now)
            if participation.going_on is not None:
                effects = participation.gone_on(participation.going_on, effects)
            return effects if control.changing is None else control.changed(control.changing, effects)
        except ProtocolError as error:
            return self._cut(peer, error.message)

    # --- losses ---

    def _cut(self, peer: Peer, reason: str) -> list[Effect]:
        """Close a connection over which nonsense came; it is as good as lost."""
        gone = self._scheduler_gone(reason) if peer == SCHEDULER else self._attaching.gone(peer, reason)
        return [Disconnect(peer, reason), *gone]

    def _scheduler_gone(self, reason: str) -> list[Effect]:
        self._calls.outage = lambda what: self._standing.scheduler_error(f"{reason}; {what}")
        effects, reconnects = self._farewell.scheduler_gone(), self._joiner.on_lost(reason)
        does = "has not joined yet" if self._joiner.joining else "goes on without barriers"
        text = f"{self._standing.scheduler_error(reason)}; {self._joiner.name} {does}, and looks for it"
        log = Log("warning", text, "scheduler_gone", {"reason": reason})
        return [*effects, log, *reconnects] if reconnects else effects

    def _refused(self, error: AiokvError) -> list[Effect]:
        if self._joiner.joining:
            return self._joiner.fail(error)
        if not isinstance(error, OtherSettingsError):
            return self._dismissed(error)
        address = {"address": self._joiner.address}
        text = f"{self._standing.label(SCHEDULER)} can't go on with the cluster: {error.message}"
        self._calls.outage = lambda what: OtherSettingsError(f"{what}: {text}", **error.details | address)
        said = self._joiner.cannot_return(error, "goes on without barriers")
        return [*self._farewell.scheduler_gone(), *said]

    def _dismissed(self, error: AiokvError) -> list[Effect]:
        """The scheduler does not take this worker for a member any longer."""
        self._standing.expulsion = error
        self._joiner.leave()
        self._joiner.on_lost(error.message)

        def error_of(what: str) -> AiokvError:
            return type(error)(f"{what}: {error.message}", **error.details)

        failed = self._calls.fail_all(error_of) + self._crossing.fail_all(error_of)
        return [Disconnect(SCHEDULER, "this worker is no member any longer"), *failed]

    def _tick(self, now: float) -> list[Effect]:
        joining = self._joiner.joining
        absent = [self._standing.label(peer) for peer in self._links.down if joining]
        effects = self._joiner.tick(now, " and ".join(absent))
        if reason := self._joiner.silence(now):
            effects += self._cut(SCHEDULER, reason)
        return effects + self._calls.expire(now) + self._crossing.expire(now)

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        self._calls.validate()
        assert self._is_steady is False or self._find_steady()
        assert self._due == self._joiner.due
