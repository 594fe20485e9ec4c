"""The scheduler lets workers join a running cluster: it looks for a boundary that nobody is beyond."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import CallTimeoutError, ClusterFullError, PolicyError, StaleEpochError, WorkerLostError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Like, Scheduler

EVERYBODY = ("worker-0", "worker-1", "server-0")


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler of two workers and one server, who have joined; up to four workers may be there."""
    rig = make_scheduler(workers=2, servers=1, max_workers=4, respawn_timeout=3.0)
    rig.form(*EVERYBODY)
    return rig


def entry(scheduler: Scheduler, rank: int = 2) -> m.WorkerEntry:
    """Return a worker's entry in the last view."""
    return scheduler.views["server-0"][-1].workers[rank]


def boundaries(scheduler: Scheduler, name: str) -> list[m.Boundary]:
    """Return the boundaries that a node was asked for."""
    sends = [effect for effect in scheduler.effects if isinstance(effect, ef.Send)]
    return [s.message for s in sends if s.peer == scheduler.peers[name] and isinstance(s.message, m.Boundary)]


def say(scheduler: Scheduler, name: str, message: m.Message) -> list[ef.Effect]:
    """Let a node tell the scheduler something."""
    return scheduler.handle(st.Received(scheduler.peers[name], 0, message))


def agree(scheduler: Scheduler, clock: int, *names: str) -> None:
    """Let nodes agree to a boundary."""
    for name in names or EVERYBODY:
        say(scheduler, name, m.BoundaryClock(clock, clock, waits=name == "server-0"))


def enter(scheduler: Scheduler, name: str = "worker-2", timeout: float = 5.0) -> Asked:
    """Let a worker come, and say that it is ready."""
    scheduler.register(name)
    return scheduler.ask(name, m.Enter(timeout))


def test_who_comes_is_a_member_at_once_and_nobody_waits_for_it(scheduler: Scheduler) -> None:
    scheduler.register("worker-2")
    assert entry(scheduler) == m.WorkerEntry(2, "worker-2", 1, "joining")
    assert scheduler.views["worker-2"][-1].declared == 2
    waiting = [scheduler.barrier("worker-0"), scheduler.barrier("worker-1")]
    assert [each.answer for each in waiting] == [m.Met((), 1)] * 2
    assert scheduler.barrier("worker-2").answer == m.Met(())


def test_it_counts_behind_a_boundary_to_which_all_agree_and_is_told_when_all_are_past_it(scheduler: Scheduler) -> None:
    asked = enter(scheduler)
    assert [boundaries(scheduler, name) for name in EVERYBODY] == [[m.Boundary(1, 2)]] * 3
    agree(scheduler, 1, "worker-0", "worker-1")
    assert entry(scheduler).since == 0
    agree(scheduler, 1, "server-0")
    assert (entry(scheduler).state, entry(scheduler).since) == ("joining", 1)
    say(scheduler, "worker-0", m.Passed(1))
    say(scheduler, "worker-1", m.Passed(7))
    assert asked.pending
    say(scheduler, "worker-1", m.Passed(1))
    assert asked.answer == m.Entered(1)
    assert (entry(scheduler).state, entry(scheduler).since) == ("alive", 1)
    assert scheduler.ask("worker-2", m.Enter(5.0)).answer == m.Entered(1)
    waiting = [scheduler.barrier("worker-0"), scheduler.barrier("worker-1")]
    assert waiting[0].pending
    assert scheduler.barrier("worker-2").answer == waiting[0].answer == m.Met((), 1)


def test_where_no_key_goes_in_rounds_nobody_has_to_be_past_it(scheduler: Scheduler) -> None:
    asked = enter(scheduler)
    for name in EVERYBODY:
        say(scheduler, name, m.BoundaryClock(1, 0))
    assert asked.answer == m.Entered(1)


