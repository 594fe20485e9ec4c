"""The scheduler of a complete cluster: barriers, losses, leaving, and the end of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import BarrierTimeoutError, MembershipError, WorkerLostError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Scheduler

EVERYBODY = ("worker-0", "worker-1", "worker-2", "server-0")


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler of three workers and one server, who have all joined; heartbeat 0.5 s, death time-out 2 s."""
    rig = make_scheduler(workers=3, servers=1)
    rig.form(*EVERYBODY)
    return rig


def states(scheduler: Scheduler, name: str = "server-0") -> dict[str, str]:
    """Return the states in the last view that a node was sent."""
    view = scheduler.views[name][-1]
    workers = {entry.name: entry.state for entry in view.workers}
    servers = {entry.name: entry.state for entry in view.servers}
    return {name: state for name, state in (workers | servers).items() if state != "alive"}


# --- barriers ---


def test_barrier_opens_when_every_worker_is_here(scheduler: Scheduler) -> None:
    first = [scheduler.barrier(f"worker-{rank}") for rank in (2, 0)]
    assert [asked.answer for asked in first] == [None, None]
    last = scheduler.barrier("worker-1")
    assert [asked.answer for asked in (*first, last)] == [m.Met((), 1)] * 3


def test_scenario_6_barrier_counts_ranks_and_not_calls(scheduler: Scheduler) -> None:
    # Scenario 6: worker 0 asks twice.
    asked = [scheduler.barrier("worker-0"), scheduler.barrier("worker-0"), scheduler.barrier("worker-1")]
    assert [a.answer for a in asked] == [None] * 3
    asked.append(scheduler.barrier("worker-2"))
    assert [a.answer for a in asked] == [m.Met((), 1)] * 4


def test_what_workers_say_at_a_barrier_is_told_to_all(scheduler: Scheduler) -> None:
    """By rank; of worker 0, which asks twice, the last word counts; what nobody has said is not there."""
    asked = [
        scheduler.ask(name, m.Barrier("b", 5.0, (), said))
        for name, said in (
            ("worker-2", {"n": 2}),
            ("worker-0", {"n": 0}),
            ("worker-0", {"n": 9}),
            ("worker-1", None),
        )
    ]
    assert [a.answer for a in asked] == [m.Met(((0, {"n": 9}), (2, {"n": 2})), 1)] * 4


def test_barriers_of_different_names_do_not_mix(scheduler: Scheduler) -> None:
    for rank, name in enumerate(("a", "a", "b")):
        assert scheduler.barrier(f"worker-{rank}", name).pending


def test_barrier_can_be_used_many_times(scheduler: Scheduler) -> None:
    for number in (1, 2, 3):
        asked = [scheduler.barrier(f"worker-{rank}") for rank in range(3)]
        assert [a.answer for a in asked] == [m.Met((), number)] * 3


def test_scenario_7_late_barrier_names_the_absent_to_everybody(scheduler: Scheduler) -> None:
    asked = [scheduler.barrier(f"worker-{rank}", timeout=0.5) for rank in (0, 1)]
    scheduler.tick(0.5)
    for a in asked:
        assert isinstance(a.error, BarrierTimeoutError)
        assert a.error.details == {"ranks": [2]}
        for word in ("'b'", "2 (worker-2)", "0.5 s"):
            assert word in str(a.error)


def test_scenario_7_late_barrier_names_nobody_who_came_and_gave_up_first(scheduler: Scheduler) -> None:
    # Scenario 7: deadlines that are a moment apart.
    asked = [scheduler.barrier("worker-0", timeout=0.5), scheduler.barrier("worker-1", timeout=0.6)]
    scheduler.tick(0.5)
    scheduler.tick(0.6)
    assert [a.error.details["ranks"] for a in asked] == [[2], [2]]
    assert not scheduler.machine._barriers._gave_up


