"""A worker's decisions: which server gets which bytes, what a call still waits for, and why it failed."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core import stimuli as st
from aiokv.core.bundle import name_keys
from aiokv.core.calls import NO_CALL, Call, Calls, Change
from aiokv.core.compression import Compression, make_compression
from aiokv.core.crossing import Crossing
from aiokv.core.deadlines import check_timeout, earliest
from aiokv.core.directory import Directory
from aiokv.core.effects import (
    URGENT,
    CallBuffer,
    CallMemory,
    CallTensors,
    Complete,
    Disconnect,
    Effect,
    Encode,
    Fail,
    Log,
    Replica,
)
from aiokv.core.joiner import REGISTER_REQUEST, Joiner, answer_time
from aiokv.core.keys import check_key
from aiokv.core.passing import Passing
from aiokv.core.roster import Roster
from aiokv.core.rows import check_table
from aiokv.core.rules import check_changes
from aiokv.core.server_links import ServerLinks
from aiokv.core.state_parts import read_states, write_states
from aiokv.errors import (
    AiokvError,
    ClosedError,
    CodecError,
    ConfigError,
    MembershipError,
    OverloadedError,
    ProtocolError,
    SchedulerLostError,
    ServerLostError,
    from_code,
)
from aiokv.initializers import make_initializer
from aiokv.optim import make_optimizer
from aiokv.policy import get_policy
from aiokv.types import SCHEDULER, Key, Peer, Rank, Role, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_PRIORITY = 1_000_000

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

MAX_OPEN_PUSHES = 16
"""How many pushes of one key may be under way unless another number is given."""


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
        policy: text of the synchronisation policy of the keys that it initialises, such as "bsp" or "ssp:3".
        max_open_pushes: how many pushes of one key may be under way. Calls that would push more of it wait, and with
            them later ones of that key, so that a server holds at most so many contributions of a worker.
        call_timeout: seconds that its calls wait if they are told nothing else. It does not join a cluster whose
            `death_timeout` is as long.

    Raises:
        PolicyError: unknown policy, or a wrong option.
    """

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
        self._rank: Rank = -1
        self._roster = Roster()
        self._links = ServerLinks(joiner.name)
        self._directory = Directory(self.policy)
        self._calls = Calls(self._directory, self._label, self._links.outage, max_open_pushes=max_open_pushes)
        self._passing = Passing(self._calls)
        self._crossing = Crossing(self._calls.open_pushes)
        self._compression = Compression()
        self._changes = 0
        """How often it was changed."""
        self._changing: tuple[int, Compression] | None = None
        """The call that changes it, and to what."""
        self._finished = False
        self._closed = False
        self._going_on: int | None = None
        """The call that asks where another process was."""
        self._joins = False
        """Whether this worker has come to a running cluster, and does not know yet where it is to begin."""
        self._expulsion: AiokvError | None = None
        """Why this worker is no member any longer, as far as it knows."""
        self._planning: int | None = None
        """The request by which it has told the scheduler that it is about to leave."""
        self._leaves = False
        """Whether it has, or knows that it need not."""
        self._leave = NO_CALL
        """The call with which it leaves."""
        self._draining: tuple[st.Depart, float] | None = None
        """How it will leave when all that it has pushed is answered, and when at the latest."""
        self._farewell: tuple[st.Depart, float] | None = None
        """How it will leave when all files are written, and when at the latest."""

    def _refuse_timeouts(self, death_timeout: float) -> list[Effect]:
        """Do not join: this worker's calls would give up before anybody is counted as lost."""
        rule = "death_timeout < call_timeout"
        got = f"death_timeout = {death_timeout:g} at the scheduler, call_timeout = {self._call_timeout:g} here"
        text = f"time-outs contradict each other: {rule} must hold, got {got}; set them alike for all nodes"
        return self._joiner.fail(ConfigError(text, expected=rule, got=got))

    # --- read only ---

    @property
    def rank(self) -> Rank:
        """This worker's rank; -1 before it has joined."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """How many workers the cluster was declared with; 0 before this one has joined."""
        return self._roster.world

    @property
    def resumed_from(self) -> str:
        """The folder of the checkpoint with which the servers have begun; empty: with nothing."""
        view = self._joiner.view
        return view.resume if view else ""

    @property
    def num_lost(self) -> int:
        """How many workers and servers are lost."""
        return len(self._roster.lost) + len(self._links.lost)

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
        entry = self._roster.entry(self._rank)
        return entry.since if entry is not None else 0

    @property
    def pending(self) -> int:
        """How many requests are not answered yet."""
        return self._calls.pending

    def spec(self, key: Key) -> TensorSpec | None:
        """Return shape and dtype of a key that this worker has initialised."""
        return self._directory.keys.spec(key)

    @property
    def dropped(self) -> dict[str, int]:
        """How many contributions of this worker to a key count nowhere, by reason."""
        return dict(self._calls.dropped)

    @property
    def torn_reads(self) -> int:
        """How many calls have got values that are not of one round, because rounds were made faster than read."""
        return self._calls.torn_reads

    @property
    def reconnects(self) -> int:
        """How often a connection to a server has ended and was made again."""
        return self._links.reconnects

    @property
    def compression(self) -> Compression:
        """How this worker compresses."""
        return self._compression

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
        self._roster.check_group(group)

    def landing(self, request: int, nbytes: int) -> CallMemory | CallTensors | CallBuffer | Replica | None:
        """Return where the payload of an answer belongs; None when nobody waits for it any longer."""
        return self._calls.landing(request, nbytes)

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        deadlines, due = self._calls.deadlines, self._joiner.due
        # After every stimulus, so not by `earliest`.
        first = due if not deadlines or (due is not None and due < deadlines.bound) else deadlines.bound
        if not self._crossing.deadlines and self._draining is None and self._farewell is None:
            return first
        leaving = self._draining or self._farewell
        return earliest(first, self._crossing.deadlines.next(), None if leaving is None else leaving[1])

    # --- the door ---

    def handle(self, stimulus: st.Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        effects = self._handle(stimulus, now)
        if self._passing.is_active:
            effects = self._pass_clocks(effects)
        if self._crossing.watched:
            effects += self._crossing.look(self._directory.counts.clock)
        if self._draining is not None and (now >= self._draining[1] or not self._calls.is_pushing):
            effects += self._drained(self._draining[0], now)
        if self._farewell is not None:
            effects += self._take_leave(*self._farewell, now)
        return self._links.passing(effects) if self._links.down else effects

    def _handle(self, stimulus: st.Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case st.Received():
                return self._received(stimulus.peer, stimulus.request, stimulus.message, stimulus.nbytes, now)
            case st.Transfer():
                return self._transfer(stimulus, now)
            case st.EnterBarrier():
                return self._enter_barrier(stimulus, now)
            case st.Finish(call, timeout):
                return self._ask_scheduler(Call(call, "finish", timeout), m.Finish(), now)
            case st.DeleteKeys():
                return self._delete(stimulus, now)
            case st.Encoded(call, error):
                return self._calls.encoded(call, error)
            case st.ReadState() | st.WriteState() | st.ReadRules() | st.WriteRules() | st.Adopt() | st.Resume():
                return self._save_or_load(stimulus, now)
            case st.Cancel(call):
                self._crossing.forget(call)
                return self._calls.cancel(call)
            case st.Depart():
                return self._depart(stimulus, now)
            case _:
                return self._set(stimulus, now)

    def _set(self, stimulus: st.Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case st.ConfigureOptimizer():
                return self._set_optimizer(stimulus, now)
            case st.AdjustOptimizer():
                return self._change_optimizer(stimulus, now)
            case st.SendCommand():
                return self._command(stimulus, now)
            case st.ReadTallies(call, timeout):
                return self._ask_all(Call(call, "reading of tallies", timeout), m.GetTally, now)
            case st.ChangePolicy():
                return self._change_policy(stimulus, now)
            case st.AwaitRound():
                return self._await_round(stimulus, now)
            case st.ConfigureCompression():
                return self._set_compression(stimulus, now)
            case st.GoOn() | st.AskMembers() | st.PlanLeave():
                return self._find_place(stimulus, now)
            case st.RestoreResiduals(call, keys, timeout):
                return self._restore(Call(call, "restore of residuals", timeout), keys)
            case _:
                return self._link_event(stimulus, now)

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
            case st.PeerLost(peer, reason) if peer == SCHEDULER:
                return self._scheduler_gone(reason)
            case st.PartWritten():
                return self._passing.written(stimulus)
            case st.Tick():
                return self._tick(now)
            case st.Connected() | st.ConnectFailed() | st.PeerLost():
                return self._server_event(stimulus, now)
            case _:
                raise TypeError(f"not a stimulus for a worker: {stimulus!r}")

    def _server_event(self, stimulus: st.Connected | st.ConnectFailed | st.PeerLost, now: float) -> list[Effect]:
        """The connection to a server is there, or is over."""
        peer = stimulus.peer
        if self._closed or peer in self._links.lost or not (self._joiner.joining or self._joiner.joined):
            is_open = isinstance(stimulus, st.Connected)
            return [Disconnect(peer, "nobody waits for this connection any longer")] if is_open else []
        if isinstance(stimulus, st.Connected):
            return self._attach(peer, now)
        reason, error = stimulus.reason, stimulus.error
        # What a server can't hold now would be too much again: its user has to know.
        is_full = isinstance(stimulus, st.PeerLost) and isinstance(error, OverloadedError)
        if error is not None and (is_full or not error.retriable):
            return [*self._joiner.fail(error), *self._server_gone(peer, reason)]
        if isinstance(stimulus, st.PeerLost):
            return self._links.ended(peer, reason, now)
        return self._links.failed(peer, reason)

    # --- joining ---

    def _viewed(self, view: m.View, now: float) -> list[Effect]:
        first, was_registered = self._joiner.view is None, self._joiner.is_registered
        is_news = self._joiner.on_view(view, now)
        effects: list[Effect] = []
        if not first and not was_registered:
            self._calls.outage = None
            back = Log("info", f"{self._joiner.name} is back at the scheduler")
            effects = [back, *self._calls.ask_scheduler_again(now)]
        if not is_news:
            return effects
        if first and view.death_timeout >= self._call_timeout:
            return self._refuse_timeouts(view.death_timeout)
        self._passing.viewed(view)
        self._roster = Roster(view)
        effects += self._crossing.viewed(self._roster)
        if first:
            self._rank = self._roster.rank_of(self._joiner.name)
        effects += self._limit()
        if first:
            self._joins = self._is_joining
            self._directory.layout.settle(view)
            self._calls.whole = view.on_worker_loss == "shrink"
            connects = self._links.begin(view, now)
            for entry in view.servers:
                if entry.state != "alive":
                    # Only who takes the place of another worker can meet with that.
                    return self._server_gone(entry.index, entry.reason)
            return connects
        for entry in view.servers:
            if entry.state == "lost" and entry.index not in self._links.lost:
                self._links.servers[entry.index] = entry
                effects += [Disconnect(entry.index, entry.reason), *self._server_gone(entry.index, entry.reason)]
            else:
                effects += self._links.viewed(entry, now)
        return effects

    def _attach(self, peer: Peer, now: float) -> list[Effect]:
        view = self._joiner.view
        assert view is not None, "servers are known from the view only"
        seconds = self._joiner.join_by - now if self._joiner.joining else view.death_timeout
        left = answer_time(max(0.0, seconds))
        message = m.Attach(self._rank, self._joiner.name, self._joiner.incarnation, view.epoch, left)
        send = self._calls.request(None, peer, message)
        self._links.attach(peer, send.request)
        return [send]

    def _label(self, peer: Peer) -> str:
        if peer == SCHEDULER:
            return f"the scheduler at {self._joiner.address}"
        return self._links.label(peer)

    # --- calls ---

    def _check_open(self, call: Call) -> None:
        check_timeout(call.timeout)
        if self._closed or self._draining is not None or not self._joiner.joined:
            state = "leaving" if self._draining is not None else "closed" if self._closed else "not connected"
            raise ClosedError(f"{call.what}: this worker is {state}")

    def _check_ready(self, call: Call) -> None:
        self._check_open(call)
        if self._expulsion is not None:
            raise self._expulsion
        if self._links.lost:
            peer, reason = next(iter(self._links.lost.items()))
            raise self._server_error(peer, reason, call.what)

    def _transfer(self, stimulus: st.Transfer, now: float) -> list[Effect]:
        call = Call(stimulus.call, stimulus.operation, stimulus.timeout, {}, stimulus.tensors, stimulus)
        try:
            self._check_ready(call)
            check_priority(stimulus.priority)
            call.tensors = self._directory.check(stimulus.tensors, len(stimulus.rows))
            call.compression = self._compression
            if self._finished or self._joins or stimulus.operation is st.Operation.INIT:
                self._check_options(call, stimulus)
        except AiokvError as error:
            return [Fail(call.number, error)]
        return self._calls.transfer(call, now, rank=self._rank)

    def _check_options(self, call: Call, transfer: st.Transfer) -> None:
        operation, options = transfer.operation, transfer.options
        if self._finished and operation in {st.Operation.PUSH, st.Operation.PUSHPULL}:
            raise MembershipError(f"{call.what}: this worker has finished; nobody waits for its contributions")
        if self._joins and operation in {st.Operation.PUSH, st.Operation.PUSHPULL}:
            text = f"{call.what}: this worker joins a running job: call resume_step before the first push"
            raise MembershipError(text)
        if operation is not st.Operation.INIT:
            return
        get_policy(options.policy or self.policy)
        for _, spec in transfer.tensors[len(transfer.tensors) - len(transfer.rows) :]:
            make_initializer(options.initializer, spec.dtype)
        options.group = self._roster.check_group(options.group)
        if options.group and self._rank not in options.group:
            ranks = list(options.group)
            raise MembershipError(f"{call.what}: its group is ranks {ranks}; rank {self._rank} is none of them")

    def _enter_barrier(self, stimulus: st.EnterBarrier, now: float) -> list[Effect]:
        name, timeout = stimulus.name, stimulus.timeout
        call = Call(stimulus.call, f"barrier {name!r}", timeout)
        message = m.Barrier(name, answer_time(timeout), stimulus.group, stimulus.said)
        if not stimulus.leaves:
            return self._ask_scheduler(call, message, now)
        try:
            # Lost servers may be just what the others are to hear of.
            self._check_open(call)
        except AiokvError as error:
            return [Fail(call.number, error)]
        return [*self._calls.ask_scheduler(None, message), Complete(call.number)]

    def _ask_scheduler(self, call: Call, message: m.Message, now: float) -> list[Effect]:
        try:
            self._check_ready(call)
        except AiokvError as error:
            return [Fail(call.number, error)]
        if isinstance(message, m.Finish):
            self._finished = True
            call.last = message
            return self._calls.finish(call, now)
        self._calls.open(call, now)
        return self._calls.ask_scheduler(call, message)

    def _delete(self, stimulus: st.DeleteKeys, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"delete of {name_keys(tuple(stimulus.keys))}", stimulus.timeout)
        try:
            self._check_ready(call)
        except AiokvError as error:
            return [Fail(call.number, error)]
        self._directory.forget(stimulus.keys)
        effects = self._calls.forget_keys(stimulus.keys)
        if self._rank != 0:
            return [*effects, Complete(call.number)]
        message = m.Delete(tuple(stimulus.keys), answer_time(call.timeout), self._directory.counts.clock)
        return effects + self._ask_servers(call, message, 0, now)

    def _set_optimizer(self, stimulus: st.ConfigureOptimizer, now: float) -> list[Effect]:
        name, params, merging = stimulus.name, stimulus.params, stimulus.merging
        call = Call(stimulus.call, f"set_optimizer {name!r}", stimulus.timeout)
        try:
            self._check_ready(call)
            rule = make_optimizer(name, params)
            merging.check(rule)
            self._directory.keys.check_rule(rule, merging)
        except AiokvError as error:
            return [Fail(call.number, error)]
        message = m.SetOptimizer(
            name, dict(params), merging.reduction, answer_time(call.timeout), merging.staleness_rate
        )
        # Like a push of no special priority, so that it does not overtake those that were made before.
        return self._ask_servers(call, message, 0, now)

    def _change_optimizer(self, stimulus: st.AdjustOptimizer, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"change of {', '.join(stimulus.params)}", stimulus.timeout)
        try:
            self._check_ready(call)
            check_changes(stimulus.params)
        except AiokvError as error:
            return [Fail(call.number, error)]
        call.result = since = self._calls.next_clock() if stimulus.since is None else stimulus.since
        message = m.ChangeOptimizer(since, dict(stimulus.params), answer_time(call.timeout))
        # It says when it counts, so it may overtake; and no push of that round may overtake it.
        return self._ask_servers(call, message, URGENT, now)

    def _command(self, stimulus: st.SendCommand, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"command {stimulus.name!r}", stimulus.timeout, result={})
        try:
            self._check_ready(call)
        except AiokvError as error:
            return [Fail(call.number, error)]
        message = m.Command(stimulus.name, dict(stimulus.params), answer_time(call.timeout))
        # Like a push of no special priority, so that it is carried out after those that were made before.
        return self._ask_servers(call, message, 0, now)

    def _change_policy(self, stimulus: st.ChangePolicy, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"set_policy {stimulus.policy!r}", stimulus.timeout)
        try:
            self._check_ready(call)
            policy = str(get_policy(stimulus.policy))
            leaving = self._directory.keys.leaving(policy, stimulus.keys, self._rank)
        except AiokvError as error:
            return [Fail(call.number, error)]
        if not leaving:
            return [Complete(call.number)]
        call.change = Change(policy, leaving, list(self._links.servers))
        return self._calls.change(call, now)

    def _await_round(self, stimulus: st.AwaitRound, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"wait for a round of key {stimulus.key!r}", stimulus.timeout)
        try:
            self._check_ready(call)
            key = check_key(stimulus.key)
            server, newest = self._directory.newest(key)
        except AiokvError as error:
            return [Fail(call.number, error)]
        if stimulus.newer_than is not None:
            newest = stimulus.newer_than
        message = m.AwaitRound(key, newest, answer_time(call.timeout))
        self._calls.open(call, now)
        return [self._calls.request(call, server, message)]

    def _set_compression(self, stimulus: st.ConfigureCompression, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"compression with {stimulus.name or None!r}", stimulus.timeout)
        try:
            self._check_ready(call)
            wanted = make_compression(stimulus.name, stimulus.params, stimulus.pull_name, stimulus.pull_params)
            if self._changing is not None and self._calls.is_open(self._changing[0]):
                raise CodecError(f"{call.what}: another change is under way")
        except AiokvError as error:
            return [Fail(call.number, error)]
        if wanted == self._compression:
            return [Complete(call.number)]
        self._changing = (call.number, wanted)
        push, pull = (("", {}) if codec is None else (codec.name, codec.params) for codec in (wanted.push, wanted.pull))
        message = m.SetCompression(self._changes + 1, *push, *pull, answer_time(call.timeout))
        return self._ask_servers(call, message, URGENT, now)

    def _changed(self, changing: tuple[int, Compression], effects: list[Effect]) -> list[Effect]:
        """Compress as all servers know it by now, if that is so; what was called before goes as it was to go then."""
        if Complete(changing[0]) in effects:
            self._compression = changing[1]
            self._changes += 1
            self._changing = None
        return effects

    def _find_place(self, stimulus: st.GoOn | st.AskMembers | st.PlanLeave, now: float) -> list[Effect]:
        """Find out where this worker is to begin, with whom it goes on, or where it is to end."""
        match stimulus:
            case st.AskMembers():
                return self._ask_members(stimulus, now)
            case st.PlanLeave(call):
                return self._plan_leave(call)
            case _:
                return self._go_on(stimulus, now)

    def _plan_leave(self, call: int) -> list[Effect]:
        """Ask behind which clock nobody relies on this worker, if there is somebody who does."""
        try:
            self._check_open(Call(call, "plan_leave", 0.0))
        except AiokvError as error:
            return [Fail(call, error)]
        if self._leaves:
            return [Complete(call)]
        self._leaves = True
        if not self._directory.keys.waits_for_others:
            return [Complete(call), *self._crossing.leave(self._rank, self._roster)]
        send = self._calls.request(None, SCHEDULER, m.PlanLeave(self._calls.next_clock() - 1))
        self._planning = send.request
        return [Complete(call)] if self._calls.outage is not None else [Complete(call), send]

    def _planned(self, peer: Peer, request: int) -> list[Effect]:
        """Leave at once, if no view has said by now where this worker's rounds end."""
        self._calls.take(peer, request)
        self._planning = None
        return [] if self._until else self._crossing.leave(self._rank, self._roster)

    @property
    def _until(self) -> int:
        """The clock up to which this worker counts; 0: it stays, as far as it knows."""
        entry = self._roster.entry(self._rank)
        return entry.until if entry is not None else 0

    def _bounded(self, boundary: m.Boundary) -> list[Effect]:
        """Agree to a boundary. Where this worker leaves there, its calls that wait for their turn have to be before."""
        mine = boundary.rank == self._rank
        clock = self._calls.next_clock() - 1 if mine else self._directory.counts.clock
        return self._crossing.bounded(boundary, clock, self._roster) + self._limit()

    def _limit(self) -> list[Effect]:
        """Let no push go beyond the clock up to which this worker counts, or may turn out to count."""
        if self._until:
            return self._calls.limit(self._until, for_good=True)
        return self._calls.limit(self._crossing.last_of(self._rank), for_good=False)

    def _go_on(self, stimulus: st.GoOn, now: float) -> list[Effect]:
        call = Call(stimulus.call, "resume_step", stimulus.timeout, result=[])
        try:
            self._check_ready(call)
            parts = self._directory.push_counts(answer_time(call.timeout))
        except AiokvError as error:
            return [Fail(call.number, error)]
        self._going_on = call.number
        if not self._is_joining:
            return self._calls.send(call, parts, now)
        self._calls.open(call, now)
        return self._calls.ask_scheduler(call, m.Enter(answer_time(call.timeout)))

    @property
    def _is_joining(self) -> bool:
        """Whether the others do not wait for this worker yet, as far as it knows."""
        entry = self._roster.entry(self._rank)
        return entry is not None and entry.state == "joining"

    def _ask_members(self, stimulus: st.AskMembers, now: float) -> list[Effect]:
        try:
            self._check_ready(Call(stimulus.call, "members", stimulus.timeout))
        except AiokvError as error:
            return [Fail(stimulus.call, error)]
        return self._crossing.ask(stimulus, self._roster, now)

    def _gone_on(self, number: int, effects: list[Effect]) -> list[Effect]:
        """Count from what the servers have, if all of them have said it."""
        done = next((one for one in effects if isinstance(one, Complete) and one.call == number), None)
        if done is None:
            return effects
        self._going_on = None
        try:
            if self._joins:
                done.result = self._directory.counts.admit(self.since, done.result)
                self._joins = False
            else:
                done.result = self._directory.counts.go_on(done.result)
        except AiokvError as error:
            return [Fail(number, error) if one is done else one for one in effects]
        return effects

    def _restore(self, call: Call, keys: list[Key]) -> list[Effect]:
        try:
            self._check_ready(call)
        except AiokvError as error:
            return [Fail(call.number, error)]
        self._calls.owe(keys)
        return [Complete(call.number)]

    def _save_or_load(self, stimulus: st.SavingCall, now: float) -> list[Effect]:
        match stimulus:
            case st.ReadState() | st.WriteState():
                return self._exchange_state(stimulus, now)
            case st.ReadRules(call, timeout):
                return self._ask_all(Call(call, "reading of the update rule", timeout), m.GetRules, now)
            case st.WriteRules(call, rules, timeout):
                put = partial(_put_rules, rules)
                return self._ask_all(Call(call, "loading of the update rule", timeout), put, now)
            case st.Adopt(call, records):
                self._directory.adopt(records)
                return [Complete(call)]
            case _:
                self._directory.counts.resume(stimulus.clock, stimulus.updates)
                return [Complete(stimulus.call)]

    def _ask_all(self, call: Call, make: Callable[[float], m.Message], now: float) -> list[Effect]:
        try:
            self._check_ready(call)
        except AiokvError as error:
            return [Fail(call.number, error)]
        return self._ask_servers(call, make(answer_time(call.timeout)), 0, now)

    def _exchange_state(self, stimulus: st.ReadState | st.WriteState, now: float) -> list[Effect]:
        verb = "saving" if isinstance(stimulus, st.ReadState) else "loading"
        call = Call(stimulus.call, verb, stimulus.timeout)
        try:
            self._check_ready(call)
        except AiokvError as error:
            return [Fail(call.number, error)]
        wait = answer_time(call.timeout)
        if isinstance(stimulus, st.ReadState):
            return self._calls.send(call, read_states(self._directory.layout, stimulus, wait), now)
        return self._calls.send(call, write_states(self._directory.layout, stimulus, wait), now)

    def _ask_servers(self, call: Call, message: m.Message, priority: int, now: float) -> list[Effect]:
        """Send the same message to all servers."""
        self._calls.open(call, now)
        return [self._calls.request(call, peer, message, priority) for peer in self._links.servers]

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
                return self._passing.asked(clock, self._calls.newest_clock)
            case m.Boundary():
                return self._bounded(message)
            case m.Error(code, text, details):
                error = from_code(code, text, details)
                return self._joiner.fail(error) if self._joiner.joining else self._dismissed(error)
            case _:
                return self._cut(SCHEDULER, f"unexpected {type(message).__name__}")

    def _answered(self, peer: Peer, request: int, message: m.Message, nbytes: int, now: float) -> list[Effect]:
        if not isinstance(message, ANSWERS):
            return self._cut(peer, f"unexpected {type(message).__name__}")
        try:
            if self._links.down and peer in self._links.down:
                if request != self._links.down[peer].request:
                    # What is left of the connection before; it is asked again.
                    return []
                self._calls.take(peer, request)
                return self._attach_answered(peer, message, now)
            if request == self._planning and peer == SCHEDULER:
                return self._planned(peer, request)
            # Not by `isinstance`, which takes five times as long to say no.
            if type(message) is m.Entered:
                # What was pushed by now is all up to the boundary, after which this worker counts.
                return self._calls.go_on(peer, request, self._directory.push_counts, now)
            effects = self._calls.answered(peer, request, message, nbytes)
            if self._going_on is not None:
                effects = self._gone_on(self._going_on, effects)
            return effects if self._changing is None else self._changed(self._changing, effects)
        except ProtocolError as error:
            return self._cut(peer, error.message)

    def _attach_answered(self, peer: Peer, message: m.Message, now: float) -> list[Effect]:
        if isinstance(message, m.Error):
            error = from_code(message.code, message.message, message.details)
            if self._joiner.joining:
                return self._joiner.fail(error)
            reason = f"the server does not take this worker: {error}"
            if error.retriable:
                return [Disconnect(peer, reason), *self._links.ended(peer, reason, now)]
            return [Disconnect(peer, reason), *self._expelled(peer, error)]
        again = self._calls.again(peer, now)
        effects = self._links.attached(peer, now, len(again)) + again
        if self._joiner.joining and not self._links.down:
            effects += self._joiner.complete()
        return effects

    def _expelled(self, peer: Peer, error: AiokvError) -> list[Effect]:
        """A server does not take this worker for a member any longer: nothing that it does counts."""
        self._expulsion = error
        self._links.lose(peer, error.message)
        return self._calls.fail_held(lambda _: error) + self._calls.fail_requests_to(peer, lambda _: error)

    # --- losses ---

    def _cut(self, peer: Peer, reason: str) -> list[Effect]:
        """Close a connection over which nonsense came; it is as good as lost."""
        gone = self._scheduler_gone(reason) if peer == SCHEDULER else self._server_gone(peer, reason)
        return [Disconnect(peer, reason), *gone]

    def _server_error(self, peer: Peer, reason: str, what: str) -> ServerLostError:
        entry = self._links.servers[peer]
        address = f"{entry.host}:{entry.port}"
        text = f"{what}: {self._label(peer)} is lost: {reason}"
        keys = tuple(self._directory.layout.keys_on(peer, self._directory.keys.records))
        if keys:
            text += f"; with it, at least in part: {name_keys(keys)}"
        return ServerLostError(text, server=peer, address=address, keys=list(keys))

    def _scheduler_error(self, reason: str) -> SchedulerLostError:
        return SchedulerLostError(f"{self._label(SCHEDULER)} is gone: {reason}", address=self._joiner.address)

    def _server_gone(self, peer: Peer, reason: str) -> list[Effect]:
        self._links.lose(peer, reason)
        effects = self._joiner.fail(self._server_error(peer, reason, "join"))

        def error_of(what: str) -> AiokvError:
            return self._server_error(peer, reason, what)

        # What has not been sent would not be now either: a call needs all servers.
        return [*effects, *self._calls.fail_held(error_of), *self._calls.fail_requests_to(peer, error_of)]

    def _scheduler_gone(self, reason: str) -> list[Effect]:
        if self._closed and self._farewell is None and not self._calls.is_open(self._leave):
            self._joiner.leave()
        reconnects = self._joiner.on_lost()
        error = self._scheduler_error(reason)
        if self._joiner.joining:
            return self._joiner.fail(error)
        self._calls.outage = lambda what: self._scheduler_error(f"{reason}; {what}")
        text = f"{error}; {self._joiner.name} goes on without barriers, and looks for it"
        return [Log("warning", text, "scheduler_gone", {"reason": reason}), *reconnects] if reconnects else []

    def _dismissed(self, error: AiokvError) -> list[Effect]:
        """The scheduler does not take this worker for a member any longer."""
        self._expulsion = error
        self._joiner.leave()
        self._joiner.on_lost()

        def error_of(what: str) -> AiokvError:
            return type(error)(f"{what}: {error.message}", **error.details)

        failed = self._calls.fail_all(error_of) + self._crossing.fail_all(error_of)
        return [Disconnect(SCHEDULER, "this worker is no member any longer"), *failed]

    def _tick(self, now: float) -> list[Effect]:
        joining = self._joiner.joining
        absent = [self._label(peer) for peer in self._links.down if joining]
        effects = self._joiner.tick(now, " and ".join(absent))
        if reason := self._joiner.silence(now):
            effects += self._cut(SCHEDULER, reason)
        return effects + self._calls.expire(now) + self._crossing.expire(now)

    # --- leaving ---

    def _drained(self, depart: st.Depart, now: float) -> list[Effect]:
        """Leave, now that all that was pushed is answered, or that there is no more time for that."""
        effects = self._depart(st.Depart(depart.call, max(0.0, depart.timeout - now), drains=True), now)
        self._draining = None
        return effects

    def _depart(self, depart: st.Depart, now: float) -> list[Effect]:
        number, timeout = depart.call, depart.timeout
        if self._closed:
            return [Complete(number)]
        drains = depart.drains or self._leaves
        if drains and self._joiner.joined and self._expulsion is None and self._draining is None:
            # Its time-out becomes the time at which it is over.
            self._draining = (st.Depart(number, now + timeout, drains=True), now + answer_time(timeout))
            return []
        effects = self._joiner.fail(ClosedError("join: the worker was closed while it was joining"))

        def error_of(what: str) -> AiokvError:
            return ClosedError(f"{what}: the worker was closed while the call was pending")

        effects += self._calls.fail_all(error_of) + self._crossing.fail_all(error_of)
        self._closed = True
        if not self._joiner.joined or self._expulsion is not None:
            return [*effects, Complete(number)]
        effects += self._passing.departs(self._directory.counts.clock)
        self._farewell = (st.Depart(number, now + timeout, drains), now + answer_time(timeout))
        return effects

    def _take_leave(self, depart: st.Depart, until: float, now: float) -> list[Effect]:
        """Say that this worker leaves, when what it had left of gradients is written, which belongs to a checkpoint."""
        if self._passing.writes and now < until:
            return []
        self._farewell = None
        if self._expulsion is not None:
            return [Complete(depart.call)]
        self._leave = depart.call
        call = Call(depart.call, "leave", max(0.0, depart.timeout - now))
        self._calls.open(call, now)
        return self._calls.ask_scheduler(call, m.Leave(depart.drains))

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        self._calls.validate()


def _put_rules(rules: m.RulesState, wait: float) -> m.Message:
    return m.PutRules(**structs.asdict(rules), timeout=wait)
