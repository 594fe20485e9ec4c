"""Received bytes -> frames, large payloads straight to where they belong. Does no I/O and takes no decisions.

The driver asks `get_buffer` where to receive into and reports with `buffer_updated` how much it received there:

    state             get_buffer hands out         left when
    scratch           free part of the scratch     a frame starts that is larger than what has arrived
    filling control   memory for a large control   the control part is complete
    filling landing   rest of the landing          the payload is complete, or the frame is discarded
    skipping          scratch                      the rest of a discarded payload has gone by
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiokv.errors import ChecksumError, HandshakeError, LimitError, ProtocolError
from aiokv.wire.frames import (
    HEADER_BYTES,
    Checksum,
    Header,
    begin_checksum,
    check_prefix,
    decode_header,
    decode_message,
    end_checksum,
)
from aiokv.wire.limits import DEFAULT_LIMITS, Limits
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

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from aiokv.wire.shared import SharedMemory

SCRATCH_BYTES: Final = 64 * 1024
LINK_TYPES: Final = frozenset(
    TYPE_OF[cls] for cls in (Hello, Challenge, Proof, Welcome, Goodbye, Ping, Pong, Share, Shared, Freed)
)
"""Frame types that concern the connection itself: its owner may take them out of the stream."""


@dataclass(slots=True)
class Head:
    """What is known of a frame before its payload is received."""

    request: int
    message: Message
    payload_nbytes: int


@dataclass(slots=True)
class Landing:
    """Where a payload shall go: a writable view of exactly its bytes, and the slot that the frame will carry."""

    view: memoryview
    slot: int | None


@dataclass(slots=True)
class Frame:
    """A whole frame. `nbytes` is the length of its payload, `slot` where it landed (None: no payload, or discarded)."""

    request: int
    message: Message
    slot: int | None
    nbytes: int


_SAME: Final = "give every node of the cluster the same setting `checksum`"

Land = Callable[[Head], Landing]
"""Chooses where a payload goes. Called once for each frame with a payload, after its control part was found good."""

OnLink = Callable[[Message, int], None]
"""Takes a link frame: the message, and the bytes of the whole frame. It may call `admit` and raise `AiokvError`."""


class Receiver:
    """Cuts the stream of one connection into frames.

    After an error it can't be used any more: the stream has no place from which it could be read again.
    """

    __slots__ = (
        "_admitted",
        "_begun",
        "_checksum",
        "_control",
        "_end",
        "_failure",
        "_frame",
        "_head",
        "_header",
        "_land",
        "_landing",
        "_max_control",
        "_max_payload",
        "_on_link",
        "_rest",
        "_scratch",
        "_shared",
        "_skip",
        "_undelivered",
    )

    def __init__(
        self,
        land: Land,
        limits: Limits = DEFAULT_LIMITS,
        on_link: OnLink | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        self._land = land
        self._on_link = on_link
        self._checksum = checksum
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        # The bytes [0, _end) of the scratch are the start of a frame that is not complete.
        self._end = 0
        # Memory outside the scratch that is being filled: the rest of a landing, or of a large control part.
        self._rest: memoryview | None = None
        # A large control part that is being filled, and the header of its frame.
        self._control: memoryview | None = None
        self._header: Header = (0, 0, 0, 0, False, 0)
        # For its checksum: the bytes of that header, the sum of a frame up to its payload, and where that lands.
        self._head = b""
        self._begun = 0
        self._landing: memoryview | None = None
        # The frame whose payload is being received, and how much of it is still to be skipped if it was discarded.
        self._frame: Frame | None = None
        self._skip = 0
        self._failure: str | None = None
        self._undelivered: list[Frame] = []
        self._shared: SharedMemory | None = None
        self.admit(frozenset(FRAME_TYPES), limits.max_control_bytes, limits.max_payload_bytes)

    def admit(self, types: AbstractSet[int], max_control_bytes: int, max_payload_bytes: int) -> None:
        """Set what the next frames may be."""
        self._admitted = types
        self._max_control = max_control_bytes
        self._max_payload = max_payload_bytes

    def share(self, shared: SharedMemory | None) -> None:
        """Take payloads out of this memory when a frame says that they are there; None: there is none."""
        self._shared = shared

    @property
    def pending_slot(self) -> int | None:
        """Slot of a landing that is not complete: the driver frees it when the connection ends."""
        return None if self._frame is None else self._frame.slot

    @property
    def undelivered(self) -> list[Frame]:
        """Frames that were complete when `buffer_updated` raised because of what came behind them."""
        return self._undelivered

    def get_buffer(self) -> memoryview:
        """Return the memory to receive into, never empty.

        Raises:
            ProtocolError: the receiver has stopped after an error.
        """
        if self._failure is not None:
            raise self._stopped()
        return self._scratch[self._end :] if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> list[Frame]:
        """Take `nbytes` that were received into the last `get_buffer`, and return the frames that they complete.

        Raises:
            ProtocolError: the peer broke the protocol, or the receiver has stopped; see `undelivered`.
            RuntimeError: `land` returned unusable memory.
        """
        if self._failure is not None:
            raise self._stopped()
        frames: list[Frame] = []
        try:
            if self._rest is None:
                self._end += nbytes
                self._parse(frames)
            else:
                self._fill(self._rest, nbytes, frames)
        except BaseException as error:
            self.stop(str(error))
            self._undelivered = frames
            raise
        return frames

    def discard(self, request: int) -> None:
        """Give back the landing of the frame being received if it has this request id; its slot is the caller's again.

        The rest of the payload is dropped and the frame is delivered with slot None.
        """
        if self._frame is None or self._frame.request != request:
            return
        self._frame.slot = None
        # What is not received can't be checked; it is not used either.
        self._landing = None
        if self._rest is not None:
            self._skip = len(self._rest)
            self._rest = None

    def stop(self, reason: str) -> None:
        """Refuse everything from now on, and let go of all memory but the scratch."""
        self._failure = reason
        self._rest = None
        self._control = None

    def _parse(self, frames: list[Frame]) -> None:
        """Take all that is complete out of the scratch."""
        scratch, end = self._scratch, self._end
        start = self._pass_by(frames) if self._skip else 0
        while end - start >= HEADER_BYTES:
            header = decode_header(scratch, start)
            frame_type, _, payload, control, _, checksum = header
            if frame_type not in self._admitted or control > self._max_control or payload > self._max_payload:
                raise self._refusal(frame_type, control, payload)
            if checksum or self._checksum is not None:
                self._check_presence(frame_type, checksum)
            body = start + HEADER_BYTES
            if end - body < control:
                if control > SCRATCH_BYTES - HEADER_BYTES:
                    self._begin_control(header, scratch[start:end])
                    start = end
                break
            if self._checksum is not None:
                self._begun = begin_checksum(self._checksum, scratch[start:body], scratch[body : body + control])
            start = body + control
            landing = self._accept(header, decode_message(frame_type, scratch[body:start]), frames)
            if landing is None:
                continue
            if end - start < payload:
                landing[: end - start] = scratch[start:end]
                self._rest = landing[end - start :]
                start = end
                break
            landing[:] = scratch[start : start + payload]
            start += payload
            self._finish(frames)
        self._end = end - start
        if 0 < start < end:
            scratch[: end - start] = scratch[start:end]
        if 0 < self._end < HEADER_BYTES:
            check_prefix(scratch[: self._end])

    def _accept(self, header: Header, message: Message, frames: list[Frame]) -> memoryview | None:
        """Take a frame whose control part is complete; return where its payload goes, if it follows in the stream."""
        frame_type, request, payload, control, by_reference, checksum = header
        if self._on_link is not None and frame_type in LINK_TYPES:
            self._on_link(message, HEADER_BYTES + control)
            return None
        if not payload:
            if self._checksum is not None:
                self._verify(message, checksum, None)
            frames.append(Frame(request, message, None, 0))
            return None
        source = self._fetch(message, payload) if by_reference else None
        landing = self._land(Head(request, message, payload))
        view = landing.view
        self._frame = Frame(request, message, landing.slot, payload)
        if view.format != "B" or view.ndim != 1 or view.nbytes != payload or view.readonly or not view.contiguous:
            raise RuntimeError(
                f"land must return a writable contiguous view of {payload} bytes (format 'B'), "
                f"got {view.nbytes} bytes, format {view.format!r}, shape {view.shape}, read-only: {view.readonly}"
            )
        self._header, self._landing = header, view
        if source is None:
            return view
        view[:] = source
        self._finish(frames)
        return None

    def _fetch(self, message: Message, nbytes: int) -> memoryview:
        if self._shared is None:
            name = type(message).__name__
            raise ProtocolError(f"a {name} frame hands over its payload by reference, but no memory is shared")
        return self._shared.fetch(nbytes)

    def _finish(self, frames: list[Frame]) -> None:
        """Deliver the frame whose payload has just become complete."""
        assert self._frame is not None
        if self._checksum is not None and self._landing is not None:
            self._verify(self._frame.message, self._header[5], self._landing)
        self._landing = None
        frames.append(self._frame)
        self._frame = None

    def _check_presence(self, frame_type: int, checksum: int) -> None:
        """Refuse a frame that has a checksum and should have none, or the other way round."""
        name = FRAME_TYPES[frame_type].__name__
        if checksum and frame_type in LINK_TYPES:
            raise ProtocolError(f"a {name} frame has a checksum, which these never have", got=name)
        if checksum and self._checksum is None:
            raise HandshakeError(f"a {name} frame has a checksum, but this side uses none: {_SAME}", got=name)
        if not checksum and frame_type not in LINK_TYPES:
            raise HandshakeError(f"a {name} frame has no checksum, but this side wants one: {_SAME}", got=name)

    def _verify(self, message: Message, checksum: int, payload: memoryview | None) -> None:
        assert self._checksum is not None
        found = end_checksum(self._checksum, self._begun, payload)
        if found != checksum:
            name, key = type(message).__name__, getattr(message, "key", None)
            what = f"a {name} frame" if key is None else f"a {name} frame of key {key!r}"
            text = f"{what} is not what was sent: expected checksum {checksum:#010x}, got {found:#010x}"
            raise ChecksumError(text, key=key, expected=checksum, got=found)

    def _fill(self, rest: memoryview, nbytes: int, frames: list[Frame]) -> None:
        """Account for bytes that were received straight into a landing or a large control part."""
        if nbytes < len(rest):
            self._rest = rest[nbytes:]
            return
        self._rest = None
        if self._control is None:
            self._finish(frames)
            return
        if self._checksum is not None:
            self._begun = begin_checksum(self._checksum, self._head, self._control)
        message = decode_message(self._header[0], self._control)
        self._control = None
        self._rest = self._accept(self._header, message, frames)

    def _begin_control(self, header: Header, begun: memoryview) -> None:
        """Get memory for a control part that does not fit into the scratch; its length has been checked."""
        self._header = header
        self._head, start = bytes(begun[:HEADER_BYTES]), begun[HEADER_BYTES:]
        self._control = memoryview(bytearray(header[3]))
        self._control[: len(start)] = start
        self._rest = self._control[len(start) :]

    def _pass_by(self, frames: list[Frame]) -> int:
        """Skip the discarded payload at the start of the scratch, and return how much of it was there."""
        here = min(self._skip, self._end)
        self._skip -= here
        if not self._skip:
            self._finish(frames)
        return here

    def _refusal(self, frame_type: int, control: int, payload: int) -> ProtocolError:
        name = FRAME_TYPES[frame_type].__name__
        if frame_type not in self._admitted:
            expected = ", ".join(FRAME_TYPES[number].__name__ for number in sorted(self._admitted))
            return ProtocolError(
                f"a {name} frame is not allowed now: expected one of {expected}", expected=expected, got=name
            )
        part, got, limit = "control part", control, self._max_control
        if control <= limit:
            part, got, limit = "payload", payload, self._max_payload
        limit = max(limit, 0)
        return LimitError(
            f"a {name} frame announces a {part} of {got} bytes, but at most {limit} are allowed now",
            expected=limit,
            got=got,
        )

    def _stopped(self) -> ProtocolError:
        return ProtocolError(f"nothing can be received on this connection after an error: {self._failure}")
