"""Bytes become the same frames however they are cut, and large payloads land without a copy."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import LimitError, ProtocolError, UnknownKeyError
from aiokv.wire.frames import encode_frame
from aiokv.wire.limits import Limits
from aiokv.wire.messages import Done, Error, Heartbeat, Init, Message, Push, Stop, Value, Welcome
from aiokv.wire.receiver import Frame, Head, Landing, Receiver

if TYPE_CHECKING:
    from collections.abc import Iterable

SCRATCH = 64 * 1024


class Landings:
    """Memory for payloads: slot i is the i-th payload."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.memory: list[bytearray] = []

    def land(self, head: Head) -> Landing:
        self.heads.append(head)
        self.memory.append(bytearray(head.payload_nbytes))
        return Landing(memoryview(self.memory[-1]), len(self.memory) - 1)


def feed(receiver: Receiver, data: bytes, sizes: Iterable[int] = ()) -> list[Frame]:
    """Receive `data` in pieces of at most these sizes (repeated; none: as large as fits)."""
    frames: list[Frame] = []
    rest = memoryview(data)
    for size in itertools.cycle(list(sizes) or [len(data)]):
        if not rest:
            break
        buffer = receiver.get_buffer()
        nbytes = min(len(buffer), len(rest), size)
        buffer[:nbytes] = rest[:nbytes]
        rest = rest[nbytes:]
        frames += receiver.buffer_updated(nbytes)
    return frames


def pattern(nbytes: int, start: int = 0) -> bytes:
    return bytes((start + i) % 251 for i in range(251)) * (nbytes // 251) + bytes(
        (start + i) % 251 for i in range(nbytes % 251)
    )


def push(nbytes: int, key: str | int = "w") -> Push:
    return Push(key, (nbytes,), "uint8", 0, nbytes, 1, 0, False, 30.0)


def stream(parts: list[tuple[Message, int]]) -> tuple[bytes, list[Frame], list[bytes]]:
    """Return the bytes of these messages with payloads of that length, the frames they are, and the payloads."""
    data = b""
    frames: list[Frame] = []
    payloads: list[bytes] = []
    for request, (message, nbytes) in enumerate(parts):
        payload = pattern(nbytes, request)
        data += encode_frame(message, request, nbytes) + payload
        frames.append(Frame(request, message, len(payloads) if payload else None, nbytes))
        payloads += [payload] if payload else []
    return data, frames, payloads


MIXED: list[tuple[Message, int]] = [
    (Heartbeat(), 0),
    (push(5), 5),
    (Done(3), 0),
    (Value(4), 0),
    (Value(5), 300),
    (Error(1, "e" * 300, {}), 0),
    (push(1), 1),
]


# --- the same frames however the bytes are cut ---


def test_all_frames_of_one_read_are_returned() -> None:
    data, frames, payloads = stream(MIXED)
    landings = Landings()
    assert feed(Receiver(landings.land), data) == frames
    assert landings.memory == payloads


def test_one_byte_at_a_time_gives_the_same_frames() -> None:
    data, frames, payloads = stream(MIXED)
    landings = Landings()
    assert feed(Receiver(landings.land), data, [1]) == frames
    assert landings.memory == payloads


messages_with_sizes = st.one_of(
    st.tuples(st.builds(Done, st.integers(0, 2**64 - 1)), st.just(0)),
    st.tuples(st.builds(Stop, st.text(max_size=50)), st.just(0)),
    st.tuples(st.builds(lambda size: Error(1, "x" * size, {}), st.integers(60_000, 140_000)), st.just(0)),
    st.integers(0, 300).map(lambda nbytes: (push(nbytes), nbytes)),
    st.integers(SCRATCH - 100, 3 * SCRATCH).map(lambda nbytes: (Value(1), nbytes)),
    st.integers(1, 2 * SCRATCH).map(
        lambda nbytes: (Init("k" * 70_000, (nbytes,), "uint8", 0, nbytes, "", 1.0), nbytes)
    ),
)


