"""A server's decisions about compressed pushes and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.codec import Float16, TopK, TwoBit
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import CodecError, ProtocolError, SpecMismatchError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Like, Server

HALF = Float16()


def set_compression(server: Server, rank: int, change: int = 1, name: str = "fp16", **fields: Any) -> Asked:
    defaults: dict[str, Any] = {"params": {}, "pull_name": "", "pull_params": {}, "timeout": 5.0}
    return server.ask(rank, m.SetCompression(change, name, **(defaults | fields)))


def push(server: Server, rank: int, value: float = 1.0, sequence: int = 1, **changes: Any) -> Asked:
    """Push one element of key "w" as two bytes."""
    fields: dict[str, Any] = {"shape": (1,), "dtype": "float32", "start": 0, "stop": 1, "read_version": 0}
    fields |= {"sequence": sequence, "want_value": False, "timeout": 5.0, "codec": HALF.number} | changes
    length = fields.pop("length", 2)
    return server.ask(rank, m.Push(key=fields.pop("key", "w"), **fields), value, length=length)


@pytest.fixture
def compressed(server: Server) -> Server:
    """A server of three workers that compress, with key "w"."""
    server.init()
    for rank in range(3):
        assert set_compression(server, rank).answer == m.Done()
    return server


# --- pushes ---


def test_compressed_and_plain_pushes_make_one_round(compressed: Server) -> None:
    push(compressed, 2, 4.0)
    compressed.push(1, 2.0)
    assert push(compressed, 0, 1.0).answer == m.Done(1)
    assert compressed.value() == 7.0
    decodes = compressed.seen(ef.Decode)
    assert [(decode.codec, decode.dtype, decode.sizes) for decode in decodes] == [(HALF, "float32", [1])] * 2


def test_what_comes_later_over_the_connection_waits(compressed: Server) -> None:
    """A pull must see the push before it, and a push counts although its worker is gone since."""
    compressed.hold_decoding = True
    first = push(compressed, 0, 1.0)
    second = push(compressed, 0, 10.0, 2)
    pull = compressed.ask(0, m.Pull("w", (1,), "float32", 0, 1, 2, 5.0))
    other = compressed.pull(1)
    assert other.payload == 0.0, "other connections do not wait"
    compressed.handle(st.PeerLost(10, "reset"))
    assert first.pending
    compressed.decode()
    compressed.decode()
    assert first.pending
    assert second.pending
    assert pull.pending
    compressed.push(1, 2.0)
    compressed.push(2, 4.0)
    assert compressed.value() == 7.0


def test_a_malformed_payload_is_not_counted(compressed: Server) -> None:
    compressed.hold_decoding = True
    bad = push(compressed, 0)
    compressed.decode(ProtocolError("indices"))
    assert isinstance(bad.error, ProtocolError)
    assert push(compressed, 0, 1.0).pending, "it is push 1"


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"codec": 5}, CodecError, "no worker has set the codec with number 5"),
        ({"length": 3}, ProtocolError, "must have 2 bytes, got 3"),
        ({"key": "i", "dtype": "int32"}, SpecMismatchError, "key 'i' has int32"),
    ],
)
def test_a_push_that_can_not_be_decoded_is_refused(
    compressed: Server, changes: Any, error: type[Exception], text: str
) -> None:
    compressed.init("i", dtype="int32")
    refused = push(compressed, 0, **changes)
    assert isinstance(refused.error, error)
    assert text in str(refused.error)
    assert not compressed.seen(ef.Decode)
    assert push(compressed, 0).pending


def test_payload_without_bytes_is_zeros(compressed: Server) -> None:
    """Of a tensor that is cut, the largest values may all be in other chunks."""
    set_compression(compressed, 0, 2, "topk", params={"k": 1})
    compressed.init("v", 3.0, shape=(4,), stop=2)
    message = m.Push("v", (4,), "float32", 0, 2, 1, 0, False, 5.0, codec=TopK(k=1).number)
    asked = compressed.ask(0, message)
    compressed.push(1, 1.0, key="v", shape=(4,), stop=2)
    compressed.push(2, 1.0, key="v", shape=(4,), stop=2)
    assert asked.answer == m.Done(1)
    assert compressed.value("v") == 5.0


def test_keys_of_a_bundle_are_decoded_one_by_one(compressed: Server, like: type[Like]) -> None:
    compressed.bundle_size = 5
    named = m.InitBundle(("a", "b"), ((2,), (3,)), "float32", "bsp", 5.0, (), (b"a", b"b"))
    assert compressed.ask(0, named, 0.0).answer == m.Bundled(0)
    message = m.PushBundle(0, 1, 0, False, 5.0, codec=HALF.number)
    short = compressed.ask(0, message, 1.0, length=9)
    assert "a payload of codec 'fp16' of 2 tensors must have 10 bytes, got 9" in str(short.error)
    for rank in range(3):
        compressed.ask(rank, message, 1.0, length=10)
    assert compressed.seen(ef.Decode) == [like(ef.Decode, sizes=[2, 3], dtype="float32")] * 3
    assert compressed.value("a", -1) == 3.0


# --- what is agreed on ---


def test_workers_that_differ_are_told(server: Server) -> None:
    """Trap of MXNet: what ranks other than 0 set was not looked at."""
    assert set_compression(server, 0, name="2bit", params={"threshold": 0.5}).answer == m.Done()
    assert server.seen(ef.Prepare) == [ef.Prepare(TwoBit(threshold=0.5))]
    differs = set_compression(server, 1, name="2bit", params={"threshold": 0.25})
    assert isinstance(differs.error, CodecError)
    assert differs.error.details["ranks"] == [0, 1]
    assert "rank 1 (worker-1) compresses gradients with TwoBit" in str(differs.error)
    assert set_compression(server, 1, name="2bit", params={"threshold": 0.5}).answer == m.Done()


def test_it_may_change_later_on_each_worker_in_its_own_time(server: Server) -> None:
    for rank, change, name in [(0, 1, "fp16"), (0, 2, "bf16"), (1, 1, "fp16"), (0, 3, ""), (1, 2, "bf16")]:
        assert set_compression(server, rank, change, name).answer == m.Done()
    assert isinstance(set_compression(server, 1, 3, "fp8").error, CodecError)
    assert isinstance(set_compression(server, 2, 5, "fp8").error, ProtocolError)
    assert isinstance(set_compression(server, 2, 0, "fp8").error, ProtocolError)


@pytest.mark.parametrize(
    ("pull", "params"), [("1bit", {}), ("fp16", {"error_feedback": False}), ("zip", {}), ("fp16", {"level": 1})]
)
def test_values_need_a_codec_that_comes_to_an_end(server: Server, pull: str, params: Any) -> None:
    asked = set_compression(server, 0, name="", pull_name=pull, pull_params=params)
    assert isinstance(asked.error, CodecError)


# --- values ---


def pull(server: Server, rank: int, key: str = "w", **changes: Any) -> Asked:
    return server.pull(rank, key=key, value_codec=HALF.number, priority=9, **changes)


def test_first_a_value_comes_whole_then_its_differences(compressed: Server) -> None:
    named = ("w", 0, 0, 4, 11)
    assert pull(compressed, 1).answer == m.Value(0, 0)
    assert pull(compressed, 1).answer == m.Value(0, HALF.number)
    assert pull(compressed, 2).answer == m.Value(0, 0)
    sends = [send for send in compressed.seen(ef.Send) if isinstance(send.payload, ef.StoredDifference)]
    assert [send.payload for send in sends[:2]] == [
        ef.StoredDifference(*named, None),
        ef.StoredDifference(*named, HALF),
    ]
    assert {send.priority for send in sends} == {0}, "differences must not overtake each other"


def test_pushpull_gets_a_difference_when_the_round_is_closed(compressed: Server) -> None:
    pull(compressed, 0)
    asked = push(compressed, 0, 1.0, want_value=True, value_codec=HALF.number)
    compressed.push(1, 2.0)
    compressed.push(2, 4.0)
    assert asked.answer == m.Value(1, HALF.number)


@pytest.mark.parametrize("message", ["push", "pull"])
def test_a_value_in_an_unknown_codec_is_refused(compressed: Server, message: str) -> None:
    asked = compressed.push(0, value_codec=5) if message == "push" else compressed.pull(0, value_codec=5)
    assert isinstance(asked.error, CodecError)
    assert compressed.push(0).pending, "the push was not counted"


def test_what_no_codec_can_say_comes_as_it_is(compressed: Server) -> None:
    compressed.init("i", dtype="int32")
    for _ in range(2):
        assert pull(compressed, 0, "i", dtype="int32").answer == m.Value(0, 0)


def test_after_a_key_is_deleted_its_value_comes_whole(compressed: Server) -> None:
    pull(compressed, 1)
    compressed.ask(0, m.Delete(("w",), 5.0))
    del compressed.values["w", 0]
    compressed.init()
    assert pull(compressed, 1).answer == m.Value(0, 0)


def test_after_a_bundle_is_divided_values_come_whole(compressed: Server) -> None:
    compressed.bundle_size = 2
    compressed.ask(0, m.InitBundle(("a", "b"), ((1,), (1,)), "float32", "bsp", 5.0, (), (b"a", b"b")), 0.0)
    both = m.PullBundle(0, 0, 5.0, 0, HALF.number)
    assert [compressed.ask(1, both).answer for _ in range(2)] == [m.Value(0, 0), m.Value(0, HALF.number)]
    assert pull(compressed, 1, "a").answer == m.Value(0, 0)
    assert compressed.ask(1, both).answer == m.Value(0, 0)
    assert pull(compressed, 1, "a").answer == m.Value(0, HALF.number)


def test_replicas_go_with_their_peer(compressed: Server) -> None:
    pull(compressed, 1)
    assert ef.ForgetReplicas(11) in compressed.handle(st.PeerLost(11, "reset"))
    assert ef.ForgetReplicas(12) not in compressed.handle(st.PeerLost(12, "reset"))
    compressed.handle(st.PeerLost(SCHEDULER, "reset"))
