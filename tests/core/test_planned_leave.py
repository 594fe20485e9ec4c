"""A worker leaves behind a clock of which nobody was told yet who counts there, for all others at the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.roster import Roster
from aiokv.errors import CallTimeoutError, ClosedError, MembershipError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Like, Scheduler, Server, Worker

WORKERS = ("worker-0", "worker-1", "worker-2")


def make(make_scheduler: type[Scheduler], **settings: Any) -> Scheduler:
    """Return a scheduler of three workers and one server, who have joined."""
    scheduler = make_scheduler(workers=3, servers=1, **settings)
    scheduler.form(*WORKERS, "server-0")
    return scheduler


@pytest.fixture(params=[0, 5])
def scheduler(make_scheduler: type[Scheduler], request: pytest.FixtureRequest) -> Scheduler:
    """A scheduler as above; nobody may join, or up to five workers may be there."""
    return make(make_scheduler, max_workers=request.param)


def entry(scheduler: Scheduler, rank: int = 1) -> m.WorkerEntry:
    """Return a worker's entry in the last view."""
    return scheduler.views["server-0"][-1].workers[rank]


def boundaries(scheduler: Scheduler, name: str) -> list[m.Boundary]:
    """Return the boundaries that a node was asked for."""
    sends = [effect for effect in scheduler.effects if isinstance(effect, ef.Send)]
    return [s.message for s in sends if s.peer == scheduler.peers[name] and isinstance(s.message, m.Boundary)]


def agree(scheduler: Scheduler, clock: int, *names: str) -> None:
    """Let workers agree to a boundary, or servers."""
    for name in names or WORKERS:
        answer = m.BoundaryClock(clock, clock, waits=name.startswith("server"))
        scheduler.handle(st.Received(scheduler.peers[name], 0, answer))


def plan(scheduler: Scheduler, name: str = "worker-1") -> Asked:
    """Let a worker say that it is about to leave."""
    return scheduler.ask(name, m.PlanLeave(0))


# --- the scheduler ---


def test_a_worker_counts_up_to_a_boundary_to_which_all_workers_agree(scheduler: Scheduler, like: type[Like]) -> None:
    asked = plan(scheduler)
    assert [boundaries(scheduler, name) for name in WORKERS] == [[m.Boundary(1, 1)]] * 3
    assert boundaries(scheduler, "server-0") == []
    agree(scheduler, 1, "worker-0", "worker-1")
    assert (asked.pending, entry(scheduler).until) == (True, 0)
    agree(scheduler, 1, "worker-2")
    assert (entry(scheduler).state, entry(scheduler).until) == ("alive", 1)
    assert asked.answer == m.Done()
    assert like(ef.Log, event="worker_leaves") in scheduler.effects
    scheduler.ask("worker-1", m.Leave(early=True))
    assert (entry(scheduler).state, entry(scheduler).until) == ("left", 1)


def test_a_boundary_that_somebody_is_beyond_is_given_up_for_a_later_one(scheduler: Scheduler) -> None:
    plan(scheduler)
    scheduler.handle(st.Received(scheduler.peers["worker-2"], 0, m.BoundaryClock(1, 4)))
    assert boundaries(scheduler, "worker-0")[-1] == m.Boundary(6, 1)
    agree(scheduler, 6)
    assert entry(scheduler).until == 6


def test_a_boundary_is_not_before_what_the_worker_has_made(scheduler: Scheduler) -> None:
    scheduler.ask("worker-1", m.PlanLeave(4))
    assert boundaries(scheduler, "worker-0") == [m.Boundary(5, 1)]


def test_who_asks_again_is_answered_under_its_new_number(make_scheduler: type[Scheduler]) -> None:
    scheduler = make(make_scheduler, reconnect_grace=1.0)
    before = plan(scheduler)
    again = plan(scheduler)
    agree(scheduler, 1)
    assert (before.pending, again.answer) == (True, m.Done())
    assert plan(scheduler).answer == m.Done()
    assert len(boundaries(scheduler, "worker-0")) == 1


def test_who_is_not_connected_when_it_is_planned_asks_again(make_scheduler: type[Scheduler]) -> None:
    scheduler = make(make_scheduler, reconnect_grace=1.0)
    before = plan(scheduler)
    agree(scheduler, 1, "worker-1", "worker-2")
    scheduler.drop("worker-1")
    agree(scheduler, 1, "worker-0")
    assert entry(scheduler).until == 1
    scheduler.register("worker-1", again=True, epoch=2)
    assert scheduler.ask_again("worker-1", before, m.PlanLeave(0)).answer == m.Done()