@given(
    parts=st.lists(messages_with_sizes, max_size=6),
    sizes=st.lists(st.one_of(st.integers(1, 200), st.integers(1, 3 * SCRATCH)), min_size=1, max_size=8),
)
def test_random_cuts_give_the_same_frames(parts: list[tuple[Message, int]], sizes: list[int]) -> None:
    data, frames, payloads = stream(parts)
    landings = Landings()
    receiver = Receiver(landings.land)
    # Ten bytes at least on average: a stream of a megabyte is not cut into a million pieces.
    assert feed(receiver, data, [*sizes, 10 * len(sizes), 1000]) == frames
    assert landings.memory == payloads
    assert receiver.pending_slot is None


def test_land_is_called_once_a_frame_and_only_for_payloads() -> None:
    data, frames, _ = stream(MIXED)
    landings = Landings()
    feed(Receiver(landings.land), data, [1])
    expected = [Head(frame.request, frame.message, frame.nbytes) for frame in frames if frame.nbytes]
    assert landings.heads == expected


def test_a_payload_of_no_bytes_lands_nowhere() -> None:
    landings = Landings()
    assert feed(Receiver(landings.land), encode_frame(Value(7), 3, 0)) == [Frame(3, Value(7), None, 0)]
    assert landings.heads == []


def test_a_control_part_larger_than_the_scratch_is_received() -> None:
    message = Error(1, "x" * (1024 * 1024 - 20), {})
    landings = Landings()
    data = encode_frame(message, 4) + encode_frame(Done(1), 5)
    assert feed(Receiver(landings.land), data) == [Frame(4, message, None, 0), Frame(5, Done(1), None, 0)]


@pytest.mark.parametrize("control_nbytes", [SCRATCH - 33, SCRATCH - 32, SCRATCH - 31])
def test_a_control_part_about_as_large_as_the_scratch_is_received(control_nbytes: int) -> None:
    message = Stop("x" * (control_nbytes - 6))
    data = encode_frame(message)
    # A string this long has a head of 3 bytes up to 65535 bytes and the array one of 1; the rest is text.
    data = encode_frame(Stop("x" * (control_nbytes - (len(data) - 32 - (control_nbytes - 6)))))
    assert len(data) == 32 + control_nbytes
    frames = feed(Receiver(Landings().land), data + encode_frame(Done(9)), [7, 50_000])
    assert [type(frame.message) for frame in frames] == [Stop, Done]


def test_a_receiver_alone_delivers_handshake_frames_too() -> None:
    assert feed(Receiver(Landings().land), encode_frame(Welcome())) == [Frame(0, Welcome(), None, 0)]


# --- landing without a copy ---


def test_the_rest_of_a_payload_is_received_straight_into_its_landing() -> None:
    landings = Landings()
    receiver = Receiver(landings.land)
    payload = pattern(200_000)
    assert feed(receiver, encode_frame(push(200_000), 1, 200_000) + payload[:10]) == []
    buffer = receiver.get_buffer()
    assert (buffer.obj is landings.memory[0], len(buffer)) == (True, 199_990)
    buffer[:] = payload[10:]
    assert receiver.buffer_updated(199_990) == [Frame(1, push(200_000), 0, 200_000)]
    assert landings.memory[0] == payload


def test_a_landing_that_is_partly_filled_is_continued_where_it_stopped() -> None:
    landings = Landings()
    receiver = Receiver(landings.land)
    feed(receiver, encode_frame(push(1000), 1, 1000))
    receiver.get_buffer()[:600] = b"a" * 600
    receiver.buffer_updated(600)
    buffer = receiver.get_buffer()
    assert len(buffer) == 400
    buffer[:] = b"b" * 400
    receiver.buffer_updated(400)
    assert landings.memory[0] == b"a" * 600 + b"b" * 400


def test_nothing_behind_a_payload_is_received_into_its_landing() -> None:
    receiver = Receiver(Landings().land)
    data = encode_frame(push(100_000), 1, 100_000)
    feed(receiver, data + bytes(99_999))
    assert len(receiver.get_buffer()) == 1
    feed(receiver, b"\0")
    assert len(receiver.get_buffer()) == SCRATCH


