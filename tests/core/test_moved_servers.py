"""A worker whose view has another node for an index goes over to it, and asks again what was not answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import ServerLostError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m
from tests.core.conftest import only

if TYPE_CHECKING:
    from tests.core.conftest import Call, Like, Worker

STANDBY = ("standby/1/x", 7, "10.0.0.5", 9101)
"""The node that has the place of server 1."""


@pytest.fixture
def small_chunks(make_worker: type[Worker]) -> Worker:
    """A worker with two servers, each of which has a half of every key."""
    worker = make_worker(chunk_bytes=64, split_bytes=16)
    worker.finish(worker.transfer("init"))
    return worker


def promote(worker: Worker) -> list[ef.Effect]:
    """Let the next view have another node for index 1."""
    worker.nodes[1] = STANDBY
    return worker.publish()


def attach(worker: Worker) -> ef.Send:
    """Let the connection to server 1 be made; return what the worker says first, and all that it says."""
    (send,) = only(worker.handle(st.Connected(1)), ef.Send)
    assert isinstance(send.message, m.Attach)
    return send


def go_over(worker: Worker) -> list[ef.Send]:
    """Let the other node know the worker; return what is sent to it then."""
    return only(worker.answer(attach(worker)), ef.Send)


def push(worker: Worker) -> Call:
    return worker.transfer("push")


def pull(worker: Worker) -> Call:
    return worker.transfer("pull")


def set_rule(worker: Worker) -> Call:
    return worker.agree(worker.call(st.ConfigureOptimizer, name="assign", params={}, timeout=10.0))


def push_rows(worker: Worker) -> Call:
    worker.finish(worker.transfer_rows("init", st.Rows([0, 0])))
    return worker.transfer_rows("push", st.Rows([2, 1]))


def push_compressed(worker: Worker) -> Call:
    compression = {"name": "2bit", "params": {"threshold": 0.5}, "pull_name": "", "pull_params": {}}
    worker.finish(worker.call(st.ConfigureCompression, timeout=10.0, **compression))
    call = worker.transfer("push")
    (encode,) = [each for each in worker.effects if isinstance(each, ef.Encode)]
    call.sends = only(worker.handle(st.Encoded(encode.call, None)), ef.Send)
    return call


def delete(worker: Worker) -> Call:
    return worker.call(st.DeleteKeys, keys=["w"], timeout=10.0)


@pytest.mark.parametrize("begin", [push, pull, set_rule, push_compressed, push_rows, delete])
def test_calls_go_on_with_the_other_node(small_chunks: Worker, like: type[Like], begin: Any) -> None:
    worker = small_chunks
    call = begin(worker)
    theirs = [send for send in call.sends if send.peer == 1]
    assert theirs
    for send in call.sends:
        if send.peer == 0:
            worker.answer(send)
    assert promote(worker) == [
        ef.Disconnect(1, "standby/1/x is server 1 now"),
        ef.Connect(1, "10.0.0.5", 9101),
        like(ef.Log, level="warning"),
    ]
    again = go_over(worker)
    assert [(send.request, send.payload) for send in again] == [(send.request, send.payload) for send in theirs]
    assert [type(send.message) for send in again] == [type(send.message) for send in theirs]
    assert call.outcome is None
    for send in again:
        worker.answer(send)
    assert call.outcome == "done"
    assert worker.machine.pending == 0
    assert worker.machine.reconnects == 1


def test_what_is_asked_in_the_middle_of_it_goes_to_the_other_node_in_its_order(small_chunks: Worker) -> None:
    worker = small_chunks
    calls = [push(worker), worker.call(st.SendCommand, name="ping", params={}, timeout=10.0)]
    calls.append(worker.call(st.AdjustOptimizer, params={"learning_rate": 0.1}, since=2, timeout=10.0))
    promote(worker)
    calls.append(push(worker))
    first = attach(worker)
    calls.append(pull(worker))
    assert [send.peer for call in calls[3:] for send in call.sends] == [0, 0]
    again = only(worker.answer(first), ef.Send)
    assert [type(send.message) for send in again] == [m.Push, m.Command, m.ChangeOptimizer, m.Push, m.Pull]
    # Of what waits in a connection the more urgent would leave first.
    assert len({send.priority for send in again}) == 1
    assert [send.message.sequence for send in again if isinstance(send.message, m.Push)] == [1, 2]
    for send in (*again, *(send for call in calls for send in call.sends if send.peer == 0)):
        worker.answer(send)
    assert [call.outcome for call in calls] == ["done"] * 5


def test_answers_of_the_node_before_count_no_longer(small_chunks: Worker) -> None:
    """They were on their way when the view came."""
    worker = small_chunks
    call = push(worker)
    for send in call.sends:
        if send.peer == 0:
            worker.answer(send)
    promote(worker)
    (theirs,) = [send for send in call.sends if send.peer == 1]
    assert worker.answer(theirs) == []
    first = attach(worker)
    assert worker.answer(theirs) == []
    assert call.outcome is None
    (again,) = only(worker.answer(first), ef.Send)
    worker.answer(again)
    assert call.outcome == "done"


@pytest.mark.parametrize("attaching", [False, True])
def test_connection_that_has_ended_is_made_to_the_other_node_at_once(
    small_chunks: Worker, like: type[Like], attaching: bool
) -> None:
    worker = small_chunks
    call = push(worker)
    worker.answer(next(send for send in call.sends if send.peer == 0))
    worker.handle(st.PeerLost(1, "connection reset"))
    for _ in range(5):
        worker.handle(st.ConnectFailed(1, "connection refused"))
    if attaching:
        attach(worker)
    assert promote(worker)[:2] == [like(ef.Disconnect, peer=1), ef.Connect(1, "10.0.0.5", 9101, 0.0)]
    (again,) = go_over(worker)
    worker.answer(again)
    assert call.outcome == "done"
    assert worker.machine.pending == 0
    assert worker.machine.reconnects == 1


def test_place_that_another_node_has_while_the_worker_joins(make_worker: type[Worker]) -> None:
    worker = make_worker(join=False)
    joined = worker.call(st.Join, timeout=10.0)
    worker.handle(st.Connected(SCHEDULER))
    worker.publish()
    (zero,) = only(worker.handle(st.Connected(0)), ef.Send)
    worker.answer(zero)
    promote(worker)
    assert go_over(worker) == []
    assert joined.outcome == "done"
    assert worker.machine.reconnects == 0


def test_view_with_the_same_nodes_changes_nothing(small_chunks: Worker) -> None:
    promote(small_chunks)
    assert small_chunks.publish() == []
    go_over(small_chunks)
    assert small_chunks.publish() == []


@pytest.mark.parametrize("after", [False, True])
def test_other_node_may_be_lost_too(small_chunks: Worker, after: bool) -> None:
    worker = small_chunks
    call = push(worker)
    promote(worker)
    if after:
        go_over(worker)
    worker.publish(server_1=("lost", "no heartbeat"))
    assert isinstance(call.error, ServerLostError)
    assert "server 1 (standby/1/x at 10.0.0.5:9101) is lost: no heartbeat" in str(call.error)
    worker.nodes[1] = ("another", 9, "10.0.0.6", 9102)
    assert worker.publish() == [], "what is lost stays so"
