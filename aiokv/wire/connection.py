"""One authenticated connection, sans-IO: a receiver behind a handshake. Opens no socket, reads no clock.

Until the peer is authenticated it may send `max_handshake_bytes` in `handshake_seconds`, and only the handshake's
messages in their order. After that every frame type is allowed but those.
"""

from __future__ import annotations

import math
from typing import Final

from aiokv.errors import AiokvError, HandshakeError, ProtocolError, from_code
from aiokv.wire.auth import Handshake
from aiokv.wire.frames import HEADER_BYTES, Checksum, by_reference, encode_frame, seal
from aiokv.wire.limits import DEFAULT_LIMITS, Limits
from aiokv.wire.liveness import Liveness
from aiokv.wire.messages import (
    FRAME_TYPES,
    TYPE_OF,
    Challenge,
    Freed,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    Proof,
    Share,
    Shared,
    Welcome,
)
from aiokv.wire.receiver import LINK_TYPES, Frame, Land, Receiver
from aiokv.wire.shared import Mapping, Open, SharedMemory

MAX_REASON_BYTES: Final = 1024
"""Longest reason in a `Goodbye`, so that it fits into what an unauthenticated peer may send."""

_TYPE_AT: Final = 5
"""Place of the frame type in a header."""

_PING: Final = encode_frame(Ping())
_PONG: Final = encode_frame(Pong())

_HANDSHAKE_TYPES: Final = frozenset(TYPE_OF[cls] for cls in (Hello, Challenge, Proof, Welcome))
_OPEN_TYPES: Final = frozenset(FRAME_TYPES) - _HANDSHAKE_TYPES


def goodbye(error: AiokvError) -> bytes:
    """Return the frame that tells a peer why this side closes the connection; write it last."""
    reason = error.message.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
    return encode_frame(Goodbye(error.code, reason))


