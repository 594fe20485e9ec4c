"""A worker's calls: how each of them is sent when its turn has come, and how it ends. See also `replies`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiokv.core.effects import (
    Complete,
    Effect,
    EncodedParts,
    Fail,
    Send,
)
from aiokv.core.joiner import answer_time
from aiokv.core.stimuli import Operation
from aiokv.core.worker.call import UNCOMPRESSED
from aiokv.core.worker.changing import Changing
from aiokv.core.worker.encoding import Encodings, ask_compressed, refer_to_encoded
from aiokv.core.worker.meetings import Meetings
from aiokv.core.worker.open_calls import OpenCalls
from aiokv.core.worker.read_ahead import ReadAhead
from aiokv.core.worker.replies import Replies
from aiokv.core.worker.requests import Requests
from aiokv.core.worker.turns import Turns
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    PolicyError,
)
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.worker.call import Call
    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.parts import Part
    from aiokv.types import Key, Peer, Rank

ErrorOf = Callable[[str], AiokvError]


class Calls:
    """All calls of one worker.

    Args:
        directory: what is known of the keys.
        label: names a peer, for errors.
        outage: says what is wrong with the connection to it, if anything is.
        max_open_pushes: how many pushes of one key may be under way; calls that would push more of it wait here.
    """

    __slots__ = (
        "_binds",
        "_changing",
        "_directory",
        "_label",
        "_outage",
        "_pushing",
        "ahead",
        "compression",
        "encodings",
        "is_plain",
        "meetings",
        "open",
        "outage",
        "replies",
        "requests",
        "turns",
        "whole",
    )

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
        self.outage: ErrorOf | None = None
        """Why the scheduler can't be asked at the moment."""
        self.meetings = Meetings()
        """The barriers that were passed."""
        self.requests = Requests()
        """What they have asked, and what the session has asked for itself."""
        self.open = OpenCalls()
        """The calls that are not over."""
        self.turns = Turns(directory, max_open_pushes)
        """Which of them wait for others."""
        self.encodings = Encodings(directory)
        self.compression = UNCOMPRESSED
        """How pushes and pulls are compressed."""
        self.whole = False
        """Whether the pushes of a call are to count together; see `Whole`."""
        self._pushing = 0
        """How many calls have pushed so."""
        self._changing = Changing(directory, self.requests, self.turns)
        self.ahead = ReadAhead(directory, self.requests, self.open)
        self.replies = Replies(self, directory, label)
        """What becomes of what servers answer."""
        self._binds = False
        """Whether the pushes of a call are to say that they count together."""
        self.is_plain = False
        """Whether a push or pull need not be looked at for its turn, policy or compression, while no push is under way.

        With thousands of workers each thing that is looked at is in no cache.
        """

    # --- read only ---

    @property
    def is_pushing(self) -> bool:
        """Whether a push is not answered, or not sent yet."""
        return self.turns.are_pushing or self.requests.are_pushing

    def is_open(self, number: int) -> bool:
        """Tell whether a call is not over."""
        return number in self.open

    def next_clock(self) -> int:
        """Return the clock of the first push after all that the user has made so far."""
        return self.turns.next_clock()

    # --- asking ---

    def look(self) -> None:
        """Find out what has to be looked at for each push and pull; these do not change it, but what else comes may."""
        self._binds, self.is_plain = self._find_binds(), self._find_plain()

    def _find_binds(self) -> bool:
        return self.whole or self._directory.keys.binds

    def _find_plain(self) -> bool:
        keys, turns, compression = self._directory.keys, self.turns, self.compression
        is_compressed = self.encodings.begun or compression.push is not None or compression.pull is not None
        differs = keys.has_steps or keys.has_eager or keys.is_asking or self._changing
        return not (turns.waiting or turns.is_limited or is_compressed or differs)

    def enter(self, call: Call, now: float) -> None:
        """Enter a call."""
        self.open.enter(call, now + call.timeout)

    def again(self, peer: Peer, now: float) -> list[Effect]:
        """Return what sends everything again that a server has not answered."""
        return self.requests.again(peer, lambda call: self._time_left(call, now))

    def ask_scheduler(self, call: Call | None, message: m.Message) -> list[Effect]:
        """Ask the scheduler for something, as soon as it can be asked."""
        send = self.requests.send(call, SCHEDULER, message)
        return [] if self.outage is not None else [send]

    def ask_scheduler_again(self, now: float) -> list[Effect]:
        """Ask the scheduler for all that it has not answered."""
        return self.requests.ask_scheduler_again(lambda call: self._time_left(call, now))

    def _time_left(self, call: int, now: float) -> float | None:
        return self.open.left(call, now)

    def send(self, call: Call, parts: list[Part], now: float) -> list[Effect]:
        """Send what a call that is no transfer sends."""
        self.enter(call, now)
        return self.send_on(call, parts)

    def init(self, call: Call, now: float, *, rank: Rank) -> list[Effect]:
        """Send what an init of this rank sends."""
        self.enter(call, now)
        assert call.transfer is not None, "it is a transfer"
        options = call.transfer.options
        wait, root = answer_time(call.timeout), min(options.group, default=0)
        rows = call.transfer.rows
        parts = self._directory.init(call.number, call.tensors, rows, wait, options, values=rank == root)
        return self.send_on(call, parts)

    def transfer(self, call: Call, now: float) -> list[Effect]:
        """Send what a push or pull sends, or hold it until its keys have room."""
        call.compression = self.compression
        self.enter(call, now)
        if self.is_plain and not self._directory.pushes.open:
            return self._exchange(call)
        return self._take_turn(call)

    def finish(self, call: Call, now: float) -> list[Effect]:
        """Send a call's `last` message to the scheduler when all pushes so far have arrived at their servers."""
        self.enter(call, now)
        call.tensors = self.turns.tensors
        return self._take_turn(call)

    def change(self, call: Call, now: float) -> list[Effect]:
        """Ask the servers for another rule, or policy, when all earlier calls of its keys are sent."""
        self.enter(call, now)
        assert call.change is not None, "it is a change"
        call.tensors = self._changing.tensors(call.change)
        return self._take_turn(call)

    def limit(self, last: int | None, *, for_good: bool) -> list[Effect]:
        """Push nothing beyond a clock, for good or until there is another limit."""
        return self.resume(tuple(self.turns.waiting)) if self.turns.limit(last, for_good=for_good) else []

    def _take_turn(self, call: Call) -> list[Effect]:
        """Send what a call sends, or hold it until its turn comes."""
        call.held = self.turns.obstacle(call)
        if call.held is None:
            return self._begin(call)
        self.turns.hold(call)
        self.is_plain = False
        return []

    def resume(self, keys: tuple[Key, ...]) -> list[Effect]:
        """Send the first held calls of keys that have room again."""
        effects: list[Effect] = []
        look = list(keys) if self.turns.waiting else []
        while look:
            waiting = self.turns.waiting.get(look.pop())
            if not waiting:
                continue
            call = waiting[0]
            if call.number in self.encodings.calls or call.number in self._changing:
                continue
            call.held = self.turns.obstacle(call)
            if call.held is None:
                look += self.turns.release(call)
                effects += self._begin(call)
        return effects

    # --- sending ---

    def _begin(self, call: Call) -> list[Effect]:
        """Send what a call sends, now that its turn has come, or have it encoded first."""
        if call.last is not None:
            return self._fence(call) or self.complete(call)
        if call.change is not None:
            trials = self._changing.begin(call, call.change)
            # Policies are about the pushes of before.
            return trials + (self._fence(call) if call.change.policy else []) or self.complete(call)
        refusal = self.turns.refusal(call)
        if refusal is not None:
            return self.fail(call, refusal)
        pushes = call.pushes
        asking = self._directory.keys.asking(call.tensors) if pushes else None
        if asking is not None:
            text = f"{call.what}: another policy of key {asking!r} was asked for in vain: call set_policy again"
            return self.fail(call, PolicyError(text, key=asking))
        if pushes and call.transfer is not None:
            # Rows, of the last tensors, are sent as they are.
            dense = call.tensors[: len(call.tensors) - len(call.transfer.rows)]
            call.encode = self.encodings.encode(call.number, dense, call.compression.push)
        if call.encode is None:
            return self._exchange(call)
        self.encodings.calls[call.number] = call
        call.held = call.tensors[0][0]
        self.turns.hold_others(call)
        return [call.encode]

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
        if self.is_plain or not self._directory.keys.has_eager:
            return self.send_on(call, parts)
        return self._exchange_eagerly(call, parts)

    def _exchange_eagerly(self, call: Call, parts: list[Part]) -> list[Effect]:
        """Send what some servers answer before they are asked."""
        if call.pushes:
            outdated = self.ahead.drop(call.keys)
            return outdated + self.send_on(call, parts) + self.ahead.follow(call)
        parts, outdated = self.ahead.serve(call, parts)
        return outdated + self.send_on(call, parts)

    def send_on(self, call: Call, parts: list[Part]) -> list[Effect]:
        """Send parts of a call that is open; without any, and if it waits for nothing else, it is complete."""
        if self._binds:
            self._bind_together(parts)
        ask = self.requests.ask
        effects: list[Effect] = [
            Send(part.peer, ask(call, part.peer, part), part.message, part.sends, part.priority) for part in parts
        ]
        return effects if call.open else self.complete(call)

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

    def encoded(self, number: int, error: AiokvError | None) -> list[Effect]:
        """Send what was encoded, whether its caller still waits for it or not; or end the call with an error."""
        call = self.encodings.calls.pop(number)
        keys = self.turns.release(call)
        call.held = None
        effects: list[Effect] = []
        if error is None:
            effects = self._exchange(call)
        elif number in self.open:
            effects = self.fail(call, error)
        return effects + self.resume(tuple(keys))

    def _fence(self, call: Call) -> list[Effect]:
        """Ask the servers what is answered at once, behind the pushes that they have not answered.

        What they hear by way of the scheduler could overtake those. Frames of one priority keep their order.
        """
        message = m.GetRules(answer_time(call.timeout))
        behind = self.requests.ways_of_pushes()
        return [self.requests.send(call, peer, message, priority) for peer, priority in behind]

    def _changed(self, call: Call) -> list[Effect]:
        """Send the calls that have waited for a change which is over."""
        return self.resume(tuple(self._changing.end(call)))

    # --- ends ---

    def complete(self, call: Call) -> list[Effect]:
        """End a call of which all is answered, or ask what comes after that."""
        if call.last is not None:
            message, call.last = call.last, None
            return self.ask_scheduler(call, message)
        if call.change is not None:
            effects = self._changing.go_on(call, call.change)
            self.look()
            if effects:
                return effects
        del self.open[call.number]
        if call.transfer is not None and call.transfer.operation is Operation.INIT:
            self._directory.initialized(call.tensors, len(call.transfer.rows), call.transfer.options)
            self.look()
        complete: list[Effect] = [Complete(call.number, call.result)]
        if self.is_plain:
            return complete
        if call.ahead:
            complete = self.ahead.hand_over(call) + complete
        elif call.transfer is None and self.ahead:
            # It may have met others, whose pushes its user is to see.
            complete = self.ahead.drop_all() + complete
        return complete + self._changed(call) if self._changing else complete

    def _forget(self, call: Call) -> list[Effect]:
        """Forget a call before all its requests are answered; they stay known until they are."""
        del self.open[call.number]
        effects: list[Effect] = [self.requests.release(call), *self.ahead.forget(call)]
        if call.held is not None and call.number not in self.encodings.calls:
            effects += self.resume(tuple(self.turns.release(call)))
        return effects + self._changed(call)

    def fail(self, call: Call, error: AiokvError) -> list[Effect]:
        """End a call with an error."""
        if call.is_own:
            # Nobody waits for it: who pulls next asks for itself.
            return self.ahead.drop(call.keys)
        return [*self._forget(call), Fail(call.number, error)]

    def cancel(self, number: int) -> list[Effect]:
        """End a call whose caller does not wait any longer."""
        call = self.open.get(number)
        return [] if call is None else self._forget(call)

    def fail_all(self, error_of: ErrorOf) -> list[Effect]:
        """End all calls with errors."""
        return self._fail_each(list(self.open.values()), error_of)

    def fail_requests_to(self, peer: Peer, error_of: ErrorOf) -> list[Effect]:
        """End the calls that wait for a peer which is gone."""
        concerned: dict[int, Call] = {}
        effects: list[Effect] = []
        for number, request in self.requests.take_all_to(peer):
            if request.part is not None:
                self._directory.answered(request.part)
                if isinstance(request.part.sends, EncodedParts):
                    effects.append(self.encodings.settle(request.part, request.part.sends, counted=True))
            call = self.open.get(request.call)
            if call is not None:
                call.answered(number)
                concerned[call.number] = call
            effects += self.requests.let_go(request)
        return effects + self._fail_each(list(concerned.values()), error_of)

    def fail_held(self, error_of: ErrorOf) -> list[Effect]:
        """End the calls that wait for their turn."""
        return self._fail_each([call for call in self.open.values() if call.held is not None], error_of)

    def _fail_each(self, calls: list[Call], error_of: ErrorOf) -> list[Effect]:
        # Backwards, so that no held call is sent because the one before it has ended.
        return [effect for call in reversed(calls) for effect in self.fail(call, error_of(call.what))]

    def expire(self, now: float) -> list[Effect]:
        """End the calls that have waited too long, and say for whom."""
        effects: list[Effect] = []
        # Backwards, so that no held call is sent because the one before it has ended.
        for call in reversed(self.open.due(now)):
            # What is read ahead may be outdated by a call that was held until now.
            if call.number in self.open:
                effects += self.fail(call, self._late(call))
        return effects

    def _late(self, call: Call) -> AiokvError:
        if call.number in self.encodings.calls:
            return CallTimeoutError(f"{call.what}: not compressed within {call.timeout:.3g} s; it will count")
        if call.held is not None:
            return self.turns.late(call)
        silent = dict.fromkeys(pending.peer for pending in map(self.requests.get, call.requests) if pending is not None)
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
        waiting_calls = self.turns.waiting
        for number, call in self.open.items():
            assert number == call.number
            assert bool(call.open) == (call.held is None), "a call without open requests is held, or complete"
            for request in map(self.requests.get, call.requests):
                assert request is not None
                assert request.call == number
            assert call.held is None or all(call in waiting_calls[key] for key in call.keys)
        for waiting in waiting_calls.values():
            assert waiting
            known = self.open | self.encodings.calls
            assert all(known[call.number] is call for call in waiting)
            assert all(call.held is not None or call.number in self._changing for call in waiting)
            assert all(call.number not in self.encodings.calls for call in list(waiting)[1:])
        assert self._binds == self._find_binds()
        assert self._find_plain() or not self.is_plain
        self.requests.validate()
