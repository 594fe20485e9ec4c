"""Members on a server: who may talk to it, and what becomes of rounds when a worker leaves or is lost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.server.coordinator import Coordinator
from aiokv.errors import (
    CallTimeoutError,
    ClusterFullError,
    ConfigError,
    HandshakeError,
    JoinTimeoutError,
    MembershipError,
    OtherSettingsError,
    ProtocolError,
    StaleEpochError,
    WorkerLostError,
)
from aiokv.types import SCHEDULER, Role, peer_of_server
from aiokv.wire import messages as m
from tests.core.conftest import only, views_entries

if TYPE_CHECKING:
    from tests.core.conftest import Like, Server


@pytest.fixture
def outsider(make_server: type[Server]) -> Server:
    """A server that has not begun to join."""
    return make_server(workers=2, attach=False)


# --- joining ---


def test_server_registers_with_its_address(outsider: Server, like: type[Like]) -> None:
    assert outsider.handle(st.Join(0, 10.0)) == [ef.Connect(SCHEDULER, "127.0.0.1", 9091)]
    assert outsider.handle(st.Connected(SCHEDULER)) == [
        like(ef.Send, peer=SCHEDULER, message=like(m.Register, role=Role.SERVER, host="127.0.0.1", port=9000))
    ]


def test_what_comes_over_a_link_to_another_server_that_is_given_up_is_forgotten(outsider: Server) -> None:
    assert outsider.handle(st.Received(peer_of_server(1), 2, m.Done())) == []


def test_server_is_a_member_with_the_first_view(outsider: Server) -> None:
    outsider.handle(st.Join(0, 10.0))
    outsider.handle(st.Connected(SCHEDULER))
    assert outsider.publish() == [ef.Complete(0)]
    assert outsider.publish() == []


def test_server_tries_again_while_there_is_no_scheduler(outsider: Server, like: type[Like]) -> None:
    outsider.handle(st.Join(0, 10.0))
    effects = outsider.handle(st.ConnectFailed(SCHEDULER, "connection refused"))
    assert effects == [like(ef.Connect, peer=SCHEDULER), like(ef.Log, level="warning")]


def test_server_that_is_refused_says_so(outsider: Server, like: type[Like]) -> None:
    outsider.handle(st.Join(0, 10.0))
    outsider.handle(st.Connected(SCHEDULER))
    error = ClusterFullError("all 1 places are taken", expected=1)
    effects = outsider.handle(st.Received(SCHEDULER, 1, m.Error(error.code, error.message, error.details)))
    assert effects == [like(ef.Disconnect, peer=SCHEDULER), like(ef.Fail, call=0, error=like(ClusterFullError))]


def test_server_gives_up_when_the_cluster_is_not_complete_in_time(outsider: Server, like: type[Like]) -> None:
    outsider.handle(st.Join(0, 10.0))
    outsider.handle(st.Connected(SCHEDULER))
    assert outsider.machine.deadline() == 10.0
    effects = outsider.tick(10.0)
    assert effects == [like(ef.Disconnect, peer=SCHEDULER), like(ef.Fail, call=0, error=like(JoinTimeoutError))]


def test_server_sends_heartbeats(server: Server) -> None:
    assert server.machine.deadline() == 2.0
    assert server.tick(2.0) == [ef.Send(SCHEDULER, 0, m.Heartbeat())]
    assert server.machine.deadline() == 4.0


def test_scheduler_that_is_silent_for_the_death_time_out_is_lost(server: Server, like: type[Like]) -> None:
    server.tick(8.0)
    server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.tick(17.9)
    effects = server.tick(18.0)
    assert like(ef.Disconnect, peer=SCHEDULER, reason="no heartbeat for 10.0 s") in effects
    assert like(ef.Log, level="warning") in effects


def test_older_view_is_ignored(server: Server) -> None:
    server.lose(1)
    server.states = {}
    server.publish(epoch=1)
    server.init()
    assert isinstance(server.push(0).answer, WorkerLostError)


def test_coordinator_is_for_servers_only() -> None:
    joiner = Joiner(role=Role.WORKER, name="x", incarnation=1, scheduler=("h", 1), advertised=("", 0))
    with pytest.raises(ValueError, match="worker"):
        Coordinator(joiner)


@pytest.mark.parametrize("stimulus", [st.Cancel(1), st.Connected(3), st.ConnectFailed(3, "")])
def test_stimulus_of_another_machine_is_a_bug(server: Server, stimulus: Any) -> None:
    with pytest.raises(TypeError, match="not a stimulus for a server"):
        server.handle(stimulus)


# --- attaching ---


def test_connection_that_has_not_said_who_it_is_gets_nothing(outsider: Server) -> None:
    outsider.publish()
    requests = [
        outsider.init(),
        outsider.push(0),
        outsider.pull(0),
        outsider.ask(0, m.SetOptimizer("sgd", {}, "sum", 5.0)),
    ]
    assert [type(asked.answer) for asked in requests] == [MembershipError] * 4
    assert not outsider.slots


@pytest.mark.parametrize("changes", [{"name": "worker-1"}, {"incarnation": 2}])
def test_worker_that_differs_from_the_view_is_refused(outsider: Server, changes: dict[str, Any]) -> None:
    outsider.publish()
    assert isinstance(outsider.attach(0, **changes).answer, MembershipError)


def test_worker_with_a_rank_that_nobody_has_is_refused(outsider: Server) -> None:
    outsider.publish()
    assert isinstance(outsider.attach(2).answer, MembershipError)


@pytest.mark.parametrize("state", ["lost", "left"])
def test_worker_that_is_not_alive_is_refused(outsider: Server, state: str) -> None:
    outsider.states[0] = (state, "")
    outsider.publish()
    error = outsider.attach(0).error
    assert isinstance(error, MembershipError)
    assert "worker-0" in str(error)


def test_worker_with_a_newer_view_waits_for_it(server: Server) -> None:
    early = server.attach(1, peer=50, epoch=3)
    server.publish()
    assert early.pending
    server.publish()
    assert early.answer == m.Done()


@pytest.mark.parametrize(("rank", "incarnation"), [(3, 1), (0, 2)], ids=["it has joined", "it has joined again"])
def test_worker_of_an_older_view_that_the_newest_does_not_know_yet_waits_for_a_later_one(
    server: Server, rank: int, incarnation: int
) -> None:
    """It alone had heard so when the scheduler ended, and joins once more at the next one."""
    server.publish(epoch=1000)
    waiting = server.attach(rank, peer=50, epoch=2, incarnation=incarnation)
    shown = server.ask(rank, m.GetWaiting(), peer=60).answer
    assert isinstance(shown, m.Waiting)
    assert [call.reason for call in shown.calls] == ["it is no member of the newest view"]
    known = server.machine._joiner.view
    assert known is not None
    entries = {entry.rank: entry for entry in known.workers}
    entries[rank] = m.WorkerEntry(rank, f"worker-{rank}", incarnation, "joining")
    view = structs.replace(known, epoch=1001, workers=tuple(entries.values()))
    server.handle(st.Received(SCHEDULER, 0, view))
    assert waiting.answer == m.Done()


def test_worker_that_no_later_view_knows_is_refused_when_its_time_is_over(server: Server) -> None:
    server.publish(epoch=1000)
    waiting = server.attach(3, peer=50, epoch=2, timeout=3.0)
    server.tick(2.9)
    assert waiting.pending
    server.tick(3.0)
    assert isinstance(waiting.error, MembershipError)
    assert str(waiting.error) == "worker-3 (rank 3) is no member of epoch 1000"


def test_who_waits_for_a_view_can_not_fill_the_memory_with_asking_again(server: Server) -> None:
    first = server.attach(1, peer=50, epoch=3)
    assert isinstance(server.attach(1, peer=50, epoch=3).error, MembershipError)
    assert first.pending
    assert server.attach(1, peer=51, epoch=3).pending, "on another connection"


@pytest.mark.parametrize("seconds", [math.inf, math.nan])
def test_nobody_waits_for_a_view_for_ever(server: Server, seconds: float) -> None:
    for message in (
        m.Attach(1, "worker-1", 1, 9, seconds),
        m.AttachServer(1, "server-1", 1, 9, seconds),
        m.AttachStandby(0, "server-0", 1, 9, seconds),
    ):
        assert isinstance(server.ask(1, message, peer=50).error, ConfigError)


def test_view_that_does_not_come_ends_the_wait(outsider: Server) -> None:
    asked = outsider.attach(0, epoch=1, timeout=1.0)
    outsider.tick(1.0)
    assert isinstance(asked.error, CallTimeoutError)
    assert "epoch 1" in str(asked.error)


def test_worker_before_the_first_view_is_refused(outsider: Server) -> None:
    assert isinstance(outsider.attach(0, epoch=0).answer, MembershipError)


# --- a worker is lost ---


def test_scenario_1_lost_worker_fails_its_round_at_once(server: Server) -> None:
    # Scenario 1: round 1 closes with all three, rank 2 dies before it pushes to round 2.
    server.init()
    for rank in range(3):
        server.push(rank)
    pushes = [server.push(rank) for rank in range(2)]
    server.lose(2, "connection reset")
    for push in pushes:
        assert isinstance(push.error, WorkerLostError)
        assert push.error.details == {"ranks": [2], "key": "w", "round": 2}
        for word in ("2 (worker-2)", "'w'", "round 2", "connection reset"):
            assert word in str(push.error)
    assert server.value() == 3.0


def test_later_pushes_fail_at_once_too(server: Server) -> None:
    server.init()
    server.lose(2)
    assert [type(server.push(0).answer) for _ in range(3)] == [WorkerLostError] * 3
    assert server.push(0, want_value=True).error.details["round"] == 4


def test_pull_that_waits_for_such_a_round_fails_with_it(server: Server) -> None:
    server.init()
    server.push(0)
    early = server.pull(0)
    server.lose(2)
    late = server.pull(0)
    for pull in (early, late):
        assert pull.error.details == {"ranks": [2], "key": "w", "round": 1}


def test_value_can_still_be_read(server: Server) -> None:
    server.init()
    server.push(0)
    server.lose(2)
    assert server.pull(1).answer == m.Value(0)


def test_round_that_has_all_it_needs_closes(server: Server) -> None:
    server.init()
    server.push(2)
    server.lose(2)
    pushes = [server.push(rank) for rank in range(2)]
    assert [push.answer for push in pushes] == [m.Done(1)] * 2
    assert server.value() == 3.0


def test_only_rounds_that_need_the_lost_worker_fail(server: Server) -> None:
    server.init()
    server.push(2)
    first, second = server.push(0), server.push(0)
    server.lose(2)
    assert first.pending
    assert isinstance(second.answer, WorkerLostError)
    server.push(1)
    assert first.answer == m.Done(1)


def test_round_names_all_who_are_lost_and_not_who_is_merely_late(server: Server) -> None:
    server.init()
    server.states = {1: ("lost", "one"), 2: ("lost", "two")}
    server.publish()
    assert server.push(0).error.details["ranks"] == [1, 2]


def test_scenario_2_push_of_a_lost_worker_changes_nothing(server: Server) -> None:
    # Scenario 2: it was stopped, declared lost, and goes on.
    server.init()
    for rank in range(2):
        server.push(rank)
    server.lose(2, "no heartbeat for 1.0 s")
    late = server.push(2)
    assert isinstance(late.error, MembershipError)
    assert "no heartbeat for 1.0 s" in str(late.error)
    assert late.error.details == {"ranks": [2]}
    assert server.value() == 0.0


def test_answers_to_a_connection_that_ended_are_dropped(server: Server) -> None:
    server.init()
    gone, pull = server.push(0), server.pull(0)
    server.handle(st.PeerLost(gone.peer, "connection reset"))
    for rank in (1, 2):
        server.push(rank)
    assert gone.pending
    assert pull.pending
    assert server.value() == 3.0
    assert not server.machine._answers._waiters


def test_connection_that_ended_while_it_attached_is_forgotten(server: Server) -> None:
    early = server.attach(1, peer=50, epoch=9)
    server.handle(st.PeerLost(50, "connection reset"))
    server.publish(epoch=9)
    assert early.pending


# --- a worker leaves ---


def test_open_rounds_close_with_the_rest_when_a_worker_leaves(server: Server, like: type[Like]) -> None:
    server.init()
    pushes = [server.push(0), server.push(0), server.push(2)]
    server.leave(1)
    assert [push.answer for push in pushes] == [m.Done(1), None, m.Done(1)]
    assert server.push(2).answer == m.Done(2)
    assert server.seen(ef.Apply) == [like(ef.Apply, ranks=[0, 2])] * 2


def test_what_the_leaver_has_pushed_counts(server: Server) -> None:
    server.init()
    server.push(1, 10.0)
    server.push(1, 100.0)
    server.leave(1)
    for rank in (2, 0):
        server.push(rank)
    assert server.value() == 12.0
    for rank in (2, 0):
        server.push(rank)
    assert server.value() == 114.0


def test_scenario_4_uneven_number_of_steps(make_server: type[Server]) -> None:
    # Scenario 4 with w += sum: 10 and 11 pushes.
    server = make_server(workers=2)
    server.init()
    for _ in range(10):
        for rank in range(2):
            server.push(rank)
    server.leave(0)
    assert server.push(1).answer == m.Done(11)
    assert server.value() == 21.0


def test_held_contributions_are_added_when_the_one_before_leaves(server: Server, like: type[Like]) -> None:
    server.init()
    server.push(1)
    server.push(2)
    server.leave(0)
    assert server.seen(ef.Apply) == [like(ef.Apply, ranks=[1, 2])]
    assert server.value() == 2.0


def test_rounds_close_when_all_have_left(server: Server) -> None:
    server.init()
    server.push(1)
    for rank in range(3):
        server.leave(rank)
    assert server.value() == 1.0


def test_leaver_that_pushes_too_late_for_the_order_is_told(server: Server) -> None:
    server.init()
    server.leave(0)
    server.push(1)
    late = server.push(0)
    assert isinstance(late.error, MembershipError)
    assert late.error.details == {"ranks": [0], "key": "w", "round": 1}
    server.push(2)
    assert server.value() == 2.0


def test_leaver_cannot_push_into_a_sum_that_is_being_applied(server: Server) -> None:
    server.init()
    server.leave(2)
    server.hold = True
    for rank in range(2):
        server.push(rank)
    assert isinstance(server.push(2).answer, MembershipError)
    server.finish()
    assert isinstance(server.push(2).answer, MembershipError)
    assert server.value() == 2.0


def test_round_can_close_when_the_late_one_leaves_after_the_time_out(server: Server) -> None:
    server.init()
    for rank in range(2):
        server.push(rank, timeout=1.0)
    server.tick(1.0)
    server.leave(2)
    assert server.value() == 2.0


# --- nonsense ---


def test_worker_that_talks_nonsense_is_cut_off(server: Server, like: type[Like]) -> None:
    server.init()
    waiting = server.push(1)
    effects = server.handle(st.Received(waiting.peer, 7, m.Heartbeat()))
    assert effects == [like(ef.Disconnect, peer=waiting.peer)]
    assert not server.machine._answers._waiters
    assert isinstance(server.pull(1).answer, MembershipError)


def test_payload_of_nonsense_is_freed(server: Server, like: type[Like]) -> None:
    effects = server.machine.handle(st.Received(11, 7, m.Value(1), 99, 4), now=0.0)
    assert effects == [ef.Free(99), like(ef.Disconnect, peer=11)]


# --- the end ---


def test_server_stops_when_the_scheduler_says_so(server: Server) -> None:
    assert server.handle(st.Received(SCHEDULER, 0, m.Stop("all workers have left"))) == [
        ef.Stop("all workers have left")
    ]
    assert server.handle(st.Received(SCHEDULER, 0, m.Stop("all workers have left"))) == [], "once is enough"
    assert server.handle(st.PeerLost(SCHEDULER, "closed")) == []


def test_server_without_scheduler_serves_on_until_its_workers_are_gone(server: Server, like: type[Like]) -> None:
    effects = server.handle(st.PeerLost(SCHEDULER, "connection reset"))
    assert effects == [like(ef.Log, level="warning"), like(ef.Connect, peer=SCHEDULER)]
    server.init()
    for rank in range(3):
        server.push(rank)
    assert server.value() == 3.0
    for peer in (10, 11, 12, 50):
        assert server.handle(st.PeerLost(peer, "closed")) == []
    # A worker may have lost its connection only, and the scheduler may be started again.
    assert server.machine.deadline() == 10.0
    assert server.tick(9.9) == []
    assert server.tick(10.0) == [like(ef.Stop, failed=True)]
    assert server.tick(20.0) == []
    assert server.machine.deadline() is None


@pytest.mark.parametrize("who", ["scheduler", "worker"])
def test_server_whose_scheduler_or_worker_comes_back_does_not_stop(server: Server, who: str) -> None:
    server.handle(st.PeerLost(SCHEDULER, "connection reset"))
    for peer in (10, 11, 12):
        server.handle(st.PeerLost(peer, "closed"))
    server.tick(9.0)
    if who == "worker":
        assert server.attach(1, peer=20).answer == m.Done()
    else:
        server.handle(st.Connected(SCHEDULER))
        server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.tick(18.0)
    assert not server.seen(ef.Stop)


def test_standby_is_started_once_when_the_scheduler_says_so(server: Server) -> None:
    for _ in range(2):
        server.handle(st.Received(SCHEDULER, 0, m.HostStandby(1, "server-0/1.4")))
    assert server.seen(ef.StartNode) == [ef.StartNode(1, "server-0/1.4")]


def left_alone(server: Server) -> None:
    """Let the scheduler and all workers be gone."""
    server.handle(st.PeerLost(SCHEDULER, "reset"))
    for rank in range(3):
        server.lose_peer(rank)


@pytest.mark.parametrize("mode", ["shrink", "respawn"])
def test_server_stays_for_a_while_for_those_who_take_the_places_of_lost_workers(
    make_server: type[Server], mode: str
) -> None:
    """All workers may be lost together with the scheduler, and their next processes need one to join."""
    server = make_server(3, settings={"on_worker_loss": mode})
    left_alone(server)
    assert server.machine.deadline() == 60.0
    server.tick(59.9)
    assert not server.seen(ef.Stop)
    server.tick(60.0)
    assert server.seen(ef.Stop)


def test_server_ends_when_the_scheduler_that_is_there_does_not_take_it_back(server: Server) -> None:
    """Such as one that was started again for another number of workers."""
    left_alone(server)
    for second in range(1, 10):
        server.now = float(second)
        server.handle(st.Connected(SCHEDULER))
        server.handle(st.PeerLost(SCHEDULER, "the cluster has 3 workers"))
    server.tick(9.9)
    assert not server.seen(ef.Stop)
    server.tick(10.0)
    assert server.seen(ef.Stop)


def test_server_is_not_alone_while_a_scheduler_finds_out_what_the_cluster_was(server: Server) -> None:
    left_alone(server)
    server.now = 9.0
    server.handle(st.Connected(SCHEDULER))
    server.tick(12.0)
    server.publish(server.epoch)
    server.now = 13.0
    server.handle(st.PeerLost(SCHEDULER, "reset"))
    server.tick(22.9)
    assert not server.seen(ef.Stop)
    server.tick(23.0)
    assert server.seen(ef.Stop)


def test_server_stays_while_one_of_its_process_serves(server: Server) -> None:
    """It would end with it, and has workers."""
    server.handle(st.Received(SCHEDULER, 0, m.HostStandby(1, "server-0/1.4")))
    taken = [
        m.ServerEntry(index, name, 1, "127.0.0.1", 9000) for index, name in enumerate(["server-0", "server-0/1.4"])
    ]
    view = m.View(server.epoch + 1, views_entries(server.names, {}), tuple(taken), 2.0, 2**19, 2**19, 10.0)
    server.handle(st.Received(SCHEDULER, 0, view))
    left_alone(server)
    server.tick(50.0)
    assert not server.seen(ef.Stop)
    server.handle(st.NodeEnded("server-0/1.4"))
    server.tick(70.0)
    assert server.seen(ef.Stop)


def test_server_does_not_stay_for_a_standby(server: Server) -> None:
    """That ends when its primary does, and nobody would end first."""
    server.handle(st.Received(SCHEDULER, 0, m.HostStandby(1, "server-0/1.4")))
    left_alone(server)
    server.tick(50.0)
    assert server.seen(ef.Stop)


def test_server_that_is_to_end_stays_until_others_have_what_it_had(server: Server) -> None:
    (log, send) = server.handle(st.Depart(1, 20.0))
    assert send == ef.Send(SCHEDULER, 2, m.LeaveServer())
    assert isinstance(log, ef.Log)
    server.tick(9.9)
    assert not server.seen(ef.Stop)
    assert server.handle(st.Received(SCHEDULER, 2, m.Done())) == [ef.Stop("others serve what it had")]


@pytest.mark.parametrize("why", ["refused", "time"])
def test_server_that_is_to_end_does_so_when_nobody_takes_over(server: Server, why: str) -> None:
    server.handle(st.Depart(1, 20.0))
    if why == "refused":
        server.handle(st.Received(SCHEDULER, 2, m.Error(MembershipError.code, "it is the only one", {})))
    else:
        server.now = 15.0
        server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
        server.tick(20.0)
    (stop,) = server.seen(ef.Stop)
    assert stop.failed


def _asked_to_leave(server: Server) -> int:
    return sum(isinstance(send.message, m.LeaveServer) for send in server.seen(ef.Send))


@pytest.mark.parametrize("gone", ["before", "then"])
def test_server_that_is_to_end_waits_for_a_scheduler_that_is_away(server: Server, gone: str) -> None:
    """It alone can say who is to go on with what the workers need."""
    happens: list[st.Stimulus] = [st.PeerLost(SCHEDULER, "reset"), st.Depart(1, 20.0)]
    for stimulus in happens if gone == "before" else reversed(happens):
        server.handle(stimulus)
    server.tick(19.0)
    server.handle(st.Connected(SCHEDULER))
    assert _asked_to_leave(server) == (gone == "then")
    server.publish(server.epoch)
    assert _asked_to_leave(server) == 1 + (gone == "then")
    server.publish()
    assert server.handle(st.Received(SCHEDULER, 2, m.Done())) == [ef.Stop("others serve what it had")]
    assert _asked_to_leave(server) == 1 + (gone == "then"), "it was asked already"


def test_scheduler_that_was_away_may_not_know_the_others_yet(server: Server) -> None:
    server.handle(st.PeerLost(SCHEDULER, "reset"))
    server.handle(st.Depart(1, 20.0))
    server.handle(st.Connected(SCHEDULER))
    server.publish(server.epoch)
    refusal = m.Error(MembershipError.code, "there is no other process of servers", {})
    for second in (1.0, 2.0):
        server.handle(st.Received(SCHEDULER, 2, refusal))
        assert server.machine.deadline() == second
        server.tick(second)
    assert _asked_to_leave(server) == 3
    server.handle(st.Received(SCHEDULER, 2, refusal))
    server.handle(st.PeerLost(SCHEDULER, "reset"))
    assert server.machine.deadline() == 20.0, "it is asked when it is there again"
    server.tick(20.0)
    (stop,) = server.seen(ef.Stop)
    assert stop.failed


@pytest.mark.parametrize("needed", [True, False])
def test_server_that_is_to_end_waits_for_no_scheduler_when_nobody_needs_it(server: Server, needed: bool) -> None:
    if needed:
        server.handle(st.PeerLost(SCHEDULER, "reset"))
    server.handle(st.Depart(1, 20.0))
    for rank in range(3):
        assert not server.seen(ef.Stop)
        server.lose_peer(rank)
    if needed:
        assert server.machine.deadline() == 0.0
        server.tick(0.0)
    else:
        server.handle(st.PeerLost(SCHEDULER, "reset"))
    (stop,) = server.seen(ef.Stop)
    assert stop.failed


def test_server_without_a_scheduler_ends_at_once_when_it_is_told_to(outsider: Server) -> None:
    (stop,) = outsider.handle(st.Depart(1, 20.0))
    assert isinstance(stop, ef.Stop)
    assert stop.failed


def test_standby_stays_for_a_while_without_a_scheduler() -> None:
    """Its server may be lost, too, so that it has the only copy."""
    address = ("h", 2)
    joiner = Joiner(role=Role.SERVER, name="s", incarnation=1, scheduler=("h", 1), advertised=address, standby=0)
    standby = Coordinator(joiner)
    entry = m.ServerEntry(0, "server-0", 1, "h", 3, standby=m.StandbyEntry("s", "server-1", 1, *address, "filling"))
    stimuli: list[st.Stimulus] = [st.Join(0, 60.0), st.Connected(SCHEDULER)]
    stimuli += [st.Received(SCHEDULER, 0, m.View(1, (), (entry,), 2.0, 64, 64, 10.0)), st.PeerLost(SCHEDULER, "reset")]
    for stimulus in stimuli:
        standby.handle(stimulus, now=0.0)
    assert not only(standby.handle(st.Tick(), now=59.9), ef.Stop)
    assert only(standby.handle(st.Tick(), now=60.0), ef.Stop)


def test_server_looks_for_its_scheduler_and_says_who_it_was(server: Server, like: type[Like]) -> None:
    server.handle(st.PeerLost(SCHEDULER, "connection reset"))
    failed = [server.handle(st.ConnectFailed(SCHEDULER, "connection refused")) for _ in range(8)]
    delays = [connect.delay for (connect,) in failed if isinstance(connect, ef.Connect)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]
    registers = server.handle(st.Connected(SCHEDULER))
    assert registers == [
        like(ef.Send, message=m.Register(Role.SERVER, "server-0", 1, "127.0.0.1", 9000, 10.0, 0, server.epoch)),
        like(ef.Log, text="server-0 is connected to the scheduler at 127.0.0.1:9091 again"),
    ]
    server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.publish(server.epoch)
    assert server.machine.deadline() == 2.0, "it sends heartbeats again"


def test_server_that_the_scheduler_does_not_take_back_stops(server: Server, like: type[Like]) -> None:
    server.handle(st.PeerLost(SCHEDULER, "connection reset"))
    server.handle(st.Connected(SCHEDULER))
    error = StaleEpochError("server-0 is lost: no heartbeat")
    effects = server.handle(st.Received(SCHEDULER, 1, m.Error(error.code, error.message, {})))
    assert effects == [ef.Stop("server-0 is lost: no heartbeat", failed=True)]
    assert server.handle(st.PeerLost(SCHEDULER, "closed")) == []
    assert server.handle(st.Connected(SCHEDULER)) == [like(ef.Disconnect, peer=SCHEDULER)]
    assert server.handle(st.ConnectFailed(SCHEDULER, "connection refused")) == []


def differs(server: Server) -> list[ef.Effect]:
    """Let a scheduler be there that was started with other settings."""
    server.handle(st.PeerLost(SCHEDULER, "connection reset"))
    server.handle(st.Connected(SCHEDULER))
    error = OtherSettingsError("num_workers = 3, where the cluster has 2")
    return server.handle(st.Received(SCHEDULER, 1, m.Error(error.code, error.message, {})))


def test_server_stays_at_a_scheduler_that_cannot_go_on_with_the_cluster(server: Server, like: type[Like]) -> None:
    text = (
        "the scheduler at 127.0.0.1:9091 can't go on with the cluster: num_workers = 3, where the cluster has 2; "
        "server-0 serves its workers until they leave"
    )
    assert differs(server) == [like(ef.Log, level="error", text=text, event="scheduler_differs")]
    for beat in range(1, 60):
        server.now = float(beat)
        server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
        assert server.tick(float(beat)) == []


def test_server_that_has_no_worker_ends_although_such_a_scheduler_is_there(server: Server) -> None:
    differs(server)
    for rank in range(3):
        server.lose_peer(rank)
    server.now = 9.0
    server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.tick(9.9)
    assert not server.seen(ef.Stop)
    server.tick(10.0)
    assert server.seen(ef.Stop)


def test_server_without_scheduler_sends_no_heartbeats(server: Server) -> None:
    server.handle(st.PeerLost(SCHEDULER, "connection reset"))
    assert server.machine.deadline() is None


def test_a_join_ends_when_the_scheduler_does_not_fit(outsider: Server, like: type[Like]) -> None:
    outsider.handle(st.Join(0, 10.0))
    outsider.handle(st.Connected(SCHEDULER))
    effects = outsider.handle(st.PeerLost(SCHEDULER, "no checksum", HandshakeError("no checksum")))
    assert effects == [ef.Disconnect(SCHEDULER, "the join failed"), like(ef.Fail, call=0, error=like(HandshakeError))]


def test_a_join_waits_for_a_scheduler_that_is_started_again(outsider: Server, like: type[Like]) -> None:
    outsider.handle(st.Join(0, 10.0))
    outsider.handle(st.Connected(SCHEDULER))
    effects = outsider.handle(st.PeerLost(SCHEDULER, "connection reset"))
    assert effects == [like(ef.Log, level="warning"), like(ef.Connect, peer=SCHEDULER)]
    (register,) = outsider.handle(st.Connected(SCHEDULER))
    assert register == like(ef.Send, peer=SCHEDULER, message=like(m.Register, epoch=0, timeout=9.5))
    assert like(ef.Complete, call=0) in outsider.publish()


def test_a_join_that_has_waited_in_vain_for_a_scheduler_says_so(outsider: Server, like: type[Like]) -> None:
    outsider.handle(st.Join(0, 10.0))
    outsider.handle(st.Connected(SCHEDULER))
    outsider.handle(st.PeerLost(SCHEDULER, "connection reset"))
    effects = outsider.tick(10.0)
    assert effects[-1] == like(ef.Fail, call=0, error=like(JoinTimeoutError))
    assert isinstance(effects[-1], ef.Fail)
    assert "within 10 s: waiting for the scheduler at 127.0.0.1:9091" in str(effects[-1].error)
    assert outsider.machine.deadline() is None


def test_scheduler_that_talks_nonsense_is_as_good_as_lost(server: Server, like: type[Like]) -> None:
    effects = server.handle(st.Received(SCHEDULER, 0, m.Done()))
    assert effects[:2] == [like(ef.Disconnect, peer=SCHEDULER), like(ef.Log, level="warning")]


def test_error_of_the_scheduler_outside_the_join_is_nonsense(server: Server, like: type[Like]) -> None:
    error = ProtocolError("?")
    effects = server.handle(st.Received(SCHEDULER, 5, m.Error(error.code, error.message, {})))
    assert effects[0] == like(ef.Disconnect, peer=SCHEDULER)


def test_server_without_workers_in_its_view_has_nobody_to_wait_for(make_server: type[Server]) -> None:
    server = make_server(workers=0, attach=False)
    assert server.publish() == []


def test_server_tells_a_scheduler_that_was_started_again_what_it_knows(server: Server) -> None:
    known = server.machine._joiner.view
    assert known is not None
    assert server.handle(st.Received(SCHEDULER, 0, m.GetView())) == [ef.Send(SCHEDULER, 0, known)]
