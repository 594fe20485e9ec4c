"""A worker's calls: which requests each of them still waits for, which wait for their turn, and how they end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import structs

from aiokv.core.bundle import name_keys
from aiokv.core.compression import Compression
from aiokv.core.deadlines import Deadlines
from aiokv.core.decisions import LEADER
from aiokv.core.effects import (
    URGENT,
    CallBuffer,
    CallMemory,
    CallTensors,
    Complete,
    Discard,
    Effect,
    Encode,
    EncodedParts,
    Fail,
    ForgetResiduals,
    Release,
    Replica,
    Send,
    Settle,
)
from aiokv.core.encoding import Encodings, ask_compressed, refer_to_encoded
from aiokv.core.joiner import REGISTER_REQUEST, answer_time
from aiokv.core.records import Record, field
from aiokv.core.stimuli import Operation, Transfer
from aiokv.core.whole_reads import PATIENCE, WholeReads
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    MembershipError,
    PolicyError,
    ProtocolError,
    from_code,
    is_counted,
)
from aiokv.policy import get_policy
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.directory import Directory
    from aiokv.core.parts import Leaving, Part, Tensors
    from aiokv.types import Key, Peer, Rank, Round

ErrorOf = Callable[[str], AiokvError]

UNCOMPRESSED = Compression()

NO_CALL = -1
"""Stands for the call of a request that the session makes for itself."""


class Change(Record, eq=False):
    """Another policy for keys: `asked` of the servers, and `told` to the one that decides when all have it."""

    policy: str
    leaving: list[Leaving]
    servers: list[Peer]
    asked: bool = False
    told: bool = False

    @property
    def keys(self) -> list[Key]:
        """All keys."""
        return [key for some in self.leaving for key in some.keys]


class Call(Record, eq=False, gc=False):
    """A user's call that is not answered yet.

    `open` are the ids of the requests it still waits for; `held` is set while none of them has been sent, because of
    the key that it names. `encode` is set once its turn has come, if it is to be encoded first. `last` goes to the
    scheduler when the servers have answered. A `change` lets later calls of its keys wait until it is over. `reads` are
    of values that are to be of one round.
    """

    number: int
    verb: str
    timeout: float
    open: dict[int, None] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=list)
    transfer: Transfer | None = None
    held: Key | None = None
    result: Any = None
    compression: Compression = UNCOMPRESSED
    encode: Encode | None = None
    last: m.Message | None = None
    change: Change | None = None
    reads: WholeReads | None = None

    @property
    def what(self) -> str:
        """The call in words, for errors."""
        keys = name_keys(tuple(key for key, _ in self.tensors))
        return f"{self.verb} of {keys}" if self.transfer else self.verb


class Request(Record, eq=False, gc=False):
    """A message that is not answered yet. It outlives its call when the caller stopped waiting.

    It is that of the `part` of a transfer, or another `message`, which has no payload.
    """

    call: int
    peer: Peer
    part: Part | None = None
    message: m.Message | None = None

    @property
    def pushes(self) -> bool:
        """Whether a contribution goes with it."""
        return self.part is not None and isinstance(self.part.message, m.Push | m.PushBundle | m.PushRows)


class Calls:
    """All calls and requests of one worker.

    Args:
        directory: what is known of the keys.
        label: names a peer, for errors.
        outage: says what is wrong with the connection to it, if anything is.
        max_open_pushes: how many pushes of one key may be under way; calls that would push more of it wait here.
    """

    def __init__(
        self,
        directory: Directory,
        label: Callable[[Peer], str],
        outage: Callable[[Peer], str],
        *,
        max_open_pushes: int,
    ) -> None:
        self._directory = directory
        self._label = label
        self._outage = outage
        self._most = max_open_pushes
        self.dropped: dict[str, int] = {}
        """How many contributions to a key count nowhere, by reason."""
        self.torn_reads = 0
        """How many calls have got values that are not of one round."""
        self.outage: ErrorOf | None = None
        """Why the scheduler can't be asked at the moment."""
        self._next_request = REGISTER_REQUEST + 1
        self._calls: dict[int, Call] = {}
        self._requests: dict[int, Request] = {}
        self.deadlines: Deadlines[int] = Deadlines()
        self._kept: dict[int, int] = {}
        """How many messages of a call that has ended may have to be sent again from its memory."""
        self._waiting: dict[Key, deque[Call]] = {}
        """Held calls in their order, under each of their keys."""
        self._encodings = Encodings(directory)
        self._encoding: dict[int, Call] = {}
        """Calls that are being encoded. They are held, and are sent even when their caller waits no longer."""
        self.whole = False
        """Whether the pushes of a call are to count together; see `Whole`."""
        self._pushing = 0
        """How many calls have pushed so."""
        self._last: int | None = None
        """The clock beyond which nothing is pushed; None: there is no such clock."""
        self._is_last = False
        """Whether that is so for good; otherwise what is beyond waits."""
        self._changing: dict[int, Call] = {}
        """Changes of policies that are under way; they are the first that wait, under each of their keys."""

    # --- read only ---

    @property
    def pending(self) -> int:
        """How many requests are not answered yet."""
        return len(self._requests)

    @property
    def is_pushing(self) -> bool:
        """Whether a push is not answered, or not sent yet."""
        held = any(_pushes(call) for calls in self._waiting.values() for call in calls)
        return held or any(request.pushes for request in self._requests.values())

    def is_open(self, number: int) -> bool:
        """Tell whether a call is not over."""
        return number in self._calls

    def open_pushes(self, clock: int) -> list[int]:
        """Return the ids of the requests that push with a clock, or an earlier one, and are not answered."""
        return [
            number
            for number, request in self._requests.items()
            if request.part and request.part.push and getattr(request.part.message, "clock", 0) <= clock
        ]

    @property
    def has_encoded(self) -> bool:
        """Whether something may be, or have been, left of what was pushed."""
        return self._encodings.begun

    @property
    def is_encoding(self) -> bool:
        """Whether a gradient is being encoded, and not sent yet."""
        return bool(self._encoding)

    @property
    def newest_clock(self) -> int:
        """The clock of the last push, also if that is still being encoded."""
        keys = {key: None for call in self._encoding.values() for key, _ in call.tensors}
        return self._directory.counts.next_clock(keys) if keys else self._directory.counts.clock

    def is_unanswered(self, request: int) -> bool:
        """Tell whether a request was asked and is not answered."""
        return request in self._requests

    def landing(self, request: int, nbytes: int) -> CallMemory | CallTensors | CallBuffer | Replica | None:
        """Return where the payload of an answer belongs; None when nobody waits for it any longer.

        A replica is kept up to date all the same.
        """
        pending = self._requests.get(request)
        if pending is None or pending.part is None:
            return None
        replica = pending.part.replica
        if replica is not None:
            assert not isinstance(pending.part.receives, CallBuffer), "of a state there is no replica"
            replica.target = pending.part.receives if pending.call in self._calls else None
            return replica
        if pending.call not in self._calls:
            return None
        return pending.part.receives if pending.part.fits(nbytes) else None

    def next_clock(self) -> int:
        """Return the clock of the first push after all that the user has made so far."""
        held = [self._directory.counts.counted(key) + sum(map(_pushes, calls)) for key, calls in self._waiting.items()]
        return max([self._directory.counts.clock, *held]) + 1

    # --- asking ---

    def open(self, call: Call, now: float) -> None:
        """Enter a call."""
        self._calls[call.number] = call
        self.deadlines.add(call.number, now + call.timeout)

    def ask(self, call: Call | None, peer: Peer, part: Part | None = None) -> int:
        """Return the id for a request of a call, or of the session itself."""
        number = self._next_request
        self._next_request += 1
        self._requests[number] = Request(NO_CALL if call is None else call.number, peer, part)
        if call is not None:
            call.open[number] = None
        return number

    def request(self, call: Call | None, peer: Peer, message: m.Message, priority: int = URGENT) -> Send:
        """Return what asks something for a call, or for the session itself, without a payload."""
        number = self.ask(call, peer)
        self._requests[number].message = message
        return Send(peer, number, message, None, priority)

    def again(self, peer: Peer, now: float) -> list[Effect]:
        """Return what sends everything again that a server has not answered, in the order in which it was asked.

        The numbers of pushes tell the server what it has had before. What nobody waits for is asked again only if it
        brings a contribution. All of it is urgent, so that it keeps that order: some of it was asked because what had
        been asked before was there, which another server knows nothing of.
        """
        effects: list[Effect] = []
        for number, request in list(self._requests.items()):
            if request.peer != peer:
                continue
            call, part = self._calls.get(request.call), request.part
            if call is None and not request.pushes:
                del self._requests[number]
                continue
            message, payload = (request.message, None) if part is None else (part.message, part.sends)
            assert message is not None, "it is that of a part, or of its own"
            if call is not None and hasattr(message, "timeout"):
                left = max(0.0, self.deadlines[call.number] - now)
                message = structs.replace(message, timeout=answer_time(left))
            effects.append(Send(peer, number, message, payload, URGENT))
        return effects

    def ask_scheduler(self, call: Call | None, message: m.Message) -> list[Effect]:
        """Ask the scheduler for something, as soon as it can be asked."""
        send = self.request(call, SCHEDULER, message)
        return [] if self.outage is not None else [send]

    def ask_scheduler_again(self, now: float) -> list[Effect]:
        """Ask the scheduler for all that it has not answered; what it has answered it knows by the numbers."""
        effects: list[Effect] = []
        for number, request in self._requests.items():
            message = request.message
            if request.peer != SCHEDULER or message is None:
                continue
            if request.call in self._calls and hasattr(message, "timeout"):
                left: dict[str, Any] = {"timeout": answer_time(max(0.0, self.deadlines[request.call] - now))}
                message = structs.replace(message, **left)
            effects.append(Send(SCHEDULER, number, message))
        return effects

    def transfer(self, call: Call, now: float, *, rank: Rank) -> list[Effect]:
        """Send what a transfer of this rank sends, or hold it until its keys have room."""
        self.open(call, now)
        assert call.transfer is not None, "it is a transfer"
        if call.transfer.operation is Operation.INIT:
            options = call.transfer.options
            wait, root = answer_time(call.timeout), min(options.group, default=0)
            rows = call.transfer.rows
            parts = self._directory.init(call.number, call.tensors, rows, wait, options, values=rank == root)
            return self._send(call, parts)
        return self._enter(call)

    def finish(self, call: Call, now: float) -> list[Effect]:
        """Send a call's `last` message to the scheduler when all pushes so far have arrived at their servers."""
        self.open(call, now)
        call.tensors = [tensor for calls in self._waiting.values() for held in calls for tensor in held.tensors]
        return self._enter(call)

    def change(self, call: Call, now: float) -> list[Effect]:
        """Ask the servers for another policy when all earlier calls of its keys are sent."""
        self.open(call, now)
        assert call.change is not None, "it is a change"
        specs = [(key, self._directory.keys.spec(key)) for key in call.change.keys]
        call.tensors = [(key, spec) for key, spec in specs if spec is not None]
        return self._enter(call)

    def limit(self, last: int | None, *, for_good: bool) -> list[Effect]:
        """Push nothing beyond a clock, for good or until there is another limit."""
        if (last, for_good) == (self._last, self._is_last):
            return []
        self._last, self._is_last = last, for_good
        return self._resume(tuple(self._waiting))

    def _is_beyond(self, call: Call) -> bool:
        """Tell whether a call would push something beyond the limit."""
        if self._last is None or not _pushes(call):
            return False
        return self._directory.counts.next_clock([key for key, _ in call.tensors]) > self._last

    def _begin_change(self, call: Call, change: Change) -> list[Effect]:
        """Let later calls of the keys wait, and see that all pushes so far have arrived."""
        self._directory.ask_for(change.keys)
        self._changing[call.number] = call
        for key in change.keys:
            self._waiting.setdefault(key, deque()).appendleft(call)
        return self._fence(call)

    def _go_on(self, call: Call, change: Change) -> list[Effect]:
        """Send what comes next for a change; nothing: it is over."""
        if not change.asked:
            change.asked, call.result, wait = True, None, answer_time(call.timeout)
            asks = [m.SetPolicy(change.policy, some.keys, some.old, some.group, wait) for some in change.leaving]
            return [self.request(call, peer, message) for message in asks for peer in change.servers]
        if change.told:
            return []
        change.told = True
        self._directory.keys.follow(change.policy, change.keys)
        return self._tell(call, change)

    def _tell(self, call: Call, change: Change) -> list[Effect]:
        """Tell the server that decides rounds which keys have left them, if there are any."""
        left = [some for some in change.leaving if get_policy(some.old).decides and some.old != change.policy]
        messages = [m.Switched(some.keys, some.old, some.group, answer_time(call.timeout)) for some in left]
        return [self.request(call, LEADER, message) for message in messages]

    def _changed(self, call: Call) -> list[Effect]:
        """Send the calls that have waited for a change of their keys' policy which is over."""
        if self._changing.pop(call.number, None) is None:
            return []
        return self._resume(tuple(self._unhold(call)))

    def _enter(self, call: Call) -> list[Effect]:
        """Send what a call sends, or hold it until its turn comes."""
        call.held = self._obstacle(call)
        if call.held is None:
            return self._begin(call)
        for key in dict.fromkeys(key for key, _ in call.tensors):
            self._waiting.setdefault(key, deque()).append(call)
        return []

    def _fence(self, call: Call) -> list[Effect]:
        """Ask the servers what is answered at once, behind the pushes that they have not answered.

        What they hear by way of the scheduler could overtake those. Frames of one priority keep their order.
        """
        parts = [(request.peer, request.part) for request in self._requests.values()]
        behind = dict.fromkeys((peer, part.priority) for peer, part in parts if part and part.push)
        message = m.GetRules(answer_time(call.timeout))
        effects: list[Effect] = [self.request(call, peer, message, priority) for peer, priority in behind]
        return effects or self._complete(call)

    def _begin(self, call: Call) -> list[Effect]:
        """Send what a call sends, now that its turn has come, or have it encoded first."""
        if call.last is not None:
            return self._fence(call)
        if call.change is not None:
            return self._begin_change(call, call.change)
        if self._is_last and self._is_beyond(call):
            text = f"{call.what}: this worker leaves after step {self._last}, and nobody waits for what it pushes then"
            return self.fail(call, MembershipError(text))
        pushes = _pushes(call)
        asking = self._directory.keys.asking(call.tensors) if pushes else None
        if asking is not None:
            text = f"{call.what}: another policy of key {asking!r} was asked for in vain: call set_policy again"
            return self.fail(call, PolicyError(text, key=asking))
        # Rows are sent as they are.
        if pushes and call.transfer is not None and not call.transfer.rows:
            call.encode = self._encodings.encode(call.number, call.tensors, call.compression.push)
        if call.encode is None:
            return self._exchange(call)
        self._encoding[call.number] = call
        call.held = call.tensors[0][0]
        for key in dict.fromkeys(key for key, _ in call.tensors):
            self._waiting.setdefault(key, deque()).appendleft(call)
        return [call.encode]

    def encoded(self, number: int, error: AiokvError | None) -> list[Effect]:
        """Send what was encoded, whether its caller still waits for it or not; or end the call with an error."""
        call = self._encoding.pop(number)
        keys = self._unhold(call)
        call.held = None
        effects: list[Effect] = []
        if error is None:
            effects = self._exchange(call)
        elif number in self._calls:
            effects = self.fail(call, error)
        return effects + self._resume(tuple(keys))

    def forget_keys(self, keys: list[Key]) -> list[Effect]:
        """Forget what is left of keys that are no more."""
        self._encodings.forget(keys)
        return [ForgetResiduals(keys)]

    def owe(self, keys: list[Key]) -> None:
        """Take note that something of keys is left that was not sent."""
        for key in keys:
            self._encodings.owe(key)

    def _obstacle(self, call: Call) -> Key | None:
        """Return a key because of which the call can't be sent yet."""
        if self._waiting:
            # Calls of a key stay in their order.
            for key, _ in call.tensors:
                first = self._waiting.get(key)
                if first and first[0] is not call:
                    return key
        if call.transfer is None or not _pushes(call):
            return None
        if self._last is not None and not self._is_last and self._is_beyond(call):
            return call.tensors[0][0]
        return self._directory.full(call.tensors, self._most, len(call.transfer.rows))

    def _exchange(self, call: Call) -> list[Effect]:
        assert call.transfer is not None, "only transfers have tensors"
        transfer, wait = call.transfer, answer_time(call.timeout)
        parts = self._directory.exchange(
            call.number, transfer.operation, call.tensors, transfer.rows, wait, transfer.priority
        )
        if call.encode is not None:
            refer_to_encoded(parts, call.encode)
        if call.compression.pull is not None:
            ask_compressed(parts, call.tensors, call.compression.pull)
        return self._send(call, parts)

    def send(self, call: Call, parts: list[Part], now: float) -> list[Effect]:
        """Send what a call that is no transfer sends."""
        self.open(call, now)
        return self._send(call, parts)

    def _send(self, call: Call, parts: list[Part]) -> list[Effect]:
        if self.whole:
            self._bind_together(parts)
        effects: list[Effect] = []
        for part in parts:
            request = self.ask(call, part.peer, part)
            effects.append(Send(part.peer, request, part.message, part.sends, part.priority))
        return effects or self._complete(call)

    def _bind_together(self, parts: list[Part]) -> None:
        """Let the pushes among these messages say that they count together."""
        pushes = [(part.peer, part.message) for part in parts if part.push is not None]
        if not pushes:
            return
        self._pushing += 1
        counts = Counter(peer for peer, _ in pushes)
        for peer, message in pushes:
            assert isinstance(message, m.Push | m.PushBundle | m.PushRows), "only these push"
            message.whole = m.Whole(self._pushing, counts[peer], len(counts))

    def _resume(self, keys: tuple[Key, ...]) -> list[Effect]:
        """Send the first held calls of keys that have room again."""
        effects: list[Effect] = []
        look = list(keys) if self._waiting else []
        while look:
            waiting = self._waiting.get(look.pop())
            if not waiting:
                continue
            call = waiting[0]
            if call.number in self._encoding or call.number in self._changing:
                continue
            call.held = self._obstacle(call)
            if call.held is None:
                look += self._unhold(call)
                effects += self._begin(call)
        return effects

    def _unhold(self, call: Call) -> list[Key]:
        """Take a call out of those that wait for their turn; return its keys."""
        keys = list(dict.fromkeys(key for key, _ in call.tensors))
        for key in keys:
            waiting = self._waiting[key]
            waiting.remove(call)
            if not waiting:
                del self._waiting[key]
        return keys

    # --- answers ---

    def answered(self, peer: Peer, request: int, message: m.Message, nbytes: int) -> list[Effect]:
        """Take in the answer to a request of a call.

        Raises:
            ProtocolError: it was not asked, or by somebody else.
        """
        pending = self.take(peer, request)
        part = pending.part
        effects: list[Effect] = []
        freed: tuple[Key, ...] = ()
        if part is not None:
            # Not by `isinstance`, which takes five times as long to say no.
            counted = type(message) is not m.Error or is_counted(message.code)
            push = part.push
            if push is not None and not counted:
                self._directory.take_back(part)
            if type(part.sends) is EncodedParts:
                effects.append(self._settle(part, part.sends, counted=counted))
            if push is not None and isinstance(message, (m.Value, m.Done)) and message.dropped:
                push.dropped = message.dropped
            freed = self._directory.answered(part)
            if push is not None and push.dropped and freed:
                self._count_dropped(pending.call, freed, push.dropped)
            if part.bundle is not None and isinstance(message, m.Bundled):
                self._directory.bundled(part.bundle, message.bundle)
        call = self._calls.get(pending.call)
        if call is not None:
            call.open.pop(request)
            effects += self._advance(call, peer, part, message, nbytes)
        elif self._kept:
            effects += self._let_go(pending)
        return effects + self._resume(freed) if self._waiting else effects

    def _count_dropped(self, number: int, keys: tuple[Key, ...], reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + len(keys)
        call = self._calls.get(number)
        if call is not None:
            call.result = {**(call.result or {}), **dict.fromkeys(keys, reason)}

    def _settle(self, part: Part, sent: EncodedParts, *, counted: bool) -> Effect:
        """Let go of what was encoded for a part."""
        if not counted:
            self.owe([part.key] if part.bundle is None else list(part.bundle.keys))
        return Settle(sent, counted)

    def go_on(self, peer: Peer, request: int, ask: Callable[[float], list[Part]], now: float) -> list[Effect]:
        """Take an answer in, and ask what its call asks after that, if somebody still waits for it.

        Raises:
            ProtocolError: it was not asked, or by somebody else.
        """
        call = self._calls.get(self.take(peer, request).call)
        if call is None:
            return []
        del call.open[request]
        return self._send(call, ask(answer_time(self.deadlines[call.number] - now)))

    def take(self, peer: Peer, request: int) -> Request:
        """Take an answered request out.

        Raises:
            ProtocolError: it was not asked, or by somebody else.
        """
        pending = self._requests.get(request)
        if pending is None or pending.peer != peer:
            raise ProtocolError(f"an answer to request {request}, which was not asked")
        return self._requests.pop(request)

    def _advance(self, call: Call, peer: Peer, part: Part | None, message: m.Message, nbytes: int) -> list[Effect]:
        if type(message) is m.Error:
            return self.fail(call, from_code(message.code, message.message, message.details))
        # The length of a compressed difference is checked where it is decoded.
        fits = not nbytes if part is None else part.fits(nbytes)
        if not fits and not getattr(message, "codec", 0):
            expected = 0 if part is None else part.nbytes
            text = f"{call.what}: {self._label(peer)} answered {nbytes} bytes where {expected} were asked for"
            return self.fail(call, ProtocolError(text))
        if isinstance(message, m.Value) and part is not None:
            self._directory.received(part, message.version)
            if self._directory.keys.has_steps:
                self._read(call, part, message.round)
        elif not isinstance(message, m.Done):
            self._keep(call, peer, part, message)
        if call.open:
            return []
        return self._complete(call) if call.reads is None else self._read_again(call, call.reads)

    def _read(self, call: Call, part: Part, number: Round) -> None:
        lane = self._directory.read(part, number)
        if lane is not None:
            call.reads = call.reads or WholeReads()
            call.reads.add(lane, part, number)

    def _read_again(self, call: Call, reads: WholeReads) -> list[Effect]:
        """Complete a call whose values are of one round, or ask again for the older ones."""
        if reads.is_whole:
            return self._complete(call)
        if reads.is_hopeless:
            self.torn_reads += 1
            return self._complete(call)
        return self._send(call, reads.again(min(PATIENCE, answer_time(call.timeout))))

    def _keep(self, call: Call, peer: Peer, part: Part | None, message: m.Message) -> None:
        """Take what an answer says into the result of a call."""
        match message:
            case m.RulesState() | m.Tally():
                call.result = [*(call.result or []), message]
            case m.CommandResult(result) if isinstance(call.result, dict):
                call.result[peer] = result
            case m.Met(said):
                call.result = dict(said)
            case m.Pushes() if part is not None and isinstance(call.result, list):
                call.result.append((part.key, message))
            case m.Reached(number):
                call.result = number
            case m.State(version) if part is not None and isinstance(part.receives, CallBuffer):
                call.result = {} if call.result is None else call.result
                call.result[part.receives.number] = version

    # --- ends ---

    def _complete(self, call: Call) -> list[Effect]:
        if call.last is not None:
            message, call.last = call.last, None
            return self.ask_scheduler(call, message)
        if call.change is not None and (effects := self._go_on(call, call.change)):
            return effects
        del self._calls[call.number]
        self.deadlines.pop(call.number, None)
        if call.transfer is not None and call.transfer.operation is Operation.INIT:
            self._directory.initialized(call.tensors, len(call.transfer.rows), call.transfer.options)
        complete: list[Effect] = [Complete(call.number, call.result)]
        return complete + self._changed(call) if self._changing else complete

    def _forget(self, call: Call) -> list[Effect]:
        """Forget a call before all its requests are answered; they stay known until they are."""
        del self._calls[call.number]
        self.deadlines.discard(call.number)
        pending = [(number, self._requests[number]) for number in call.open]
        receiving = [(request.peer, number) for number, request in pending if request.part and request.part.receives]
        effects: list[Effect] = [Release(call.number, receiving, self._to_keep(call, [one for _, one in pending]))]
        if call.held is not None and call.number not in self._encoding:
            effects += self._resume(tuple(self._unhold(call)))
        return effects + self._changed(call)

    def _to_keep(self, call: Call, pending: list[Request]) -> list[int]:
        """Return the tensors of a call that ends which may have to be sent again."""
        kept = [request for request in pending if request.pushes and not _is_encoded(request)]
        if kept:
            self._kept[call.number] = len(kept)
        tensors: dict[int, None] = {}
        for request in kept:
            sends = request.part.sends if request.part else None
            if isinstance(sends, CallMemory):
                tensors[sends.tensor] = None
            else:
                assert isinstance(sends, CallTensors), "what is compressed is kept elsewhere"
                tensors |= dict.fromkeys(sends.tensors)
        return list(tensors)

    def _let_go(self, request: Request) -> list[Effect]:
        """Take note that a message of a call that has ended will not be sent again."""
        if request.call not in self._kept or not request.pushes or _is_encoded(request):
            return []
        self._kept[request.call] -= 1
        if self._kept[request.call]:
            return []
        del self._kept[request.call]
        return [Discard(request.call)]

    def fail(self, call: Call, error: AiokvError) -> list[Effect]:
        """End a call with an error."""
        return [*self._forget(call), Fail(call.number, error)]

    def cancel(self, number: int) -> list[Effect]:
        """End a call whose caller does not wait any longer."""
        call = self._calls.get(number)
        return [] if call is None else self._forget(call)

    def fail_all(self, error_of: ErrorOf) -> list[Effect]:
        """End all calls with errors."""
        return self._fail_each(list(self._calls.values()), error_of)

    def fail_requests_to(self, peer: Peer, error_of: ErrorOf) -> list[Effect]:
        """End the calls that wait for a peer which is gone."""
        concerned: dict[int, Call] = {}
        effects: list[Effect] = []
        for number, request in list(self._requests.items()):
            if request.peer != peer:
                continue
            del self._requests[number]
            if request.part is not None:
                self._directory.answered(request.part)
                if isinstance(request.part.sends, EncodedParts):
                    effects.append(self._settle(request.part, request.part.sends, counted=True))
            call = self._calls.get(request.call)
            if call is not None:
                call.open.pop(number)
                concerned[call.number] = call
            effects += self._let_go(request)
        return effects + self._fail_each(list(concerned.values()), error_of)

    def fail_held(self, error_of: ErrorOf) -> list[Effect]:
        """End the calls that wait for their turn."""
        return self._fail_each([call for call in self._calls.values() if call.held is not None], error_of)

    def _fail_each(self, calls: list[Call], error_of: ErrorOf) -> list[Effect]:
        # Backwards, so that no held call is sent because the one before it has ended.
        return [effect for call in reversed(calls) for effect in self.fail(call, error_of(call.what))]

    def expire(self, now: float) -> list[Effect]:
        """End the calls that have waited too long, and say for whom."""
        effects: list[Effect] = []
        # Backwards, so that no held call is sent because the one before it has ended.
        for number in reversed(self.deadlines.due(now)):
            call = self._calls[number]
            effects += self.fail(call, self._late(call))
        return effects

    def _late(self, call: Call) -> AiokvError:
        if call.number in self._encoding:
            return CallTimeoutError(f"{call.what}: not compressed within {call.timeout:.3g} s; it will count")
        if call.held is not None and self._last is not None and not self._is_last:
            text = f"{call.what}: no word from the scheduler within {call.timeout:.3g} s whether this worker leaves"
            return CallTimeoutError(text, key=call.held)
        if call.held is not None:
            text = (
                f"{call.what}: not sent within {call.timeout:.3g} s, because {self._most} pushes of key {call.held!r} "
                "are not answered yet, or calls before this one wait for that"
            )
            return CallTimeoutError(text, key=call.held)
        silent = dict.fromkeys(self._requests[request].peer for request in call.open)
        names = " and ".join(self._label(peer) + self._outage(peer) for peer in silent)
        if SCHEDULER in silent and self.outage is not None:
            return self.outage(f"{call.what} has waited {call.timeout:.3g} s for it")
        return CallTimeoutError(f"{call.what}: no answer from {names} within {call.timeout:.3g} s", server=list(silent))

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        for number, call in self._calls.items():
            assert number == call.number
            assert bool(call.open) == (call.held is None), "a call without open requests is held, or complete"
            for request in call.open:
                assert self._requests[request].call == number
            assert call.held is None or all(call in self._waiting[key] for key, _ in call.tensors)
        for waiting in self._waiting.values():
            assert waiting
            known = self._calls | self._encoding
            assert all(known[call.number] is call for call in waiting)
            assert all(call.held is not None or call.number in self._changing for call in waiting)
            assert all(call.number not in self._encoding for call in list(waiting)[1:])
        assert self.deadlines.holds(self._calls.keys())
        assert not self._requests or max(self._requests) < self._next_request


def _is_encoded(request: Request) -> bool:
    return request.part is not None and isinstance(request.part.sends, EncodedParts)


def _pushes(call: Call) -> bool:
    return call.transfer is not None and call.transfer.operation is not Operation.PULL