class Connection:
    """The bytes of one connection.

    Args:
        initiator: this side opened the connection.
        cluster: id of the cluster; must be the same on both sides.
        token: shared secret of the cluster; may be empty, then nothing is proved.
        nonce: 32 bytes of fresh randomness for this connection alone.
        land: where payloads go; see `Receiver`.
        limits: what the peer may announce.
        open_shared: opens memory that the peer names; None: this side takes none.
        checksum: of every frame but those of the link itself; None: there is none. The same on both sides.
        patience: after so many seconds of silence, a quarter more at most, the peer is `gone`; see `watch`.
        now: the current time in seconds on the clock of `handle_timeout`.

    Raises:
        ValueError: the nonce has another length.
    """

    __slots__ = (
        "_checksum",
        "_deadline",
        "_handshake",
        "_handshake_bytes",
        "_limits",
        "_liveness",
        "_offered",
        "_open_shared",
        "_outgoing",
        "_receiver",
        "_shared",
    )

    def __init__(
        self,
        *,
        initiator: bool,
        cluster: str,
        token: bytes,
        nonce: bytes,
        land: Land,
        limits: Limits = DEFAULT_LIMITS,
        open_shared: Open | None = None,
        checksum: Checksum | None = None,
        patience: float = math.inf,
        now: float,
    ) -> None:
        self._limits = limits
        self._liveness = Liveness(patience)
        self._deadline: float | None = now + limits.handshake_seconds
        self._handshake = Handshake(initiator=initiator, cluster=cluster, token=token, nonce=nonce)
        self._handshake_bytes = 0
        self._receiver = Receiver(land, limits, self._receive_link, checksum)
        self._checksum = checksum
        self._open_shared = open_shared
        self._offered: Mapping | None = None
        self._shared: SharedMemory | None = None
        first = self._handshake.start()
        self._outgoing = b"" if first is None else encode_frame(first)
        self._admit()

    @property
    def established(self) -> bool:
        """True when both sides are authenticated: frames may be sent and will be returned."""
        return self._handshake.expected is None

    @property
    def pending_slot(self) -> int | None:
        """Slot of a landing that is not complete: the driver frees it when the connection ends."""
        return self._receiver.pending_slot

    @property
    def undelivered(self) -> list[Frame]:
        """Frames that were complete when `buffer_updated` raised because of what came behind them, a `Goodbye` say.

        The peer sent them in good order, so the driver handles them before it ends the connection.
        """
        return self._receiver.undelivered

    def get_buffer(self) -> memoryview:
        """Return the memory to receive into, never empty.

        Raises:
            ProtocolError: the connection has failed before.
        """
        return self._receiver.get_buffer()

    def buffer_updated(self, nbytes: int) -> list[Frame]:
        """Take `nbytes` that were received into the last `get_buffer`, and return the frames that they complete.

        Look at `data_to_send`, `offered` and `established` afterwards.

        Raises:
            HandshakeError: another protocol version, cluster or token.
            LimitError: a length is over its limit.
            ProtocolError: the peer broke the protocol, or the connection has failed before.
            AiokvError: the peer closes the connection and says why, with the class of its reason.
        """
        self._liveness.heard = True
        frames = self._receiver.buffer_updated(nbytes)
        freed = None if self._shared is None else self._shared.freed()
        if freed is not None:
            self._outgoing += encode_frame(freed)
        return frames

    def data_to_send(self) -> bytes:
        """Return and forget the bytes of link frames that wait to be written, in front of any other frame."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def deadline(self) -> float | None:
        """Return when `handle_timeout` wants to be called; None when established and not watched."""
        return self._deadline

    def handle_timeout(self, now: float) -> None:
        """Give up if the peer is not authenticated in time; later, see whether it is still there.

        Look at `data_to_send` and `gone` afterwards.

        Raises:
            HandshakeError: it is not; the message names what was missing.
        """
        if self._deadline is None or now < self._deadline:
            return
        expected = self._handshake.expected
        if expected is None:
            if self._liveness.look():
                self._outgoing += _PING
            self.watch(now)
            return
        error = HandshakeError(
            f"no {expected.__name__} from the peer within {self._limits.handshake_seconds:g} s: "
            "it is not an aiokv peer, is overloaded, or the network loses its data",
            expected=expected.__name__,
        )
        self._receiver.stop(error.message)
        raise error

    # --- whether the peer is still there ---

    def watch(self, now: float) -> None:
        """See from now on whether an authenticated peer is still there."""
        self._deadline = now + self._liveness.interval

    def heard(self) -> None:
        """Take note of a sign of life besides what was received: the peer's system has taken data that waited, say."""
        self._liveness.heard = True

    @property
    def gone(self) -> str:
        """What tells that the peer is not there any longer; empty while it may be. There is no use to say goodbye."""
        return str(self._liveness) if self._liveness.is_over else ""

    # --- frames ---

    def discard(self, request: int) -> None:
        """Give back the landing of the frame being received if it has this request id; see `Receiver.discard`."""
        self._receiver.discard(request)

    def seal(self, head: bytes, payload: memoryview | None) -> bytes:
        """Return header and control part of a frame as they are to be written, with a checksum if there are any."""
        if self._checksum is None or head[_TYPE_AT] in LINK_TYPES:
            return head
        return seal(self._checksum, head, payload)

    # --- shared memory ---

    @property
    def sharing(self) -> bool:
        """True when large payloads can go through shared memory."""
        return self._shared is not None

    @property
    def offered(self) -> bool:
        """True while the peer has not answered to `offer`."""
        return self._offered is not None

    def offer(self, share: Share, mapping: Mapping) -> None:
        """Offer the peer to use this memory; look at `data_to_send`. Only for an established initiator, and once."""
        self._offered = mapping
        self._outgoing += encode_frame(share)

    def shares(self, nbytes: int) -> bool:
        """Say whether a payload of this size is to be sent with `refer`."""
        return self._shared is not None and self._shared.suits(nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Say whether `refer` has a place for a payload that `shares`; if not, it will have after a later receive."""
        return self._shared is not None and self._shared.has_room(nbytes)

    def refer(self, head: bytes, payload: memoryview) -> bytes:
        """Copy a payload for which there is room into the shared memory; return what to write instead of the frame.

        Frames must be written in the order of these calls.
        """
        assert self._shared is not None
        self._shared.put(payload)
        return by_reference(head)

    def unshare(self) -> None:
        """Let go of the memory: the connection is over."""
        for memory in (self._offered, self._shared):
            if memory is not None:
                memory.release()
        self._offered = self._shared = None
        self._receiver.share(None)

    def _use(self, mapping: Mapping) -> None:
        self._shared = SharedMemory(mapping)
        self._receiver.share(self._shared)

    def _take_share(self, share: Share) -> None:
        mapping = None
        if self._open_shared is not None and self._shared is None:
            mapping = self._open_shared(share)
        if mapping is not None:
            self._use(mapping)
        self._outgoing += encode_frame(Shared(b"" if mapping is None else mapping.proof))

    def _take_answer(self, answer: Shared) -> None:
        mapping, self._offered = self._offered, None
        if mapping is None or answer.proof not in (b"", mapping.proof):
            raise ProtocolError("the peer says that it has opened shared memory, but not that of this side")
        if answer.proof:
            self._use(mapping)

    def _receive_link(self, message: Message, nbytes: int) -> None:
        match message:
            case Goodbye():
                raise from_code(message.code, f"the peer closed the connection: {message.reason}", {})
            case Ping():
                # One answer does for all that come at once: nobody can make this side send more than it receives.
                if not self._outgoing.endswith(_PONG):
                    self._outgoing += _PONG
            case Pong():
                pass
            case Share():
                self._take_share(message)
            case Shared():
                self._take_answer(message)
            case Freed():
                self._take_freed(message)
            case _:
                self._take_handshake(message, nbytes)

    def _take_freed(self, freed: Freed) -> None:
        if self._shared is None:
            raise ProtocolError("the peer frees shared memory, but none is shared")
        self._shared.free(freed)

    def _take_handshake(self, message: Message, nbytes: int) -> None:
        self._handshake_bytes += nbytes
        answer = self._handshake.receive(message)
        if answer is not None:
            self._outgoing += encode_frame(answer)
        self._admit()

    def _admit(self) -> None:
        """Tell the receiver which frames may come next."""
        limits = self._limits
        expected = self._handshake.expected
        if expected is None:
            self._deadline = None
            self._receiver.admit(_OPEN_TYPES, limits.max_control_bytes, limits.max_payload_bytes)
            return
        left = limits.max_handshake_bytes - self._handshake_bytes - HEADER_BYTES
        self._receiver.admit({TYPE_OF[expected], TYPE_OF[Goodbye]}, min(left, limits.max_control_bytes), 0)