def test_the_first_bytes_of_a_payload_are_not_written_past_a_smaller_landing() -> None:
    memory = bytearray(30)
    receiver = Receiver(lambda head: Landing(memoryview(memory)[10:20], 0))
    feed(receiver, encode_frame(push(10), 1, 10) + b"p" * 10 + encode_frame(Done(1)))
    assert memory == bytes(10) + b"p" * 10 + bytes(10)


@pytest.mark.parametrize(
    "view",
    [
        memoryview(bytearray(15)),
        memoryview(bytearray(17)),
        memoryview(bytes(16)),
        memoryview(bytearray(16)).cast("f"),
        memoryview(bytearray(16)).cast("b"),
        memoryview(bytearray(16)).cast("B", (4, 4)),
        memoryview(bytearray(32))[::2],
    ],
    ids=["short", "long", "read-only", "float", "signed", "2-d", "strided"],
)
def test_a_landing_that_is_not_16_writable_bytes_is_a_bug(view: memoryview) -> None:
    receiver = Receiver(lambda head: Landing(view, 0))
    with pytest.raises(RuntimeError, match="must return a writable contiguous view of 16 bytes"):
        feed(receiver, encode_frame(push(16), 1, 16))


# --- a connection that dies, and a caller that does not want the payload any more ---


def test_the_slot_of_an_incomplete_landing_is_pending() -> None:
    receiver = Receiver(Landings().land)
    feed(receiver, encode_frame(push(4), 1, 4) + b"full")
    assert receiver.pending_slot is None
    feed(receiver, encode_frame(push(4), 2, 4) + b"ful")
    assert receiver.pending_slot == 1


def test_nothing_is_pending_before_the_control_part_is_complete() -> None:
    receiver = Receiver(Landings().land)
    feed(receiver, encode_frame(push(4), 1, 4)[:-1])
    assert receiver.pending_slot is None


def test_a_discarded_payload_leaves_its_landing_alone_from_then_on() -> None:
    landings = Landings()
    receiver = Receiver(landings.land)
    feed(receiver, encode_frame(push(200_000), 8, 200_000) + b"a" * 50)
    receiver.discard(8)
    assert receiver.pending_slot is None
    frames = feed(receiver, b"b" * 199_950 + encode_frame(Done(2), 9))
    assert frames == [Frame(8, push(200_000), None, 200_000), Frame(9, Done(2), None, 0)]
    assert landings.memory[0] == b"a" * 50 + bytes(199_950)


@given(nbytes=st.integers(1, 200_000), here=st.integers(0, 200_000), sizes=st.lists(st.integers(1, 90_000), min_size=1))
def test_frames_behind_a_discarded_payload_are_received(nbytes: int, here: int, sizes: list[int]) -> None:
    here = min(here, nbytes - 1)
    landings = Landings()
    receiver = Receiver(landings.land)
    feed(receiver, encode_frame(Value(1), 8, nbytes) + b"a" * here)
    receiver.discard(8)
    frames = feed(receiver, b"b" * (nbytes - here) + encode_frame(Value(2), 9, 5) + b"hello", [*sizes, 1000])
    assert frames == [Frame(8, Value(1), None, nbytes), Frame(9, Value(2), 1, 5)]
    assert landings.memory == [b"a" * here + bytes(nbytes - here), b"hello"]


def test_discarding_between_get_buffer_and_buffer_updated_does_not_lose_count() -> None:
    receiver = Receiver(Landings().land)
    feed(receiver, encode_frame(push(100), 8, 100))
    receiver.get_buffer()[:60] = b"a" * 60
    receiver.discard(8)
    assert receiver.buffer_updated(60) == []
    frames = feed(receiver, b"b" * 40 + encode_frame(Done(1), 9))
    assert frames == [Frame(8, push(100), None, 100), Frame(9, Done(1), None, 0)]


def test_discarding_another_request_changes_nothing() -> None:
    landings = Landings()
    receiver = Receiver(landings.land)
    feed(receiver, encode_frame(push(4), 8, 4) + b"ab")
    receiver.discard(9)
    assert feed(receiver, b"cd") == [Frame(8, push(4), 0, 4)]
    assert landings.memory == [b"abcd"]


