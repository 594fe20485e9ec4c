"""Checksums of frames, against CRC32C as RFC 3720 defines it: every flipped bit is found, and nothing is delivered."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import ChecksumError, HandshakeError, ProtocolError
from aiokv.wire.connection import Connection, goodbye
from aiokv.wire.frames import HEADER_BYTES, encode_frame, seal
from aiokv.wire.messages import Barrier, Done, Freed, Heartbeat, Message, Push, Value
from aiokv.wire.receiver import SCRATCH_BYTES, Frame, Head, Landing, Receiver

if TYPE_CHECKING:
    from collections.abc import Iterable

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its bits reversed."""


def crc32c(data: bytes | memoryview, begun: int) -> int:
    """Compute bit by bit, as the definition says."""
    value = begun ^ 0xFFFFFFFF
    for byte in bytes(data):
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_the_function_of_these_tests_is_the_one_of_rfc_3720() -> None:
    """Appendix B.4 of the RFC."""
    assert crc32c(bytes(32), 0) == 0x8A9136AA
    assert crc32c(b"\xff" * 32, 0) == 0x62A8AB43
    assert crc32c(bytes(range(32)), 0) == 0x46DD794E
    assert crc32c(bytes(range(16, 32)), crc32c(bytes(range(16)), 0)) == 0x46DD794E


PUSH = Push("w", (2, 3), "float32", 0, 6, 1, 0, True, 30.0)
PAYLOAD = bytes(range(24))


def frame(message: Message, request: int = 0, payload: bytes = b"") -> bytes:
    head = encode_frame(message, request, len(payload))
    return seal(crc32c, head, memoryview(payload) if payload else None) + payload


class Sink:
    """A receiver with checksums, and where its payloads land."""

    def __init__(self, *, with_checksums: bool = True) -> None:
        self.landed: list[bytearray] = []
        self.links: list[Message] = []
        self.receiver = Receiver(
            self._land,
            on_link=lambda message, _: self.links.append(message),
            checksum=crc32c if with_checksums else None,
        )

    def _land(self, head: Head) -> Landing:
        self.landed.append(bytearray(head.payload_nbytes))
        return Landing(memoryview(self.landed[-1]), len(self.landed) - 1)

    def feed(self, data: bytes, sizes: Iterable[int] = ()) -> list[Frame]:
        frames: list[Frame] = []
        rest = memoryview(data)
        for size in itertools.cycle(list(sizes) or [len(data)]):
            if not rest:
                return frames
            buffer = self.receiver.get_buffer()
            nbytes = min(len(buffer), len(rest), size)
            buffer[:nbytes] = rest[:nbytes]
            rest = rest[nbytes:]
            frames += self.receiver.buffer_updated(nbytes)
        return frames


def test_the_bytes_of_a_frame_with_a_checksum() -> None:
    """Over version, type, request id, lengths and control part, then the payload; by hand from the layout."""
    data = frame(Value(7), 4, b"abcd")
    control = bytes.fromhex("94 07 00 a0 00")
    assert data[HEADER_BYTES:] == control + b"abcd"
    covered = bytes.fromhex("01 31  0400000000000000  0400000000000000  05000000") + control + b"abcd"
    assert data[28:32] == crc32c(covered, 0).to_bytes(4, "little")
    assert data[:28] == encode_frame(Value(7), 4, 4)[:28]


@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4))
def test_good_frames_are_delivered_however_they_are_cut(sizes: list[int]) -> None:
    sink = Sink()
    data = frame(PUSH, 1, PAYLOAD) + frame(Heartbeat()) + frame(Done(3), 2) + frame(Value(1), 3, b"xyz")
    assert [got.message for got in sink.feed(data, sizes)] == [PUSH, Heartbeat(), Done(3), Value(1)]
    assert [bytes(landed) for landed in sink.landed] == [PAYLOAD, b"xyz"]