def test_a_boundary_that_somebody_is_beyond_is_given_up_for_later_ones(scheduler: Scheduler) -> None:
    enter(scheduler)
    say(scheduler, "server-0", m.BoundaryClock(1, 5))
    assert boundaries(scheduler, "server-0")[-1] == m.Boundary(7, 2)
    # What was said of the one before does not count.
    agree(scheduler, 1)
    say(scheduler, "server-0", m.BoundaryClock(7, 9))
    assert boundaries(scheduler, "worker-0")[-1] == m.Boundary(13, 2)
    agree(scheduler, 13)
    assert entry(scheduler).since == 13


def test_whoever_has_come_back_is_asked_again(scheduler: Scheduler) -> None:
    enter(scheduler)
    agree(scheduler, 1, "worker-0")
    scheduler.register("worker-0", again=True, epoch=2)
    assert boundaries(scheduler, "worker-0") == [m.Boundary(2, 2)]
    agree(scheduler, 1)
    assert entry(scheduler).since == 0
    agree(scheduler, 2)
    assert entry(scheduler).since == 2
    scheduler.register("worker-1", again=True, epoch=2)
    assert boundaries(scheduler, "worker-1") == [m.Boundary(2, 2)]


def test_nobody_is_asked_while_one_is_not_there(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=1, max_workers=4, reconnect_grace=1.0)
    scheduler.form(*EVERYBODY)
    scheduler.drop("worker-0")
    asked = enter(scheduler)
    assert boundaries(scheduler, "server-0") == []
    waiting = scheduler.ask("worker-1", m.GetWaiting()).answer
    assert isinstance(waiting, m.Waiting)
    assert waiting.calls[0].reason == "no answer from worker-0"
    scheduler.register("worker-0", again=True, epoch=2)
    assert boundaries(scheduler, "server-0") == [m.Boundary(1, 2)]
    assert asked.pending


# --- when a worker is lost for good ---


def test_nobody_is_let_in_where_rounds_wait_for_a_worker_that_is_lost(scheduler: Scheduler) -> None:
    """Of the round in which it was lost one server may have all contributions, and another one never will."""
    scheduler.drop("worker-1")
    asked = enter(scheduler)
    agree(scheduler, 1, "worker-0", "server-0")
    assert isinstance(asked.error, WorkerLostError)
    assert asked.error.details["ranks"] == [1]
    assert (entry(scheduler).state, entry(scheduler).since) == ("joining", 0)


def test_who_would_be_let_in_when_a_worker_is_lost_is_told_so(scheduler: Scheduler) -> None:
    asked = enter(scheduler)
    agree(scheduler, 1)
    say(scheduler, "worker-0", m.Passed(1))
    scheduler.drop("worker-1")
    assert isinstance(asked.error, WorkerLostError)
    assert entry(scheduler).state == "evicted"


def test_where_nobody_waits_for_others_who_comes_is_let_in_although_a_worker_is_lost(scheduler: Scheduler) -> None:
    scheduler.drop("worker-1")
    asked = enter(scheduler)
    for name in ("worker-0", "server-0"):
        say(scheduler, name, m.BoundaryClock(1, 0))
    assert asked.answer == m.Entered(1)


def test_one_after_the_other_is_let_in(scheduler: Scheduler) -> None:
    first, second = enter(scheduler), enter(scheduler, "worker-3")
    waiting = scheduler.ask("worker-1", m.GetWaiting()).answer
    assert isinstance(waiting, m.Waiting)
    assert [call.reason for call in waiting.calls] == [
        "no answer from server-0, worker-0, worker-1",
        "worker-2 is let in before it",
    ]
    clock = boundaries(scheduler, "server-0")[-1].clock
    agree(scheduler, clock)
    for name in ("worker-0", "worker-1"):
        say(scheduler, name, m.Passed(clock))
    assert first.answer == m.Entered(clock)
    assert second.pending
    clock = boundaries(scheduler, "worker-2")[-1].clock
    agree(scheduler, clock, *EVERYBODY, "worker-2")
    for name in ("worker-0", "worker-1", "worker-2"):
        say(scheduler, name, m.Passed(clock))
    assert second.answer == m.Entered(clock)