def test_a_worker_goes_at_once_where_rounds_wait_for_one_that_is_lost(scheduler: Scheduler) -> None:
    asked = plan(scheduler)
    scheduler.drop("worker-2")
    assert asked.answer == m.Done()
    assert boundaries(scheduler, "worker-0")[-1] == m.Boundary(0, 1)
    assert plan(scheduler, "worker-0").answer == m.Done()
    assert [entry(scheduler, rank).until for rank in (0, 1)] == [0, 0]


def test_nobody_plans_where_others_would_wait_for_one_more(make_scheduler: type[Scheduler]) -> None:
    """Two of three have to be left: the first may plan, the second one's place is kept."""
    scheduler = make(make_scheduler, min_workers=2, max_workers=4)
    first, second = plan(scheduler), plan(scheduler, "worker-2")
    agree(scheduler, 1)
    agree(scheduler, boundaries(scheduler, "worker-0")[-1].clock)
    assert (first.answer, second.answer) == (m.Done(), m.Done())
    assert [entry(scheduler, rank).until for rank in (1, 2)] == [1, 0]
    scheduler.ask("worker-2", m.Leave(early=True))
    assert entry(scheduler, 2).state == "left", "two are there, as long as the first one is"
    scheduler.ask("worker-1", m.Leave(early=True))
    assert (entry(scheduler).state, entry(scheduler).until) == ("away", 0)
    assert plan(scheduler, "worker-0").answer == m.Done()


def test_rounds_wait_for_a_place_that_is_kept_whatever_its_worker_had_planned(make_scheduler: type[Scheduler]) -> None:
    scheduler = make(make_scheduler, min_workers=2, max_workers=4, on_worker_loss="shrink")
    plan(scheduler)
    agree(scheduler, 1)
    scheduler.drop("worker-2")
    scheduler.drop("worker-1")
    assert (entry(scheduler).state, entry(scheduler).until) == ("away", 0)


def test_a_worker_leaves_when_another_one_is_let_in(make_scheduler: type[Scheduler]) -> None:
    scheduler = make(make_scheduler, max_workers=5)
    scheduler.register("worker-3")
    scheduler.register("worker-4")
    entered = scheduler.ask("worker-3", m.Enter(5.0))
    asked = plan(scheduler)
    scheduler.ask("worker-4", m.Enter(5.0))
    agree(scheduler, 1, *WORKERS, "server-0")
    for name in WORKERS:
        scheduler.handle(st.Received(scheduler.peers[name], 0, m.Passed(1)))
    assert (entered.answer, asked.pending) == (m.Entered(1), True)
    waiting = scheduler.ask("worker-0", m.GetWaiting()).answer
    assert isinstance(waiting, m.Waiting)
    assert [call.reason for call in waiting.calls] == ["worker-1 is let go before it"]
    clock = boundaries(scheduler, "worker-3")[-1].clock
    agree(scheduler, clock, *WORKERS, "worker-3")
    assert (asked.answer, entry(scheduler).until) == (m.Done(), clock)
    assert boundaries(scheduler, "server-0")[-1].rank == 4


@pytest.mark.parametrize("gone", ["drop", "leave", "finish"])
def test_a_worker_that_is_gone_before_all_agree_has_planned_nothing(scheduler: Scheduler, gone: str) -> None:
    plan(scheduler)
    if gone == "drop":
        scheduler.drop("worker-1")
    else:
        scheduler.ask("worker-1", m.Leave() if gone == "leave" else m.Finish())
    agree(scheduler, boundaries(scheduler, "worker-0")[-1].clock, "worker-0", "worker-2")
    assert entry(scheduler).until == 0
    assert plan(scheduler, "worker-0").pending == (gone != "drop")


@pytest.mark.parametrize("gone", [m.Leave(told=6), m.Finish(told=6)])
def test_what_one_was_told_that_is_gone_stays_as_it_was(scheduler: Scheduler, gone: m.Message) -> None:
    """It has made its part of step 5, dealt out to all three; the others are at their first."""
    scheduler.ask("worker-0", gone)
    assert scheduler.views["server-0"][-1].told == 6
    scheduler.ask("worker-2", m.Finish(told=2))
    plan(scheduler)
    assert boundaries(scheduler, "worker-1") == [m.Boundary(7, 1)]


