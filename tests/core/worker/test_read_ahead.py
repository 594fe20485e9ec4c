"""Reads that a worker's servers answer before its user pulls: when they are asked for, who gets them, when not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    ClosedError,
    OptimizerError,
    RoundTimeoutError,
    ServerLostError,
    WorkerLostError,
)
from aiokv.types import SCHEDULER, TensorSpec
from aiokv.wire import messages as m
from tests.core.conftest import only

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.conftest import Call, Worker

SPEC = TensorSpec((2, 3), "float32")


@pytest.fixture
def reader(make_worker: type[Worker]) -> Callable[..., Worker]:
    """Return a function that makes a worker which has initialised and read keys, of policy essp unless told."""

    def make(*keys: str, policy: str = "essp:1", shape: tuple[int, ...] = (2, 3), **settings: Any) -> Worker:
        worker = make_worker(policy=policy, **settings)
        worker.finish(worker.transfer("init", *keys, shape=shape))
        worker.finish(worker.transfer("pull", *keys, shape=shape))
        return worker

    return make


def pushed(worker: Worker, *keys: str, **fields: Any) -> tuple[list[ef.Send], list[ef.Send]]:
    """Push, and return the pushes and the reads that were sent behind them."""
    sends = worker.transfer("push", *keys, **fields).sends
    pushes = [send for send in sends if isinstance(send.message, m.Push)]
    reads = [send for send in sends if isinstance(send.message, m.Pull)]
    assert sends == pushes + reads
    return pushes, reads


def own_memory(worker: Worker, read: ef.Send) -> int:
    """Return the number of the memory into which what was read ahead comes."""
    memory = worker.machine.landing(read.request, 24)
    assert isinstance(memory, ef.CallMemory)
    assert memory == ef.CallMemory(memory.call, 0, 0, 24)
    assert ef.Allocate(memory.call, SPEC) in worker.effects
    return memory.call


# --- what is asked for ahead ---


def test_who_has_read_a_key_is_sent_what_its_next_push_is_in(reader: Callable[..., Worker]) -> None:
    worker = reader()
    ([push], [read]) = pushed(worker)
    assert (read.peer, read.message.at_least) == (push.peer, 1)  # type: ignore[attr-defined]
    assert own_memory(worker, read) < 0


def test_who_has_not_read_a_key_is_sent_nothing(make_worker: type[Worker]) -> None:
    worker = make_worker(policy="essp:1")
    worker.finish(worker.transfer("init"))
    assert pushed(worker)[1] == []


def test_who_did_not_pull_what_was_sent_is_sent_nothing_more(reader: Callable[..., Worker]) -> None:
    worker = reader()
    assert [len(pushed(worker)[1]) for _ in range(3)] == [1, 0, 0]


def test_pushpull_has_its_read_with_it(reader: Callable[..., Worker]) -> None:
    worker = reader()
    assert len(worker.finish(worker.transfer("pushpull")).sends) == 1
    assert len(pushed(worker)[1]) == 1


def test_under_other_policies_a_read_is_asked_for_by_its_pull(reader: Callable[..., Worker]) -> None:
    worker = reader(policy="ssp:1")
    assert pushed(worker)[1] == []
    assert len(worker.transfer("pull").sends) == 1


def test_rows_are_not_sent_ahead(make_worker: type[Worker]) -> None:
    worker = make_worker(policy="essp:1", servers=1)
    rows = st.Rows([1], bytes(8))
    worker.finish(worker.transfer_rows("init", st.Rows([1])))
    worker.finish(worker.transfer_rows("pull", rows))
    assert [type(send.message) for send in worker.transfer_rows("push", st.Rows([1])).sends] == [m.PushRows]


def test_nothing_is_sent_ahead_for_a_push_whose_caller_has_gone(reader: Callable[..., Worker]) -> None:
    worker = reader(servers=1)
    compress = worker.call(
        st.ConfigureCompression, name="2bit", params={"threshold": 0.5}, pull_name="", pull_params={}, timeout=10.0
    )
    worker.finish(compress)
    push = worker.transfer("push")
    worker.handle(st.Cancel(push.number))
    sends = only(worker.handle(st.Encoded(push.number)), ef.Send)
    assert [type(send.message) for send in sends] == [m.Push]


# --- who gets it ---


def test_pull_gets_what_is_there_and_asks_for_nothing(reader: Callable[..., Worker]) -> None:
    worker = reader()
    ([push], [read]) = pushed(worker)
    memory = own_memory(worker, read)
    worker.answer(push)
    worker.answer(read, m.Value(5))
    pull = worker.transfer("pull")
    assert (pull.outcome, pull.sends) == ("done", [])
    assert worker.effects[-2:] == [ef.Deliver(pull.number, memory, [0]), ef.Complete(pull.number)]
    assert worker.machine.reads_ahead == 1


def test_pull_waits_for_what_is_under_way(reader: Callable[..., Worker]) -> None:
    worker = reader(servers=2, chunk_bytes=16, split_bytes=16)
    (_, reads) = pushed(worker)
    worker.answer(reads[0])
    pull = worker.transfer("pull")
    assert (pull.outcome, pull.sends) == (None, [])
    for read in reads[1:]:
        assert pull.outcome is None
        worker.answer(read)
    assert pull.outcome == "done"


def test_pull_asks_for_the_keys_that_were_not_sent(reader: Callable[..., Worker]) -> None:
    worker = reader("a", "b", servers=1)
    (_, [read]) = pushed(worker, "b")
    memory = own_memory(worker, read)
    worker.answer(read)
    pull = worker.transfer("pull", "a", "b")
    assert [send.message.key for send in pull.sends] == ["a"]  # type: ignore[attr-defined]
    worker.finish(pull)
    assert ef.Deliver(pull.number, memory, [1]) in worker.effects


def test_keys_of_one_push_are_pulled_one_by_one(reader: Callable[..., Worker]) -> None:
    worker = reader("a", "b")
    (_, reads) = pushed(worker, "a", "b")
    for read in reads:
        worker.answer(read)
    assert [worker.transfer("pull", key).outcome for key in "ba"] == ["done", "done"]


def test_key_that_is_named_twice_comes_once(reader: Callable[..., Worker]) -> None:
    worker = reader()
    (_, [read]) = pushed(worker, "w", "w")
    memory = own_memory(worker, read)
    worker.answer(read)
    pull = worker.transfer("pull", "w", "w")
    assert pull.outcome == "done"
    assert ef.Deliver(pull.number, memory, [0, 1]) in worker.effects


def test_only_what_a_pull_got_was_read(reader: Callable[..., Worker]) -> None:
    worker = reader()
    (_, [read]) = pushed(worker)
    worker.answer(read, m.Value(7))
    ([second], _) = pushed(worker)
    assert second.message.read_version == 1  # type: ignore[attr-defined]
    worker.finish(worker.transfer("pull"))
    (_, [read]) = pushed(worker)
    worker.answer(read, m.Value(9))
    worker.transfer("pull")
    ([last], _) = pushed(worker)
    assert last.message.read_version == 9  # type: ignore[attr-defined]


def test_compressed_values_are_sent_ahead_as_differences(reader: Callable[..., Worker]) -> None:
    worker = reader(servers=1)
    codec = {"pull_name": "2bit", "pull_params": {"threshold": 0.5}}
    worker.finish(worker.call(st.ConfigureCompression, name="", params={}, timeout=10.0, **codec))
    worker.finish(worker.transfer("pull"))
    (_, [read]) = pushed(worker)
    replica = worker.machine.landing(read.request, 4)
    assert isinstance(replica, ef.Replica)
    assert isinstance(replica.target, ef.CallMemory)
    assert replica.target.call < 0
    worker.answer(read, m.Value(2, codec=read.message.value_codec), 4)  # type: ignore[attr-defined]
    assert worker.transfer("pull").outcome == "done"


# --- what is outdated ---


def test_what_came_before_a_push_is_asked_for_anew(reader: Callable[..., Worker]) -> None:
    worker = reader()
    (_, [read]) = pushed(worker)
    memory = own_memory(worker, read)
    worker.answer(read)
    pushed(worker)
    assert ef.Deallocate(memory) in worker.effects
    (again,) = worker.transfer("pull").sends
    assert again.message.at_least == 2  # type: ignore[attr-defined]


def test_what_is_under_way_when_a_push_is_made_lands_nowhere(reader: Callable[..., Worker]) -> None:
    worker = reader()
    (_, [read]) = pushed(worker)
    memory = own_memory(worker, read)
    effects = worker.call(st.Transfer, operation=st.Operation.PUSH, tensors=[("w", SPEC)], timeout=10.0)
    assert effects.sends
    assert ef.Release(memory, [(read.peer, read.request)]) in worker.effects
    assert worker.machine.landing(read.request, 24) is None
    worker.answer(read)
    assert len(worker.transfer("pull").sends) == 1


def test_after_a_barrier_a_pull_asks_for_what_others_have_pushed(reader: Callable[..., Worker]) -> None:
    worker = reader()
    (_, [read]) = pushed(worker)
    worker.answer(read)
    barrier = worker.call(st.EnterBarrier, name="here", timeout=10.0)
    worker.handle(st.Received(SCHEDULER, barrier.sends[0].request, m.Done()))
    assert barrier.outcome == "done"
    assert len(worker.transfer("pull").sends) == 1


def test_value_that_waits_for_a_push_which_does_not_count_is_not_waited_for(reader: Callable[..., Worker]) -> None:
    worker = reader()
    ([push], _) = pushed(worker)
    worker.refuse(push, OptimizerError("no"))
    (pull,) = worker.transfer("pull").sends
    assert pull.message.at_least == 0  # type: ignore[attr-defined]


# --- what goes wrong ---


@pytest.mark.parametrize("answer", [RoundTimeoutError("late"), None], ids=["refused", "too short"])
def test_pull_asks_itself_where_nothing_good_came(reader: Callable[..., Worker], answer: AiokvError | None) -> None:
    worker = reader()
    (_, [read]) = pushed(worker)
    if answer is not None:
        worker.refuse(read, answer)
    else:
        worker.answer(read, m.Value(2), 3)
    assert len(worker.transfer("pull").sends) == 1


def test_pull_has_all_of_its_own_time(reader: Callable[..., Worker]) -> None:
    """What was asked for ahead is refused earlier than the pull would be."""
    worker = reader()
    (_, [read]) = pushed(worker, timeout=10.0)
    worker.now = 6.0
    pull = worker.transfer("pull", timeout=10.0)
    worker.now = 9.5
    (again,) = only(worker.refuse(read, RoundTimeoutError("ranks 1 are too far behind")), ef.Send)
    assert pull.outcome is None
    # 6.5 s are left, of which the server gets all but half a second.
    assert (again.message.at_least, again.message.timeout) == (1, 6.0)  # type: ignore[attr-defined]
    worker.now = 15.5
    worker.refuse(again, RoundTimeoutError("ranks 1 are too far behind"))
    assert isinstance(pull.outcome, RoundTimeoutError)


def test_other_errors_are_those_of_the_pull(reader: Callable[..., Worker]) -> None:
    worker = reader()
    (_, [read]) = pushed(worker)
    memory = own_memory(worker, read)
    pull = worker.transfer("pull")
    worker.refuse(read, WorkerLostError("rank 1 is lost"))
    assert isinstance(pull.outcome, WorkerLostError)
    assert ef.Deallocate(memory) in worker.effects


def test_pull_that_waits_less_long_asks_for_itself(reader: Callable[..., Worker]) -> None:
    worker = reader()
    pushed(worker, timeout=10.0)
    assert [send.message.timeout for send in worker.transfer("pull", timeout=1.0).sends] == [0.9]  # type: ignore[attr-defined]


def test_pull_names_the_server_that_does_not_answer(reader: Callable[..., Worker]) -> None:
    worker = reader(servers=1)
    pushed(worker, timeout=10.0)
    pull = worker.transfer("pull", timeout=10.0)
    worker.tick(10.0)
    assert isinstance(pull.outcome, CallTimeoutError)
    assert "no answer from server 0" in str(pull.outcome)


def test_nobody_is_told_of_a_value_for_which_nobody_waits(reader: Callable[..., Worker]) -> None:
    worker = reader()
    ([push], [read]) = pushed(worker, timeout=1.0)
    memory = own_memory(worker, read)
    worker.answer(push)
    assert worker.tick(1.0) == [ef.Release(memory, [(read.peer, read.request)]), ef.Deallocate(memory)]


def test_value_that_a_held_push_outdates_when_its_time_is_over(reader: Callable[..., Worker]) -> None:
    """What ends then lets the push go on, which makes outdated what ends, too."""
    worker = reader("a", "b", servers=1, max_open_pushes=1)
    pushed(worker, "b", timeout=50.0)
    ([push], [read]) = pushed(worker, "a", timeout=1.0)
    worker.answer(push)
    held = worker.transfer("push", "a", "b", timeout=1.0)
    behind = worker.transfer("push", "a", timeout=50.0)
    assert held.sends == behind.sends == []
    memory = own_memory(worker, read)
    effects = worker.tick(1.0)
    assert isinstance(held.outcome, CallTimeoutError)
    assert [type(send.message) for send in only(effects, ef.Send)] == [m.Push]
    assert effects.count(ef.Deallocate(memory)) == 1


def test_pull_that_is_cancelled_lets_go_of_what_it_has_taken_over(reader: Callable[..., Worker]) -> None:
    worker = reader()
    (_, [read]) = pushed(worker)
    memory = own_memory(worker, read)
    pull = worker.transfer("pull")
    worker.handle(st.Cancel(pull.number))
    assert pull.released == ef.Release(pull.number, [(read.peer, read.request)])
    assert ef.Deallocate(memory) in worker.effects
    assert worker.machine.landing(read.request, 24) is None


def test_lost_server_ends_the_pull_and_not_what_was_asked_for_ahead(reader: Callable[..., Worker]) -> None:
    worker = reader("a", "b", servers=1)
    (_, reads) = pushed(worker, "a", "b")
    memories = [own_memory(worker, read) for read in reads]
    pull = worker.transfer("pull", "a")
    worker.lose_server(0)
    assert isinstance(pull.outcome, ServerLostError)
    assert [memory for memory in memories if ef.Deallocate(memory) in worker.effects] == memories


def test_worker_that_leaves_lets_go_of_everything(reader: Callable[..., Worker]) -> None:
    worker = reader()
    (_, [read]) = pushed(worker)
    memory = own_memory(worker, read)
    pull: Call = worker.transfer("pull")
    worker.call(st.Depart, timeout=1.0)
    assert isinstance(pull.outcome, ClosedError)
    assert ef.Deallocate(memory) in worker.effects
