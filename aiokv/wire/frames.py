"""One frame <-> bytes: the fixed header and the MessagePack control part. Knows nothing of connections or limits.

    offset  size  field
    0       4     magic "AIOK"
    4       1     protocol version
    5       1     frame type, a key of `FRAME_TYPES`
    6       2     flags; bit 0: the payload lies in shared memory and not in the stream, see `wire.shared`
    8       8     request id
    16      8     payload length in bytes
    24      4     control length in bytes
    28      4     checksum, see `begin_checksum`; 0 means none
    32            control part: one MessagePack array
                  payload: the elements of a chunk, as they lie in memory

All integers are unsigned and little-endian. The payload is not handled here: the driver writes it from its owner's
memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NoReturn

import msgspec

from aiokv.errors import HandshakeError, ProtocolError
from aiokv.wire.messages import FRAME_TYPES, PROTOCOL_VERSION, TYPE_OF, WITH_PAYLOAD, Message

MAGIC: Final = b"AIOK"
HEADER_BYTES: Final = 32
PAYLOAD_BY_REFERENCE: Final = 1
"""Flag: the payload lies in memory that both processes have mapped; the next frame follows the control part."""

_HEADER: Final = struct.Struct("<4sBBHQQII")
_FLAGS_AT: Final = 6

Header = tuple[int, int, int, int, bool, int]
"""Frame type, request id, bytes of the payload, bytes of the control part; whether the payload is by reference; the
checksum.
"""

Checksum = Callable[[memoryview | bytes, int], int]
"""Continues a checksum of 32 bits with more bytes; 0 begins one."""

_CHECKSUM_AT: Final = 28
_ZERO: Final = 2**32 - 1
"""What stands for a checksum that is 0."""

_PAYLOAD_TYPES: Final = frozenset(TYPE_OF[cls] for cls in WITH_PAYLOAD)
_HTTP: Final = frozenset(
    {b"GET ", b"HEAD", b"POST", b"PUT ", b"PATC", b"DELE", b"OPTI", b"CONN", b"TRAC", b"PRI ", b"HTTP"}
)
_TLS: Final = frozenset({b"\x16\x03", b"\x15\x03"})
_TLS_HINT: Final = "this is TLS, but this side does not use TLS: turn it on for both or for neither"
_HTTP_HINT: Final = "this is HTTP, but this port speaks only aiokv's own protocol: check the address and port"
_OTHER_HINT: Final = "this is not an aiokv peer, or the stream is corrupted: check the address and port"


def _refuse_extension(code: int, _data: memoryview) -> NoReturn:
    # Without this the decoder would hand out a view of receive memory that is soon overwritten.
    raise ValueError(f"extension type {code} is not used by this protocol")


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODE: Final[dict[int, Callable[[memoryview | bytes], Message]]] = {
    number: msgspec.msgpack.Decoder(cls, ext_hook=_refuse_extension).decode for number, cls in FRAME_TYPES.items()
}


def encode_frame(message: Message, request: int = 0, payload_nbytes: int = 0) -> bytes:
    """Encode header and control part; `payload_nbytes` bytes of payload must be written right behind.

    Raises:
        ValueError: the message cannot have a payload.
    """
    frame_type = TYPE_OF[type(message)]
    if payload_nbytes and frame_type not in _PAYLOAD_TYPES:
        raise ValueError(f"{type(message).__name__} cannot have a payload, got {payload_nbytes} bytes")
    control = _ENCODER.encode(message)
    header = _HEADER.pack(MAGIC, PROTOCOL_VERSION, frame_type, 0, request, payload_nbytes, len(control), 0)
    return header + control


def by_reference(head: bytes) -> bytes:
    """Return header and control part of a frame with a payload, changed to say that it is not in the stream."""
    return head[:_FLAGS_AT] + PAYLOAD_BY_REFERENCE.to_bytes(2, "little") + head[_FLAGS_AT + 2 :]


def begin_checksum(compute: Checksum, header: memoryview | bytes, control: memoryview | bytes) -> int:
    """Return the checksum of a frame up to its payload.

    It covers version, type, request id, lengths and control part. The flags are not known yet when it is computed; if
    they were wrong, what follows the frame would be no frame.
    """
    return compute(b"".join((header[4:_FLAGS_AT], header[_FLAGS_AT + 2 : _CHECKSUM_AT], control)), 0)


def end_checksum(compute: Checksum, begun: int, payload: memoryview | None) -> int:
    """Return the checksum of a whole frame, as it stands in the header, from that up to its payload."""
    return (begun if payload is None else compute(payload, begun)) or _ZERO


def seal(compute: Checksum, head: bytes, payload: memoryview | None) -> bytes:
    """Return header and control part of a frame with its checksum."""
    begun = begin_checksum(compute, head, head[HEADER_BYTES:])
    whole = end_checksum(compute, begun, payload)
    return head[:_CHECKSUM_AT] + whole.to_bytes(4, "little") + head[HEADER_BYTES:]


def decode_header(buffer: memoryview | bytes, offset: int = 0) -> Header:
    """Decode the `HEADER_BYTES` at `offset`, which must be there.

    Raises:
        HandshakeError: the peer speaks another version of the protocol.
        ProtocolError: this is no frame, of an unknown type, or uses something reserved.
    """
    fields = _HEADER.unpack_from(buffer, offset)
    magic, version, frame_type, flags, request, payload_nbytes, control_nbytes, checksum = fields
    if (
        magic != MAGIC
        or version != PROTOCOL_VERSION
        or flags > (payload_nbytes > 0)
        or frame_type not in FRAME_TYPES
        or (payload_nbytes and frame_type not in _PAYLOAD_TYPES)
    ):
        _check_start(magic, version)
        raise _reserved(frame_type, flags, payload_nbytes)
    return frame_type, request, payload_nbytes, control_nbytes, flags == PAYLOAD_BY_REFERENCE, checksum


def check_prefix(buffer: memoryview) -> None:
    """Refuse a stranger by the first bytes of a header that is not complete: it might never send the rest.

    Raises:
        HandshakeError: the peer speaks another version of the protocol.
        ProtocolError: this is no frame.
    """
    if len(buffer) >= len(MAGIC):
        _check_start(bytes(buffer[: len(MAGIC)]), buffer[len(MAGIC)] if len(buffer) > len(MAGIC) else PROTOCOL_VERSION)


def decode_message(frame_type: int, buffer: memoryview | bytes) -> Message:
    """Decode the control part of a frame whose type is in `FRAME_TYPES`.

    Raises:
        ProtocolError: the bytes are not such a message.
    """
    try:
        return _DECODE[frame_type](buffer)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        # Older releases let strings that are no UTF-8 and unhashable keys through as ValueError and TypeError.
        # Deep nesting inside a field of any type ends in a RecursionError in all of them.
        name = FRAME_TYPES[frame_type].__name__
        raise ProtocolError(
            f"the control part of a {name} frame ({len(buffer)} bytes) is malformed: {error}", got=name
        ) from error


def _check_start(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        hint = _TLS_HINT if magic[:2] in _TLS else _HTTP_HINT if magic in _HTTP else _OTHER_HINT
        raise ProtocolError(f"expected a frame to start with {MAGIC!r}, got {magic!r}: {hint}")
    if version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"the peer speaks protocol version {version}, this side speaks version {PROTOCOL_VERSION}: "
            "install the same aiokv release on every node",
            expected=PROTOCOL_VERSION,
            got=version,
        )


def _reserved(frame_type: int, flags: int, payload_nbytes: int) -> ProtocolError:
    if frame_type not in FRAME_TYPES:
        return ProtocolError(f"unknown frame type {frame_type}", got=frame_type)
    name = FRAME_TYPES[frame_type].__name__
    if flags == PAYLOAD_BY_REFERENCE and not payload_nbytes:
        return ProtocolError(f"a {name} frame hands over a payload by reference, but has none", expected=0, got=flags)
    if flags & ~PAYLOAD_BY_REFERENCE:
        return ProtocolError(f"a {name} frame has unknown flags {flags:#06x}", expected=0, got=flags)
    return ProtocolError(
        f"a {name} frame cannot have a payload, got {payload_nbytes} bytes", expected=0, got=payload_nbytes
    )