def test_what_one_was_told_that_is_gone_outlives_the_scheduler(make_scheduler: type[Scheduler]) -> None:
    before = make(make_scheduler)
    before.ask("worker-0", m.Finish(told=6))
    scheduler = make_scheduler(workers=3, servers=1)
    for name in (*WORKERS, "server-0"):
        scheduler.register(name, epoch=2)
    scheduler.ask("worker-0", before.views["server-0"][-1])
    plan(scheduler)
    assert boundaries(scheduler, "worker-2") == [m.Boundary(7, 1)]


def test_what_was_planned_outlives_the_scheduler(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=1)
    known = m.View(
        7,
        (m.WorkerEntry(0, "worker-0", 1, until=9),),
        (m.ServerEntry(0, "server-0", 1, "127.0.0.1", 9000),),
        *(0.5, 2**19, 2**16, 2.0),
    )
    for name in ("worker-0", "server-0"):
        scheduler.register(name, epoch=7)
    scheduler.ask("worker-0", known)
    assert entry(scheduler, 0).until == 9


# --- the worker ---


def told(worker: Worker, message: m.Message) -> list[m.Message]:
    """Let the scheduler say something; return what it is told."""
    effects = worker.handle(st.Received(SCHEDULER, 0, message))
    return [effect.message for effect in effects if isinstance(effect, ef.Send) and effect.peer == SCHEDULER]


def view(worker: Worker, **mine: Any) -> m.View:
    """Return the next view, with changes of the first worker's entry."""
    last = worker.view()
    return structs.replace(last, workers=(structs.replace(last.workers[0], **mine), *last.workers[1:]))


def members(worker: Worker, step: int) -> Any:
    """Return who makes a step, as far as that is known."""
    call = worker.call(st.AskMembers, step=step, timeout=5.0)
    return next((e.result for e in worker.effects if isinstance(e, ef.Complete) and e.call == call.number), None)


@pytest.fixture
def leaver(worker: Worker) -> Worker:
    """Worker 0 of two, which has made one step and has said that it is about to leave."""
    worker.finish(worker.transfer("init"))
    worker.finish(worker.transfer("push"))
    call = worker.call(st.PlanLeave)
    assert (call.outcome, [send.message for send in call.sends]) == ("done", [m.PlanLeave(1)])
    assert worker.call(st.PlanLeave).sends == [], "it has said so"
    return worker


def test_it_pushes_nothing_behind_the_boundary_before_it_is_known_whether_it_leaves_there(leaver: Worker) -> None:
    assert told(leaver, m.Boundary(2, 0)) == [m.BoundaryClock(2, 1)]
    second, third, read = leaver.transfer("push"), leaver.transfer("push"), leaver.transfer("pull", "v")
    assert (len(second.sends), third.sends, len(read.sends)) == (1, [], 1)
    effects = leaver.handle(st.Received(SCHEDULER, 0, view(leaver)))
    assert [e.message.clock for e in effects if isinstance(e, ef.Send) and isinstance(e.message, m.Push)] == [3]


def test_behind_the_boundary_a_push_is_refused_and_nobody_is_told_that_it_pushes(leaver: Worker) -> None:
    told(leaver, m.Boundary(2, 0))
    held = [leaver.transfer("push"), leaver.transfer("push")][1]
    assert members(leaver, 2) is None
    told(leaver, view(leaver, until=2))
    assert isinstance(held.outcome, MembershipError)
    assert "this worker leaves after step 2" in str(held.outcome)
    assert isinstance(leaver.transfer("push").outcome, MembershipError)
    assert len(leaver.transfer("pull", "v").sends) == 1, "it may still read"
    assert ef.Complete(7, [1]) in leaver.effects
    assert (members(leaver, 1), members(leaver, 2)) == ([0, 1], [1])


def test_calls_that_were_made_before_the_boundary_was_asked_for_are_not_behind_it(make_worker: type[Worker]) -> None:
    leaver = make_worker(max_open_pushes=1)
    leaver.finish(leaver.transfer("init"))
    for _ in range(3):
        leaver.transfer("push")
    assert told(leaver, m.Boundary(2, 0)) == [m.BoundaryClock(2, 3)]
    assert told(leaver, m.Boundary(3, 0)) == [m.BoundaryClock(3, 3)]


