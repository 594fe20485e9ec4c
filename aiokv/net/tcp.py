"""One TCP connection: bytes in through `wire.Connection`, frames out through a queue that never copies a payload."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import deque
from typing import TYPE_CHECKING, cast

from aiokv.addresses import format_address
from aiokv.errors import AiokvError, ChecksumError
from aiokv.net import tls
from aiokv.net.link import Outgoing, detach
from aiokv.net.shared import Segments, Sharing
from aiokv.net.silence import end_when_silent
from aiokv.net.watch import Watch
from aiokv.wire.connection import Connection, goodbye
from aiokv.wire.frames import encode_frame
from aiokv.wire.limits import Limits
from aiokv.wire.sendqueue import SendQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.net.link import Owner
    from aiokv.types import Peer
    from aiokv.wire.frames import Checksum
    from aiokv.wire.messages import Message
    from aiokv.wire.receiver import Frame, Head, Landing

WINDOW_BYTES = 512 * 1024
"""How many bytes may lie in the transport. What waits in our queue can be copied when its owner wants it back."""

BATCH = 16
"""How many frames are handed on before it is looked at how much waits to be sent."""

LINGER_SECONDS = 5.0
"""How long a connection that is closed may wait for the other side to read the rest."""

UNWANTED_BYTES = 4096
"""How much of what is not wanted any longer is received at a time."""

LAST = -(1 << 40)
"""Priority of the frame that closes a connection."""

JOIN_BYTES = 16 * 1024
"""Payloads up to this size are copied behind their header: one write for many small frames."""


def peer_address(transport: asyncio.BaseTransport) -> str:
    """Return where the other side of a connection is, as `host:port`; empty where that has no such address."""
    name = transport.get_extra_info("peername")
    return format_address(*name[:2]) if isinstance(name, tuple) else ""


def in_words(error: Exception) -> str:
    """Return why a connection failed, without the number that the system has for it."""
    if not isinstance(error, OSError):
        return str(error)
    # What is wrong with a name has numbers of its own, which are negative; asyncio puts addresses before the reason.
    text = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
    return text.lower()


class Link(asyncio.BufferedProtocol):
    """The protocol of one connection.

    Args:
        owner: whom to report to.
        initiator: True on the side that connected.
        cluster: the cluster's id; both sides must have the same.
        token: the shared secret.
        peer: the owner's number for this connection.
        remote: where the other side is, if that is known before it is connected.
        limits: what the other side may send.
        max_queued_bytes: with more than this waiting to be sent nothing is read, so that a peer that asks and does not
            read can't fill the memory. Only for the side that answers: with both it would be a deadlock.
        segments: makes the memory that is shared with a peer on this host; None: none is.
        checksum: of every frame; None: there is none.
        patience: after so many seconds without a sign of life of the other side the connection ends.
        system_patience: the same for the systems at its ends, for which it is none that the other side does not read.
    """

    def __init__(
        self,
        owner: Owner,
        *,
        initiator: bool,
        cluster: str,
        token: str,
        peer: Peer,
        remote: str = "",
        limits: Limits | None = None,
        max_queued_bytes: int | None = None,
        segments: Segments | None = None,
        checksum: Checksum | None = None,
        patience: float = 10.0,
        system_patience: float = 60.0,
    ) -> None:
        self.peer = peer
        self.initiator = initiator
        self.remote = remote
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is over."""
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(
            initiator=initiator,
            cluster=cluster,
            token=token.encode(),
            nonce=secrets.token_bytes(32),
            land=self._land,
            limits=limits or Limits(),
            open_shared=None if segments is None or initiator else segments.open,
            checksum=checksum,
            patience=patience,
            now=self._loop.time(),
        )
        self._transport: asyncio.Transport | None = None
        self._watch = Watch(self._connection, self)
        self._queue: SendQueue[Outgoing] = SendQueue()
        self._queued_bytes = 0
        self._max_queued_bytes = max_queued_bytes
        self._reading = True
        self._backlog: deque[Frame] = deque()
        self._written: list[Outgoing] = []
        self._written_bytes = 0
        self._drained: list[asyncio.Future[None]] = []
        self._error: AiokvError | None = None
        self._closed = False
        self._secured = False
        self._seals = checksum is not None
        self._system_patience = system_patience
        self._flushing = False
        self._unwanted: memoryview | None = None
        """Where what comes while the connection is closed is received into."""
        self._lingering: asyncio.TimerHandle | None = None
        self._sharing = Sharing(self._connection, segments if initiator else None)

    @property
    def established(self) -> bool:
        """True when the other side has proved that it belongs to the cluster."""
        return self._connection.established

    @property
    def queued_bytes(self) -> int:
        """How much waits to be written, without what lies in the transport."""
        return self._queued_bytes

    @property
    def unsent_bytes(self) -> int:
        """How much lies in the transport, since the other side takes no more for now."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def is_reading(self) -> bool:
        """Whether what the other side sends is read."""
        return self._reading

    @property
    def pending_slot(self) -> int | None:
        """Slot of a payload that is only partly here."""
        return self._connection.pending_slot

    # --- called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        stream = cast("asyncio.Transport", transport)  # uvloop's transports are none by class
        self._transport = stream
        self.remote = peer_address(stream) or self.remote
        endpoint = transport.get_extra_info("socket")
        if endpoint is not None and endpoint.family in (socket.AF_INET, socket.AF_INET6):
            endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_when_silent(endpoint, self._system_patience)
        # With no low mark, `resume_writing` says exactly when nothing of ours lies in the transport. A transport with
        # TLS would take an empty buffer for a full one if the high mark were none either.
        self._secured = stream.get_extra_info("sslcontext") is not None
        stream.set_write_buffer_limits(high=1 if self._secured else 0, low=0)
        self._watch.begin()
        self.write_link_frames()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory to receive into."""
        return self._connection.get_buffer() if self._unwanted is None else self._unwanted

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what was received."""
        if self._closed:
            self._connection.heard()
            return
        was_established = self._connection.established
        try:
            frames = self._connection.buffer_updated(nbytes)
        except AiokvError as error:
            # What came before it is in good order: a peer may answer and then say why it closes.
            self._deliver(self._connection.undelivered)
            self.refuse(self._from_whom(error))
            return
        self.write_link_frames()
        if not was_established and self._connection.established:
            self._watch.established()
            self._owner.link_up(self)
        self._sharing.received()
        self._deliver(frames)
        if self._queue:
            # The other side may have made room in the shared memory.
            self.flush()

    def eof_received(self) -> bool:
        """Close when the other side has closed."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back everything that was queued and report."""
        self._closed = True
        self._transport = None
        self._watch.end()
        if self._lingering is not None:
            self._lingering.cancel()
        self._sharing.close()
        # It arrived whole, so it counts; there is nobody left to read the answers.
        self._reading = True
        self._deliver([])
        pending = [*self._written, *self._queue]
        self._written.clear()
        self._queue.clear()
        for outgoing in pending:
            outgoing.done()
        self._wake_drained()
        if not self.ended.done():
            self.ended.set_result(None)
        self._owner.link_down(self, self._reason(exc), self._error)

    def _from_whom(self, error: AiokvError) -> AiokvError:
        """Name the peer in an error about bytes that were changed on their way: it may be the fault of its machine."""
        if not isinstance(error, ChecksumError) or not self.remote:
            return error
        return ChecksumError(f"{error.message} (from {self.remote})", **error.details, address=self.remote)

    def _reason(self, exc: Exception | None) -> str:
        if self._error is not None:
            return str(self._error)
        if self._secured and self.initiator and not self.established:
            return tls.UNHEARD
        if self._connection.gone:
            return self._connection.gone
        return in_words(exc) if exc else "connection closed"

    def pause_writing(self) -> None:
        """Do nothing: what may lie in the transport is counted here."""

    def resume_writing(self) -> None:
        """Take note that the transport is empty, and go on."""
        if self._flushing:
            # A transport with TLS may say so while it is being written to.
            self._loop.call_soon(self.resume_writing)
            return
        self._empty()
        self.flush()

    # --- called by the owner ---

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
        """Queue a message under a request id, followed by the payload. The rest is as in `send`."""
        head = encode_frame(message, request, payload.nbytes if payload is not None else 0)
        self.send(head, payload, sent, call=call, priority=priority)

    def send(
        self,
        head: bytes,
        payload: memoryview | None = None,
        sent: Callable[[], None] | None = None,
        *,
        call: int = -1,
        priority: int = 0,
    ) -> None:
        """Queue a frame; `flush` writes.

        Args:
            head: header and control part.
            payload: bytes that stay as they are until `sent` is called.
            sent: called when the payload's memory is not needed any longer.
            call: the user's call that the payload belongs to.
            priority: of what waits, the highest leaves first.
        """
        if self._closed:
            if sent is not None:
                sent()
            return
        outgoing = Outgoing(head, payload, sent, call)
        self._queue.add(outgoing, priority)
        self._queued_bytes += outgoing.nbytes
        self.set_reading()

    def flush(self) -> None:
        """Write as much of the queue as the transport may hold."""
        transport = self._transport
        if transport is None or self._closed:
            return
        self._flushing = True
        joined: list[bytes | memoryview] = []
        while self._queue and self._written_bytes < WINDOW_BYTES and not self._must_wait(self._queue.peek()):
            outgoing = self._queue.take()
            self._queued_bytes -= outgoing.nbytes
            if self._seals:
                outgoing.head = self._connection.seal(outgoing.head, outgoing.payload)
            self._sharing.leave(outgoing)
            self._written.append(outgoing)
            self._written_bytes += outgoing.nbytes
            joined.append(outgoing.head)
            payload = outgoing.payload
            if payload is None:
                continue
            self._consider_sharing(payload.nbytes)
            if payload.nbytes <= JOIN_BYTES:
                joined.append(payload)
                continue
            transport.write(b"".join(joined))
            joined.clear()
            transport.write(payload)
        if joined:
            transport.write(b"".join(joined))
        self._flushing = False
        if self._written and not transport.get_write_buffer_size():
            if self._queue:
                # There is more; but first the loop may read, or nothing would flow both ways.
                self._loop.call_soon(self.resume_writing)
            else:
                self._empty()
        self.set_reading()

    def detach(self, call: int, most: int) -> bool:
        """Copy queued payloads of a call, up to about `most` bytes; return whether there are more."""
        return detach(self._queue, call, most)

    def holds(self, call: int) -> bool:
        """Tell whether a payload of a call lies in the transport, out of reach."""
        return any(outgoing.call == call and outgoing.payload is not None for outgoing in self._written)

    async def drained(self) -> None:
        """Wait until nothing lies in the transport, or the connection is over."""
        if not self._written or self._closed:
            return
        future = self._loop.create_future()
        self._drained.append(future)
        await future

    def set_reading(self) -> None:
        """Stop to read while too much waits to be sent or the owner is busy; go on when half of it has left."""
        limit = self._max_queued_bytes
        if limit is None or self._transport is None or self._closed:
            return
        wanted = not self._owner.busy and self._queued_bytes <= (limit if self._reading else limit // 2)
        if wanted == self._reading or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
            self._loop.call_soon(self._deliver, [])
        else:
            self._transport.pause_reading()
            # What has waited for room in the shared memory would not hear of it now.
            self._loop.call_soon(self.flush)

    def discard(self, request: int) -> None:
        """Receive nothing more into the memory of this request."""
        self._connection.discard(request)

    def refuse(self, error: AiokvError) -> None:
        """Tell the other side what it did wrong, and close."""
        self._error = error
        if not self._closed:
            self.send(goodbye(error), priority=LAST)
        self.close()

    def close(self) -> None:
        """Close when everything that was queued has been sent."""
        if self._transport is not None and not self._closed:
            self._written_bytes = -(1 << 62)
            self.flush()
            self._end(self._transport)
        self._closed = True

    def write_link_frames(self) -> None:
        """Write what the connection itself has to say."""
        data = self._connection.data_to_send()
        if data and self._transport is not None and not self._closed:
            self._transport.write(data)

    def abort(self) -> None:
        """Close at once."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    # --- inside ---

    def _end(self, transport: asyncio.Transport) -> None:
        """Close when everything is written; with shared memory when the other side has read it, too.

        The other side says when it has copied something out of the memory. If that met a closed socket, the system
        would reset the connection, and what the other side has not read yet would be lost.
        """
        if not self._connection.sharing or transport.is_closing():
            transport.close()
            return
        self._unwanted = memoryview(bytearray(UNWANTED_BYTES))
        if not self._reading:
            transport.resume_reading()
        transport.write_eof()
        self._lingering = self._loop.call_later(LINGER_SECONDS, transport.abort)

    def _consider_sharing(self, nbytes: int) -> None:
        """Offer shared memory to a peer on this host when the first large payload comes along."""
        if self._transport is not None and self._sharing.offer(nbytes, self._transport):
            self.write_link_frames()

    def _must_wait(self, outgoing: Outgoing) -> bool:
        """Say whether a frame waits for room in the shared memory.

        While nothing is read, nobody says that there is room again; and what is left when the connection closes goes
        through the stream at once.
        """
        return self._reading and self._written_bytes >= 0 and not self._sharing.has_room(outgoing)

    def _land(self, head: Head) -> Landing:
        self._consider_sharing(head.payload_nbytes)
        return self._owner.land(self, head)

    def _deliver(self, frames: list[Frame]) -> None:
        """Hand frames on; only a few at a time when each may make much to send, and none while reading is stopped."""
        if self._max_queued_bytes is None:
            if frames:
                self._owner.frames_received(self, frames)
            return
        self._backlog.extend(frames)
        while self._backlog and self._reading:
            batch = [self._backlog.popleft() for _ in range(min(BATCH, len(self._backlog)))]
            self._owner.frames_received(self, batch)

    def _empty(self) -> None:
        if self._transport is None or self._transport.get_write_buffer_size():
            return
        self._watch.emptied = True
        written, self._written = self._written, []
        self._written_bytes = 0
        for outgoing in written:
            outgoing.done()
        self._wake_drained()

    def _wake_drained(self) -> None:
        for future in self._drained:
            if not future.done():
                future.set_result(None)
        self._drained.clear()
