"""Two connections joined by a fake link: the handshake, everything that may go wrong in it, and the end."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import (
    BY_CODE,
    AiokvError,
    ClosedError,
    HandshakeError,
    LimitError,
    ProtocolError,
    SchedulerLostError,
)
from aiokv.types import Role
from aiokv.wire.connection import Connection, goodbye
from aiokv.wire.frames import encode_frame
from aiokv.wire.limits import DEFAULT_LIMITS, Limits
from aiokv.wire.messages import (
    Attach,
    Challenge,
    Done,
    Error,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Pong,
    Proof,
    Pull,
    Push,
    Register,
    Value,
    Welcome,
)
from aiokv.wire.receiver import Frame, Head, Landing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

TOKEN = b"correct horse battery staple"
NONCE_I = bytes(range(32))
NONCE_L = bytes(range(32, 64))


def land(head: Head) -> Landing:
    return Landing(memoryview(bytearray(head.payload_nbytes)), head.request)


def initiator(
    *,
    cluster: str = "ml",
    token: bytes = TOKEN,
    nonce: bytes = NONCE_I,
    limits: Limits = DEFAULT_LIMITS,
    patience: float = math.inf,
) -> Connection:
    settings: dict[str, Any] = {"cluster": cluster, "token": token, "limits": limits, "patience": patience}
    return Connection(initiator=True, nonce=nonce, land=land, now=100.0, **settings)


def listener(
    *,
    cluster: str = "ml",
    token: bytes = TOKEN,
    nonce: bytes = NONCE_L,
    limits: Limits = DEFAULT_LIMITS,
    patience: float = math.inf,
) -> Connection:
    settings: dict[str, Any] = {"cluster": cluster, "token": token, "limits": limits, "patience": patience}
    return Connection(initiator=False, nonce=nonce, land=land, now=100.0, **settings)


def feed(connection: Connection, data: bytes, sizes: Iterable[int] = ()) -> list[Frame]:
    frames: list[Frame] = []
    rest = memoryview(data)
    for size in itertools.cycle(list(sizes) or [len(data)]):
        if not rest:
            break
        buffer = connection.get_buffer()
        nbytes = min(len(buffer), len(rest), size)
        buffer[:nbytes] = rest[:nbytes]
        rest = rest[nbytes:]
        frames += connection.buffer_updated(nbytes)
    return frames


def join(first: Connection, second: Connection) -> None:
    """Carry bytes both ways until both sides are silent."""
    silent = 0
    while silent < 2:
        data = first.data_to_send()
        assert feed(second, data) == []
        silent = 0 if data else silent + 1
        first, second = second, first


def established() -> tuple[Connection, Connection]:
    first, second = initiator(), listener()
    join(first, second)
    assert first.established
    assert second.established
    return first, second


# --- the handshake as it should be ---


def test_the_initiator_speaks_at_once_and_the_listener_waits() -> None:
    assert initiator().data_to_send() == encode_frame(Hello("ml", NONCE_I))
    assert listener().data_to_send() == b""


def test_both_sides_are_established_after_the_handshake() -> None:
    first, second = initiator(), listener()
    assert (first.established, second.established) == (False, False)
    join(first, second)
    assert (first.established, second.established) == (True, True)


def test_the_initiator_is_not_established_before_it_is_welcome() -> None:
    first, second = initiator(), listener()
    feed(second, first.data_to_send())
    feed(first, second.data_to_send())
    feed(second, first.data_to_send())
    assert (first.established, second.established) == (False, True)


def test_an_empty_token_is_a_token() -> None:
    first, second = initiator(token=b""), listener(token=b"")
    join(first, second)
    assert first.established


def test_the_handshake_arrives_one_byte_at_a_time() -> None:
    first, second = initiator(), listener()
    feed(second, first.data_to_send(), [1])
    feed(first, second.data_to_send(), [1])
    feed(second, first.data_to_send(), [1])
    feed(first, second.data_to_send(), [1])
    assert first.established


def test_handshake_bytes_are_handed_out_once() -> None:
    first = initiator()
    first.data_to_send()
    assert first.data_to_send() == b""


def test_frames_in_the_same_read_as_the_welcome_are_returned() -> None:
    first, second = initiator(), listener()
    feed(second, first.data_to_send())
    feed(first, second.data_to_send())
    feed(second, first.data_to_send())
    frames = feed(first, second.data_to_send() + encode_frame(Value(1), 3, 5) + b"value" + encode_frame(Heartbeat()))
    assert frames == [Frame(3, Value(1), 3, 5), Frame(0, Heartbeat(), None, 0)]


def test_frames_in_the_same_read_as_the_proof_are_returned() -> None:
    first, second = initiator(), listener()
    feed(second, first.data_to_send())
    feed(first, second.data_to_send())
    register = Register(Role.WORKER, "w0", 1, "10.0.0.2", 7777, 30.0)
    assert feed(second, first.data_to_send() + encode_frame(register, 1)) == [Frame(1, register, None, 0)]


def test_all_data_may_flow_after_the_handshake() -> None:
    first, second = established()
    push = Push("w", (200_000,), "uint8", 0, 200_000, 1, 0, True, 30.0)
    assert feed(second, encode_frame(push, 4, 200_000) + bytes(200_000)) == [Frame(4, push, 4, 200_000)]
    message = Error(1, "x" * 100_000, {})
    assert feed(first, encode_frame(message, 4)) == [Frame(4, message, None, 0)]


def test_the_token_is_neither_sent_nor_shown() -> None:
    first, second = initiator(), listener()
    seen = b""
    for _ in range(2):
        data = first.data_to_send()
        feed(second, data)
        answer = second.data_to_send()
        feed(first, answer)
        seen += data + answer
    assert first.established
    assert TOKEN not in seen
    assert TOKEN.decode() not in f"{first!r} {second!r}"


# --- strangers, and peers that are set up otherwise ---


def test_an_initiator_notices_another_token_and_says_so() -> None:
    first, second = initiator(token=b"wrong"), listener()
    with pytest.raises(HandshakeError, match="the listener has another token") as caught:
        join(first, second)
    assert TOKEN.decode() not in str(caught.value)
    with pytest.raises(HandshakeError, match="peer closed the connection: the listener has another token"):
        feed(second, goodbye(caught.value))


def test_a_listener_with_another_token_does_not_convince_the_initiator() -> None:
    with pytest.raises(HandshakeError, match="the listener has another token"):
        join(initiator(), listener(token=b"wrong"))


def test_an_initiator_that_cannot_prove_the_token_is_refused() -> None:
    second = listener()
    with pytest.raises(HandshakeError, match="the initiator has another token"):
        feed(second, encode_frame(Hello("ml", NONCE_I)) + encode_frame(Proof(bytes(32))))
    assert not second.established


def test_another_cluster_is_refused_and_the_initiator_learns_why() -> None:
    first, second = initiator(cluster="dev"), listener()
    with pytest.raises(HandshakeError, match="cluster 'ml', got one of cluster 'dev'") as caught:
        join(first, second)
    with pytest.raises(HandshakeError, match=r"peer closed the connection: .*cluster 'ml', got one of cluster 'dev'"):
        feed(first, goodbye(caught.value))


def test_a_recorded_stream_is_refused_when_it_is_played_again() -> None:
    first, second = initiator(), listener()
    recorded = first.data_to_send()
    feed(second, recorded)
    feed(first, second.data_to_send())
    proof = first.data_to_send()
    recorded += proof + encode_frame(Attach(0, "w0", 1, 1, 30.0), 1)
    feed(second, proof)
    assert second.established
    fresh = listener(nonce=bytes(reversed(NONCE_L)))
    with pytest.raises(HandshakeError, match="another token"):
        feed(fresh, recorded)


def test_a_listener_that_reflects_the_nonce_is_refused() -> None:
    with pytest.raises(HandshakeError, match="own nonce"):
        feed(initiator(), encode_frame(Challenge(NONCE_I, bytes(32))))


def test_a_listener_that_reflects_everything_is_refused() -> None:
    first = initiator()
    with pytest.raises(ProtocolError, match="a Hello frame is not allowed now: expected one of Challenge, Goodbye"):
        feed(first, first.data_to_send())


def test_an_initiator_that_reflects_the_proof_is_refused() -> None:
    # The peer opens a second connection and lets the listener itself answer what it was asked in the first.
    second = listener()
    feed(second, encode_frame(Hello("ml", NONCE_I)))
    proof = second.data_to_send()[-32:]
    with pytest.raises(HandshakeError, match="another token"):
        feed(second, encode_frame(Proof(proof)))


@pytest.mark.parametrize("side", [initiator, listener])
def test_another_protocol_version_is_named(side: Callable[[], Connection]) -> None:
    data = bytearray(encode_frame(Hello("ml", NONCE_I)))
    data[4] = 2
    with pytest.raises(HandshakeError, match="peer speaks protocol version 2, this side speaks version 1"):
        feed(side(), bytes(data))


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "this is HTTP"),
        (b"GET ", "this is HTTP"),
        (bytes.fromhex("1603010200010001fc0303"), "this is TLS"),
        (bytes(range(0x80, 0x100)), "not an aiokv peer"),
    ],
)
def test_a_stranger_is_told_apart(data: bytes, hint: str) -> None:
    with pytest.raises(ProtocolError, match=hint):
        feed(listener(), data)


@pytest.mark.parametrize("message", [Heartbeat(), Pull("w", (), "float32", 0, 1, 0, 1.0), Welcome(), Proof(bytes(32))])
def test_nothing_but_hello_opens_a_connection(message: Message) -> None:
    name = type(message).__name__
    with pytest.raises(ProtocolError, match=f"a {name} frame is not allowed now: expected one of Hello, Goodbye"):
        feed(listener(), encode_frame(message))


def test_data_before_the_proof_is_refused_before_its_payload_lands() -> None:
    heads: list[Head] = []

    def remember(head: Head) -> Landing:
        heads.append(head)
        return land(head)

    second = Connection(initiator=False, cluster="ml", token=TOKEN, nonce=NONCE_L, land=remember, now=0.0)
    with pytest.raises(ProtocolError, match="a Value frame is not allowed now: expected one of Proof, Goodbye"):
        feed(second, encode_frame(Hello("ml", NONCE_I)) + encode_frame(Value(1), 1, 4) + b"data")
    assert heads == []


@pytest.mark.parametrize("message", [Hello("ml", NONCE_I), Challenge(NONCE_L, NONCE_L), Proof(NONCE_L), Welcome()])
def test_there_is_no_second_handshake(message: Message) -> None:
    first, _ = established()
    with pytest.raises(ProtocolError, match=f"a {type(message).__name__} frame is not allowed now"):
        feed(first, encode_frame(message))


def test_more_than_4096_bytes_before_authentication_are_refused_by_the_header_alone() -> None:
    hello = encode_frame(Hello("c" * 5000, NONCE_I))
    with pytest.raises(LimitError, match="a Hello frame announces a control part of 5038 bytes, but at most 4064"):
        feed(listener(), hello[:32])


@pytest.mark.parametrize(("cluster", "fits"), [("c" * 120, True), ("c" * 121, False)])
def test_the_handshake_limit_is_for_all_frames_together(cluster: str, fits: bool) -> None:
    # Hello: 32 + 1 + (2 + 120) + (2 + 32) = 189 bytes, Proof: 32 + 1 + (2 + 32) = 67 bytes, together 256.
    first, second = initiator(cluster=cluster), listener(cluster=cluster, limits=Limits(max_handshake_bytes=256))
    if fits:
        join(first, second)
        assert second.established
    else:
        with pytest.raises(LimitError, match="a Proof frame announces a control part of 35 bytes, but at most 34"):
            join(first, second)


def test_no_header_fits_when_the_handshake_limit_is_used_up() -> None:
    cluster = "c" * 180
    second = listener(cluster=cluster, limits=Limits(max_handshake_bytes=256))
    feed(second, encode_frame(Hello(cluster, NONCE_I)))
    with pytest.raises(LimitError, match="at most 0 are allowed now"):
        feed(second, encode_frame(Proof(bytes(32))))


def test_the_control_limit_holds_in_the_handshake_too() -> None:
    with pytest.raises(LimitError, match="a Hello frame announces a control part of 38 bytes, but at most 37"):
        feed(listener(limits=Limits(max_control_bytes=37)), encode_frame(Hello("ml", NONCE_I)))


def test_the_handshake_limit_does_not_count_what_comes_behind_it() -> None:
    first, second = initiator(), listener()
    feed(second, first.data_to_send())
    feed(first, second.data_to_send())
    behind = encode_frame(Error(1, "x" * 20_000, {}), 1)
    assert len(feed(second, first.data_to_send() + behind)) == 1


# --- time ---


def test_the_handshake_has_a_deadline_until_it_is_done() -> None:
    first, second = initiator(), listener(limits=Limits(handshake_seconds=2.5))
    assert (first.deadline(), second.deadline()) == (105.0, 102.5)
    join(first, second)
    assert (first.deadline(), second.deadline()) == (None, None)


def test_a_peer_that_says_nothing_is_given_up_at_the_deadline() -> None:
    second = listener()
    second.handle_timeout(104.9)
    with pytest.raises(HandshakeError, match="no Hello from the peer within 5 s"):
        second.handle_timeout(105.0)


def test_the_time_out_names_the_step_that_is_missing() -> None:
    second = listener()
    feed(second, encode_frame(Hello("ml", NONCE_I)) + encode_frame(Proof(bytes(32)))[:-1])
    with pytest.raises(HandshakeError, match="no Proof from the peer"):
        second.handle_timeout(200.0)


def test_nothing_is_accepted_after_the_time_out() -> None:
    second = listener()
    with pytest.raises(HandshakeError):
        second.handle_timeout(105.0)
    with pytest.raises(ProtocolError, match="after an error: no Hello from the peer"):
        second.get_buffer()


def test_an_established_connection_has_no_time_out_before_it_is_watched() -> None:
    first, _ = established()
    first.handle_timeout(1e9)
    assert first.established
    assert (first.gone, first.data_to_send()) == ("", b"")


# --- whether the other side is still there ---


def watched() -> tuple[Connection, Connection]:
    """Return two ends that look every second, from time 1000 on."""
    first, second = initiator(patience=4.0), listener(patience=4.0)
    join(first, second)
    for end in (first, second):
        end.watch(1000.0)
    return first, second


def test_a_connection_is_looked_at_four_times_in_its_patience() -> None:
    first, _ = watched()
    assert first.deadline() == 1001.0
    first.handle_timeout(1000.9)
    assert first.deadline() == 1001.0
    first.handle_timeout(1003.0)
    assert first.deadline() == 1004.0


def test_nothing_is_asked_while_something_comes() -> None:
    first, second = watched()
    for second_passed in range(1, 20):
        feed(first, encode_frame(Done(), second_passed))
        first.handle_timeout(1000.0 + second_passed)
        assert (first.data_to_send(), first.gone) == (b"", "")
    assert second.data_to_send() == b""


def test_a_peer_that_is_asked_answers_and_lives() -> None:
    first, second = watched()
    first.handle_timeout(1001.0)
    assert first.data_to_send() == b"", "the handshake was heard since"
    for second_passed in range(2, 21):
        first.handle_timeout(1000.0 + second_passed)
        # At every other look: the answer was heard at the next one.
        asked = first.data_to_send()
        assert asked == (encode_frame(Ping()) if second_passed % 2 == 0 else b"")
        assert feed(second, asked) == []
        assert feed(first, second.data_to_send()) == []
        assert first.gone == ""


def test_a_peer_that_does_not_answer_is_gone_after_the_patience() -> None:
    first, _ = watched()
    asked = []
    for second_passed in range(1, 5):
        first.handle_timeout(1000.0 + second_passed)
        asked.append(first.data_to_send() == encode_frame(Ping()))
        assert first.gone == ""
    first.handle_timeout(1005.0)
    assert asked == [False, True, True, True]
    assert first.data_to_send() == b""
    assert first.gone == "nothing has come from the other side for 4 s, and no answer to a ping"


def test_looks_that_were_missed_are_no_silence() -> None:
    """Whoever stood still for a minute has not listened, and looks once for that time."""
    first, second = watched()
    first.handle_timeout(1001.0)
    first.handle_timeout(1060.0)
    assert first.gone == ""
    feed(second, first.data_to_send())
    feed(first, second.data_to_send())
    first.handle_timeout(1061.0)
    assert (first.gone, first.data_to_send()) == ("", b"")


def test_what_else_shows_that_the_peer_is_there_counts_as_well() -> None:
    first, _ = watched()
    for second_passed in range(1, 20):
        first.heard()
        first.handle_timeout(1000.0 + second_passed)
    assert (first.gone, first.data_to_send()) == ("", b"")


def test_pings_that_come_together_are_answered_once() -> None:
    first, second = watched()
    assert feed(second, 100 * encode_frame(Ping())) == []
    assert second.data_to_send() == encode_frame(Pong())
    assert feed(first, encode_frame(Pong())) == [], "also one that was not asked for"


# --- the end ---


def test_a_goodbye_raises_the_error_that_the_peer_closed_with() -> None:
    _, second = established()
    with pytest.raises(SchedulerLostError, match="the peer closed the connection: no heartbeat for 5 s"):
        feed(second, goodbye(SchedulerLostError("no heartbeat for 5 s", address="10.0.0.1:9000")))


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_error_can_be_the_reason_of_a_goodbye(code: int) -> None:
    _, second = established()
    with pytest.raises(BY_CODE[code]) as caught:
        feed(second, goodbye(BY_CODE[code]("because")))
    assert type(caught.value) is BY_CODE[code]


def test_a_goodbye_with_an_unknown_code_is_an_error_too() -> None:
    with pytest.raises(AiokvError, match="peer closed the connection: later release"):
        feed(initiator(), encode_frame(Goodbye(999, "later release")))


@pytest.mark.parametrize("text", ["x", "\N{GREEK SMALL LETTER OMEGA}", "\N{GRINNING FACE}", "a\N{EURO SIGN}"])
def test_a_long_reason_is_cut_so_that_it_fits_before_authentication(text: str) -> None:
    reason = text * 5000
    farewell = goodbye(ProtocolError(reason))
    assert len(farewell) < 1100
    with pytest.raises(ProtocolError) as caught:
        feed(initiator(), farewell)
    assert reason.startswith(caught.value.message.removeprefix("the peer closed the connection: "))


def test_a_goodbye_larger_than_the_scratch_is_understood() -> None:
    first, _ = established()
    with pytest.raises(ClosedError, match=r"x{100}"):
        feed(first, encode_frame(Goodbye(ClosedError.code, "x" * 100_000)))


def test_answers_in_front_of_a_goodbye_are_not_lost() -> None:
    first, _ = established()
    data = encode_frame(Done(4), 1) + encode_frame(Value(4), 2, 3) + b"abc" + goodbye(ClosedError("done"))
    with pytest.raises(ClosedError):
        feed(first, data)
    assert first.undelivered == [Frame(1, Done(4), None, 0), Frame(2, Value(4), 2, 3)]


def test_a_cancelled_value_is_dropped_and_its_memory_given_back() -> None:
    first, _ = established()
    feed(first, encode_frame(Value(4), 12, 1000) + bytes(10))
    assert first.pending_slot == 12
    first.discard(12)
    assert first.pending_slot is None
    assert feed(first, bytes(990)) == [Frame(12, Value(4), None, 1000)]


# --- bytes that nobody meant ---


@given(data=st.binary(max_size=300))
def test_random_bytes_end_in_a_protocol_error_or_in_waiting(data: bytes) -> None:
    second = listener()
    try:
        assert feed(second, data) == []
    except ProtocolError:
        return
    assert len(data) < 4 or data[:5] in (b"AIOK", b"AIOK\x01")


def session() -> bytes:
    """Return all that an initiator sends: the handshake, and some frames of each kind."""
    first, second = initiator(), listener()
    data = first.data_to_send()
    feed(second, data)
    feed(first, second.data_to_send())
    return b"".join(
        [
            data,
            first.data_to_send(),
            encode_frame(Register(Role.WORKER, "w0", 1, "10.0.0.2", 7777, 30.0), 1),
            encode_frame(Push("w", (2, 3), "float32", 0, 6, 1, 0, True, 30.0), 2, 24) + bytes(24),
            encode_frame(Error(42, "key 'w'", {"key": "w", "ranks": [0, 2], "round": None}), 3),
            encode_frame(Value(7), 4, 100) + bytes(100),
            encode_frame(Done(1), 5),
        ]
    )


SESSION = session()


def test_the_session_below_is_good() -> None:
    assert len(feed(listener(), SESSION)) == 5


@given(
    flips=st.lists(st.integers(0, 8 * len(SESSION) - 1), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=4),
)
def test_flipped_bits_end_in_a_protocol_error_or_in_other_frames(flips: list[int], sizes: list[int]) -> None:
    data = bytearray(SESSION)
    for bit in flips:
        data[bit // 8] ^= 1 << bit % 8
    second = listener()
    try:
        feed(second, bytes(data), sizes)
    except ProtocolError:
        with pytest.raises(ProtocolError, match="after an error"):
            second.get_buffer()


@given(control=st.binary(max_size=60), frame_type=st.sampled_from([16, 17, 18, 19, 32, 33, 34, 35, 36, 48, 49, 50]))
def test_random_control_parts_end_in_a_protocol_error_or_in_a_message(control: bytes, frame_type: int) -> None:
    _, second = established()
    header = bytearray(encode_frame(Heartbeat())[:32])
    header[5] = frame_type
    header[24:28] = len(control).to_bytes(4, "little")
    try:
        assert len(feed(second, bytes(header) + control)) == 1
    except ProtocolError as error:
        assert "malformed" in error.message  # noqa: PT017 - a message is as good as an error here


@given(nbytes=st.integers(0, len(SESSION) - 1), sizes=st.lists(st.integers(1, 500), min_size=1, max_size=4))
def test_a_stream_that_ends_early_delivers_only_whole_frames(nbytes: int, sizes: list[int]) -> None:
    whole = feed(listener(), SESSION)
    frames = feed(listener(), SESSION[:nbytes], sizes)
    assert frames == whole[: len(frames)]
    assert len(frames) < len(whole)
