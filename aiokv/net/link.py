"""What a driver knows of a connection, whatever carries it: `tcp.Link` or, inside a process, `memory.MemoryLink`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from aiokv.errors import AiokvError
    from aiokv.types import Peer
    from aiokv.wire.messages import Message
    from aiokv.wire.receiver import Frame, Head, Landing


class AnyLink(Protocol):
    """What a `Link` and a `MemoryLink` have in common for those who own them. See `Link`."""

    peer: Peer
    initiator: bool
    ended: asyncio.Future[None]
    remote: str
    """Where the other side is, for people; empty as long as that is not known."""

    @property
    def established(self) -> bool:
        """True when the other side belongs to the cluster."""

    @property
    def pending_slot(self) -> int | None:
        """Slot of a payload that is only partly here."""

    @property
    def queued_bytes(self) -> int:
        """How much waits to leave."""

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
        """Queue a message."""

    def flush(self) -> None:
        """Begin to send what is queued."""

    def detach(self, call: int, most: int) -> bool:
        """Copy queued payloads of a call, up to about `most` bytes; return whether there are more."""

    def holds(self, call: int) -> bool:
        """Tell whether a payload of a call is out of reach."""

    async def drained(self) -> None:
        """Wait until nothing is out of reach."""

    def set_reading(self) -> None:
        """Stop to read, or go on, as the owner is busy or not."""

    def discard(self, request: int) -> None:
        """Receive nothing more into the memory of this request."""

    def refuse(self, error: AiokvError) -> None:
        """Close, and say why."""

    def close(self) -> None:
        """Close when everything has been sent."""

    def abort(self) -> None:
        """Close at once."""


class Owner(Protocol):
    """Whom a link reports to."""

    @property
    def busy(self) -> bool:
        """Whether what is received has to wait."""

    def land(self, link: AnyLink, head: Head) -> Landing:
        """Choose where a payload goes."""

    def link_up(self, link: AnyLink) -> None:
        """Take note that the handshake is done."""

    def frames_received(self, link: AnyLink, frames: list[Frame]) -> None:
        """Take in whole frames."""

    def link_down(self, link: AnyLink, reason: str, error: AiokvError | None) -> None:
        """Take note that the connection is over; `error` when this side or the peer refused to go on."""


class Outgoing:
    """A frame in the queue. `sent` is called once: when its bytes have left the process, or never will."""

    __slots__ = ("call", "head", "payload", "sent")

    def __init__(self, head: bytes, payload: memoryview | None, sent: Callable[[], None] | None, call: int) -> None:
        self.head = head
        self.payload = payload
        self.sent = sent
        self.call = call

    @property
    def nbytes(self) -> int:
        """Bytes of the whole frame."""
        return len(self.head) + (self.payload.nbytes if self.payload is not None else 0)

    def leave(self, head: bytes) -> None:
        """Go on without the payload, which was copied, and give its memory back."""
        self.head, self.payload, self.call = head, None, -1
        self.done()
        self.sent = None

    def done(self) -> None:
        """Give the payload's memory back."""
        if self.sent is not None:
            self.sent()


def detach(queue: Iterable[Outgoing], call: int, most: int) -> bool:
    """Put copies in the place of a call's payloads, up to about `most` bytes; return whether there are more."""
    copied = 0
    for outgoing in queue:
        if outgoing.call != call or outgoing.payload is None:
            continue
        if copied >= most:
            return True
        copied += outgoing.payload.nbytes
        outgoing.payload, outgoing.call = memoryview(bytes(outgoing.payload)), -1
    return False