def test_late_barrier_names_who_gave_up_when_all_others_came(scheduler: Scheduler) -> None:
    scheduler.barrier("worker-0", timeout=0.5)
    asked = [scheduler.barrier("worker-1", timeout=0.7)]
    scheduler.tick(0.5)
    asked.append(scheduler.barrier("worker-2", timeout=0.2))
    scheduler.tick(0.7)
    assert [a.error.details["ranks"] for a in asked] == [[0], [0]]


def test_who_gave_up_is_waited_for_again(scheduler: Scheduler) -> None:
    scheduler.barrier("worker-0", timeout=0.5)
    last = scheduler.barrier("worker-1", timeout=5.0)
    scheduler.tick(0.5)
    scheduler.barrier("worker-2", timeout=5.0)
    assert last.pending
    assert scheduler.barrier("worker-0").answer == last.answer == m.Met((), 1)
    assert not scheduler.machine._barriers._gave_up


def test_barrier_can_be_used_again_after_a_time_out(scheduler: Scheduler) -> None:
    scheduler.barrier("worker-0", timeout=0.5)
    scheduler.tick(0.5)
    asked = [scheduler.barrier(f"worker-{rank}") for rank in (1, 2)]
    assert [a.answer for a in asked] == [None, None]
    assert scheduler.barrier("worker-0").answer == m.Met((), 1)
    assert [a.answer for a in asked] == [m.Met((), 1)] * 2


def test_retry_outlives_the_call_that_timed_out(scheduler: Scheduler) -> None:
    first, retry = scheduler.barrier("worker-0", timeout=0.5), scheduler.barrier("worker-0", timeout=1.5)
    scheduler.tick(0.5)
    for rank in (1, 2):
        scheduler.barrier(f"worker-{rank}")
    assert isinstance(first.answer, BarrierTimeoutError)
    assert retry.answer == m.Met((), 1)


def test_barrier_does_not_wait_for_one_who_has_left(scheduler: Scheduler) -> None:
    asked = [scheduler.barrier(f"worker-{rank}") for rank in (0, 1)]
    scheduler.ask("worker-2", m.Leave())
    assert [a.answer for a in asked] == [m.Met((), 1)] * 2


def test_barrier_of_a_group_waits_for_its_ranks_alone(scheduler: Scheduler) -> None:
    alone = scheduler.ask("worker-0", m.Barrier("b", 5.0))
    first = scheduler.ask("worker-2", m.Barrier("b", 5.0, (2, 0)))
    assert first.pending
    assert scheduler.ask("worker-0", m.Barrier("b", 5.0, (0, 2))).answer == first.answer == m.Met((), 1)
    assert alone.pending, "that of all workers is another one"


def test_group_of_all_is_the_barrier_of_all(scheduler: Scheduler) -> None:
    waiting = [
        scheduler.ask("worker-0", m.Barrier("b", 5.0)),
        scheduler.ask("worker-1", m.Barrier("b", 5.0, (0, 1, 2))),
    ]
    scheduler.ask("worker-2", m.Barrier("b", 5.0))
    assert [asked.answer for asked in waiting] == [m.Met((), 1)] * 2


@pytest.mark.parametrize("group", [(1, 2), (0, 7)], ids=["of others", "of nobody"])
def test_barrier_of_another_group_is_refused(scheduler: Scheduler, group: tuple[int, ...]) -> None:
    assert isinstance(scheduler.ask("worker-0", m.Barrier("b", 5.0, group)).answer, MembershipError)


# --- who has finished ---


def test_nobody_waits_for_one_who_has_finished(scheduler: Scheduler) -> None:
    asked = [scheduler.barrier(f"worker-{rank}") for rank in (0, 1)]
    assert scheduler.ask("worker-2", m.Finish()).answer == m.Done()
    assert [a.answer for a in asked] == [m.Met((), 1)] * 2
    states = [entry.state for entry in scheduler.views["worker-2"][-1].workers]
    assert states == ["alive", "alive", "finished"], "it is told, because it stays"


