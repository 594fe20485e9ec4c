"""What answers make of a worker's calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import CallBuffer, EncodedParts
from aiokv.core.joiner import answer_time
from aiokv.core.worker.changing import refusal
from aiokv.core.worker.whole_reads import PATIENCE, WholeReads
from aiokv.errors import ProtocolError, RoundTimeoutError, from_code, is_counted
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.effects import CallMemory, CallTensors, Effect, Replica
    from aiokv.core.worker.call import Call
    from aiokv.core.worker.calls import Calls
    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.parts import Part
    from aiokv.types import Key, Peer, Round


class Replies:
    """The answers to all calls of one worker.

    Args:
        calls: begins and ends them.
        directory: what is known of the keys.
        label: names a peer, for errors.
    """

    __slots__ = ("_calls", "_directory", "_label", "dropped", "torn_reads")

    def __init__(self, calls: Calls, directory: Directory, label: Callable[[Peer], str]) -> None:
        self._calls = calls
        self._directory = directory
        self._label = label
        self.dropped: dict[str, int] = {}
        """How many contributions to a key count nowhere, by reason."""
        self.torn_reads = 0
        """How many calls have got values that are not of one round."""

    def landing(self, request: int, nbytes: int) -> CallMemory | CallTensors | CallBuffer | Replica | None:
        """Return where the payload of an answer belongs; None when nobody waits for it any longer.

        A replica is kept up to date all the same.
        """
        pending = self._calls.requests.get(request)
        if pending is None or pending.part is None:
            return None
        replica = pending.part.replica
        if replica is not None:
            assert not isinstance(pending.part.receives, CallBuffer), "of a state there is no replica"
            replica.target = pending.part.receives if pending.call in self._calls.open else None
            return replica
        if pending.call not in self._calls.open:
            return None
        return pending.part.receives if pending.part.fits(nbytes) else None

    def answered(self, peer: Peer, request: int, message: m.Message, nbytes: int, now: float) -> list[Effect]:
        """Take in the answer to a request of a call.

        Raises:
            ProtocolError: it was not asked, or by somebody else.
        """
        calls = self._calls
        pending = calls.requests.take(peer, request)
        part = pending.part
        effects: list[Effect] = []
        freed: tuple[Key, ...] = ()
        if part is None:
            if type(message) is m.Met and isinstance(pending.message, m.Barrier):
                # Also if nobody waits for it any longer.
                calls.meetings.passed(pending.message, message)
        else:
            # Not by `isinstance`, which takes five times as long to say no.
            counted = type(message) is not m.Error or is_counted(message.code)
            push = part.push
            if push is not None and not counted:
                self._directory.take_back(part)
                # It waits for that push.
                effects += calls.ahead.drop([part.key])
            if type(part.sends) is EncodedParts:
                effects.append(calls.encodings.settle(part, part.sends, counted=counted))
            if push is not None and isinstance(message, (m.Value, m.Done)) and message.dropped:
                push.dropped = message.dropped
            freed = self._directory.answered(part)
            if push is not None and push.dropped and freed:
                self._count_dropped(pending.call, freed, push.dropped)
            if part.bundle is not None and isinstance(message, m.Bundled):
                self._directory.bundled(part.bundle, message.bundle)
        call = calls.open.get(pending.call)
        if call is not None:
            call.answered(request)
            effects += self._advance(call, peer, part, message, nbytes, now)
        else:
            effects += calls.requests.let_go(pending)
        if calls.is_plain or not calls.turns.waiting:
            return effects
        effects += calls.resume(freed)
        if not calls.turns.waiting:
            calls.look()
        return effects

    def _count_dropped(self, number: int, keys: tuple[Key, ...], reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + len(keys)
        call = self._calls.open.get(number)
        if call is not None:
            call.result = {**(call.result or {}), **dict.fromkeys(keys, reason)}

    def go_on(self, peer: Peer, request: int, ask: Callable[[float], list[Part]], now: float) -> list[Effect]:
        """Take an answer in, and ask what its call asks after that, if somebody still waits for it.

        Raises:
            ProtocolError: it was not asked, or by somebody else.
        """
        calls = self._calls
        call = calls.open.get(calls.requests.take(peer, request).call)
        if call is None:
            return []
        call.answered(request)
        return calls.send_on(call, ask(answer_time(call.until - now)))

    def _advance(
        self, call: Call, peer: Peer, part: Part | None, message: m.Message, nbytes: int, now: float
    ) -> list[Effect]:
        calls = self._calls
        if part is not None and part.is_ahead:
            if call.is_own:
                return calls.ahead.answered(call, part, message, nbytes)
            if type(message) is m.Error and message.code == RoundTimeoutError.code:
                left = max(0.0, call.until - now)
                return calls.send_on(call, [calls.ahead.ask_again(part, answer_time(left))])
        if type(message) is m.Error:
            error = from_code(message.code, message.message, message.details)
            return calls.fail(call, error if call.change is None else refusal(call.change, self._label(peer), error))
        # The length of a compressed difference is checked where it is decoded.
        fits = not nbytes if part is None else part.fits(nbytes)
        if not fits and not getattr(message, "codec", 0):
            expected = 0 if part is None else part.nbytes
            text = f"{call.what}: {self._label(peer)} answered {nbytes} bytes where {expected} were asked for"
            return calls.fail(call, ProtocolError(text))
        if isinstance(message, m.Value) and part is not None:
            self._directory.received(part, message.version)
            if not calls.is_plain and self._directory.keys.has_steps:
                self._read(call, part, message.round)
        elif not isinstance(message, m.Done):
            call.keep(peer, part, message)
        if call.open:
            return []
        return calls.complete(call) if call.reads is None else self._read_again(call, call.reads)

    def _read(self, call: Call, part: Part, number: Round) -> None:
        lane = self._directory.read(part, number)
        if lane is not None:
            call.reads = call.reads or WholeReads()
            call.reads.add(lane, part, number)

    def _read_again(self, call: Call, reads: WholeReads) -> list[Effect]:
        """Complete a call whose values are of one round, or ask again for the older ones."""
        if reads.is_whole:
            return self._calls.complete(call)
        if reads.is_hopeless:
            self.torn_reads += 1
            return self._calls.complete(call)
        return self._calls.send_on(call, reads.again(min(PATIENCE, answer_time(call.timeout))))
