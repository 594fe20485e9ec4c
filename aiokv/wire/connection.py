"""One authenticated connection, sans-IO: a receiver behind a handshake. Opens no socket, reads no clock.

Until the peer is authenticated it may send `max_handshake_bytes` in `handshake_seconds`, and only the handshake's
messages in their order. After that every frame type is allowed but those.
"""

from __future__ import annotations

from typing import Final

from aiokv.errors import AiokvError, HandshakeError, from_code
from aiokv.wire.auth import Handshake
from aiokv.wire.frames import HEADER_BYTES, encode_frame
from aiokv.wire.limits import DEFAULT_LIMITS, Limits
from aiokv.wire.messages import FRAME_TYPES, TYPE_OF, Challenge, Goodbye, Hello, Message, Proof, Welcome
from aiokv.wire.receiver import Frame, Land, Receiver

MAX_REASON_BYTES: Final = 1024
"""Longest reason in a `Goodbye`, so that it fits into what an unauthenticated peer may send."""

_HANDSHAKE_TYPES: Final = frozenset(TYPE_OF[cls] for cls in (Hello, Challenge, Proof, Welcome))
_OPEN_TYPES: Final = frozenset(FRAME_TYPES) - _HANDSHAKE_TYPES


class Connection:
    """The bytes of one connection.

    Args:
        initiator: this side opened the connection.
        cluster: id of the cluster; must be the same on both sides.
        token: shared secret of the cluster; may be empty, then nothing is proved.
        nonce: 32 bytes of fresh randomness for this connection alone.
        land: where payloads go; see `Receiver`.
        limits: what the peer may announce.
        now: the current time in seconds on the clock of `handle_timeout`.

    Raises:
        ValueError: the nonce has another length.
    """

    __slots__ = ("_deadline", "_handshake", "_handshake_bytes", "_limits", "_outgoing", "_receiver")

    def __init__(
        self,
        *,
        initiator: bool,
        cluster: str,
        token: bytes,
        nonce: bytes,
        land: Land,
        limits: Limits = DEFAULT_LIMITS,
        now: float,
    ) -> None:
        self._limits = limits
        self._deadline = now + limits.handshake_seconds
        self._handshake = Handshake(initiator=initiator, cluster=cluster, token=token, nonce=nonce)
        self._handshake_bytes = 0
        self._receiver = Receiver(land, limits, self._receive_link)
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

        Look at `data_to_send` and `established` afterwards.

        Raises:
            HandshakeError: another protocol version, cluster or token.
            LimitError: a length is over its limit.
            ProtocolError: the peer broke the protocol, or the connection has failed before.
            AiokvError: the peer closes the connection and says why, with the class of its reason.
        """
        return self._receiver.buffer_updated(nbytes)

    def data_to_send(self) -> bytes:
        """Return and forget the handshake bytes that wait to be written."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def deadline(self) -> float | None:
        """Return when `handle_timeout` wants to be called; None when established."""
        return None if self.established else self._deadline

    def handle_timeout(self, now: float) -> None:
        """Give up if the peer is not authenticated in time.

        Raises:
            HandshakeError: it is not; the message names what was missing.
        """
        expected = self._handshake.expected
        if expected is None or now < self._deadline:
            return
        error = HandshakeError(
            f"no {expected.__name__} from the peer within {self._limits.handshake_seconds:g} s: "
            "it is not an aiokv peer, is overloaded, or the network loses its data",
            expected=expected.__name__,
        )
        self._receiver.stop(error.message)
        raise error

    def discard(self, request: int) -> None:
        """Give back the landing of the frame being received if it has this request id; see `Receiver.discard`."""
        self._receiver.discard(request)

    def goodbye(self, error: AiokvError) -> bytes:
        """Return the frame that tells the peer why this side closes the connection; write it last."""
        reason = error.message.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore")
        return encode_frame(Goodbye(error.code, reason))

    def _receive_link(self, message: Message, nbytes: int) -> None:
        if isinstance(message, Goodbye):
            raise from_code(message.code, f"the peer closed the connection: {message.reason}", {})
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
            self._receiver.admit(_OPEN_TYPES, limits.max_control_bytes, limits.max_payload_bytes)
            return
        left = limits.max_handshake_bytes - self._handshake_bytes - HEADER_BYTES
        self._receiver.admit({TYPE_OF[expected], TYPE_OF[Goodbye]}, min(left, limits.max_control_bytes), 0)