def test_end_of_one_who_has_finished_is_no_loss(scheduler: Scheduler) -> None:
    scheduler.ask("worker-2", m.Finish())
    scheduler.drop("worker-2", "connection reset")
    assert [entry.state for entry in scheduler.views["worker-0"][-1].workers] == ["alive", "alive", "left"]
    for rank in (0, 1):
        scheduler.ask(f"worker-{rank}", m.Leave())
    (stop,) = [effect for effect in scheduler.effects if isinstance(effect, ef.Stop)]
    assert not stop.failed


def test_job_is_over_when_the_finished_have_left_too(scheduler: Scheduler) -> None:
    for rank in range(3):
        scheduler.ask(f"worker-{rank}", m.Finish())
    assert not any(isinstance(effect, ef.Stop) for effect in scheduler.effects)
    for rank in range(3):
        scheduler.ask(f"worker-{rank}", m.Leave())
    assert any(isinstance(effect, ef.Stop) for effect in scheduler.effects)


def test_barrier_fails_at_once_when_a_worker_is_lost(scheduler: Scheduler) -> None:
    waiting = scheduler.barrier("worker-0")
    scheduler.drop("worker-2", "connection reset")
    later = scheduler.barrier("worker-1")
    for asked in (waiting, later):
        assert isinstance(asked.error, WorkerLostError)
        assert asked.error.details == {"ranks": [2]}
        for word in ("'b'", "2 (worker-2)", "connection reset"):
            assert word in str(asked.error)


def test_arrival_of_one_who_is_lost_does_not_count(scheduler: Scheduler) -> None:
    scheduler.barrier("worker-2")
    waiting = scheduler.barrier("worker-0")
    scheduler.drop("worker-2")
    assert isinstance(waiting.answer, WorkerLostError)


def test_lost_server_does_not_fail_a_barrier(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=2)
    scheduler.form("worker-0", "worker-1", "server-0", "server-1")
    waiting = scheduler.barrier("worker-0")
    scheduler.drop("server-1")
    assert waiting.pending
    scheduler.barrier("worker-1")
    assert waiting.answer == m.Met((), 1)


# --- losses ---


def test_closed_connection_is_a_loss_that_all_others_hear_of(scheduler: Scheduler, like: type[Like]) -> None:
    scheduler.now = 1.0
    effects = scheduler.drop("worker-1", "connection reset")
    assert effects[0] == like(ef.Log, level="error")
    for name in ("server-0", "worker-0", "worker-2"):
        assert scheduler.views[name][-1].epoch == 2
        assert states(scheduler, name) == {"worker-1": "lost"}
    assert scheduler.views["server-0"][-1].workers[1].reason == "connection reset, last heard 1.0 s before"
    assert len(scheduler.views["worker-1"]) == 1


def test_silence_is_a_loss_after_the_death_time_out(scheduler: Scheduler, like: type[Like]) -> None:
    for now in (0.5, 1.0, 1.5):
        scheduler.tick(now)
        scheduler.beat("worker-0", "worker-2", "server-0")
    assert states(scheduler) == {}
    effects = scheduler.tick(2.0)
    assert effects[0] == like(ef.Disconnect, peer=scheduler.peers["worker-1"])
    assert states(scheduler) == {"worker-1": "lost"}
    assert scheduler.views["server-0"][-1].workers[1].reason == "no heartbeat for 2.0 s"


def test_anything_that_is_heard_is_a_sign_of_life(scheduler: Scheduler) -> None:
    scheduler.now = 1.5
    scheduler.beat("worker-1", "worker-2", "server-0")
    scheduler.barrier("worker-0", timeout=60.0)
    scheduler.tick(2.0)
    assert states(scheduler) == {}


def test_silent_server_is_lost_too(scheduler: Scheduler) -> None:
    scheduler.now = 1.5
    scheduler.beat("worker-0", "worker-1", "worker-2")
    scheduler.tick(2.0)
    assert states(scheduler, "worker-0") == {"server-0": "lost"}


