"""A worker joins a running cluster, or is there when another one does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.stimuli import KeyOptions
from aiokv.errors import CallTimeoutError, ClosedError, MembershipError, StaleEpochError
from aiokv.types import SCHEDULER, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Worker


def told(worker: Worker, message: m.Message) -> list[m.Message]:
    """Let the scheduler say something; return what it is told."""
    effects = worker.handle(st.Received(SCHEDULER, 0, message))
    return said(effects)


def said(effects: list[ef.Effect]) -> list[m.Message]:
    """Return what is sent to the scheduler."""
    return [effect.message for effect in effects if isinstance(effect, ef.Send) and effect.peer == SCHEDULER]


def view(worker: Worker, *entries: m.WorkerEntry, **changes: Any) -> m.View:
    """Return the next view, with other workers behind the first two."""
    last = worker.view()
    return structs.replace(last, workers=(*last.workers[:2], *entries), declared=2, **changes)


def third(state: str = "joining", since: int = 0) -> m.WorkerEntry:
    return m.WorkerEntry(2, "worker-2", 1, state, "", since)


# --- one that is there ---


def test_a_worker_agrees_to_a_boundary_that_it_is_not_beyond(worker: Worker) -> None:
    assert told(worker, m.Boundary(1, 2)) == [m.BoundaryClock(1, 0)]
    worker.finish(worker.transfer("init"))
    worker.finish(worker.transfer("push"))
    worker.finish(worker.transfer("push"))
    assert told(worker, m.Boundary(1, 2))[0] == m.BoundaryClock(1, 2)


def test_it_says_when_it_is_past_it_with_answers_to_all_from_before(worker: Worker) -> None:
    worker.finish(worker.transfer("init"))
    told(worker, m.Boundary(1, 2))
    first = worker.transfer("push")
    second = worker.transfer("push")
    passed = [worker.answer(send) for send in (*second.sends, *first.sends)]
    assert [message for effects in passed for message in said(effects)] == [m.Passed(1)]
    assert said(passed[-1]) == [m.Passed(1)]


def come_back(worker: Worker, known: m.View) -> list[m.Message]:
    """Let a scheduler be there again, and send a view; return what it is told then."""
    worker.handle(st.PeerLost(SCHEDULER, "reset"))
    worker.handle(st.Connected(SCHEDULER))
    return told(worker, known)


def test_a_scheduler_that_is_there_again_hears_who_is_past_it_before_who_waits_at_a_barrier(worker: Worker) -> None:
    worker.finish(worker.transfer("init"))
    worker.finish(worker.transfer("push"))
    worker.finish(worker.transfer("push"))
    (barrier,) = worker.call(st.EnterBarrier, name="b", timeout=5.0).sends
    known = view(worker, third(since=1), epoch=1000)
    assert come_back(worker, known) == [m.Passed(1), barrier.message]
    assert come_back(worker, structs.replace(known, epoch=2000, workers=known.workers[:2])) == [barrier.message]


def test_it_says_so_later_when_it_is_not_past_it_yet(worker: Worker) -> None:
    worker.finish(worker.transfer("init"))
    worker.finish(worker.transfer("push"))
    assert come_back(worker, view(worker, third(since=1), epoch=1000)) == []
    assert said(list(worker.transfer("push").sends)) == [m.Passed(1)]


def test_nothing_is_to_be_passed_when_nobody_joins_after_all(worker: Worker) -> None:
    worker.finish(worker.transfer("init"))
    told(worker, m.Boundary(1, 2))
    assert told(worker, m.Boundary(0, 2)) == []
    sent = [worker.transfer("push") for _ in range(2)]
    assert said([effect for call in sent for send in call.sends for effect in worker.answer(send)]) == []


def test_who_counts_in_a_step_is_known_at_once_or_when_a_view_says_so(worker: Worker) -> None:
    told(worker, m.Boundary(1, 2))
    now = worker.call(st.AskMembers, step=0, timeout=5.0)
    later = worker.call(st.AskMembers, step=1, timeout=5.0)
    assert (now.outcome, later.outcome) == ("done", None)
    told(worker, view(worker, third(since=1)))
    assert ef.Complete(now.number, [0, 1]) in worker.effects
    assert ef.Complete(later.number, [0, 1, 2]) in worker.effects


def test_what_was_said_of_a_step_holds(worker: Worker) -> None:
    worker.call(st.AskMembers, step=4, timeout=5.0)
    assert told(worker, m.Boundary(4, 2)) == [m.BoundaryClock(4, 5)]
    later = worker.call(st.AskMembers, step=5, timeout=5.0)
    assert later.outcome == "done"


def test_a_boundary_that_is_in_the_view_is_only_to_be_passed(worker: Worker) -> None:
    told(worker, view(worker, third(since=1)))
    told(worker, m.Boundary(1, 2))
    call = worker.call(st.AskMembers, step=7, timeout=5.0)
    assert ef.Complete(call.number, [0, 1, 2]) in worker.effects


def test_nobody_waits_for_a_scheduler_that_says_nothing(worker: Worker) -> None:
    told(worker, m.Boundary(1, 2))
    call = worker.call(st.AskMembers, step=1, timeout=5.0)
    assert worker.machine.deadline() == 2.0
    worker.tick(4.9)
    assert call.outcome is None
    worker.tick(5.0)
    assert isinstance(call.outcome, CallTimeoutError)
    assert "no word from the scheduler within 5 s whether rank 2 joins" in str(call.outcome)


def test_the_end_of_the_worker_ends_its_questions(worker: Worker) -> None:
    told(worker, m.Boundary(1, 2))
    first, second = (worker.call(st.AskMembers, step=1, timeout=5.0) for _ in range(2))
    worker.handle(st.Cancel(first.number))
    worker.call(st.Depart, timeout=5.0)
    assert first.outcome is None
    assert isinstance(second.outcome, ClosedError)
    assert isinstance(worker.call(st.AskMembers, step=1, timeout=5.0).outcome, ClosedError)


def test_a_worker_that_is_dismissed_is_told_so(worker: Worker) -> None:
    told(worker, m.Boundary(1, 2))
    call = worker.call(st.AskMembers, step=1, timeout=5.0)
    error = StaleEpochError("gone on without it")
    worker.handle(st.Received(SCHEDULER, 1, m.Error(error.code, error.message, {})))
    assert isinstance(call.outcome, StaleEpochError)


# --- one that comes ---


@pytest.fixture
def comer(make_worker: type[Worker]) -> Worker:
    """Worker 2 that has come to a cluster of two, and has initialised a key."""
    worker = make_worker(rank=2, servers=1, join=False)
    worker.call(st.Join, timeout=10.0)
    worker.handle(st.Connected(SCHEDULER))
    told(worker, view(worker, third()))
    (attach,) = [effect for effect in worker.handle(st.Connected(0)) if isinstance(effect, ef.Send)]
    worker.answer(attach)
    worker.finish(worker.transfer("init"))
    return worker


def entered(worker: Worker, clock: int) -> list[ef.Send]:
    """Let the scheduler say that the worker counts; return what it asks the server then."""
    call = worker.call(st.GoOn, timeout=5.0)
    (enter,) = call.sends
    assert isinstance(enter.message, m.Enter)
    told(worker, view(worker, third(since=clock)))
    effects = worker.handle(st.Received(SCHEDULER, enter.request, m.Entered(clock)))
    return [effect for effect in effects if isinstance(effect, ef.Send)]


def test_it_may_not_push_before_it_has_asked_where_to_begin(comer: Worker) -> None:
    for operation in ("push", "pushpull"):
        error = comer.transfer(operation).outcome
        assert isinstance(error, MembershipError)
        assert "call resume_step before the first push" in str(error)
    assert comer.transfer("pull").outcome is None


def test_it_goes_on_from_what_the_others_have_pushed(comer: Worker) -> None:
    (ask,) = entered(comer, 7)
    assert isinstance(ask.message, m.GetPushes)
    comer.answer(ask, m.Pushes(7, 7, "bsp"))
    assert any(isinstance(effect, ef.Complete) and effect.result == 7 for effect in comer.effects)
    (push,) = comer.transfer("push").sends
    assert isinstance(push.message, m.Push)
    assert (push.message.sequence, push.message.clock) == (8, 8)
    assert (comer.machine.since, comer.machine.pushes, comer.machine.clock) == (7, 8, 8)


def test_keys_that_were_pushed_less_often_keep_their_numbers(comer: Worker) -> None:
    (ask,) = entered(comer, 7)
    comer.answer(ask, m.Pushes(3, 7, "bsp"))
    (push,) = comer.transfer("push").sends
    assert isinstance(push.message, m.Push)
    assert (push.message.sequence, push.message.clock) == (4, 8)


def test_small_keys_that_go_together_go_on_together(comer: Worker) -> None:
    comer.finish(comer.transfer("init", "a", "b"))
    for ask in entered(comer, 7):
        comer.answer(ask, m.Pushes(7, 7, "bsp"))
    (push,) = comer.transfer("push", "a", "b").sends
    assert isinstance(push.message, m.PushBundle)
    assert (push.message.sequence, push.message.clock) == (8, 8)


def test_it_learns_which_policies_keys_have_by_now(comer: Worker) -> None:
    comer.finish(comer.transfer("init", "a", "b"))
    for ask in entered(comer, 7):
        assert isinstance(ask.message, m.GetPushes)
        comer.answer(ask, m.Pushes(7, 7, "bsp" if ask.message.key == "w" else "ssp:1"))
    assert [(one.key, one.options.policy) for one in comer.machine.records] == [
        ("w", "bsp"),
        ("a", "ssp:1"),
        ("b", "ssp:1"),
    ]
    # They go alone.
    pushes = [send.message for send in comer.transfer("push", "a", "b").sends]
    assert [getattr(push, "sequence", None) for push in pushes if isinstance(push, m.Push)] == [8, 8]


def test_a_policy_that_not_all_servers_follow_yet_is_to_be_asked_for(make_worker: type[Worker]) -> None:
    directory = make_worker(join=False).machine._directory
    directory.keys.add([("w", TensorSpec((6,), "float32"))], 0, KeyOptions(policy="bsp"))
    directory.learn([("w", m.Pushes(7, 7, "asp")), ("w", m.Pushes(7, 7, "bsp")), ("w", m.Pushes(7, 7, "asp"))])
    assert [one.options.policy for one in directory.keys.records] == ["bsp"]
    directory.learn([("w", m.Pushes(7, 7, "asp"))] * 3)
    assert [one.options.policy for one in directory.keys.records] == ["asp"]


def test_who_gave_up_asks_again(comer: Worker) -> None:
    call = comer.call(st.GoOn, timeout=5.0)
    (enter,) = call.sends
    comer.handle(st.Cancel(call.number))
    told(comer, view(comer, third("alive", since=7)))
    assert said(comer.handle(st.Received(SCHEDULER, enter.request, m.Entered(7)))) == []
    (ask,) = comer.call(st.GoOn, timeout=5.0).sends
    comer.answer(ask, m.Pushes(7, 7, "bsp"))
    (push,) = comer.transfer("push").sends
    assert getattr(push.message, "sequence", 0) == 8


# --- one that leaves ---


def test_leaving_waits_for_answers_to_all_that_was_pushed(worker: Worker) -> None:
    worker.finish(worker.transfer("init"))
    push = worker.transfer("push")
    leaving = worker.call(st.Depart, timeout=5.0, drains=True)
    assert leaving.sends == []
    error = worker.transfer("push").outcome
    assert isinstance(error, ClosedError)
    assert "this worker is leaving" in str(error)
    assert said(worker.answer(push.sends[0])) == [m.Leave(early=True)]
    assert push.outcome == "done"


def test_leaving_does_not_wait_forever(worker: Worker) -> None:
    worker.finish(worker.transfer("init"))
    push = worker.transfer("push", timeout=60.0)
    worker.call(st.Depart, timeout=1.0, drains=True)
    assert worker.machine.deadline() == 0.9
    assert said(worker.tick(0.9)) == [m.Leave(early=True)]
    assert isinstance(push.outcome, ClosedError)


def test_who_finishes_or_leaves_names_the_last_step_of_which_it_was_told(worker: Worker) -> None:
    worker.call(st.AskMembers, step=5, timeout=5.0)
    assert said(list(worker.call(st.Finish, timeout=5.0).sends)) == [m.Finish(told=6)]
    assert said(list(worker.call(st.Depart, timeout=5.0, drains=True).sends)) == [m.Leave(early=True, told=6)]


def test_leaving_with_nothing_under_way_leaves_at_once(worker: Worker) -> None:
    assert said(list(worker.call(st.Depart, timeout=5.0, drains=True).sends)) == [m.Leave(early=True)]
    assert said(list(worker.call(st.Depart, timeout=5.0, drains=True).sends)) == []
