"""What a worker asks for before its user does, where servers send fresh values ahead of reads (Dai et al., 2015).

A worker that has read a key since its last push of it is a registered reader. Right behind its next push it asks for
the value that holds it, which the server sends as soon as the policy lets this worker go on. The next pull is served
from what came, or takes over what is still under way. A push in between makes it outdated, and so does whatever has let
this worker meet others, such as a barrier: what they have pushed before that is to be in what it reads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.effects import Allocate, CallMemory, Deallocate, Deliver, Effect, Send
from aiokv.core.joiner import answer_time
from aiokv.core.records import Record, field
from aiokv.core.stimuli import Operation, Transfer
from aiokv.core.worker.call import NO_CALL, Call
from aiokv.core.worker.encoding import ask_compressed
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.open_calls import OpenCalls
    from aiokv.core.worker.parts import Part, Tensors
    from aiokv.core.worker.requests import Requests
    from aiokv.types import Key, Version


class Ahead(Record, eq=False):
    """One key that is read ahead, by a `call` of the session's own, whose number is negative and names the memory.

    `came` are the parts that are there, with their versions: nobody has read them yet. `tensors` are those of the
    user's call that get the value.
    """

    call: Call
    came: list[tuple[Part, Version]] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)


class ReadAhead:
    """The part of `Calls` that reads ahead.

    Args:
        directory: what is known of the keys.
        requests: what was asked.
        calls: those that are open, to which it adds its own.
    """

    def __init__(self, directory: Directory, requests: Requests, calls: OpenCalls) -> None:
        self._directory = directory
        self._requests = requests
        self._calls = calls
        self._last = NO_CALL
        self._readers: dict[Key, None] = {}
        """Keys that were read since they were last pushed."""
        self._kept: dict[Key, Ahead] = {}
        """What was asked for and no pull has got."""
        self.served = 0
        """How many tensors pulls have got that were asked for ahead."""

    def __bool__(self) -> bool:
        """Tell whether anything is kept that could be outdated."""
        return bool(self._kept)

    # --- pushes ---

    def follow(self, call: Call) -> list[Effect]:
        """Ask for the keys of a push that was just sent, where this worker is their reader."""
        found = {key: spec for key, spec in self._eager(call) if key in self._readers}
        assert call.transfer is not None, "it pushes"
        if call.transfer.operation is Operation.PUSHPULL:
            # It has its read with it.
            self._register(call)
            return []
        for key in found:
            del self._readers[key]
        # Nobody waits for the answer to a push whose caller has gone.
        return self._ask(call, list(found.items())) if found and self._waits(call) else []

    def _waits(self, call: Call) -> bool:
        return call.number in self._calls and call.until > -math.inf

    def _ask(self, push: Call, tensors: Tensors) -> list[Effect]:
        assert push.transfer is not None, "it pushes"
        priority = push.transfer.priority
        parts = self._directory.exchange(push.number, Operation.PULL, tensors, [], answer_time(push.timeout), priority)
        if push.compression.pull is not None:
            ask_compressed(parts, tensors, push.compression.pull)
        effects: list[Effect] = []
        for key, spec in tensors:
            self._last -= 1
            pull = Transfer(self._last, Operation.PULL, [(key, spec)], push.timeout, priority)
            call = Call(self._last, Operation.PULL, push.timeout, 0, pull.tensors, pull)
            self._kept[key] = Ahead(call)
            self._calls.enter(call, push.until)
            effects.append(Allocate(call.number, spec))
        for part in parts:
            call, memory = self._kept[part.key].call, part.receives
            assert isinstance(memory, CallMemory), "keys whose reads may wait are in no bundle"
            memory.call, memory.tensor, part.is_ahead = call.number, 0, True
            request = self._requests.ask(call, part.peer, part)
            effects.append(Send(part.peer, request, part.message, None, part.priority))
        return effects

    # --- what is outdated ---

    def drop(self, keys: Iterable[Key]) -> list[Effect]:
        """Let go of what was asked for of keys, whether it is there or not."""
        effects: list[Effect] = []
        for key in keys:
            ahead = self._kept.pop(key, None)
            if ahead is None:
                continue
            call = ahead.call
            if call.number in self._calls:
                del self._calls[call.number]
                effects.append(self._requests.release(call))
            effects.append(Deallocate(call.number))
        return effects

    def drop_all(self) -> list[Effect]:
        """Let go of everything."""
        return self.drop(list(self._kept))

    # --- answers ---

    def answered(self, call: Call, part: Part, message: m.Message, nbytes: int) -> list[Effect]:
        """Take in an answer for which no pull waits yet; after an error the next one asks for itself."""
        if not isinstance(message, m.Value) or not (part.fits(nbytes) or message.codec):
            return self.drop([part.key])
        self._kept[part.key].came.append((part, message.version))
        if not call.open:
            del self._calls[call.number]
        return []

    # --- pulls ---

    def serve(self, call: Call, parts: list[Part]) -> tuple[list[Part], list[Effect]]:
        """Give a pull what was asked for ahead; return the parts that are left to be asked, and what is outdated."""
        self._register(call)
        taken: dict[Key, Ahead] = {}
        effects: list[Effect] = []
        for tensor, (key, _) in enumerate(call.tensors):
            if key in self._kept and not self._is_in_time(self._kept[key].call, call):
                effects += self.drop([key])
            if key in self._kept:
                taken[key] = self._kept.pop(key)
                self._take_over(taken[key].call, call)
            if key in taken:
                taken[key].tensors.append(tensor)
        call.ahead = list(taken.values())
        return [part for part in parts if part.key not in taken], effects

    def _is_in_time(self, own: Call, pull: Call) -> bool:
        """Tell whether a value is there, or is answered before a pull gives up, and be it with an error."""
        if own.number not in self._calls:
            return True
        return self._waits(own) and not (self._waits(pull) and pull.until < own.until)

    def _take_over(self, own: Call, pull: Call) -> None:
        """Let what is still under way be what the pull has asked."""
        if own.number not in self._calls:
            return
        del self._calls[own.number]
        for number in own.requests:
            request = self._requests.get(number)
            assert request is not None, "it is open"
            request.call = pull.number
            pull.ask(number)
        own.open = 0

    def ask_again(self, part: Part, wait: float) -> Part:
        """Let a pull ask for itself, in its own time, for what was asked for ahead of it and came too late."""
        assert isinstance(part.message, m.Pull), "nothing else is read ahead"
        return structs.replace(part, message=structs.replace(part.message, timeout=wait), is_ahead=False)

    def hand_over(self, call: Call) -> list[Effect]:
        """Give a pull that is complete the values that it has taken over: now they are read."""
        effects: list[Effect] = []
        for ahead in call.ahead:
            for part, version in ahead.came:
                self._directory.received(part, version)
            self.served += len(ahead.tensors)
            effects.append(Deliver(call.number, ahead.call.number, ahead.tensors))
        return effects

    def forget(self, call: Call) -> list[Effect]:
        """Let go of what a pull has taken over that ends before it is complete."""
        return [Deallocate(ahead.call.number) for ahead in call.ahead]

    # --- keys ---

    def _eager(self, call: Call) -> Tensors:
        """Return the tensors of a call whose values are sent ahead: no rows, since nobody knows which will be read."""
        assert call.transfer is not None, "only transfers have tensors"
        dense = len(call.tensors) - len(call.transfer.rows)
        return [tensor for tensor in call.tensors[:dense] if self._directory.keys.is_eager(tensor[0])]

    def _register(self, call: Call) -> None:
        self._readers.update(dict.fromkeys(key for key, _ in self._eager(call)))