def test_several_losses_at_once_are_all_published(scheduler: Scheduler) -> None:
    scheduler.now = 1.5
    scheduler.beat("worker-0", "server-0")
    waiting = scheduler.barrier("worker-0", timeout=60.0)
    scheduler.tick(2.0)
    assert states(scheduler, "worker-0") == {"worker-1": "lost", "worker-2": "lost"}
    assert isinstance(waiting.answer, WorkerLostError)


def test_one_who_is_lost_is_not_listened_to(scheduler: Scheduler) -> None:
    scheduler.drop("worker-1")
    assert isinstance(scheduler.barrier("worker-1").answer, MembershipError)
    assert scheduler.drop("worker-1") == []
    assert len(scheduler.views["server-0"]) == 2


# --- leaving and the end ---


def test_leaver_is_answered_and_the_others_hear_of_it(scheduler: Scheduler) -> None:
    assert scheduler.ask("worker-1", m.Leave()).answer == m.Done()
    for name in ("server-0", "worker-0", "worker-2"):
        assert states(scheduler, name) == {"worker-1": "left"}
    assert scheduler.drop("worker-1") == []


def test_leaver_takes_its_arrivals_with_it(scheduler: Scheduler) -> None:
    gone = scheduler.barrier("worker-2")
    scheduler.ask("worker-2", m.Leave())
    scheduler.tick(5.0)
    assert gone.pending


def test_job_ends_well_when_all_workers_have_left(scheduler: Scheduler) -> None:
    for rank in range(3):
        assert ef.Stop("all workers have left") not in scheduler.effects
        scheduler.ask(f"worker-{rank}", m.Leave())
    server = scheduler.peers["server-0"]
    assert scheduler.effects[-2:] == [
        ef.Send(server, 0, m.Stop("all workers have left")),
        ef.Stop("all workers have left"),
    ]


def test_job_fails_when_one_was_lost(scheduler: Scheduler, like: type[Like]) -> None:
    scheduler.ask("worker-0", m.Leave())
    scheduler.drop("worker-1")
    scheduler.ask("worker-2", m.Leave())
    assert scheduler.effects[-1] == like(ef.Stop, failed=True)
    assert "worker-1" in scheduler.effects[-1].reason  # type: ignore[union-attr]


def test_job_ends_when_the_last_worker_is_lost(scheduler: Scheduler, like: type[Like]) -> None:
    for rank in (0, 1):
        scheduler.ask(f"worker-{rank}", m.Leave())
    scheduler.drop("worker-2")
    assert scheduler.effects[-1] == like(ef.Stop, failed=True)


def test_only_servers_that_are_alive_are_told_to_stop(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2)
    scheduler.form("worker-0", "server-0", "server-1")
    scheduler.drop("server-0")
    scheduler.ask("worker-0", m.Leave())
    stops = [e.peer for e in scheduler.effects if isinstance(e, ef.Send) and isinstance(e.message, m.Stop)]
    assert stops == [scheduler.peers["server-1"]]


def test_server_that_goes_after_the_end_is_no_news(scheduler: Scheduler) -> None:
    for rank in range(3):
        scheduler.ask(f"worker-{rank}", m.Leave())
    assert scheduler.drop("server-0") == []


def test_tables_are_empty_at_the_end(scheduler: Scheduler) -> None:
    scheduler.barrier("worker-0")
    for rank in range(3):
        scheduler.ask(f"worker-{rank}", m.Leave())
    scheduler.drop("server-0")
    assert scheduler.machine.deadline() is None
    assert not scheduler.machine._members.by_peer
    assert not scheduler.machine._barriers._arrivals


def test_every_heartbeat_is_answered_so_that_a_silent_scheduler_is_noticed(scheduler: Scheduler) -> None:
    peer = scheduler.peers["worker-1"]
    assert scheduler.handle(st.Received(peer, 0, m.Heartbeat())) == [ef.Send(peer, 0, m.Heartbeat())]