def test_a_policy_with_which_nobody_can_join(scheduler: Scheduler) -> None:
    asked = enter(scheduler)
    say(scheduler, "server-0", m.BoundaryClock(1, 0, "key 'w' has policy k_sync:1"))
    assert isinstance(asked.error, PolicyError)
    assert str(asked.error) == "worker-2 can't join: key 'w' has policy k_sync:1"
    assert boundaries(scheduler, "worker-0")[-1] == m.Boundary(0, 2)
    assert entry(scheduler).state == "joining"


@pytest.mark.parametrize("gone", ["drop", "leave"])
def test_a_worker_that_is_gone_before_all_agree_changes_nothing(scheduler: Scheduler, gone: str) -> None:
    enter(scheduler)
    if gone == "drop":
        scheduler.drop("worker-2")
    else:
        scheduler.ask("worker-2", m.Leave())
    assert boundaries(scheduler, "worker-0")[-1] == m.Boundary(0, 2)
    assert entry(scheduler).state == ("evicted" if gone == "drop" else "left")
    agree(scheduler, 1)
    assert entry(scheduler).since == 0


def test_a_worker_that_is_gone_before_it_is_its_turn(scheduler: Scheduler) -> None:
    enter(scheduler)
    enter(scheduler, "worker-3")
    scheduler.drop("worker-3")
    assert boundaries(scheduler, "worker-0")[-1].rank == 2


def test_rounds_wait_no_longer_for_one_that_is_lost_when_it_counts_already(scheduler: Scheduler) -> None:
    enter(scheduler)
    agree(scheduler, 1)
    scheduler.drop("worker-2")
    assert (entry(scheduler).state, entry(scheduler).since) == ("evicted", 1)


def test_who_waits_too_long_is_told_for_whom(scheduler: Scheduler) -> None:
    asked = enter(scheduler, timeout=1.0)
    later = enter(scheduler, "worker-3", timeout=1.0)
    agree(scheduler, boundaries(scheduler, "server-0")[-1].clock, "worker-0", "server-0")
    scheduler.tick(1.0)
    scheduler.tick(1.0)
    assert isinstance(asked.error, CallTimeoutError)
    assert str(asked.error) == "worker-2 wants to count in rounds: no answer from worker-1 within 1 s"
    assert "worker-3 wants to count in rounds" in str(later.error)
    assert entry(scheduler).state == "joining"


def test_who_counts_already_and_waits_too_long_is_given_up(scheduler: Scheduler, like: type[Like]) -> None:
    asked = enter(scheduler, timeout=1.0)
    agree(scheduler, 1)
    say(scheduler, "worker-0", m.Passed(1))
    scheduler.tick(1.0)
    text = "worker-2 wants to count in rounds: rank 1 (worker-1) has not come past round 1 within 1 s"
    assert str(asked.error) == text
    assert entry(scheduler).state == "evicted"
    assert text in entry(scheduler).reason
    assert like(ef.Log, level="error") in scheduler.effects


def test_an_answer_that_gets_lost_with_the_connection_is_given_again(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=1, max_workers=2, reconnect_grace=1.0)
    scheduler.form("worker-0", "server-0")
    asked = enter(scheduler, "worker-1")
    agree(scheduler, 1, "worker-0", "server-0")
    scheduler.drop("worker-1")
    say(scheduler, "worker-0", m.Passed(1))
    assert asked.pending
    scheduler.register("worker-1", again=True, epoch=2)
    assert scheduler.ask_again("worker-1", asked, m.Enter(5.0)).answer == m.Entered(1)


def test_one_that_is_not_connected_is_given_up_without_a_word(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=1, max_workers=2, reconnect_grace=2.0)
    scheduler.form("worker-0", "server-0")
    asked = enter(scheduler, "worker-1", timeout=1.0)
    agree(scheduler, 1, "worker-0", "server-0")
    scheduler.drop("worker-1")
    scheduler.tick(1.0)
    assert asked.pending
    assert entry(scheduler, 1).state == "evicted"


