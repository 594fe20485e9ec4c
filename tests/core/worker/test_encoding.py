"""A worker's decisions about what it compresses: order, turns, cancelled calls, refused pushes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.codec import QSGD, Float16
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import CallTimeoutError, ClosedError, CodecError, NotFiniteError, RoundTimeoutError, UnknownKeyError
from aiokv.types import TensorSpec
from aiokv.wire import messages as m
from tests.core.conftest import Worker, only

if TYPE_CHECKING:
    from aiokv.types import Key
    from tests.core.conftest import Call, Like

HALF = Float16()


def set_compression(worker: Worker, name: str = "fp16", **fields: Any) -> Call:
    fields = {"params": {}, "pull_name": "", "pull_params": {}, "timeout": 5.0} | fields
    return worker.call(st.ConfigureCompression, name=name, **fields)


def compress(worker: Worker, name: str = "fp16", **fields: Any) -> None:
    assert worker.finish(set_compression(worker, name, **fields)).outcome == "done"


def encoded(worker: Worker, call: Call, error: Any = None) -> list[ef.Effect]:
    effects = worker.handle(st.Encoded(call.number, error))
    call.sends += only(effects, ef.Send)
    return effects


@pytest.fixture
def half(worker: Worker) -> Worker:
    """A worker that compresses."""
    compress(worker)
    return worker


# --- setting it ---


def test_it_is_set_when_all_servers_know_it(worker: Worker, like: type[Like]) -> None:
    call = set_compression(worker, "2bit", params={"threshold": 1})
    params = {"threshold": 1.0, "error_feedback": True}
    assert call.messages == [like(m.SetCompression, change=1, name="2bit", params=params, pull_name="")] * 2
    worker.answer(call.sends[0])
    assert worker.machine.compression.push is None
    worker.answer(call.sends[1])
    assert worker.machine.compression.push is not None
    again = set_compression(worker, "2bit", params={"threshold": 1})
    assert (again.outcome, again.sends) == ("done", [])
    assert set_compression(worker, "").messages[0].change == 2


def test_one_change_after_the_other(worker: Worker) -> None:
    first = set_compression(worker)
    assert isinstance(set_compression(worker, "bf16").error, CodecError)
    worker.refuse(first.sends[0], CodecError("rank 1 compresses otherwise"))
    assert isinstance(first.error, CodecError)
    assert worker.machine.compression.push is None
    assert set_compression(worker, "bf16").messages[0].change == 1


def test_mistakes_are_found_before_anything_is_sent(worker: Worker, make_worker: type[Worker]) -> None:
    call = set_compression(worker, "zip")
    assert isinstance(call.error, CodecError)
    assert not call.sends
    early = make_worker(join=False)
    assert isinstance(set_compression(early).error, ClosedError)
    assert isinstance(early.call(st.RestoreResiduals, keys=[], timeout=5.0).error, ClosedError)


# --- pushes ---


def test_a_push_is_encoded_then_sent(half: Worker) -> None:
    call = half.transfer("push", "big", shape=(65536,))
    assert not call.sends
    (encode,) = only(half.effects, ef.Encode)
    assert encode == ef.Encode(call.number, HALF, [(0, "big", [(0, 32768), (32768, 65536)])])
    encoded(half, call)
    assert [send.payload for send in call.sends] == [
        ef.EncodedParts(call.number, ((0, 0),)),
        ef.EncodedParts(call.number, ((0, 32768),)),
    ]
    assert {message.codec for message in call.messages} == {HALF.number}
    assert half.finish(call).outcome == "done"
    settled = only(half.effects, ef.Settle)
    assert [(settle.parts, settle.counted) for settle in settled] == [(send.payload, True) for send in call.sends]


def test_integers_and_empty_tensors_are_sent_as_they_are(half: Worker) -> None:
    for spec in ({"dtype": "int32"}, {"shape": (0, 3)}):
        (message,) = half.transfer("push", repr(spec), **spec).messages
        assert message.codec == 0


def test_floats_and_integers_of_one_call_go_together(half: Worker) -> None:
    tensors: Any = [("i", TensorSpec((2,), "int32")), ("w", TensorSpec((2,), "float32"))]
    call = half.call(st.Transfer, operation=st.Operation.PUSH, tensors=tensors, timeout=5.0)
    encoded(half, call)
    assert [(message.key, bool(message.codec)) for message in call.messages] == [("i", False), ("w", True)]


def test_rows_that_go_with_others_are_sent_as_they_are(half: Worker) -> None:
    tensors: Any = [("w", TensorSpec((2,), "float32")), ("t", TensorSpec((4, 2), "float32"))]
    fields: dict[str, Any] = {"tensors": tensors, "rows": [st.Rows([3])], "timeout": 5.0}
    call = half.call(st.Transfer, operation=st.Operation.PUSH, **fields)
    assert only(half.effects, ef.Encode) == [ef.Encode(call.number, HALF, [(0, "w", [(0, 2)])])]
    encoded(half, call)
    dense, rows = call.sends
    assert isinstance(dense.message, m.Push)
    assert (dense.message.codec, dense.payload) == (HALF.number, ef.EncodedParts(call.number, ((0, 0),)))
    assert isinstance(rows.message, m.PushRows)
    assert rows.payload == ef.CallMemory(call.number, 1, 0, 3 * (8 + 8))


def test_keys_of_a_bundle_are_joined(half: Worker) -> None:
    half.finish(half.transfer("init", *"abcd"))
    keys = [send.message.keys for send in only(half.effects, ef.Send) if isinstance(send.message, m.InitBundle)]
    call = half.transfer("push", *"abcd")
    encoded(half, call)
    payloads = [send.payload for send in call.sends if isinstance(send.message, m.PushBundle)]
    assert payloads == [
        ef.EncodedParts(call.number, tuple(("abcd".index(str(key)), 0) for key in some)) for some in keys
    ]


def test_what_comes_after_a_push_waits_for_its_encoding(half: Worker) -> None:
    push, pull, other = half.transfer("push"), half.transfer("pull"), half.transfer("pull", "v")
    second = half.transfer("push")
    assert other.sends
    effects = encoded(half, push)
    assert [type(send.message) for send in push.sends] == [m.Push, m.Pull]
    assert push.messages[1].at_least == 1
    assert not pull.sends
    assert only(effects, ef.Encode) == [ef.Encode(second.number, HALF, [(0, "w", [(0, 6)])])]
    encoded(half, second)
    assert second.messages[0].sequence == 2


def test_an_error_sends_nothing_and_counts_nothing(half: Worker) -> None:
    bad, after = half.transfer("push"), half.transfer("push")
    assert not only(encoded(half, bad, NotFiniteError("NaN")), ef.Send)
    assert isinstance(bad.error, NotFiniteError)
    encoded(half, after)
    assert after.messages[0].sequence == 1


def test_a_push_that_is_cancelled_while_it_is_encoded_counts(half: Worker) -> None:
    push, waiting, pull = half.transfer("push"), half.transfer("push"), half.transfer("pull")
    for call in (push, waiting):
        half.handle(st.Cancel(call.number))
    effects = encoded(half, push)
    messages = [send.message for send in only(effects, ef.Send)]
    assert [type(message) for message in messages] == [m.Push, m.Pull]
    assert (push.outcome, waiting.outcome, pull.outcome) == (None, None, None)
    assert not only(effects, ef.Encode), "what is cancelled before its turn is not sent at all"
    half.answer(push.sends[0])


def test_a_push_that_is_cancelled_and_can_not_be_encoded_is_over(half: Worker) -> None:
    push = half.transfer("push")
    half.handle(st.Cancel(push.number))
    assert encoded(half, push, NotFiniteError("NaN")) == []


def test_a_deadline_may_pass_while_it_is_encoded(half: Worker) -> None:
    push = half.transfer("push")
    half.tick(20.0)
    assert isinstance(push.error, CallTimeoutError)
    assert "not compressed within 10 s; it will count" in str(push.error)
    assert len(only(encoded(half, push), ef.Send)) == 1


def test_rows_are_sent_as_they_are(half: Worker) -> None:
    assert half.transfer_rows("push", st.Rows([1])).sends


# --- what is left ---


def test_after_it_is_turned_off_what_is_left_goes_with_the_next_push(half: Worker) -> None:
    before = half.transfer("push")
    compress(half, "")
    held = half.transfer("push")
    encoded(half, before)
    assert only(half.effects, ef.Encode)[-1] == ef.Encode(held.number, None, [(0, "w", [(0, 6)])])
    encoded(half, held)
    assert held.messages[0].codec == 0
    assert half.transfer("push").sends, "nothing is left"
    assert half.transfer("push", "v").sends, "of this key there was nothing"


def test_a_call_is_compressed_as_it_was_when_it_was_made() -> None:
    ahead = Worker(max_open_pushes=1)
    first, second = ahead.transfer("push"), ahead.transfer("push")
    compress(ahead)
    effects = ahead.answer(first.sends[0])
    assert not second.sends
    (send,) = only(effects, ef.Send)
    assert isinstance(send.message, m.Push)
    assert (send.message.sequence, send.message.codec) == (2, 0)


def test_without_error_feedback_nothing_is_left(worker: Worker) -> None:
    compress(worker, params={"error_feedback": False})
    call = worker.transfer("push")
    encoded(worker, call)
    compress(worker, "")
    assert worker.transfer("push").sends


@pytest.mark.parametrize(("error", "counted"), [(UnknownKeyError("no"), False), (RoundTimeoutError("late"), True)])
def test_a_push_that_is_not_counted_is_due_again(half: Worker, error: Any, counted: bool) -> None:
    call = half.transfer("push")
    encoded(half, call)
    half.refuse(call.sends[0], error)
    (settle,) = only(half.effects, ef.Settle)
    assert settle.counted is counted
    again = half.transfer("push")
    encoded(half, again)
    assert again.messages[0].sequence == 1 + counted


def test_a_refused_bundle_is_due_again_after_it_is_turned_off(make_worker: type[Worker]) -> None:
    half = make_worker(servers=1)
    half.finish(half.transfer("init", *"ab"))
    compress(half, params={"error_feedback": False})
    call = half.transfer("push", *"ab")
    encoded(half, call)
    compress(half, "")
    half.refuse(call.sends[0], UnknownKeyError("no"))
    half.transfer("push", "b")
    assert only(half.effects, ef.Encode)[-1].codec is None


def test_a_server_that_is_lost_takes_its_parts_along(half: Worker) -> None:
    call = half.transfer("push")
    encoded(half, call)
    half.lose_server(call.sends[0].peer, "reset")
    assert only(half.effects, ef.Settle)


def test_deleted_keys_leave_nothing(half: Worker) -> None:
    half.finish(half.transfer("push", "v", dtype="int32"))
    call = half.transfer("push")
    encoded(half, call)
    half.finish(call)
    half.call(st.DeleteKeys, keys=["w"], timeout=5.0)
    assert only(half.effects, ef.ForgetResiduals) == [ef.ForgetResiduals(["w"])]
    compress(half, "")
    assert half.transfer("push").sends


def test_restored_residuals_go_with_the_next_push(worker: Worker) -> None:
    assert worker.call(st.RestoreResiduals, keys=["w"], timeout=5.0).outcome == "done"
    call = worker.transfer("push")
    assert not call.sends
    encoded(worker, call)


# --- values ---


def test_replicas_are_kept_whether_somebody_waits_or_not(worker: Worker) -> None:
    codec = QSGD(levels=3)
    compress(worker, "", pull_name="qsgd", pull_params={"levels": 3})
    call = worker.transfer("pull", shape=(3,))
    (send,) = call.sends
    assert call.messages[0].value_codec == codec.number
    memory = ef.CallMemory(call.number, 0, 0, 12)
    assert worker.machine.landing(send.request, 7) == ef.Replica(send.peer, "w", 0, "float32", 3, codec, memory)
    worker.handle(st.Cancel(call.number))
    assert worker.machine.landing(send.request, 7) == ef.Replica(send.peer, "w", 0, "float32", 3, codec, None)
    again = worker.transfer("pull", shape=(3,))
    worker.answer(again.sends[0], m.Value(1, codec.number), 7)
    assert again.outcome == "done", "a difference has any length"


def test_values_of_bundles_are_asked_for_as_one(make_worker: type[Worker]) -> None:
    worker = make_worker(servers=1)
    worker.finish(worker.transfer("init", *"ab"))
    compress(worker, "", pull_name="fp16")
    call = worker.transfer("pushpull", *"ab")
    (send,) = call.sends
    assert isinstance(send.message, m.PushBundle)
    assert (send.message.codec, send.message.value_codec) == (0, HALF.number)
    whole = ef.CallTensors(call.number, (0, 1), 48)
    assert worker.machine.landing(send.request, 24) == ef.Replica(0, "a", -1, "float32", 12, HALF, whole)


def test_what_no_codec_can_say_is_asked_for_as_it_is(worker: Worker) -> None:
    compress(worker, "", pull_name="fp16")
    assert worker.transfer("pull", "i", dtype="int32").messages[0].value_codec == 0
    assert worker.transfer("push", "w").messages[0].value_codec == 0
    assert worker.transfer_rows("pull", st.Rows([1], bytes(8))).sends


# --- any order ---


@given(hs.lists(hs.tuples(hs.sampled_from(["push", "pull", "cancel", "encoded", "bad"]), hs.integers(0, 99))))
def test_calls_of_a_key_keep_their_order_however_long_encoding_takes(steps: list[tuple[str, int]]) -> None:
    worker = Worker(max_open_pushes=100)
    compress(worker)
    keys: list[Key] = ["a", "b"]
    calls: list[Call] = []
    for step, number in steps:
        busy = list(worker.machine._calls.encodings.calls)
        if step == "push":
            calls.append(worker.transfer("push", *("a", "b", "ab")[number % 3]))
        elif step == "pull":
            calls.append(worker.transfer("pull", keys[number % 2]))
        elif step == "cancel" and calls:
            worker.handle(st.Cancel(calls[number % len(calls)].number))
        elif busy:
            error = NotFiniteError("NaN") if step == "bad" else None
            worker.handle(st.Encoded(busy[number % len(busy)], error))
    while busy := list(worker.machine._calls.encodings.calls):
        worker.handle(st.Encoded(busy[0]))
    pushed = dict.fromkeys(keys, 0)
    for send in only(worker.effects, ef.Send):
        message = send.message
        if isinstance(message, m.Push):
            pushed[message.key] += 1
            assert message.sequence == pushed[message.key]
        elif isinstance(message, m.Pull):
            assert message.at_least == pushed[message.key]
    assert not worker.machine._calls.turns.waiting