def test_nobody_waits_for_a_scheduler_that_says_nothing(leaver: Worker) -> None:
    told(leaver, m.Boundary(1, 0))
    held = leaver.transfer("push", timeout=3.0)
    leaver.tick(3.0)
    assert isinstance(held.outcome, CallTimeoutError)
    assert "no word from the scheduler within 3 s whether this worker leaves" in str(held.outcome)


@pytest.mark.parametrize("refused", [False, True])
def test_it_may_go_at_once_when_the_scheduler_plans_nothing(leaver: Worker, refused: bool) -> None:
    (send,) = leaver.calls[3].sends
    if refused:
        leaver.refuse(send, MembershipError("no"))
    else:
        leaver.answer(send)
    assert members(leaver, 1) == [1]


def test_a_plan_that_the_view_has_is_all_that_counts(leaver: Worker) -> None:
    told(leaver, view(leaver, until=2))
    leaver.answer(leaver.calls[3].sends[0])
    assert (members(leaver, 1), members(leaver, 2)) == ([0, 1], [1])


def test_where_nobody_waits_for_others_it_may_go_at_once(make_worker: type[Worker]) -> None:
    worker = make_worker(policy="asp")
    worker.finish(worker.transfer("init"))
    call = worker.call(st.PlanLeave)
    assert (call.outcome, call.sends, members(worker, 0)) == ("done", [], [1])


def test_workers_that_may_not_run_ahead_wait_for_each_other(make_worker: type[Worker]) -> None:
    worker = make_worker(policy="ssp:2")
    worker.finish(worker.transfer("init"))
    assert [send.message for send in worker.call(st.PlanLeave).sends] == [m.PlanLeave(0)]


def test_who_has_planned_to_leave_and_closes_leaves_when_all_that_it_pushed_counts(leaver: Worker) -> None:
    push = leaver.transfer("push")
    call = leaver.call(st.Depart, timeout=5.0)
    assert call.sends == []
    effects = [effect for send in push.sends for effect in leaver.answer(send)]
    assert [e.message for e in effects if isinstance(e, ef.Send) and e.peer == SCHEDULER] == [m.Leave(early=True)]


def test_the_scheduler_is_asked_when_it_is_there_again(worker: Worker) -> None:
    worker.finish(worker.transfer("init"))
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    call = worker.call(st.PlanLeave)
    assert (call.outcome, call.sends) == ("done", [])
    worker.handle(st.Connected(SCHEDULER))
    effects = worker.publish()
    assert m.PlanLeave(0) in [effect.message for effect in effects if isinstance(effect, ef.Send)]


def test_who_is_not_connected_can_plan_nothing(make_worker: type[Worker]) -> None:
    assert isinstance(make_worker(join=False).call(st.PlanLeave).outcome, ClosedError)


# --- a server ---


def test_a_server_waits_for_the_worker_up_to_the_clock_and_no_longer(make_server: type[Server]) -> None:
    server = make_server(2)
    server.init()
    behind = [server.push(0, 1.0, clock=clock) for clock in (1, 2)]
    last = server.machine._joiner.view
    assert last is not None
    workers = (last.workers[0], structs.replace(last.workers[1], until=1))
    server.handle(st.Received(SCHEDULER, 0, structs.replace(last, epoch=last.epoch + 1, workers=workers)))
    assert [each.pending for each in behind] == [True, True]
    server.push(1, 10.0, clock=1)
    assert [each.pending for each in behind] == [False, False]
    assert float(server.values["w", 0][2]) == 12.0


# --- the view ---


def test_who_asks_late_is_told_that_one_that_has_left_as_planned_was_there() -> None:
    workers = (
        m.WorkerEntry(0, "w0", 1),
        m.WorkerEntry(1, "w1", 1, "left", "", 0, 5),
        m.WorkerEntry(2, "w2", 1, "left"),
    )
    roster = Roster(m.View(3, workers, (), 0.5, 2**19, 2**16, 2.0))
    assert (roster.pushing(5), roster.pushing(6)) == ([0, 1], [0])
    assert roster.members_after(5, ()) == [0], "no round waits for it"