def test_asking_again_waits_longer(scheduler: Scheduler) -> None:
    asked = enter(scheduler, timeout=1.0)
    scheduler.now = 0.5
    again = scheduler.ask("worker-2", m.Enter(1.0))
    assert [boundary.clock for boundary in boundaries(scheduler, "server-0")] == [1]
    scheduler.tick(1.0)
    assert again.pending
    scheduler.tick(1.5)
    assert isinstance(again.error, CallTimeoutError)
    assert asked.pending, "its user has given up on that"


def test_one_that_is_let_in_while_it_is_not_reached_is_told_when_it_asks_again(
    make_scheduler: type[Scheduler], like: type[Like]
) -> None:
    """It registers over another connection, and has asked nothing there yet when all are past the boundary."""
    scheduler = make_scheduler(workers=1, servers=1, max_workers=2, reconnect_grace=1.0)
    scheduler.form("worker-0", "server-0")
    asked = enter(scheduler, "worker-1")
    agree(scheduler, 1, "worker-0", "server-0")
    scheduler.drop("worker-1")
    scheduler.register("worker-1", again=True, epoch=3)
    say(scheduler, "worker-0", m.Passed(1))
    assert entry(scheduler, 1).state == "alive"
    assert like(ef.Send, message=m.Entered(1)) not in scheduler.effects
    assert scheduler.ask_again("worker-1", asked, m.Enter(5.0)).answer == m.Entered(1)


# --- another scheduler ---


