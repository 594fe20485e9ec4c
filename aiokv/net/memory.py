"""A connection inside one process: between a worker and the server shard that it hosts. Bytes are copied, not sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.errors import AiokvError
from aiokv.net.link import Outgoing, detach
from aiokv.wire.receiver import Frame, Head
from aiokv.wire.sendqueue import SendQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.net.link import Owner
    from aiokv.types import Peer
    from aiokv.wire.messages import Message

TURN_BYTES = 2 * 1024 * 1024
"""How much is copied in one turn of the loop: what goes over the network meanwhile must not wait for long."""


class Carried(Outgoing):
    """A frame on its way: what is known of it, instead of its first bytes."""

    __slots__ = ("message", "request")

    def __init__(
        self,
        request: int,
        message: Message,
        payload: memoryview | None,
        sent: Callable[[], None] | None,
        call: int,
    ) -> None:
        super().__init__(b"", payload, sent, call)
        self.request = request
        self.message = message


class MemoryLink:
    """One end of a connection between two drivers in the same loop. It has the methods of a `Link`.

    Args:
        owner: whom to report to.
        peer: the owner's number for this connection.
        initiator: True on the side that connected.
    """

    established = True
    remote = "this process"
    pending_slot = None
    """A payload is never only partly here."""

    def __init__(self, owner: Owner, *, peer: Peer, initiator: bool) -> None:
        self.peer = peer
        self.initiator = initiator
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._owner = owner
        self._other: MemoryLink
        self._queue: SendQueue[Carried] = SendQueue()
        self._turn: asyncio.Handle | None = None
        self._closed = False

    def join(self, other: MemoryLink) -> None:
        """Connect this end to the other one."""
        self._other, other._other = other, self

    @property
    def queued_bytes(self) -> int:
        """How much waits to be copied."""
        return sum(frame.nbytes for frame in self._queue)

    def send_message(
        self,
        request: int,
        message: Message,
        payload: memoryview | None = None,
        sent: Callable[[], None] | None = None,
        *,
        call: int = -1,
        priority: int = 0,
    ) -> None:
        """Queue a frame. See `Link.send_message`."""
        frame = Carried(request, message, payload, sent, call)
        if self._closed:
            frame.done()
            return
        self._queue.add(frame, priority)

    def flush(self) -> None:
        """Begin to move what is queued, a part in each turn of the loop."""
        if self._queue and self._turn is None and not self._closed:
            self._turn = self._loop.call_soon(self._move)

    def detach(self, call: int, most: int) -> bool:
        """Copy queued payloads of a call, up to about `most` bytes; return whether there are more."""
        return detach(self._queue, call, most)

    def holds(self, call: int) -> bool:
        """Tell that nothing is ever out of reach."""
        return False

    async def drained(self) -> None:
        """Return at once: what is not in the queue has arrived."""

    def set_reading(self) -> None:
        """Do nothing: the other end is of this process, and what it sends is bounded."""

    def discard(self, request: int) -> None:
        """Do nothing: no payload is ever half received."""

    def refuse(self, error: AiokvError) -> None:
        """Close, and tell the other side why."""
        self._end(str(error), error)

    def close(self) -> None:
        """Close when everything that was queued has arrived."""
        while self._queue and not self._closed:
            self._move()
        self._end("connection closed", None)

    def abort(self) -> None:
        """Close at once."""
        self._end("connection closed", None)

    # --- inside ---

    def _move(self) -> None:
        self._turn = None
        frames: list[Frame] = []
        moved = 0
        refusal: AiokvError | None = None
        while self._queue and moved < TURN_BYTES and refusal is None:
            frame = self._queue.take()
            moved += frame.nbytes
            try:
                frames.append(self._other._land(frame))
            except AiokvError as error:
                refusal = error
            frame.done()
        self.flush()
        if not self._other._closed:
            self._other._owner.frames_received(self._other, frames)
        if refusal is not None:
            self._other.refuse(refusal)

    def _land(self, frame: Carried) -> Frame:
        """Copy a payload to where it belongs on this side."""
        if frame.payload is None or self._closed:
            return Frame(frame.request, frame.message, None, 0)
        landing = self._owner.land(self, Head(frame.request, frame.message, frame.payload.nbytes))
        landing.view[:] = frame.payload
        return Frame(frame.request, frame.message, landing.slot, frame.payload.nbytes)

    def _end(self, reason: str, error: AiokvError | None) -> None:
        for end in (self, self._other):
            if end._closed:
                continue
            end._closed = True
            if end._turn is not None:
                end._turn.cancel()
            for frame in list(end._queue):
                frame.done()
            end._queue.clear()
            end._loop.call_soon(end._down, reason, error)

    def _down(self, reason: str, error: AiokvError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        self._owner.link_down(self, reason, error)
