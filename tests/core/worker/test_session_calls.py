"""A worker's calls: what is sent for them, when they are complete, and what becomes of those that are not."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import (
    AiokvError,
    AlreadyInitializedError,
    CallTimeoutError,
    ClosedError,
    ConfigError,
    KeyUseError,
    MembershipError,
    OptimizerError,
    PolicyError,
    ProtocolError,
    RoundTimeoutError,
    ServerLostError,
    SpecMismatchError,
    UnknownKeyError,
    WorkerLostError,
)
from aiokv.types import SCHEDULER, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Call, Like, Worker


# --- what is sent ---


def test_rank_0_sends_its_values(worker: Worker, like: type[Like]) -> None:
    (send,) = worker.transfer("init").sends
    assert send.message == like(m.Init, key="w", shape=(2, 3), dtype="float32", start=0, stop=6, policy="bsp")
    assert send.payload == ef.CallMemory(1, 0, 0, 24)


def test_other_ranks_send_none(make_worker: type[Worker]) -> None:
    (send,) = make_worker(rank=1).transfer("init").sends
    assert isinstance(send.message, m.Init)
    assert send.payload is None


def test_policy_of_the_worker_goes_with_its_keys(make_worker: type[Worker]) -> None:
    (message,) = make_worker(policy="asp").transfer("init").messages
    assert message.policy == "asp"


def test_worker_with_an_unknown_policy_is_not_made(make_worker: type[Worker]) -> None:
    with pytest.raises(PolicyError, match="known: adasync, asp, backup, bsp"):
        make_worker(policy="nope")


def test_pushes_of_a_key_are_numbered(worker: Worker) -> None:
    numbers = [worker.transfer("push", key).messages[0].sequence for key in ("a", "b", "a", "a")]
    assert numbers == [1, 1, 2, 3]


def test_pull_asks_for_what_was_pushed_before(worker: Worker) -> None:
    first = worker.transfer("pull").messages[0].at_least
    worker.transfer("push")
    worker.transfer("pushpull")
    assert (first, worker.transfer("pull").messages[0].at_least) == (0, 2)


def test_push_says_which_version_it_was_computed_at(worker: Worker) -> None:
    before = worker.transfer("push").messages[0].read_version
    (pull,) = worker.transfer("pull").sends
    worker.answer(pull, m.Value(7))
    assert (before, worker.transfer("push").messages[0].read_version) == (0, 7)


def test_value_that_the_caller_did_not_get_was_not_read(worker: Worker) -> None:
    pull = worker.transfer("pull")
    worker.handle(st.Cancel(pull.number))
    worker.answer(pull.sends[0], m.Value(7), 24)
    assert worker.transfer("push").messages[0].read_version == 0


def test_pushpull_sends_and_receives(worker: Worker) -> None:
    call = worker.transfer("pushpull")
    (send,) = call.sends
    assert send.message.want_value  # type: ignore[attr-defined]
    assert send.payload == ef.CallMemory(call.number, 0, 0, 24)
    assert worker.machine.landing(send.request, 24) == ef.CallMemory(call.number, 0, 0, 24)


def test_push_receives_nothing(worker: Worker) -> None:
    (send,) = worker.transfer("push").sends
    assert not send.message.want_value  # type: ignore[attr-defined]
    assert worker.machine.landing(send.request, 24) is None


def test_big_tensor_goes_to_all_servers_in_chunks(make_worker: type[Worker]) -> None:
    worker = make_worker(servers=2, chunk_bytes=16, split_bytes=32)
    call = worker.transfer("pushpull", shape=(16,))
    assert [(s.message.start, s.message.stop) for s in call.sends] == [(0, 4), (4, 8), (8, 12), (12, 16)]  # type: ignore[attr-defined]
    assert sorted(send.peer for send in call.sends) == [0, 0, 1, 1]
    assert [send.payload for send in call.sends] == [ef.CallMemory(1, 0, i, i + 16) for i in range(0, 64, 16)]


def test_each_tensor_of_a_call_has_its_own_memory(worker: Worker) -> None:
    call = worker.transfer("push", "a", "b")
    assert [send.payload for send in call.sends] == [ef.CallMemory(1, 0, 0, 24), ef.CallMemory(1, 1, 0, 24)]


def test_scenario_32_tensor_without_elements_is_sent_too(worker: Worker, like: type[Like]) -> None:
    # Scenario 32: it takes part in rounds like any other.
    call = worker.transfer("pushpull", shape=(0, 5))
    assert call.messages == [like(m.Push, shape=(0, 5), start=0, stop=0)]
    worker.answer(call.sends[0], m.Value(1), 0)
    assert call.outcome == "done"


def test_scalar_is_one_element(worker: Worker) -> None:
    (send,) = worker.transfer("push", shape=()).sends
    assert send.payload == ef.CallMemory(1, 0, 0, 4)


def test_servers_get_less_time_than_the_caller_waits(worker: Worker) -> None:
    # So that their explanation is here before our own deadline.
    waits = [worker.transfer("push", timeout=timeout).messages[0].timeout for timeout in (1.0, 10.0)]
    assert waits == [0.9, 9.5]


def test_same_key_twice_in_a_call_is_two_pushes(worker: Worker) -> None:
    assert [message.sequence for message in worker.transfer("push", "w", "w").messages] == [1, 2]


def test_call_without_tensors_is_complete(worker: Worker) -> None:
    assert worker.call(st.Transfer, operation=st.Operation.PUSH, tensors=[], timeout=1.0).outcome == "done"


# --- when a call is complete ---


def test_call_is_complete_with_the_last_answer(worker: Worker) -> None:
    call = worker.transfer("push", "a", "b", "c")
    for send in call.sends:
        assert call.outcome is None
        worker.answer(send)
    assert call.outcome == "done"


def test_calls_may_be_in_flight_together_and_end_in_any_order(worker: Worker) -> None:
    calls = [worker.transfer("push"), worker.transfer("pull"), worker.transfer("pushpull", "v")]
    for call in reversed(calls):
        worker.finish(call)
    assert [call.outcome for call in calls] == ["done"] * 3
    assert worker.machine.pending == 0
    assert worker.machine.deadline() == 2.0, "only the heartbeat is left"


def test_tables_are_empty_when_all_is_answered(worker: Worker) -> None:
    for number in range(200):
        call = worker.transfer("pushpull", "a", "b", timeout=0.5)
        if number % 3 == 0:
            worker.handle(st.Cancel(call.number))
        worker.finish(call)
    machine = worker.machine
    assert (machine.pending, len(machine._calls.open)) == (0, 0)
    assert len(machine._directory._known) == 2
    assert (len(machine._directory._plans._plans), len(machine._directory.pushes.open)) == (1, 0)


def test_error_of_the_server_becomes_the_same_error(worker: Worker) -> None:
    call = worker.transfer("init")
    worker.refuse(call.sends[0], AlreadyInitializedError("key 'w' has a value already", key="w"))
    assert type(call.error) is AlreadyInitializedError
    assert (str(call.error), call.error.details) == ("key 'w' has a value already", {"key": "w"})


def test_first_error_ends_the_call_and_releases_its_memory(worker: Worker) -> None:
    call = worker.transfer("pull", "a", "b", "c")
    worker.answer(call.sends[0])
    worker.refuse(call.sends[1], UnknownKeyError("key 'b' is not initialized", key="b"))
    assert isinstance(call.outcome, UnknownKeyError)
    assert call.released == ef.Release(call.number, [(call.sends[2].peer, call.sends[2].request)])
    assert worker.answer(call.sends[2], m.Value(1), 24) == []


@pytest.mark.parametrize(
    ("operation", "message", "nbytes"),
    [("pull", m.Value(1), 20), ("pull", m.Done(1), 0), ("push", m.Value(1), 24), ("init", m.Value(1), 4)],
)
def test_answer_of_other_bytes_than_asked_for_fails_the_call(
    worker: Worker, operation: str, message: m.Message, nbytes: int
) -> None:
    call = worker.transfer(operation)
    worker.answer(call.sends[0], message, nbytes)
    assert isinstance(call.outcome, ProtocolError)
    assert f"{nbytes} bytes" in str(call.outcome)


def test_payload_of_the_wrong_size_has_no_place_to_land(worker: Worker) -> None:
    (send,) = worker.transfer("pull").sends
    assert worker.machine.landing(send.request, 20) is None
    assert worker.machine.landing(send.request + 1, 24) is None


# --- cancellation ---


def test_cancelled_call_gives_its_memory_back(worker: Worker) -> None:
    call = worker.transfer("pushpull", "a", "b")
    worker.answer(call.sends[0])
    (left,) = call.sends[1:]
    assert worker.handle(st.Cancel(call.number)) == [ef.Release(call.number, [(left.peer, left.request)], [1])]
    assert worker.machine.landing(left.request, 24) is None


def test_late_answer_completes_nothing(worker: Worker) -> None:
    call = worker.transfer("pull")
    worker.handle(st.Cancel(call.number))
    assert worker.answer(call.sends[0], m.Value(1), 24) == []
    assert call.outcome is None
    assert worker.machine.pending == 0


def test_late_error_fails_nothing(worker: Worker) -> None:
    call = worker.transfer("push")
    worker.handle(st.Cancel(call.number))
    assert worker.refuse(call.sends[0], RoundTimeoutError("late")) == [ef.Discard(call.number)]


def test_cancelled_push_still_counts(worker: Worker) -> None:
    call = worker.transfer("push")
    assert worker.handle(st.Cancel(call.number)) == [ef.Release(call.number, [], [0])]
    assert worker.transfer("push").messages[0].sequence == 2


def test_call_that_is_over_cannot_be_cancelled(worker: Worker) -> None:
    call = worker.finish(worker.transfer("push"))
    assert worker.handle(st.Cancel(call.number)) == []


def test_other_calls_do_not_notice_a_cancellation(worker: Worker) -> None:
    calls = [worker.transfer("pull") for _ in range(3)]
    worker.handle(st.Cancel(calls[1].number))
    for call in calls:
        worker.finish(call)
    assert [call.outcome for call in calls] == ["done", None, "done"]


# --- pushes that a server did not take ---


def test_push_that_was_refused_does_not_count(worker: Worker) -> None:
    refused = worker.transfer("push")
    worker.refuse(refused.sends[0], UnknownKeyError("key 'w' is not initialized", key="w"))
    assert worker.transfer("pull").messages[0].at_least == 0
    assert worker.transfer("push").messages[0].sequence == 1


@pytest.mark.parametrize("error", [RoundTimeoutError("late"), WorkerLostError("lost")])
def test_push_that_stays_in_its_round_counts(worker: Worker, error: Any) -> None:
    call = worker.transfer("push")
    worker.refuse(call.sends[0], error)
    assert worker.transfer("push").messages[0].sequence == 2


def test_push_of_many_chunks_is_taken_back_once(make_worker: type[Worker]) -> None:
    worker = make_worker(chunk_bytes=16, split_bytes=32)
    call = worker.transfer("push", shape=(16,))
    for send in call.sends:
        worker.refuse(send, UnknownKeyError("unknown", key="w"))
    assert [message.sequence for message in worker.transfer("push", shape=(16,)).messages] == [1] * 4


def test_refused_pull_takes_no_push_back(worker: Worker) -> None:
    worker.finish(worker.transfer("push"))
    worker.refuse(worker.transfer("pull").sends[0], UnknownKeyError("unknown", key="w"))
    assert worker.transfer("push").messages[0].sequence == 2


# --- what is refused before anything is sent ---


def assert_refused_here(call: Call, error: type[Exception]) -> None:
    """Check that a call failed before anything was sent."""
    assert type(call.outcome) is error
    assert call.sends == []


def test_scenario_25_str_and_int_keys_are_never_mixed_in_a_call(worker: Worker) -> None:
    assert_refused_here(worker.transfer("init", "a", 1), KeyUseError)


def test_str_and_int_keys_are_never_mixed_over_time(worker: Worker) -> None:
    worker.transfer("init", 1)
    for operation in ("init", "push", "pull", "pushpull"):
        call = worker.transfer(operation, "a")
        assert_refused_here(call, KeyUseError)
    assert call.error.details == {"key": "a", "expected": "int", "got": "str"}


def test_call_that_was_refused_does_not_decide_the_kind_of_keys(worker: Worker) -> None:
    worker.transfer("init", "a", 1)
    assert worker.transfer("init", 1).sends


@pytest.mark.parametrize("key", [True, -1, 2**63, "", "x" * 1025, 1.5, None, b"w", "\ud800"])
def test_key_that_cannot_be_is_refused(worker: Worker, key: Any) -> None:
    assert_refused_here(worker.transfer("push", key), KeyUseError)


def test_key_of_a_subclass_is_sent_as_what_it_contains(worker: Worker) -> None:
    class Layer(str, enum.Enum):  # noqa: UP042 - StrEnum would hide that the class has another str()
        WEIGHT = "weight"

    (message,) = worker.transfer("push", Layer.WEIGHT).messages
    assert (type(message.key), message.key) == (str, "weight")
    assert worker.transfer("push", "weight").messages[0].sequence == 2


@pytest.mark.parametrize(
    ("operation", "shape", "dtype", "got"),
    [("push", (6,), "float32", "float32[6]"), ("pull", (2, 3), "float64", "float64[2, 3]")],
)
def test_other_shape_or_dtype_than_was_initialised_is_refused(
    worker: Worker, operation: str, shape: tuple[int, ...], dtype: str, got: str
) -> None:
    worker.finish(worker.transfer("init"))
    call = worker.transfer(operation, shape=shape, dtype=dtype)
    assert_refused_here(call, SpecMismatchError)
    assert call.error.details == {"key": "w", "expected": "float32[2, 3]", "got": got}


def test_init_that_failed_fixes_no_shape(worker: Worker) -> None:
    worker.refuse(worker.transfer("init").sends[0], SpecMismatchError("other shape"))
    assert worker.transfer("push", shape=(6,)).sends


@pytest.mark.parametrize(("shape", "dtype"), [((2,), "complex64"), ((-1,), "float32"), ((1,) * 65, "float32")])
def test_tensor_that_cannot_be_stored_is_refused(worker: Worker, shape: tuple[int, ...], dtype: str) -> None:
    assert_refused_here(worker.transfer("init", shape=shape, dtype=dtype), SpecMismatchError)


def test_refused_call_has_pushed_nothing(worker: Worker) -> None:
    worker.call(
        st.Transfer,
        operation=st.Operation.PUSH,
        tensors=[("w", TensorSpec((1,), "float32")), ("v", TensorSpec((1,), "nope"))],
        timeout=1.0,
    )
    assert worker.transfer("push").messages[0].sequence == 1


@pytest.mark.parametrize("timeout", [float("inf"), float("nan")])
def test_wait_without_an_end_is_refused(worker: Worker, timeout: float) -> None:
    calls = [
        worker.transfer("push", timeout=timeout),
        worker.call(st.EnterBarrier, name="b", timeout=timeout),
        worker.call(st.ConfigureOptimizer, name="assign", params={}, timeout=timeout),
    ]
    for call in calls:
        assert_refused_here(call, ConfigError)


# --- barriers and the rule ---


def test_barrier_is_asked_of_the_scheduler(worker: Worker) -> None:
    call = worker.call(st.EnterBarrier, name="epoch", timeout=10.0)
    (send,) = call.sends
    assert (send.peer, send.message) == (SCHEDULER, m.Barrier("epoch", 9.5))
    worker.answer(send)
    assert call.outcome == "done"


def test_rule_is_set_on_every_server(worker: Worker) -> None:
    call = worker.agree(worker.call(st.ConfigureOptimizer, name="sgd", params={"momentum": 0.9}, timeout=10.0))
    assert [(s.peer, s.message) for s in call.sends] == [
        (peer, m.SetOptimizer("sgd", {"momentum": 0.9}, "sum", 9.5)) for peer in (0, 1)
    ]
    worker.answer(call.sends[1])
    assert call.outcome is None
    worker.answer(call.sends[0])
    assert call.outcome == "done"


@pytest.mark.parametrize(("name", "params"), [("nope", {}), ("sgd", {"lr": 1.0})])
def test_rule_that_cannot_be_is_refused(worker: Worker, name: str, params: dict[str, float]) -> None:
    assert_refused_here(worker.call(st.ConfigureOptimizer, name=name, params=params, timeout=1.0), OptimizerError)


def test_barrier_says_whose_it_is(worker: Worker) -> None:
    call = worker.call(st.EnterBarrier, name="b", timeout=10.0, said={"n": 1})
    (send,) = call.sends
    assert send.message == m.Barrier("b", 9.5, (), {"n": 1})
    answer = m.Met(((0, {"n": 1}), (2, {})))
    assert worker.answer(send, answer) == [ef.Complete(call.number, {0: {"n": 1}, 2: {}})]
    leaving = worker.call(st.EnterBarrier, name="b", timeout=10.0, said={"n": 2}, leaves=True)
    assert leaving.outcome == "done"
    (send,) = leaving.sends
    assert send.message == m.Barrier("b", 9.5, (), {"n": 2})
    assert worker.answer(send, answer) == []
    (send,) = worker.call(st.EnterBarrier, name="b", timeout=10.0, group=(1, 0)).sends
    assert send.message == m.Barrier("b", 9.5, (1, 0))


def test_key_of_a_group_is_brought_by_its_first_rank(make_worker: type[Worker], like: type[Like]) -> None:
    for rank in (1, 2):
        worker = make_worker(rank=rank, workers=3)
        options = st.KeyOptions("asp", (2, 1), (b"digest",))
        tensors = [("w", TensorSpec((2,), "float32"))]
        init = worker.call(st.Transfer, operation=st.Operation.INIT, tensors=tensors, timeout=10.0, options=options)
        (send,) = init.sends
        assert send.message == like(m.Init, group=(1, 2), policy="asp", digest=b"digest" if rank == 1 else b"")
        assert (send.payload is not None) == (rank == 1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (st.KeyOptions(group=(1,)), MembershipError),
        (st.KeyOptions(group=(0, 5)), MembershipError),
        (st.KeyOptions(policy="nope"), PolicyError),
    ],
    ids=["of others", "of nobody", "policy"],
)
def test_options_that_cannot_be_are_refused(worker: Worker, options: st.KeyOptions, error: type[AiokvError]) -> None:
    tensors = [("w", TensorSpec((2,), "float32"))]
    call = worker.call(st.Transfer, operation=st.Operation.INIT, tensors=tensors, timeout=10.0, options=options)
    assert_refused_here(call, error)


def test_worker_that_has_finished_reads_and_pushes_no_more(worker: Worker) -> None:
    worker.finish(worker.transfer("push"))
    (send,) = worker.call(st.Finish, timeout=10.0).sends
    assert (send.peer, send.message) == (SCHEDULER, m.Finish())
    worker.answer(send)
    for operation in ("push", "pushpull"):
        assert_refused_here(worker.transfer(operation), MembershipError)
    assert worker.finish(worker.transfer("pull")).outcome == "done"


def test_finish_is_told_when_the_pushes_before_it_have_arrived(make_worker: type[Worker]) -> None:
    """The message goes through the scheduler: it could reach a server before they do."""
    worker = make_worker(max_open_pushes=1)
    first, held = worker.transfer("push", "a"), worker.transfer("push", "a")
    finish = worker.call(st.Finish, timeout=10.0)
    assert finish.sends == held.sends == []
    assert_refused_here(worker.transfer("push", "a"), MembershipError)
    worker.finish(first)
    push, fence = worker.effects[-2:]
    assert isinstance(push, ef.Send)
    assert isinstance(fence, ef.Send)
    assert isinstance(push.message, m.Push)
    assert (fence.message, fence.peer, fence.priority) == (m.GetRules(9.5), push.peer, push.priority)
    (last,) = worker.answer(fence, m.RulesState("", {}, "sum", (), 0))
    assert isinstance(last, ef.Send)
    assert (last.peer, last.message, held.outcome) == (SCHEDULER, m.Finish(), None)
    worker.answer(last)
    assert finish.outcome == "done"


def test_finish_follows_pushes_of_every_priority_to_every_server(make_worker: type[Worker]) -> None:
    """Frames of one priority keep their order on a link; those of two priorities do not."""
    worker = make_worker(servers=2, split_bytes=8, chunk_bytes=12)
    for key, priority in (("a", 3), ("a", 3), ("b", -9)):
        tensors = [(key, TensorSpec((2, 3), "float32"))]
        worker.call(st.Transfer, operation=st.Operation.PUSH, tensors=tensors, timeout=10.0, priority=priority)
    fences = worker.call(st.Finish, timeout=10.0).sends
    assert {(send.peer, send.priority) for send in fences} == {(0, 3), (1, 3), (0, -9), (1, -9)}
    assert len(fences) == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_deleted_keys_are_forgotten_and_rank_0_tells_the_servers(make_worker: type[Worker], rank: int) -> None:
    worker = make_worker(rank=rank)
    keys = ("a", "b", "c", "d", "e", "f")
    worker.finish(worker.transfer("init", *keys))
    worker.finish(worker.transfer("push", *keys))
    call = worker.call(st.DeleteKeys, keys=["a", "b", "nope"], timeout=10.0)
    told = [(send.peer, send.message) for send in call.sends]
    assert told == ([(peer, m.Delete(("a", "b", "nope"), 9.5, 1)) for peer in (0, 1)] if rank == 0 else [])
    worker.finish(call)
    assert call.outcome == "done"
    assert worker.machine.spec("a") is None
    (push,) = worker.transfer("push", "a", shape=(7,)).messages
    assert push.sequence == 1
    (other,) = worker.transfer("push", "f").messages
    assert other.sequence == 2


@pytest.mark.parametrize("operation", ["pull", "push"])
def test_answers_about_deleted_keys_are_of_no_interest(make_worker: type[Worker], operation: str) -> None:
    worker = make_worker(rank=1, servers=1)
    keys = ("a", "b", "c", "d", "e", "f")
    worker.finish(worker.transfer("init", *keys))
    together, alone = worker.transfer(operation, *keys), worker.transfer(operation, "z")
    worker.call(st.DeleteKeys, keys=["a", "z"], timeout=10.0)
    for call in (together, alone):
        worker.finish(call)
        assert call.outcome == "done"
    (push,) = worker.transfer("push", "z").messages
    assert (push.sequence, push.read_version) == (1, 0)
    assert not worker.machine._directory.pushes.open.get("a")


def test_worker_counts_who_is_lost(make_worker: type[Worker]) -> None:
    worker = make_worker(workers=3)
    worker.publish(server_1=("lost", "no heartbeat"))
    assert worker.machine.num_lost == 1


def test_keys_are_not_deleted_by_a_worker_that_is_not_there(worker: Worker) -> None:
    worker.lose_server(1, "connection reset")
    call = worker.call(st.DeleteKeys, keys=["a"], timeout=10.0)
    assert_refused_here(call, ServerLostError)


def test_change_of_the_rule_is_for_the_next_push_unless_told_otherwise(worker: Worker) -> None:
    for key in ("a", "b", "a"):
        worker.transfer("push", key)
    for since, expected in [(None, 3), (9, 9)]:
        call = worker.call(st.AdjustOptimizer, params={"wd": 0.5}, since=since, timeout=10.0)
        assert [(s.peer, s.message) for s in call.sends] == [
            (peer, m.ChangeOptimizer(expected, {"wd": 0.5}, 9.5)) for peer in (0, 1)
        ]
        assert {s.priority for s in call.sends} == {ef.URGENT}, "no push of that round may overtake it"
        for send in call.sends:
            effects = worker.answer(send)
        assert effects == [ef.Complete(call.number, expected)]


def test_change_comes_after_pushes_that_wait_for_their_turn(make_worker: type[Worker]) -> None:
    worker = make_worker(max_open_pushes=1)
    for _ in range(3):
        worker.transfer("push")
    worker.transfer("pull")
    (first, _) = worker.call(st.AdjustOptimizer, params={"wd": 0.5}, since=None, timeout=10.0).messages
    assert first.since == 4


def test_change_that_cannot_be_is_refused(worker: Worker) -> None:
    refused = worker.call(st.AdjustOptimizer, params={"momentum": 0.5}, since=None, timeout=1.0)
    assert_refused_here(refused, OptimizerError)


def test_scenario_69_all_keys_of_a_push_have_the_same_clock(worker: Worker) -> None:
    # Scenario 69: a schedule sees the largest count, whichever key it is about.
    worker.transfer("push", "a")
    worker.transfer("push", "a")
    clocks = [message.clock for message in worker.transfer("push", "b", "a").messages]
    assert clocks == [3, 3]
    assert worker.machine.clock == 3
    assert [message.clock for message in worker.transfer("push", "b").messages] == [3]


def test_contribution_that_is_dropped_is_counted_and_named(worker: Worker) -> None:
    call = worker.transfer("push", "a", "b")
    worker.answer(call.sends[0], m.Done(4, dropped="late"))
    assert ef.Complete(call.number, {"a": "late"}) in worker.answer(call.sends[1], m.Done(4))
    assert worker.machine.dropped == {"late": 1}


def test_dropped_contribution_is_counted_when_its_caller_has_given_up(worker: Worker) -> None:
    call = worker.transfer("push", "a")
    worker.handle(st.Cancel(call.number))
    worker.answer(call.sends[0], m.Done(4, dropped="stale"))
    assert worker.machine.dropped == {"stale": 1}


def test_tallies_come_from_all_servers(worker: Worker) -> None:
    call = worker.call(st.ReadTallies, timeout=5.0)
    assert [type(send.message) for send in call.sends] == [m.GetTally, m.GetTally]
    answers = [m.Tally({0: m.RankTally(applied=count)}) for count in (1, 2)]
    worker.answer(call.sends[0], answers[0])
    assert ef.Complete(call.number, answers) in worker.answer(call.sends[1], answers[1])


def test_a_loss_goes_to_the_server_that_decides_rounds(worker: Worker, like: type[Like]) -> None:
    call = worker.call(st.ReportLoss, loss=0.5, timeout=5.0)
    (send,) = call.sends
    assert send.peer == 0
    assert send.message == like(m.ReportLoss, loss=0.5)
    assert worker.answer(send, m.Done()) == [ef.Complete(call.number)]


def test_step_has_one_push_of_a_key_also_of_one_that_was_made_late(make_worker: type[Worker]) -> None:
    worker = make_worker(policy="k_sync:2")

    def make(key: str) -> None:
        call = worker.transfer("init", key)
        for send in call.sends:
            worker.answer(send)

    def clocks(*keys: str) -> list[int]:
        return [message.clock for message in worker.transfer("push", *keys).messages]

    make("a")
    assert [clocks("a"), clocks("a")] == [[1], [2]]
    make("late")
    assert [clocks("late"), clocks("late"), clocks("a")] == [[2], [3], [3]]
    assert clocks("a", "late") == [4, 4]


# --- time ---


def test_deadline_names_the_servers_that_are_silent(worker: Worker) -> None:
    call = worker.call(st.ConfigureOptimizer, name="assign", params={}, timeout=1.5)
    worker.answer(call.sends[0])
    assert worker.machine.deadline() == 1.5
    worker.tick(1.5)
    assert type(call.error) is CallTimeoutError
    assert call.error.details == {"server": [1]}
    assert "server 1 (server-1 at 127.0.0.1:9001)" in str(call.error)
    assert "server-0" not in str(call.error)


def test_deadline_releases_memory_and_ignores_late_answers(worker: Worker) -> None:
    call = worker.transfer("pull", timeout=1.0)
    worker.tick(1.0)
    (send,) = call.sends
    assert call.released == ef.Release(call.number, [(send.peer, send.request)])
    assert worker.machine.landing(send.request, 24) is None
    assert worker.answer(send, m.Value(1), 24) == []


def test_deadline_names_the_scheduler_when_it_is_silent(worker: Worker) -> None:
    call = worker.call(st.EnterBarrier, name="epoch", timeout=1.0)
    worker.tick(1.0)
    assert "barrier 'epoch'" in str(call.error)
    assert "the scheduler at 127.0.0.1:9091" in str(call.error)


def test_long_call_is_named_by_its_first_keys(worker: Worker) -> None:
    call = worker.transfer("push", "a", "b", "c", "d", "e", timeout=1.0)
    worker.tick(1.0)
    assert "push of 'a', 'b', 'c' and 2 more" in str(call.error)


# --- before and after ---


def test_worker_that_has_not_joined_calls_in_vain(make_worker: type[Worker]) -> None:
    worker = make_worker(join=False)
    assert_refused_here(worker.transfer("push"), ClosedError)
    assert_refused_here(worker.call(st.EnterBarrier, name="b", timeout=1.0), ClosedError)
    assert (worker.machine.rank, worker.machine.num_workers) == (-1, 0)


def test_member_knows_its_rank_and_the_number_of_workers(make_worker: type[Worker]) -> None:
    machine = make_worker(rank=2, workers=5).machine
    assert (machine.rank, machine.num_workers) == (2, 5)


def test_stimulus_of_another_machine_is_a_bug(worker: Worker) -> None:
    with pytest.raises(TypeError, match="not a stimulus for a worker"):
        worker.handle(st.Applied("w", 0, 1))
