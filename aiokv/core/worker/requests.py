"""What a worker has asked and has no answer to: which request is whose, and which may have to be sent again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.effects import (
    URGENT,
    CallMemory,
    CallTensors,
    Discard,
    Effect,
    EncodedParts,
    Release,
    Send,
)
from aiokv.core.joiner import REGISTER_REQUEST, answer_time
from aiokv.core.records import Record
from aiokv.core.worker.call import NO_CALL
from aiokv.errors import ProtocolError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.worker.call import Call
    from aiokv.core.worker.parts import Part
    from aiokv.types import Peer

TimeLeft = Callable[[int], float | None]
"""Returns the seconds that a call still waits; None: it is over."""


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

    @property
    def needs_memory(self) -> bool:
        """Whether it may have to be sent again from its call's memory: what is encoded is kept elsewhere."""
        return self.pushes and not (self.part is not None and isinstance(self.part.sends, EncodedParts))


class Requests:
    """All requests of one worker that are not answered."""

    __slots__ = ("_kept", "_next", "_open")

    def __init__(self) -> None:
        self._next = REGISTER_REQUEST + 1
        self._open: dict[int, Request] = {}
        self._kept: dict[int, int] = {}
        """How many messages of a call that has ended may have to be sent again from its memory."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def get(self, number: int) -> Request | None:
        """Return a request that is not answered."""
        return self._open.get(number)

    @property
    def are_pushing(self) -> bool:
        """Whether a push is among them."""
        return any(request.pushes for request in self._open.values())

    def pushes_until(self, clock: int) -> list[int]:
        """Return the ids of those that push with a clock, or an earlier one."""
        return [
            number
            for number, request in self._open.items()
            if request.part and request.part.push and getattr(request.part.message, "clock", 0) <= clock
        ]

    def ways_of_pushes(self) -> list[tuple[Peer, int]]:
        """Return to which servers, and with which priorities, pushes are under way."""
        parts = [(request.peer, request.part) for request in self._open.values()]
        return list(dict.fromkeys((peer, part.priority) for peer, part in parts if part and part.push))

    # --- asking ---

    def ask(self, call: Call | None, peer: Peer, part: Part | None = None) -> int:
        """Return the id for a request of a call, or of the session itself."""
        number = self._next
        self._next += 1
        self._open[number] = Request(NO_CALL if call is None else call.number, peer, part)
        if call is not None:
            call.ask(number)
        return number

    def send(self, call: Call | None, peer: Peer, message: m.Message, priority: int = URGENT) -> Send:
        """Return what asks something for a call, or for the session itself, without a payload."""
        number = self.ask(call, peer)
        self._open[number].message = message
        return Send(peer, number, message, None, priority)

    def again(self, peer: Peer, time_left: TimeLeft) -> list[Effect]:
        """Return what sends everything again that a server has not answered, in the order in which it was asked.

        The numbers of pushes tell the server what it has had before. What nobody waits for is asked again only if it
        brings a contribution. All of it is urgent, so that it keeps that order: some of it was asked because what had
        been asked before was there, which another server knows nothing of.
        """
        effects: list[Effect] = []
        for number, request in list(self._open.items()):
            if request.peer != peer:
                continue
            left, part = time_left(request.call), request.part
            if left is None and not request.pushes:
                del self._open[number]
                continue
            message, payload = (request.message, None) if part is None else (part.message, part.sends)
            assert message is not None, "it is that of a part, or of its own"
            effects.append(Send(peer, number, _within(message, left), payload, URGENT))
        return effects

    def ask_scheduler_again(self, time_left: TimeLeft) -> list[Effect]:
        """Ask the scheduler for all that it has not answered; what it has answered it knows by the numbers."""
        return [
            Send(SCHEDULER, number, _within(request.message, time_left(request.call)))
            for number, request in self._open.items()
            if request.peer == SCHEDULER and request.message is not None
        ]

    # --- ends ---

    def take(self, peer: Peer, number: int) -> Request:
        """Take an answered request out.

        Raises:
            ProtocolError: it was not asked, or by somebody else.
        """
        pending = self._open.get(number)
        if pending is None or pending.peer != peer:
            raise ProtocolError(f"an answer to request {number}, which was not asked")
        del self._open[number]
        return pending

    def take_all_to(self, peer: Peer) -> list[tuple[int, Request]]:
        """Take out all that nobody will answer any longer."""
        found = [(number, request) for number, request in self._open.items() if request.peer == peer]
        for number, _ in found:
            del self._open[number]
        return found

    def release(self, call: Call) -> Release:
        """Let go of the memory of a call that ends before all its requests are answered; they stay known until then."""
        pending = [(number, self._open[number]) for number in call.requests]
        receiving = [(request.peer, number) for number, request in pending if request.part and request.part.receives]
        kept = [request for _, request in pending if request.needs_memory]
        if kept:
            self._kept[call.number] = len(kept)
        return Release(call.number, receiving, _tensors(kept))

    def let_go(self, request: Request) -> list[Effect]:
        """Take note that a message of a call that has ended will not be sent again."""
        if request.call not in self._kept or not request.needs_memory:
            return []
        self._kept[request.call] -= 1
        if self._kept[request.call]:
            return []
        del self._kept[request.call]
        return [Discard(request.call)]

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert not self._open or max(self._open) < self._next


def _within(message: m.Message, left: float | None) -> m.Message:
    """Return a message that asks for an answer in the seconds that are left, if somebody still waits for it."""
    if left is None or not hasattr(message, "timeout"):
        return message
    return structs.replace(message, timeout=answer_time(left))


def _tensors(requests: list[Request]) -> list[int]:
    """Return the tensors of a call that these send."""
    tensors: dict[int, None] = {}
    for request in requests:
        sends = request.part.sends if request.part else None
        if isinstance(sends, CallMemory):
            tensors[sends.tensor] = None
        else:
            assert isinstance(sends, CallTensors), "what is compressed is kept elsewhere"
            tensors |= dict.fromkeys(sends.tensors)
    return list(tensors)