@pytest.fixture
def restarted(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler that was started again when the one before had said that worker 2 counts after clock 5."""
    scheduler = make_scheduler(workers=2, servers=2, max_workers=4)
    workers = (*(m.WorkerEntry(rank, f"worker-{rank}", 1) for rank in range(2)), NEWCOMER)
    servers = tuple(m.ServerEntry(index, f"server-{index}", 1, "127.0.0.1", 9000) for index in range(2))
    for name in [*(server.name for server in servers), *(worker.name for worker in workers)]:
        scheduler.register(name, epoch=7)
    known = m.View(7, workers, servers, 0.5, 2**19, 2**16, 2.0, founder=1)
    known.declared = 2
    say(scheduler, "server-0", known)
    return scheduler


NEWCOMER = m.WorkerEntry(2, "worker-2", 1, "joining", "", 5)


def test_what_another_scheduler_has_said_of_who_counts_holds(restarted: Scheduler) -> None:
    """Some may have gone on relying on it."""
    asked = restarted.ask("worker-2", m.Enter(5.0))
    assert entry(restarted) == NEWCOMER
    assert [boundaries(restarted, f"server-{index}") for index in range(2)] == [[m.Boundary(5, 2)]] * 2
    assert [boundaries(restarted, f"worker-{rank}") for rank in range(2)] == [[]] * 2
    for index in range(2):
        say(restarted, f"server-{index}", m.BoundaryClock(5, 6, waits=index == 0))
    for rank in range(2):
        assert boundaries(restarted, f"worker-{rank}") == [m.Boundary(5, 2)]
        say(restarted, f"worker-{rank}", m.BoundaryClock(5, 6))
        say(restarted, f"worker-{rank}", m.Passed(5))
    assert asked.answer == m.Entered(5)
    assert (entry(restarted).state, entry(restarted).since) == ("alive", 5)


def test_who_is_past_it_before_the_servers_have_answered_does_not_let_it_in_alone(restarted: Scheduler) -> None:
    """Whether the others have to be past it, too, only the servers know."""
    asked = restarted.ask("worker-2", m.Enter(5.0))
    say(restarted, "worker-0", m.Passed(5))
    assert entry(restarted) == NEWCOMER
    for index in range(2):
        say(restarted, f"server-{index}", m.BoundaryClock(5, 6, waits=True))
    assert [boundaries(restarted, f"worker-{rank}") for rank in range(2)] == [[], [m.Boundary(5, 2)]]
    assert asked.pending
    say(restarted, "worker-1", m.Passed(5))
    assert asked.answer == m.Entered(5)


def test_no_barrier_opens_without_who_counts_by_then(restarted: Scheduler) -> None:
    """All are past the boundary, and have said so before they ask again; of keys only the servers know."""
    restarted.ask("worker-2", m.Enter(5.0))
    for rank in range(2):
        say(restarted, f"worker-{rank}", m.Passed(5))
    waiting = [restarted.barrier(f"worker-{rank}") for rank in range(2)]
    for index in range(2):
        say(restarted, f"server-{index}", m.BoundaryClock(5, 6, waits=True))
    assert [each.pending for each in waiting] == [True, True]
    assert entry(restarted).state == "alive"
    restarted.barrier("worker-2")
    assert [each.pending for each in waiting] == [False, False]


def test_a_barrier_before_the_boundary_opens_when_that_is_known(restarted: Scheduler) -> None:
    waiting = [restarted.barrier(f"worker-{rank}") for rank in range(2)]
    for index in range(2):
        assert waiting[0].pending
        say(restarted, f"server-{index}", m.BoundaryClock(5, 4, waits=True))
    assert [each.pending for each in waiting] == [False, False]
    assert entry(restarted).state == "joining"


def test_where_no_key_goes_in_rounds_it_counts_at_once_and_is_told_when_it_asks(restarted: Scheduler) -> None:
    for index in range(2):
        assert entry(restarted).state == "joining"
        say(restarted, f"server-{index}", m.BoundaryClock(5, 6))
    assert entry(restarted).state == "alive"
    assert restarted.ask("worker-2", m.Enter(5.0)).answer == m.Entered(5)


def test_who_does_not_ask_another_scheduler_again_is_given_up(restarted: Scheduler) -> None:
    later = enter(restarted, "worker-3")
    waiting = restarted.ask("worker-1", m.GetWaiting()).answer
    assert isinstance(waiting, m.Waiting)
    assert [call.reason for call in waiting.calls] == [
        "no answer from server-0, server-1",
        "worker-2 is let in before it",
    ]
    restarted.now = 1.9
    restarted.beat("server-0", "server-1", "worker-0", "worker-1", "worker-2", "worker-3")
    restarted.tick(2.0)
    assert (entry(restarted).state, entry(restarted).since) == ("evicted", 5)
    assert entry(restarted).reason.endswith("no answer from server-0, server-1 within 2 s")
    assert boundaries(restarted, "worker-0")[-1] == m.Boundary(7, 3)
    assert later.pending


# --- places ---


def test_as_many_as_may_be(scheduler: Scheduler) -> None:
    enter(scheduler)
    enter(scheduler, "worker-3")
    full = scheduler.register("worker-4")
    assert isinstance(full.error, ClusterFullError)
    assert str(full.error) == "4 workers are there, as many as may be; 'worker-4' is one too many"
    taken = scheduler.register("worker-0", again=True, incarnation=2)
    assert "the name 'worker-0' is taken by a member that is alive" in str(taken.error)


def test_who_comes_before_the_cluster_is_complete_joins_when_it_is(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=1, max_workers=3)
    scheduler.form("worker-0", "worker-1", "worker-2")
    assert isinstance(scheduler.register("worker-3").error, ClusterFullError)
    scheduler.drop("worker-1")
    scheduler.register("server-0")
    entries = scheduler.views["worker-2"][-1].workers
    assert [(each.name, each.state) for each in entries] == [("worker-0", "alive"), ("worker-2", "joining")]


def test_a_place_that_was_left_is_taken_again(scheduler: Scheduler) -> None:
    scheduler.ask("worker-1", m.Leave())
    scheduler.register("worker-1", again=True, incarnation=7)
    assert entry(scheduler, 1) == m.WorkerEntry(1, "worker-1", 7, "joining")
    stale = scheduler.register("worker-1", again=True, incarnation=6)
    assert isinstance(stale.error, StaleEpochError)


def test_a_later_process_joins_instead_of_an_earlier_one(scheduler: Scheduler, like: type[Like]) -> None:
    enter(scheduler)
    before = scheduler.peers["worker-2"]
    scheduler.register("worker-2", again=True, incarnation=2)
    assert like(ef.Disconnect, peer=before) in scheduler.effects
    assert entry(scheduler) == m.WorkerEntry(2, "worker-2", 2, "joining")
    assert boundaries(scheduler, "worker-0")[-1] == m.Boundary(0, 2)


def test_a_process_of_another_cluster_is_refused(scheduler: Scheduler) -> None:
    stale = scheduler.register("worker-9", epoch=5)
    assert isinstance(stale.error, StaleEpochError)


def test_servers_of_other_names_do_not_join_so(scheduler: Scheduler) -> None:
    assert isinstance(scheduler.register("server-1").error, ClusterFullError)
    assert isinstance(scheduler.register("other", Role.SERVER).error, ClusterFullError)


# --- too few ---


def test_below_the_minimum_who_comes_takes_the_place_of_one_that_is_away(
    make_scheduler: type[Scheduler], like: type[Like]
) -> None:
    scheduler = make_scheduler(workers=2, servers=1, max_workers=2, min_workers=2, respawn_timeout=3.0)
    scheduler.form(*EVERYBODY)
    scheduler.ask("worker-1", m.Leave(early=True))
    assert entry(scheduler, 1).state == "away"
    assert "the job needs at least 2 workers" in entry(scheduler, 1).reason
    assert like(ef.Log, level="warning") in scheduler.effects
    asked = enter(scheduler)
    # Rounds can't be made, whatever the workers have gone to: they are not asked.
    assert (boundaries(scheduler, "server-0"), boundaries(scheduler, "worker-0")) == ([m.Boundary(1, 2)], [])
    say(scheduler, "server-0", m.BoundaryClock(1, 4))
    assert boundaries(scheduler, "server-0")[-1] == m.Boundary(4, 2)
    say(scheduler, "worker-0", m.BoundaryClock(4, 9))
    agree(scheduler, 4, "server-0")
    assert (entry(scheduler, 1).state, entry(scheduler).since) == ("evicted", 4)
    assert "worker-2 has taken its place" in entry(scheduler, 1).reason
    say(scheduler, "worker-0", m.Passed(4))
    assert asked.answer == m.Entered(4)
    late = scheduler.register("worker-1", again=True, incarnation=2)
    assert isinstance(late.error, ClusterFullError)


def test_below_the_minimum_workers_are_asked_where_they_go_on_all_the_same(make_scheduler: type[Scheduler]) -> None:
    """Under a policy that waits for nobody some may have been told who counts in later steps."""
    scheduler = make_scheduler(workers=2, servers=1, max_workers=2, min_workers=2, respawn_timeout=3.0)
    scheduler.form(*EVERYBODY)
    scheduler.ask("worker-1", m.Leave(early=True))
    asked = enter(scheduler)
    say(scheduler, "server-0", m.BoundaryClock(1, 1, waits=False))
    assert boundaries(scheduler, "worker-0") == [m.Boundary(2, 2)]
    say(scheduler, "server-0", m.BoundaryClock(2, 1, waits=False))
    assert asked.pending
    say(scheduler, "worker-0", m.BoundaryClock(2, 2))
    assert (entry(scheduler, 1).state, entry(scheduler).since) == ("evicted", 2)
    assert asked.answer == m.Entered(2)


# --- a scheduler that was started again ---


def test_after_a_restart_of_the_scheduler_those_who_have_joined_are_known(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=1, max_workers=4)
    workers = (
        *(m.WorkerEntry(rank, f"worker-{rank}", 1) for rank in range(2)),
        m.WorkerEntry(2, "worker-2", 1, "alive", "", 5),
        m.WorkerEntry(3, "worker-3", 1, "joining", "", 9),
    )
    servers = (m.ServerEntry(0, "server-0", 1, "127.0.0.1", 9000),)
    view = m.View(7, workers, servers, 0.5, 2**19, 2**16, 2.0, declared=2, founder=1)
    for worker in (*EVERYBODY, "worker-2", "worker-3"):
        scheduler.register(worker, epoch=7)
    say(scheduler, "worker-0", view)
    entries = scheduler.views["worker-3"][-1].workers
    assert [(entry.state, entry.since) for entry in entries[2:]] == [("alive", 5), ("joining", 9)]
    assert scheduler.views["worker-3"][-1].declared == 2
