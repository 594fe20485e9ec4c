"""A worker whose connection to a server ends goes on where it was, over another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import (
    CallTimeoutError,
    ChecksumError,
    HandshakeError,
    LimitError,
    OverloadedError,
    ServerLostError,
    StaleEpochError,
)
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m
from tests.core.conftest import only

if TYPE_CHECKING:
    from tests.core.conftest import Like, Worker


@pytest.fixture
def alone(make_worker: type[Worker]) -> Worker:
    """A worker of a cluster with one server."""
    return make_worker(servers=1)


def break_link(worker: Worker, server: int = 0) -> list[ef.Effect]:
    """Let the connection to a server end."""
    return worker.handle(st.PeerLost(server, "connection reset"))


def attach(worker: Worker, server: int = 0) -> ef.Send:
    """Let the connection be made; return what the worker says first."""
    (send,) = only(worker.handle(st.Connected(server)), ef.Send)
    assert isinstance(send.message, m.Attach)
    return send


def connect_again(worker: Worker, server: int = 0) -> list[ef.Send]:
    """Let the server know the worker again; return what is sent to it then."""
    return only(worker.answer(attach(worker, server)), ef.Send)


def test_connection_that_ends_is_made_again_and_the_operator_told_once(alone: Worker, like: type[Like]) -> None:
    effects = break_link(alone)
    assert effects == [like(ef.Connect, peer=0, host="127.0.0.1", port=9000), like(ef.Log, level="warning")]
    for word in ("worker-0", "server 0 (server-0 at 127.0.0.1:9000)", "connection reset"):
        assert word in effects[1].text  # type: ignore[union-attr]
    delays = []
    for _ in range(3):
        (connect,) = only(alone.handle(st.ConnectFailed(0, "connection refused")), ef.Connect)
        delays.append(connect.delay)
    assert delays == sorted(delays)
    send = attach(alone)
    assert send.message == like(m.Attach, rank=0, name="worker-0", incarnation=1, epoch=1, timeout=9.5)
    assert alone.machine.reconnects == 0
    assert alone.answer(send) == [like(ef.Log, level="warning")]
    assert alone.machine.reconnects == 1


def test_what_was_not_answered_is_sent_again_in_its_order(alone: Worker) -> None:
    push, pull = alone.transfer("push"), alone.transfer("pull")
    answered = alone.transfer("push")
    alone.finish(answered)
    break_link(alone)
    again = connect_again(alone)
    assert [(send.request, send.payload) for send in again] == [
        (send.request, send.payload) for send in (*push.sends, *pull.sends)
    ]
    assert [type(send.message) for send in again] == [m.Push, m.Pull]
    assert again[0].message.sequence == 1  # type: ignore[attr-defined]
    for send in again:
        alone.answer(send)
    assert push.outcome == pull.outcome == "done"


def test_the_server_gets_as_much_time_as_is_left(alone: Worker) -> None:
    alone.transfer("push", timeout=10.0)
    alone.now = 2.0
    break_link(alone)
    (again,) = connect_again(alone)
    assert again.message.timeout == 7.5  # type: ignore[attr-defined]


def test_what_is_called_meanwhile_is_sent_when_the_server_knows_the_worker(alone: Worker) -> None:
    break_link(alone)
    push = alone.transfer("push")
    send = attach(alone)
    rule = alone.call(st.ConfigureOptimizer, name="assign", params={}, timeout=10.0)
    command = alone.call(st.SendCommand, name="counters", params={}, timeout=10.0)
    assert push.sends == rule.sends == command.sends == []
    again = only(alone.answer(send), ef.Send)
    assert [type(each.message) for each in again] == [m.Push, m.SetOptimizer, m.Command]
    # Of what waits in a connection the more urgent would leave first.
    assert len({each.priority for each in again}) == 1
    for each in again:
        alone.answer(each, m.CommandResult({}) if isinstance(each.message, m.Command) else None)
    assert push.outcome == rule.outcome == command.outcome == "done"


def test_what_goes_to_others_is_sent_at_once(worker: Worker) -> None:
    break_link(worker, 1)
    both = worker.call(st.ConfigureOptimizer, name="assign", params={}, timeout=10.0)
    assert [send.peer for send in both.sends] == [0]
    barrier = worker.call(st.EnterBarrier, name="b", timeout=1.0)
    assert [send.peer for send in barrier.sends] == [SCHEDULER]


def test_connection_that_ends_while_the_worker_says_who_it_is(alone: Worker, like: type[Like]) -> None:
    call = alone.transfer("push")
    break_link(alone)
    attach(alone)
    assert break_link(alone)[0] == like(ef.Connect, peer=0)
    (again,) = connect_again(alone)
    alone.answer(again)
    assert call.outcome == "done"
    assert alone.machine.pending == 0


def test_connections_that_end_at_once_are_made_again_with_longer_and_longer_pauses(alone: Worker) -> None:
    delays = []
    for _ in range(4):
        (connect,) = only(break_link(alone), ef.Connect)
        delays.append(connect.delay)
        connect_again(alone)
    assert delays == sorted(set(delays))
    alone.now += 60.0
    (connect,) = only(break_link(alone), ef.Connect)
    assert connect.delay == delays[0]


def test_view_that_calls_the_server_lost_ends_the_waiting(alone: Worker) -> None:
    call = alone.transfer("push")
    break_link(alone)
    alone.publish(server_0=("lost", "no heartbeat"))
    assert isinstance(call.error, ServerLostError)
    assert alone.handle(st.ConnectFailed(0, "connection refused")) == []
    assert isinstance(alone.handle(st.Connected(0))[0], ef.Disconnect)
    assert break_link(alone) == []


def test_call_that_has_waited_too_long_says_that_the_connection_has_ended(alone: Worker) -> None:
    call = alone.transfer("pull", timeout=1.0)
    break_link(alone)
    alone.tick(1.0)
    assert isinstance(call.error, CallTimeoutError)
    assert "connection reset" in str(call.error)


def test_push_whose_caller_waits_no_longer_is_sent_again_from_a_copy(alone: Worker) -> None:
    gone = alone.transfer("push", "a", "b")
    alone.handle(st.Cancel(gone.number))
    assert gone.released == ef.Release(gone.number, [], [0, 1])
    reading = alone.transfer("pull")
    alone.handle(st.Cancel(reading.number))
    break_link(alone)
    first, second = connect_again(alone)
    assert [first.request, second.request] == [send.request for send in gone.sends]
    assert ef.Discard(gone.number) not in alone.answer(first)
    assert ef.Discard(gone.number) in alone.answer(second)
    assert alone.machine.pending == 0


def test_copies_of_a_lost_server_are_not_kept(alone: Worker) -> None:
    call = alone.transfer("push")
    alone.handle(st.Cancel(call.number))
    assert ef.Discard(call.number) in alone.lose_server(0)


@pytest.mark.parametrize("error", [LimitError("too long"), OverloadedError("too much"), HandshakeError("no token")])
def test_connection_that_was_refused_for_good_is_not_made_again(alone: Worker, error: Any) -> None:
    call = alone.transfer("push")
    assert not only(alone.handle(st.PeerLost(0, str(error), error)), ef.Connect)
    assert isinstance(call.error, ServerLostError)


def test_server_that_is_another_one_by_now_is_lost(alone: Worker) -> None:
    call = alone.transfer("push")
    break_link(alone)
    alone.handle(st.ConnectFailed(0, "refused", HandshakeError("another cluster")))
    assert isinstance(call.error, ServerLostError)


def test_connection_over_which_something_was_damaged_is_made_again(alone: Worker) -> None:
    error = ChecksumError("another checksum")
    assert only(alone.handle(st.PeerLost(0, str(error), error)), ef.Connect)


def test_server_that_has_no_room_for_a_connection_is_tried_again(alone: Worker) -> None:
    break_link(alone)
    assert only(alone.handle(st.ConnectFailed(0, "refused", OverloadedError("256 connections"))), ef.Connect)


def test_server_that_has_not_seen_the_view_yet_is_tried_again(alone: Worker, like: type[Like]) -> None:
    call = alone.transfer("push")
    break_link(alone)
    effects = alone.refuse(attach(alone), CallTimeoutError("the view did not reach server-0"))
    assert effects[:2] == [like(ef.Disconnect, peer=0), like(ef.Connect, peer=0)]
    (again,) = connect_again(alone)
    alone.answer(again)
    assert call.outcome == "done"


def test_worker_in_whose_place_there_is_another_one_is_told_so_from_then_on(alone: Worker, like: type[Like]) -> None:
    call = alone.transfer("push")
    break_link(alone)
    effects = alone.refuse(attach(alone), StaleEpochError("rank 0 is a later process by now", ranks=[0]))
    assert effects[0] == like(ef.Disconnect, peer=0)
    assert isinstance(call.error, StaleEpochError)
    assert isinstance(alone.transfer("pull").error, StaleEpochError)


def test_worker_that_has_left_does_not_connect_again(alone: Worker) -> None:
    alone.finish(alone.call(st.Depart, timeout=1.0))
    assert break_link(alone) == []


def test_compressed_push_is_kept_until_it_is_answered(alone: Worker) -> None:
    setting = alone.call(st.ConfigureCompression, name="fp16", params={}, pull_name="", pull_params={}, timeout=10.0)
    alone.finish(setting)
    call = alone.transfer("push")
    sends = only(alone.handle(st.Encoded(call.number)), ef.Send)
    alone.handle(st.Cancel(call.number))
    assert call.released == ef.Release(call.number, [])
    break_link(alone)
    (again,) = connect_again(alone)
    assert again.payload == sends[0].payload
    assert only(alone.answer(again), ef.Settle)
