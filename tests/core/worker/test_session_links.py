"""A worker's links: how it joins, what it does when a server or the scheduler is gone, and how it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.worker.session import Session
from aiokv.errors import (
    ClosedError,
    ClusterFullError,
    ConfigError,
    HandshakeError,
    JoinTimeoutError,
    MembershipError,
    OtherSettingsError,
    OverloadedError,
    SchedulerLostError,
    ServerLostError,
    StaleEpochError,
)
from aiokv.types import SCHEDULER, Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Call, Like, Worker


@pytest.fixture
def outsider(make_worker: type[Worker]) -> Worker:
    """Worker 0 of a cluster with two servers, which has not begun to join."""
    return make_worker(join=False)


def join(worker: Worker, timeout: float = 10.0) -> Call:
    """Let a worker begin to join."""
    return worker.call(st.Join, timeout=timeout)


def attach_all(worker: Worker) -> None:
    """Let all servers know a worker."""
    for server in (0, 1):
        (attach,) = worker.handle(st.Connected(server))
        assert isinstance(attach, ef.Send)
        worker.answer(attach)


# --- joining ---


def test_worker_joins_scheduler_then_servers_then_says_who_it_is(outsider: Worker, like: type[Like]) -> None:
    call = join(outsider)
    assert outsider.effects == [ef.Connect(SCHEDULER, "127.0.0.1", 9091)]
    assert outsider.handle(st.Connected(SCHEDULER)) == [
        like(ef.Send, peer=SCHEDULER, message=like(m.Register, role=Role.WORKER, name="worker-0", timeout=9.5))
    ]
    assert outsider.publish() == [ef.Connect(index, "127.0.0.1", 9000 + index) for index in (0, 1)]
    attach = like(m.Attach, rank=0, name="worker-0", incarnation=1, epoch=1)
    attaches = [outsider.handle(st.Connected(server)) for server in (1, 0)]
    assert attaches == [[like(ef.Send, peer=server, message=attach)] for server in (1, 0)]
    for (send,) in attaches:
        assert isinstance(send, ef.Send)
        assert call.outcome is None
        outsider.answer(send)
    assert call.outcome == "done"


def test_worker_that_has_joined_knows_from_which_checkpoint_the_job_goes_on(make_worker: type[Worker]) -> None:
    """There is what compression had left of its gradients."""
    settings = {"resume": "/checkpoints/run-1/step-90"}
    assert make_worker(settings=settings).machine.resumed_from == "/checkpoints/run-1/step-90"
    assert make_worker().machine.resumed_from == make_worker(join=False).machine.resumed_from == ""


def test_worker_that_takes_a_place_hears_of_a_server_that_is_lost(outsider: Worker) -> None:
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.publish(server_1=("lost", "connection closed"))
    assert isinstance(call.error, ServerLostError)
    for word in ("join", "server-1", "connection closed"):
        assert word in str(call.error)


def test_worker_whose_calls_would_give_up_before_anybody_is_missed_does_not_join(make_worker: type[Worker]) -> None:
    worker = make_worker(join=False, call_timeout=10.0)
    call = join(worker)
    worker.handle(st.Connected(SCHEDULER))
    effects = worker.publish()
    assert isinstance(call.error, ConfigError)
    assert str(call.error) == (
        "time-outs contradict each other: death_timeout < call_timeout must hold, got death_timeout = 10 at the "
        "scheduler, call_timeout = 10 here; set them alike for all nodes"
    )
    assert [type(effect) for effect in effects] == [ef.Disconnect, ef.Fail]


def test_session_is_for_workers_only() -> None:
    joiner = Joiner(role=Role.SERVER, name="x", incarnation=1, scheduler=("h", 1), advertised=("h", 1))
    with pytest.raises(ValueError, match="server"):
        Session(joiner, policy="bsp")


def test_scenario_40_worker_tries_again_while_there_is_no_scheduler(outsider: Worker, like: type[Like]) -> None:
    join(outsider)
    (connect, log) = outsider.handle(st.ConnectFailed(SCHEDULER, "connection refused"))
    assert connect == like(ef.Connect, peer=SCHEDULER, host="127.0.0.1", port=9091)
    assert isinstance(log, ef.Log)
    for word in ("worker-0", "127.0.0.1:9091", "connection refused"):
        assert word in log.text


def test_worker_tries_again_while_a_server_does_not_answer(outsider: Worker, like: type[Like]) -> None:
    join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.publish()
    failures = [outsider.handle(st.ConnectFailed(1, "connection refused")) for _ in range(3)]
    delays = [effects[0].delay for effects in failures if isinstance(effects[0], ef.Connect)]
    assert delays == sorted(delays)
    assert len(set(delays)) == 3
    assert failures[0][1:] == [like(ef.Log, level="warning")]
    assert "server 1 (server-1 at 127.0.0.1:9001)" in outsider.effects[-3].text  # type: ignore[union-attr]


def test_late_join_names_the_scheduler_that_does_not_answer(outsider: Worker) -> None:
    call = join(outsider, 2.0)
    outsider.handle(st.ConnectFailed(SCHEDULER, "connection refused"))
    outsider.tick(2.0)
    assert isinstance(call.error, JoinTimeoutError)
    assert "127.0.0.1:9091 (connection refused)" in str(call.error)


def test_late_join_names_the_server_that_does_not_answer(outsider: Worker) -> None:
    call = join(outsider, 2.0)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.publish()
    (attach,) = outsider.handle(st.Connected(0))
    assert isinstance(attach, ef.Send)
    outsider.answer(attach)
    outsider.tick(2.0)
    assert isinstance(call.error, JoinTimeoutError)
    assert "server 1 (server-1 at 127.0.0.1:9001)" in str(call.error)
    assert "server-0" not in str(call.error)


def test_scheduler_that_refuses_the_worker_says_why(outsider: Worker) -> None:
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    error = ClusterFullError("all 2 places for a worker are taken", expected=2)
    outsider.handle(st.Received(SCHEDULER, 1, m.Error(error.code, error.message, error.details)))
    assert isinstance(call.error, ClusterFullError)
    assert call.error.details == {"expected": 2}


@pytest.mark.parametrize("peer", [SCHEDULER, 1])
def test_wrong_token_is_not_tried_again(outsider: Worker, peer: int) -> None:
    call = join(outsider)
    if peer != SCHEDULER:
        outsider.handle(st.Connected(SCHEDULER))
        outsider.publish()
    outsider.handle(st.ConnectFailed(peer, "refused", HandshakeError("another token")))
    assert isinstance(call.outcome, HandshakeError)


@pytest.mark.parametrize("peer", [SCHEDULER, 1])
def test_a_node_that_has_no_room_now_is_tried_again(outsider: Worker, peer: int) -> None:
    call = join(outsider)
    if peer != SCHEDULER:
        outsider.handle(st.Connected(SCHEDULER))
        outsider.publish()
    effects = outsider.handle(st.ConnectFailed(peer, "refused", OverloadedError("256 connections already")))
    assert [effect.peer for effect in effects if isinstance(effect, ef.Connect)] == [peer]
    assert call.outcome is None


def test_server_that_refuses_the_worker_ends_the_join(outsider: Worker) -> None:
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.publish()
    (attach,) = outsider.handle(st.Connected(0))
    assert isinstance(attach, ef.Send)
    outsider.refuse(attach, MembershipError("not an alive member"))
    assert isinstance(call.outcome, MembershipError)


def test_a_join_ends_when_the_scheduler_does_not_fit(outsider: Worker) -> None:
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    error = HandshakeError("give every node the same setting")
    outsider.handle(st.PeerLost(SCHEDULER, error.message, error))
    assert call.outcome is error
    assert outsider.machine.deadline() is None


def test_a_worker_that_has_joined_looks_for_its_scheduler_whatever_ended_the_connection(worker: Worker) -> None:
    effects = worker.handle(st.PeerLost(SCHEDULER, "no checksum", HandshakeError("no checksum")))
    assert any(isinstance(each, ef.Connect) for each in effects)


def test_a_join_waits_for_a_scheduler_that_is_started_again(outsider: Worker, like: type[Like]) -> None:
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    effects = outsider.handle(st.PeerLost(SCHEDULER, "connection reset"))
    assert effects == [like(ef.Log, level="warning"), like(ef.Connect, peer=SCHEDULER)]
    text = "the scheduler at 127.0.0.1:9091 is gone: connection reset; worker-0 has not joined yet, and looks for it"
    assert isinstance(effects[0], ef.Log)
    assert effects[0].text == text
    outsider.now = 6.0
    (register,) = outsider.handle(st.Connected(SCHEDULER))
    assert register == like(ef.Send, peer=SCHEDULER, message=like(m.Register, epoch=0, timeout=3.6))
    outsider.publish()
    attach_all(outsider)
    assert call.outcome == "done"
    assert outsider.call(st.EnterBarrier, name="b", timeout=1.0).messages == [like(m.Barrier)]


def test_a_join_that_has_waited_in_vain_for_a_scheduler_says_so(outsider: Worker) -> None:
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.handle(st.PeerLost(SCHEDULER, "connection reset"))
    outsider.handle(st.ConnectFailed(SCHEDULER, "connection refused", None))
    assert outsider.machine.deadline() == 10.0
    outsider.tick(10.0)
    assert isinstance(call.outcome, JoinTimeoutError)
    text = "worker-0 could not join within 10 s: waiting for the scheduler at 127.0.0.1:9091 (connection refused)"
    assert str(call.outcome) == text
    assert outsider.handle(st.ConnectFailed(SCHEDULER, "connection refused", None)) == []


def test_who_has_the_view_joins_without_the_scheduler(outsider: Worker, like: type[Like]) -> None:
    """It says of which epoch it knows when there is one again, and asks it what it could not ask before."""
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.publish()
    outsider.handle(st.PeerLost(SCHEDULER, "connection reset"))
    attach_all(outsider)
    assert call.outcome == "done"
    waiting = outsider.call(st.EnterBarrier, name="b", timeout=5.0)
    assert waiting.sends == []
    register, _found = outsider.handle(st.Connected(SCHEDULER))
    assert register == like(ef.Send, message=like(m.Register, epoch=1))
    assert like(ef.Send, peer=SCHEDULER, message=like(m.Barrier)) in outsider.publish()


def test_server_that_is_lost_ends_the_join(outsider: Worker) -> None:
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.publish()
    outsider.handle(st.Connected(0))
    outsider.lose_server(0)
    assert isinstance(call.outcome, ServerLostError)


def test_connection_to_a_server_that_ends_during_the_join_is_made_again(outsider: Worker, like: type[Like]) -> None:
    call = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.publish()
    for server in (0, 1):
        outsider.handle(st.Connected(server))
    assert outsider.handle(st.PeerLost(0, "connection reset"))[0] == like(ef.Connect, peer=0)
    for server in (1, 0):
        attaches = [effect for effect in outsider.handle(st.Connected(server)) if isinstance(effect, ef.Send)]
        assert [send.message for send in attaches] == [like(m.Attach)]
        outsider.answer(attaches[0])
    assert call.outcome == "done"


def test_nothing_goes_on_after_a_join_that_failed(outsider: Worker, like: type[Like]) -> None:
    join(outsider, 1.0)
    outsider.handle(st.Connected(SCHEDULER))
    outsider.publish()
    outsider.tick(1.0)
    assert outsider.machine.deadline() is None
    assert isinstance(outsider.transfer("push").outcome, ClosedError)
    for peer in (SCHEDULER, 0):
        assert outsider.handle(st.Connected(peer)) == [like(ef.Disconnect, peer=peer)]
        assert outsider.handle(st.ConnectFailed(peer, "")) == []
    assert outsider.call(st.Depart, timeout=1.0).outcome == "done"
    assert not [effect for effect in outsider.effects if effect == like(ef.Send, message=like(m.Leave))]


def test_worker_sends_heartbeats(worker: Worker) -> None:
    assert worker.tick(2.0) == [ef.Send(SCHEDULER, 0, m.Heartbeat())]
    assert worker.machine.deadline() == 4.0


def test_scheduler_that_is_silent_for_the_death_time_out_is_lost(worker: Worker, like: type[Like]) -> None:
    for now in (2.0, 4.0):
        worker.tick(now)
        worker.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    barrier = worker.call(st.EnterBarrier, name="b", timeout=60.0)
    for now in (6.0, 8.0, 10.0, 12.0):
        worker.tick(now)
        assert barrier.outcome is None
    effects = worker.tick(14.0)
    assert like(ef.Disconnect, peer=SCHEDULER, reason="no heartbeat for 10.0 s") in effects
    assert barrier.outcome is None
    worker.tick(64.0)
    assert isinstance(barrier.error, SchedulerLostError)
    assert "no heartbeat for 10.0 s; barrier 'b' has waited 60 s for it" in str(barrier.error)
    assert worker.machine.deadline() is None


# --- a server is lost ---


def test_lost_server_fails_its_pending_calls_at_once(worker: Worker) -> None:
    both = worker.call(st.ConfigureOptimizer, name="assign", params={}, timeout=10.0)
    worker.answer(both.sends[0])
    barrier = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    worker.lose_server(1, "connection reset")
    assert isinstance(both.error, ServerLostError)
    assert both.error.details == {"server": 1, "address": "127.0.0.1:9001", "keys": []}
    for word in ("server 1", "server-1", "127.0.0.1:9001", "connection reset"):
        assert word in str(both.error)
    assert barrier.outcome is None


def test_lost_server_fails_later_calls_at_once(worker: Worker) -> None:
    worker.lose_server(1, "connection reset")
    for call in (worker.transfer("pull"), worker.call(st.EnterBarrier, name="b", timeout=1.0)):
        assert isinstance(call.error, ServerLostError)
        assert call.error.details == {"server": 1, "address": "127.0.0.1:9001", "keys": []}
        assert call.sends == []


def test_lost_server_gives_memory_back(make_worker: type[Worker]) -> None:
    worker = make_worker(chunk_bytes=16, split_bytes=16)
    call = worker.transfer("pull", shape=(8,))
    gone, other = sorted(call.sends, key=lambda send: send.peer == 0)
    worker.lose_server(gone.peer, "connection reset")
    assert call.released == ef.Release(call.number, [(other.peer, other.request)])
    assert worker.answer(other, m.Value(1), 16) == []
    assert worker.machine.pending == 0


def test_call_of_several_tensors_fails_once(worker: Worker) -> None:
    call = worker.transfer("push", *(f"key-{number}" for number in range(20)))
    worker.lose_server(0, "connection reset")
    assert isinstance(call.outcome, ServerLostError)


def test_requests_of_a_cancelled_call_go_with_their_server(worker: Worker) -> None:
    call = worker.transfer("push")
    worker.handle(st.Cancel(call.number))
    worker.lose_server(call.sends[0].peer, "connection reset")
    assert worker.machine.pending == 0


def test_view_with_a_lost_server_is_believed(worker: Worker, like: type[Like]) -> None:
    call = worker.call(st.ConfigureOptimizer, name="assign", params={}, timeout=10.0)
    effects = worker.publish(server_1=("lost", "no heartbeat for 2.0 s"))
    assert effects[0] == like(ef.Disconnect, peer=1)
    assert isinstance(call.error, ServerLostError)
    assert "no heartbeat for 2.0 s" in str(call.error)
    assert worker.publish(server_1=("lost", "no heartbeat for 2.0 s")) == []


def test_view_without_losses_changes_nothing(worker: Worker) -> None:
    call = worker.transfer("push")
    assert worker.publish() == []
    worker.finish(call)
    assert call.outcome == "done"


# --- the scheduler is lost ---


def test_worker_goes_on_without_its_scheduler_but_not_through_barriers(worker: Worker, like: type[Like]) -> None:
    waiting = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    push = worker.transfer("push")
    effects = worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    assert effects == [like(ef.Log, level="warning"), like(ef.Connect, peer=SCHEDULER)]
    later = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    worker.finish(push)
    assert push.outcome == "done"
    worker.tick(10.0)
    for call in (waiting, later):
        assert isinstance(call.error, SchedulerLostError)
        assert call.error.details == {"address": "127.0.0.1:9091"}
    assert worker.machine.deadline() is None


def test_what_the_scheduler_has_not_answered_is_asked_again(worker: Worker, like: type[Like]) -> None:
    """It says who it is first, waits until it is known, and says how much time is left."""
    waiting = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    push = worker.transfer("push")
    answered = worker.call(st.EnterBarrier, name="a", timeout=10.0)
    worker.finish(answered)
    worker.tick(1.0)
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    later = worker.call(st.EnterBarrier, name="c", timeout=10.0, group=(0,))
    leaving = worker.call(st.EnterBarrier, name="d", timeout=10.0, said={"error": "x"}, leaves=True)
    assert (later.sends, leaving.sends, leaving.outcome) == ([], [], "done")
    assert worker.handle(st.ConnectFailed(SCHEDULER, "connection refused")) == [like(ef.Connect, peer=SCHEDULER)]
    registers = worker.handle(st.Connected(SCHEDULER))
    text = "worker-0 is connected to the scheduler at 127.0.0.1:9091 again"
    assert registers == [
        like(ef.Send, message=m.Register(Role.WORKER, "worker-0", 1, "", 0, 10.0, 0, 1)),
        ef.Log("warning", text, "scheduler_found", {"address": "127.0.0.1:9091"}),
    ]
    worker.now = 2.0
    worker._epoch = 0
    again = [effect for effect in worker.publish() if isinstance(effect, ef.Send)]
    assert [send.message for send in again] == [
        m.Barrier("b", 7.5),
        m.Barrier("c", 8.5, (0,)),
        m.Barrier("d", 9.5, (), {"error": "x"}),
    ]
    assert again[0].request == waiting.sends[0].request
    for send in again:
        worker.answer(send)
    assert (waiting.outcome, later.outcome, push.outcome) == ("done", "done", None)
    worker.finish(push)
    assert worker.machine.pending == 0
    assert worker.tick(4.0) == [ef.Send(SCHEDULER, 0, m.Heartbeat())]


def test_a_worker_that_is_not_taken_back_ends_all_its_calls(worker: Worker, like: type[Like]) -> None:
    push = worker.transfer("push")
    barrier = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    worker.handle(st.Connected(SCHEDULER))
    error = StaleEpochError("rank 0 (worker-0) is evicted: no heartbeat", ranks=[0])
    effects = worker.handle(st.Received(SCHEDULER, 1, m.Error(error.code, error.message, error.details)))
    assert like(ef.Disconnect, peer=SCHEDULER) in effects
    for call in (push, barrier, worker.transfer("pull"), worker.call(st.EnterBarrier, name="b", timeout=10.0)):
        assert isinstance(call.error, StaleEpochError)
        assert "rank 0 (worker-0) is evicted: no heartbeat" in str(call.error)
        assert call.error.details == {"ranks": [0]}
    assert worker.call(st.Depart, timeout=5.0).outcome == "done"
    assert worker.handle(st.Connected(SCHEDULER)) == [like(ef.Disconnect, peer=SCHEDULER)]


def test_a_worker_stays_at_a_scheduler_that_cannot_go_on_with_the_cluster_and_says_so_once(
    worker: Worker, like: type[Like]
) -> None:
    waiting = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    worker.handle(st.Connected(SCHEDULER))
    error = OtherSettingsError("num_workers = 3, where the cluster has 2", expected=[2], got=[3])
    effects = worker.handle(st.Received(SCHEDULER, 1, m.Error(error.code, error.message, error.details)))
    text = "the scheduler at 127.0.0.1:9091 can't go on with the cluster: num_workers = 3, where the cluster has 2"
    assert effects == [
        like(ef.Log, level="error", text=f"{text}; worker-0 goes on without barriers", event="scheduler_differs")
    ]
    worker.finish(worker.transfer("push"))
    for beat in range(1, 20):
        worker.now = float(beat)
        worker.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    effects = worker.tick(19.5)
    assert not any(isinstance(effect, ef.Disconnect) for effect in effects)
    assert type(waiting.error) is OtherSettingsError
    assert waiting.error.message == f"barrier 'b' has waited 10 s for it: {text}"
    assert waiting.error.details == {"expected": [2], "got": [3], "address": "127.0.0.1:9091"}


def test_a_worker_is_taken_back_by_the_scheduler_that_comes_next(worker: Worker) -> None:
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    worker.handle(st.Connected(SCHEDULER))
    error = OtherSettingsError("num_workers = 3, where the cluster has 2")
    worker.handle(st.Received(SCHEDULER, 1, m.Error(error.code, error.message, {})))
    waiting = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    assert not waiting.sends
    worker.handle(st.PeerLost(SCHEDULER, "closed"))
    worker.handle(st.Connected(SCHEDULER))
    again = [effect for effect in worker.publish() if isinstance(effect, ef.Send)]
    assert [send.message for send in again] == [m.Barrier("b", 9.5)]


# --- nonsense ---


@pytest.mark.parametrize("peer", [0, SCHEDULER])
def test_peer_that_talks_nonsense_is_as_good_as_lost(worker: Worker, like: type[Like], peer: int) -> None:
    call = worker.call(st.EnterBarrier, name="b", timeout=10.0) if peer == SCHEDULER else worker.transfer("push", "k")
    assert call.sends[0].peer == peer
    effects = worker.handle(st.Received(peer, 0, m.Leave()))
    assert effects[0] == like(ef.Disconnect, peer=peer)
    if peer == SCHEDULER:
        worker.tick(10.0)
    assert isinstance(call.outcome, ServerLostError | SchedulerLostError)


def test_view_from_a_server_is_nonsense(worker: Worker, like: type[Like]) -> None:
    effects = worker.handle(st.Received(0, 0, worker.view()))
    assert effects == [like(ef.Disconnect, peer=0)]


def test_answer_to_a_request_that_nobody_made_is_nonsense(worker: Worker, like: type[Like]) -> None:
    effects = worker.handle(st.Received(1, 999, m.Done()))
    assert effects == [like(ef.Disconnect, peer=1)]


def test_who_lets_a_worker_in_that_did_not_ask_for_it_talks_nonsense(worker: Worker, like: type[Like]) -> None:
    assert worker.handle(st.Received(1, 999, m.Entered(7))) == [like(ef.Disconnect, peer=1)]


def test_answer_from_another_server_is_nonsense_and_answers_nothing(worker: Worker, like: type[Like]) -> None:
    call = worker.transfer("push", "k")
    (send,) = call.sends
    wrong = 1 - send.peer
    assert worker.handle(st.Received(wrong, send.request, m.Done(1))) == [like(ef.Disconnect, peer=wrong)]
    worker.answer(send)
    assert call.outcome == "done"


# --- leaving ---


def test_worker_leaves_in_good_order(worker: Worker) -> None:
    call = worker.call(st.Depart, timeout=5.0)
    (send,) = call.sends
    assert (send.peer, send.message) == (SCHEDULER, m.Leave())
    worker.answer(send)
    assert call.outcome == "done"


def test_pending_calls_fail_when_the_worker_leaves(worker: Worker) -> None:
    pending = [worker.transfer("pull"), worker.call(st.EnterBarrier, name="b", timeout=10.0)]
    worker.call(st.Depart, timeout=5.0)
    for call in pending:
        assert isinstance(call.error, ClosedError)
        assert call.released is not None


def test_worker_that_has_left_calls_in_vain(worker: Worker) -> None:
    worker.finish(worker.call(st.Depart, timeout=5.0))
    call = worker.transfer("push")
    assert isinstance(call.error, ClosedError)
    assert "closed" in str(call.error)


def test_scheduler_that_goes_after_the_worker_has_left_is_no_news(worker: Worker) -> None:
    worker.finish(worker.call(st.Depart, timeout=5.0))
    assert worker.handle(st.PeerLost(SCHEDULER, "closed")) == []


def test_worker_can_leave_when_a_server_is_lost(worker: Worker) -> None:
    worker.lose_server(1, "connection reset")
    assert worker.finish(worker.call(st.Depart, timeout=5.0)).outcome == "done"


def test_worker_can_still_say_that_a_server_is_lost(worker: Worker) -> None:
    worker.lose_server(1, "connection reset")
    call = worker.call(st.EnterBarrier, name="b", timeout=5.0, said={"error": "lost"}, leaves=True)
    assert (call.outcome, [send.peer for send in call.sends]) == ("done", [SCHEDULER])


def test_worker_that_has_not_joined_has_nothing_to_say(make_worker: type[Worker]) -> None:
    worker = make_worker(join=False)
    call = worker.call(st.EnterBarrier, name="b", timeout=5.0, said={"error": "lost"}, leaves=True)
    assert (type(call.error), call.sends) == (ClosedError, [])


def test_worker_can_leave_without_a_scheduler(worker: Worker) -> None:
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    call = worker.call(st.Depart, timeout=5.0)
    assert (call.outcome, call.sends) == (None, [])
    worker.tick(5.0)
    assert isinstance(call.error, SchedulerLostError)


def test_worker_leaves_when_the_scheduler_is_back(worker: Worker) -> None:
    call = worker.call(st.Depart, timeout=5.0)
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    worker.handle(st.Connected(SCHEDULER))
    (send,) = [one for one in worker.publish() if isinstance(one, ef.Send)]
    assert send.message == m.Leave()
    worker.answer(send)
    assert call.outcome == "done"


def test_worker_that_moves_on_says_so_while_the_scheduler_is_there(worker: Worker) -> None:
    call = worker.call(st.Depart, timeout=5.0, moves_on=True)
    assert call.messages == [m.Leave()]
    worker.answer(call.sends[0])
    assert call.outcome == "done"
    assert worker.handle(st.PeerLost(SCHEDULER, "closed")) == []


@pytest.mark.parametrize("connected", [False, True], ids=["none is there", "it has connected to another one"])
def test_worker_that_moves_on_tells_no_other_scheduler_of_its_cluster(
    worker: Worker, like: type[Like], *, connected: bool
) -> None:
    """The other one would wait for the rest of a cluster that is over."""
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    if connected:
        register, _found = worker.handle(st.Connected(SCHEDULER))
        assert register == like(ef.Send, message=like(m.Register, epoch=1))
    call = worker.call(st.Depart, timeout=5.0, moves_on=True)
    assert (type(call.error), call.sends) == (SchedulerLostError, [])
    assert str(call.error).endswith("is gone: connection reset; leave is for no other one")
    assert worker.handle(st.PeerLost(SCHEDULER, "closed")) == []
    assert worker.handle(st.Connected(SCHEDULER)) == [ef.Disconnect(SCHEDULER, "the join is over")]
    assert worker.handle(st.ConnectFailed(SCHEDULER, "connection refused", None)) == []


def test_worker_that_moves_on_does_not_wait_for_a_scheduler_that_ends_meanwhile(worker: Worker) -> None:
    call = worker.call(st.Depart, timeout=5.0, moves_on=True)
    effects = worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    assert isinstance(call.error, SchedulerLostError)
    assert not any(isinstance(each, ef.Connect) for each in effects)


def test_worker_that_moves_on_looks_for_no_other_scheduler_while_it_waits_for_its_pushes(worker: Worker) -> None:
    worker.finish(worker.transfer("init"))
    push = worker.transfer("push")
    call = worker.call(st.Depart, timeout=5.0, drains=True, moves_on=True)
    assert worker.handle(st.PeerLost(SCHEDULER, "connection reset")) == []
    assert worker.answer(push.sends[0])
    assert push.outcome == "done"
    assert isinstance(call.error, SchedulerLostError)


def test_leaving_twice_sends_one_message(worker: Worker) -> None:
    first, again = (worker.call(st.Depart, timeout=5.0) for _ in range(2))
    assert (again.outcome, again.sends) == ("done", [])
    assert worker.finish(first).outcome == "done"


def test_leaving_while_joining_ends_the_join(outsider: Worker) -> None:
    joining = join(outsider)
    outsider.handle(st.Connected(SCHEDULER))
    assert outsider.call(st.Depart, timeout=5.0).outcome == "done"
    assert isinstance(joining.outcome, ClosedError)


def test_scheduler_that_does_not_answer_ends_the_leaving(worker: Worker) -> None:
    call = worker.call(st.Depart, timeout=1.0)
    worker.tick(1.0)
    assert "leave: no answer from the scheduler" in str(call.error)


def test_keys_of_which_a_lost_server_had_a_part_are_named(make_worker: type[Worker]) -> None:
    worker = make_worker(chunk_bytes=16, split_bytes=16)
    worker.finish(worker.transfer("init", "cut", shape=(8,)))
    worker.lose_server(1, "connection reset")
    call = worker.transfer("pull", "cut", shape=(8,))
    assert call.error.details["keys"] == ["cut"]
    assert str(call.error).endswith("; with it, at least in part: 'cut'")


def test_worker_tells_a_scheduler_that_was_started_again_what_it_knows(worker: Worker) -> None:
    known = worker.machine._joiner.view
    assert known is not None
    assert worker.handle(st.Received(SCHEDULER, 0, m.GetView())) == [ef.Send(SCHEDULER, 0, known)]