COVERED = [bit for bit in range(8 * 32) if bit // 8 not in (0, 1, 2, 3, 6, 7)]
"""Bits of the header that the checksum covers, or is; the others have values that are checked."""


@given(
    bit=st.one_of(st.sampled_from(COVERED), st.integers(8 * 32, 8 * len(frame(PUSH, 1, PAYLOAD)) - 1)),
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=3),
)
def test_no_flipped_bit_is_delivered(bit: int, sizes: list[int]) -> None:
    data = bytearray(frame(PUSH, 1, PAYLOAD))
    data[bit // 8] ^= 1 << bit % 8
    try:
        # A frame that claims to be longer waits for the rest, which is then found not to fit.
        assert Sink().feed(bytes(data) + bytes(200_000), sizes) == []
    except ProtocolError:
        return
    assert 16 <= bit // 8 < 28


def test_the_error_names_the_key_and_both_sums() -> None:
    data = bytearray(frame(PUSH, 1, PAYLOAD))
    good = int.from_bytes(data[28:32], "little")
    data[-1] ^= 1
    with pytest.raises(ChecksumError, match="a Push frame of key 'w' is not what was sent") as caught:
        Sink().feed(bytes(data))
    assert caught.value.details["key"] == "w"
    assert caught.value.details["expected"] == good
    assert caught.value.details["got"] not in (good, 0)


def test_a_frame_without_a_key_is_named_by_its_type() -> None:
    data = bytearray(frame(Value(7), 4, b"abcd"))
    data[-1] ^= 1
    with pytest.raises(ChecksumError, match=r"^a Value frame is not what was sent"):
        Sink().feed(bytes(data))


def test_a_checksum_that_would_be_zero_is_written_as_all_ones() -> None:
    sink = Receiver(lambda head: Landing(memoryview(bytearray(head.payload_nbytes)), 0), checksum=lambda _data, _: 0)
    data = seal(lambda _data, _: 0, encode_frame(Done(1), 1), None)
    assert data[28:32] == b"\xff" * 4
    sink.get_buffer()[: len(data)] = data
    assert len(sink.buffer_updated(len(data))) == 1


@pytest.mark.parametrize("damaged", [False, True])
def test_a_control_part_larger_than_the_scratch_is_covered(damaged: bool) -> None:
    message = Barrier("n" * (SCRATCH_BYTES + 100), 5.0)
    data = bytearray(frame(message, 1))
    data[1000] ^= damaged
    sink = Sink()
    if damaged:
        with pytest.raises(ChecksumError, match="a Barrier frame is not what was sent"):
            sink.feed(bytes(data), [50_000])
    else:
        assert [got.message for got in sink.feed(bytes(data), [50_000])] == [message]


def test_a_payload_that_is_discarded_is_not_checked_and_the_next_frame_is() -> None:
    sink = Sink()
    data = frame(Value(1), 5, bytes(1000))
    sink.feed(data[:500])
    sink.receiver.discard(5)
    assert sink.feed(data[500:]) == [Frame(5, Value(1), None, 1000)]
    broken = bytearray(frame(Value(2), 6, b"abcd"))
    broken[-1] ^= 4
    with pytest.raises(ChecksumError):
        sink.feed(bytes(broken))


def test_a_frame_without_a_checksum_is_refused_where_they_are_wanted() -> None:
    with pytest.raises(HandshakeError, match=r"a Done frame has no checksum, .* the same setting `checksum`"):
        Sink().feed(encode_frame(Done(1), 1))


def test_a_frame_with_a_checksum_is_refused_where_there_are_none() -> None:
    with pytest.raises(HandshakeError, match=r"a Done frame has a checksum, .* the same setting `checksum`"):
        Sink(with_checksums=False).feed(frame(Done(1), 1))


def test_frames_of_the_link_have_none() -> None:
    sink = Sink()
    assert sink.feed(encode_frame(Freed(3))) == []
    assert sink.links == [Freed(3)]
    with pytest.raises(ProtocolError, match="a Freed frame has a checksum, which these never have"):
        sink.feed(frame(Freed(3)))


def connections() -> tuple[Connection, Connection]:
    """Return two ends that are authenticated."""
    ends = [
        Connection(
            initiator=side,
            cluster="c",
            token=b"t",
            nonce=bytes([side]) * 32,
            land=lambda head: Landing(memoryview(bytearray(head.payload_nbytes)), 0),
            checksum=crc32c,
            now=0.0,
        )
        for side in (True, False)
    ]
    for turn in range(4):
        data = ends[turn % 2].data_to_send()
        other = ends[1 - turn % 2]
        other.get_buffer()[: len(data)] = data
        assert other.buffer_updated(len(data)) == []
    first, second = ends
    assert first.established
    assert second.established
    return first, second


def test_a_connection_seals_what_its_owner_sends_and_nothing_else() -> None:
    first, second = connections()
    head = first.seal(encode_frame(Value(3), 9, 4), memoryview(b"abcd"))
    data = head + b"abcd"
    second.get_buffer()[: len(data)] = data
    assert second.buffer_updated(len(data)) == [Frame(9, Value(3), 0, 4)]
    farewell = goodbye(ProtocolError("enough"))
    assert first.seal(farewell, None) == farewell


def test_without_checksums_a_frame_stays_as_it_is() -> None:
    end = Connection(
        initiator=True, cluster="c", token=b"", nonce=bytes(32), land=lambda _: Landing(memoryview(b""), 0), now=0.0
    )
    head = encode_frame(Value(3), 9, 4)
    assert end.seal(head, memoryview(b"abcd")) is head
