"""Payloads by reference: two connections that have the same memory, and peers that lie about it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.errors import LimitError, ProtocolError
from aiokv.wire.connection import Connection
from aiokv.wire.frames import by_reference, encode_frame
from aiokv.wire.messages import Freed, Message, Push, Share, Shared, Value
from aiokv.wire.receiver import Frame, Head, Landing
from aiokv.wire.shared import MIN_SHARED_BYTES, Mapping, Ring, SharedMemory

RING = 256 * 1024
LARGEST = RING // 4
NONCE, PROOF = b"n" * 16, b"p" * 16
SHARE = Share(1234, 5, RING, NONCE)


@dataclass
class End:
    """One side: its connection, and what has landed there by request."""

    initiator: bool
    memory: Mapping | None = None
    landed: dict[int, bytearray] = field(default_factory=dict)
    named: list[Share] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection = Connection(
            initiator=self.initiator,
            cluster="ml",
            token=b"t",
            nonce=bytes([self.initiator]) * 32,
            land=self.land,
            open_shared=self.open,
            now=0.0,
        )

    def land(self, head: Head) -> Landing:
        self.landed[head.request] = bytearray(head.payload_nbytes)
        return Landing(memoryview(self.landed[head.request]), head.request)

    def open(self, share: Share) -> Mapping | None:
        self.named.append(share)
        return self.memory

    def receive(self, data: bytes, piece: int = 1 << 30) -> list[Frame]:
        frames: list[Frame] = []
        rest = memoryview(data)
        while rest:
            buffer = self.connection.get_buffer()
            nbytes = min(len(buffer), len(rest), piece)
            buffer[:nbytes] = rest[:nbytes]
            rest = rest[nbytes:]
            frames += self.connection.buffer_updated(nbytes)
        return frames


def mappings() -> tuple[Mapping, Mapping]:
    there, back = memoryview(bytearray(RING)), memoryview(bytearray(RING))
    return Mapping(NONCE, PROOF, there, back), Mapping(NONCE, PROOF, back, there)


def join(first: End, second: End) -> list[Frame]:
    """Carry what the connections themselves have to say, until both are silent."""
    frames: list[Frame] = []
    silent = 0
    while silent < 2:
        data = first.connection.data_to_send()
        frames += second.receive(data)
        silent = 0 if data else silent + 1
        first, second = second, first
    return frames


def established() -> tuple[End, End]:
    first, second = End(initiator=True), End(initiator=False)
    join(first, second)
    return first, second


def sharing() -> tuple[End, End]:
    first, second = established()
    mine, second.memory = mappings()
    first.connection.offer(SHARE, mine)
    join(first, second)
    return first, second


def pattern(nbytes: int, start: int) -> bytes:
    return bytes((start + i) % 251 for i in range(nbytes))


def push(nbytes: int, key: str = "w") -> Push:
    return Push(key, (nbytes,), "uint8", 0, nbytes, 1, 0, False, 30.0)


def refer(end: End, request: int, payload: bytes, message: Message | None = None) -> bytes:
    head = encode_frame(message or push(len(payload)), request, len(payload))
    return end.connection.refer(head, memoryview(payload))


# --- how two sides come to share memory ---


def test_both_sides_share_when_the_listener_finds_what_stands_in_the_memory() -> None:
    first, second = established()
    mine, second.memory = mappings()
    assert not first.connection.offered
    first.connection.offer(SHARE, mine)
    assert (first.connection.offered, first.connection.sharing) == (True, False)
    join(first, second)
    assert second.named == [SHARE]
    assert (first.connection.offered, first.connection.sharing, second.connection.sharing) == (False, True, True)


def test_a_listener_that_can_not_open_the_memory_says_so_and_nothing_is_shared() -> None:
    first, second = established()
    first.connection.offer(SHARE, mappings()[0])
    join(first, second)
    assert (first.connection.offered, first.connection.sharing, second.connection.sharing) == (False, False, False)
    assert not first.connection.shares(LARGEST)
    assert not first.connection.has_room(LARGEST)


def test_a_listener_with_no_use_for_memory_refuses_every_offer() -> None:
    first, second = established()
    second.connection._open_shared = None
    first.connection.offer(SHARE, mappings()[0])
    join(first, second)
    assert (second.named, first.connection.sharing) == ([], False)


def test_a_second_offer_does_not_take_the_memory_away_that_is_in_use() -> None:
    first, second = sharing()
    second.receive(encode_frame(Share(1, 2, RING, NONCE)))
    assert second.connection.data_to_send() == encode_frame(Shared(b""))
    frames = second.receive(refer(first, 3, pattern(LARGEST, 1)))
    assert [frame.request for frame in frames] == [3]


@pytest.mark.parametrize("answer", [Shared(b"x" * 16), Shared(PROOF[:-1])])
def test_a_listener_that_opened_other_memory_is_refused(answer: Shared) -> None:
    first, _ = established()
    first.connection.offer(SHARE, mappings()[0])
    with pytest.raises(ProtocolError, match="but not that of this side"):
        first.receive(encode_frame(answer))


@pytest.mark.parametrize("message", [Shared(b""), Shared(PROOF)])
def test_an_answer_to_no_offer_is_refused(message: Shared) -> None:
    first, _ = established()
    with pytest.raises(ProtocolError, match="shared memory"):
        first.receive(encode_frame(message))


@pytest.mark.parametrize("message", [SHARE, Shared(PROOF), Freed(0)])
def test_nobody_may_speak_of_shared_memory_before_authentication(message: Message) -> None:
    with pytest.raises(ProtocolError, match="is not allowed now"):
        End(initiator=False).receive(encode_frame(message))


# --- payloads ---


@pytest.mark.parametrize("piece", [1, 31, 33, 1 << 30])
def test_frames_keep_their_order_and_payloads_whichever_way_they_go(piece: int) -> None:
    first, second = sharing()
    sent = []
    stream = b""
    for request, nbytes in enumerate([3, LARGEST, 0, MIN_SHARED_BYTES, 70_001, 20_000, 1]):
        payload = pattern(nbytes, request)
        sent.append(payload)
        if first.connection.shares(nbytes):
            stream += refer(first, request, payload)
        else:
            stream += encode_frame(push(nbytes), request, nbytes) + payload
    assert len(stream) < 80_000
    frames = second.receive(stream, piece)
    assert [(frame.request, frame.nbytes) for frame in frames] == [(i, len(p)) for i, p in enumerate(sent)]
    assert [bytes(second.landed.get(i, b"")) for i in range(len(sent))] == sent


def test_a_payload_may_follow_a_control_part_that_is_larger_than_the_receive_buffer() -> None:
    first, second = sharing()
    message = push(LARGEST, "k" * 100_000)
    (frame,) = second.receive(refer(first, 1, pattern(LARGEST, 5), message))
    assert frame.message == message
    assert bytes(second.landed[1]) == pattern(LARGEST, 5)


def test_both_directions_have_memory_of_their_own() -> None:
    first, second = sharing()
    there = refer(first, 1, pattern(LARGEST, 1))
    back = refer(second, 2, pattern(LARGEST, 2), Value(1))
    second.receive(there)
    first.receive(back)
    assert bytes(second.landed[1]) == pattern(LARGEST, 1)
    assert bytes(first.landed[2]) == pattern(LARGEST, 2)


@pytest.mark.parametrize(
    ("nbytes", "shared"),
    [(MIN_SHARED_BYTES - 1, False), (MIN_SHARED_BYTES, True), (LARGEST, True), (LARGEST + 1, False)],
)
def test_which_payloads_go_through_the_memory(nbytes: int, shared: bool) -> None:
    first, _ = sharing()
    assert first.connection.shares(nbytes) is shared


def test_a_full_ring_has_room_again_when_the_peer_has_copied() -> None:
    first, second = sharing()
    stream = b"".join(refer(first, i, pattern(LARGEST, i)) for i in range(4))
    assert not first.connection.has_room(MIN_SHARED_BYTES)
    second.receive(stream)
    assert not first.connection.has_room(MIN_SHARED_BYTES)
    join(second, first)
    assert first.connection.has_room(LARGEST)


def test_after_the_end_of_the_connection_the_memory_is_let_go() -> None:
    first, second = sharing()
    frame = refer(first, 1, pattern(LARGEST, 1))
    for end in (first, second):
        end.connection.unshare()
    assert not first.connection.sharing
    with pytest.raises(ProtocolError, match="no memory is shared"):
        second.receive(frame)


def test_memory_that_was_not_answered_for_is_let_go_with_the_connection() -> None:
    first, _ = established()
    mine, _ = mappings()
    first.connection.offer(SHARE, mine)
    first.connection.unshare()
    assert not first.connection.offered
    with pytest.raises(ValueError, match="released"):
        bytes(mine.outgoing)


# --- peers that lie ---


def test_a_reference_where_nothing_is_shared_is_refused() -> None:
    first, _ = established()
    with pytest.raises(
        ProtocolError, match="a Push frame hands over its payload by reference, but no memory is shared"
    ):
        first.receive(by_reference(encode_frame(push(LARGEST), 1, LARGEST)))
    assert first.landed == {}


@pytest.mark.parametrize("nbytes", [LARGEST + 1, RING, RING + 1, 1 << 25])
def test_a_reference_to_more_than_may_lie_in_the_memory_is_refused_before_anything_is_taken_for_it(nbytes: int) -> None:
    first, second = sharing()
    with pytest.raises(LimitError, match=f"{nbytes} bytes of shared memory, but at most {LARGEST}"):
        second.receive(by_reference(encode_frame(push(nbytes), 1, nbytes)))
    assert second.landed == {}
    assert first.connection.sharing


@pytest.mark.parametrize("position", [-1, 2 * LARGEST - 1, 3 * LARGEST + 1, 1 << 62])
def test_a_peer_that_frees_what_it_was_not_sent_or_takes_it_back_is_refused(position: int) -> None:
    first, _ = sharing()
    for i in range(3):
        refer(first, i, pattern(LARGEST, i))
    first.receive(encode_frame(Freed(2 * LARGEST)))
    with pytest.raises(ProtocolError, match=f"frees its shared memory up to {position}"):
        first.receive(encode_frame(Freed(position)))


def test_a_peer_that_frees_where_nothing_is_shared_is_refused() -> None:
    first, _ = established()
    with pytest.raises(ProtocolError, match="none is shared"):
        first.receive(encode_frame(Freed(0)))


# --- the ring ---


@given(hs.integers(1, 64), hs.lists(hs.tuples(hs.integers(1, 1 << 14), hs.booleans()), max_size=200))
def test_payloads_that_are_not_copied_yet_never_overlap_and_lie_inside(kib: int, steps: list[tuple[int, bool]]) -> None:
    ring = Ring(kib * 1024)
    live: deque[tuple[int, int, int]] = deque()
    for wanted, read in steps:
        nbytes = min(wanted, ring.largest)
        if ring.has_room(nbytes):
            offset = ring.take(nbytes)
            assert offset >= 0
            assert offset + nbytes <= ring.size
            assert all(offset + nbytes <= start or stop <= offset for start, stop, _ in live)
            live.append((offset, offset + nbytes, ring.end))
        if read and live:
            ring.freed = live.popleft()[2]


@given(hs.lists(hs.integers(MIN_SHARED_BYTES, LARGEST), min_size=1, max_size=40), hs.integers(0, 5))
def test_who_waits_for_room_gets_it_when_all_is_copied(sizes: list[int], late: int) -> None:
    mine, theirs = mappings()
    writer, reader = SharedMemory(mine), SharedMemory(theirs)
    unread: deque[tuple[int, bytes]] = deque()

    def read() -> None:
        nbytes, first = unread.popleft()
        assert bytes(reader.fetch(nbytes)[:1]) == first

    for number, nbytes in enumerate(sizes):
        while len(unread) > late:
            read()
        if not writer.has_room(nbytes):
            while unread:
                read()
            freed = reader.freed()
            assert freed is not None
            writer.free(freed)
            assert writer.has_room(nbytes)
        payload = bytes([number]) * nbytes
        writer.put(memoryview(payload))
        unread.append((nbytes, payload[:1]))