def test_discarding_when_nothing_is_being_received_changes_nothing() -> None:
    receiver = Receiver(Landings().land)
    receiver.discard(0)
    assert feed(receiver, encode_frame(Done(1))) == [Frame(0, Done(1), None, 0)]


def test_discarding_after_an_error_gives_the_slot_back() -> None:
    receiver = Receiver(Landings().land)
    feed(receiver, encode_frame(push(4), 8, 4) + b"ab")
    receiver.stop("the connection is closed")
    assert receiver.pending_slot == 0
    receiver.discard(8)
    assert receiver.pending_slot is None


# --- limits ---


def test_lengths_up_to_the_limits_are_accepted() -> None:
    receiver = Receiver(Landings().land, Limits(max_control_bytes=6, max_payload_bytes=8))
    assert len(feed(receiver, encode_frame(Done(2000), 1) + encode_frame(Value(200), 2, 8) + bytes(8))) == 2


def test_a_control_part_over_its_limit_is_refused() -> None:
    receiver = Receiver(Landings().land, Limits(max_control_bytes=2))
    with pytest.raises(LimitError, match="a Done frame announces a control part of 4 bytes, but at most 2") as caught:
        feed(receiver, encode_frame(Done(200)))
    assert caught.value.details == {"expected": 2, "got": 4}


def test_a_payload_over_its_limit_is_refused_before_it_lands() -> None:
    landings = Landings()
    receiver = Receiver(landings.land, Limits(max_payload_bytes=8))
    with pytest.raises(LimitError, match="a Value frame announces a payload of 9 bytes, but at most 8"):
        feed(receiver, encode_frame(Value(1), 1, 9))
    assert landings.heads == []


@pytest.mark.parametrize(("payload", "control"), [(2**31 + 16, 2), (2**60, 2), (0, 2**31 + 16), (2**64 - 1, 2**32 - 1)])
def test_huge_lengths_are_refused_without_memory_being_taken(payload: int, control: int) -> None:
    receiver = Receiver(Landings().land)
    data = struct.pack("<4sBBHQQII", b"AIOK", 1, 49, 0, 1, payload, control, 0)
    tracemalloc.start()
    try:
        with pytest.raises(LimitError):
            feed(receiver, data)
        assert tracemalloc.get_traced_memory()[1] < SCRATCH
    finally:
        tracemalloc.stop()


# --- after an error ---


def test_nothing_more_is_received_after_an_error() -> None:
    receiver = Receiver(Landings().land)
    with pytest.raises(ProtocolError, match="HTTP"):
        feed(receiver, b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError, match="after an error: expected a frame"):
        receiver.get_buffer()
    with pytest.raises(ProtocolError, match="after an error: expected a frame"):
        receiver.buffer_updated(1)


def test_frames_in_front_of_an_error_are_not_lost() -> None:
    landings = Landings()
    receiver = Receiver(landings.land)
    with pytest.raises(ProtocolError, match="expected a frame to start"):
        feed(receiver, encode_frame(Value(1), 6, 4) + b"good" + encode_frame(Done(2), 7) + b"garbage")
    assert receiver.undelivered == [Frame(6, Value(1), 0, 4), Frame(7, Done(2), None, 0)]


def test_nothing_is_undelivered_without_an_error() -> None:
    receiver = Receiver(Landings().land)
    feed(receiver, encode_frame(Done(2), 7))
    assert receiver.undelivered == []


def test_land_may_refuse_a_frame() -> None:
    def refuse(head: Head) -> Landing:
        raise UnknownKeyError("nobody has initialised key 'w'", key="w")

    receiver = Receiver(refuse)
    with pytest.raises(UnknownKeyError):
        feed(receiver, encode_frame(push(4), 1, 4))
    assert receiver.pending_slot is None


def test_a_landing_is_let_go_after_an_error() -> None:
    memory = bytearray(4)
    view = memoryview(memory)
    receiver = Receiver(lambda head: Landing(view, 0))
    feed(receiver, encode_frame(push(4), 1, 4))
    receiver.stop("the connection is closed")
    view.release()
    memory.append(1)  # Fails with BufferError while anybody holds a view.
