"""Headers and control parts that must be refused, and what the refusal says."""

from __future__ import annotations

import struct

import pytest

from aiokv.errors import HandshakeError, ProtocolError
from aiokv.wire.frames import by_reference, check_prefix, decode_header, decode_message, encode_frame
from aiokv.wire.messages import TYPE_OF, Done, Error, Goodbye, Hello, Pull, Push, Value, Welcome

HEARTBEAT, PUSH, ERROR = 18, 34, 50


def header(
    *,
    magic: bytes = b"AIOK",
    version: int = 1,
    frame_type: int = HEARTBEAT,
    flags: int = 0,
    payload: int = 0,
    checksum: int = 0,
) -> bytes:
    return struct.pack("<4sBBHQQII", magic, version, frame_type, flags, 7, payload, 1, checksum)


def test_a_good_header_is_accepted_at_any_offset() -> None:
    assert decode_header(b"\xff" * 3 + header(frame_type=PUSH, payload=9), 3) == (PUSH, 7, 9, 1, False, 0)


def test_a_payload_by_reference_changes_nothing_but_the_flag() -> None:
    head = encode_frame(Value(1), 7, 70_000)
    assert decode_header(by_reference(head)) == (*decode_header(head)[:4], True, 0)
    assert by_reference(head) == head[:6] + b"\x01\x00" + head[8:]


def test_a_payload_behind_a_message_that_has_none_is_a_bug_of_the_sender() -> None:
    with pytest.raises(ValueError, match="Done cannot have a payload, got 4 bytes"):
        encode_frame(Done(1), 5, 4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (header(payload=5), "a Heartbeat frame cannot have a payload, got 5 bytes"),
        (header(frame_type=0), "unknown frame type 0"),
        (header(frame_type=255, flags=1), "unknown frame type 255"),
        (header(frame_type=PUSH, flags=1), "a Push frame hands over a payload by reference, but has none"),
        (header(frame_type=HEARTBEAT, flags=1, payload=9), "a Heartbeat frame cannot have a payload, got 9 bytes"),
        (header(frame_type=PUSH, flags=3, payload=9), "a Push frame has unknown flags 0x0003"),
        (header(flags=0x8000), "a Heartbeat frame has unknown flags 0x8000"),
    ],
)
def test_what_is_reserved_or_unknown_is_refused(bad: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_header(bad)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_protocol_version_is_named_with_ours(version: int) -> None:
    message = f"the peer speaks protocol version {version}, this side speaks version 1"
    with pytest.raises(HandshakeError, match=message) as caught:
        decode_header(header(version=version))
    assert caught.value.details == {"expected": 1, "got": version}


def test_the_version_is_looked_at_before_fields_that_another_version_may_use_otherwise() -> None:
    with pytest.raises(HandshakeError, match="protocol version 2"):
        decode_header(header(version=2, frame_type=200, flags=0xFFFF, checksum=9))


@pytest.mark.parametrize(
    ("start", "hint"),
    [
        (b"GET / HTTP/1.1\r\n", "this is HTTP"),
        (b"POST /metrics HTTP/1.1\r\n", "this is HTTP"),
        (b"HTTP/1.1 400 Bad Request\r\n", "this is HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "this is HTTP"),
        (bytes.fromhex("16030100f8010000f40303"), "this is TLS"),
        (bytes.fromhex("15030300020246"), "this is TLS"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not an aiokv peer"),
        (b"AIOX", "not an aiokv peer"),
    ],
)
def test_a_stranger_is_recognised_by_its_first_bytes(start: bytes, hint: str) -> None:
    with pytest.raises(ProtocolError, match=f"expected a frame to start with b'AIOK', got .*{hint}"):
        decode_header(start.ljust(32, b"\0"))
    with pytest.raises(ProtocolError, match=hint):
        check_prefix(memoryview(start))


def test_the_version_is_refused_before_the_header_is_complete() -> None:
    with pytest.raises(HandshakeError, match="protocol version 9"):
        check_prefix(memoryview(b"AIOK\x09"))


@pytest.mark.parametrize("start", [b"G", b"GET", b"AIOK", b"AIOK\x01", header()[:31]])
def test_what_may_still_become_a_frame_is_waited_for(start: bytes) -> None:
    check_prefix(memoryview(start))


@pytest.mark.parametrize(
    ("frame_type", "control", "reason"),
    [
        (TYPE_OF[Welcome], b"", "truncated"),
        (TYPE_OF[Welcome], b"\x90\x90", "trailing"),
        (TYPE_OF[Done], b"\x91\xa1x", "Expected `int`, got `str`"),
        (TYPE_OF[Done], b"\x93\x01\xa0\x02", "at most length 2"),
        (TYPE_OF[Value], b"\x90", "length 1"),
        (TYPE_OF[Hello], b"\x92\xa2\xff\xfe\xc4\x00", "(UTF|utf)-8"),
        (TYPE_OF[Hello], b"\x92\xdb\xff\xff\xff\xff", "truncated"),
        (TYPE_OF[Goodbye], b"\x92\xcb\x7f\xf0\0\0\0\0\0\0\xa0", "Expected `int`"),
        (TYPE_OF[Pull], b"\x97\xa1k\xdd\xff\xff\xff\xff\x01", "truncated"),
        (TYPE_OF[Push], b"\x99\xc2", "got `bool`"),
        (TYPE_OF[Error], b"\x93\x01\xa1x\xdf\xff\xff\xff\xff", "truncated"),
        (TYPE_OF[Error], b"\x93\x01\xa1x\x81\xa1k" + b"\x91" * 100_000, "recursion"),
        (TYPE_OF[Error], b"\x93\x01\xa1x\x81\xa1k\x81\x81\x01\x02\x01", "hashable"),
        (TYPE_OF[Error], b"\x93\x01\xa1x\x81\xa1k\xd4\x05\x01", "extension type 5 is not used"),
    ],
)
def test_a_malformed_control_part_is_refused_with_the_name_and_the_reason(
    frame_type: int, control: bytes, reason: str
) -> None:
    with pytest.raises(ProtocolError, match=rf"control part of a \w+ frame .* is malformed: .*{reason}"):
        decode_message(frame_type, control)


def test_what_was_decoded_is_not_changed_when_the_receive_memory_is_used_again() -> None:
    memory = bytearray(encode_frame(Hello("cluster", b"nonce" * 4))[32:])
    message = decode_message(TYPE_OF[Hello], memoryview(memory))
    memory[:] = bytes(len(memory))
    assert message == Hello("cluster", b"nonce" * 4)
