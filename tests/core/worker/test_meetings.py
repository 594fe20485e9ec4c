"""A worker remembers the barriers that it has passed, and says so to a scheduler that may be another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.worker.meetings import MOST_KEPT, Meetings
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Worker


def view(barriers: int) -> m.View:
    return m.View(1, (), (), 0.5, 64, 64, 2.0, barriers=barriers)


def told(meetings: Meetings) -> list[m.Opened]:
    """Return what the scheduler is told."""
    sends = [effect for effect in meetings.tell() if isinstance(effect, ef.Send)]
    assert all((send.peer, send.request) == (SCHEDULER, 0) for send in sends)
    return [send.message for send in sends if isinstance(send.message, m.Opened)]


@pytest.fixture
def meetings() -> Meetings:
    """Those of a worker for which the others wait since seven barriers had been opened."""
    meetings = Meetings()
    meetings.viewed(view(7), is_counted=True)
    meetings.viewed(view(9), is_counted=True)
    return meetings


def test_the_last_opening_of_each_barrier_is_told(meetings: Meetings) -> None:
    meetings.passed(m.Barrier("b", 1.0), m.Met((), 8))
    meetings.passed(m.Barrier("b", 1.0, (0, 1)), m.Met(((0, {"n": 1}),), 9))
    meetings.passed(m.Barrier("b", 1.0), m.Met((), 10))
    assert told(meetings) == [m.Opened("b", (0, 1), 9, ((0, {"n": 1}),)), m.Opened("b", (), 10)]
    assert (meetings.last("b", ()), meetings.last("b", (1, 0))) == (10, 9)


def test_what_had_opened_before_the_others_waited_for_it_is_passed(meetings: Meetings) -> None:
    assert meetings.last("b", ()) == 7


def test_nobody_waits_for_a_worker_that_is_about_to_count() -> None:
    meetings = Meetings()
    meetings.viewed(view(7), is_counted=False)
    meetings.passed(m.Barrier("b", 1.0), m.Met(()))
    meetings.viewed(view(9), is_counted=True)
    assert meetings.last("b", ()) == 9


def test_so_many_are_remembered(meetings: Meetings) -> None:
    for number in range(MOST_KEPT + 1):
        meetings.passed(m.Barrier(f"b{number}", 1.0), m.Met((), 8 + number))
    meetings.passed(m.Barrier("b1", 1.0), m.Met((), 100))
    assert [each.name for each in told(meetings)] == [*(f"b{number}" for number in range(2, MOST_KEPT + 1)), "b1"]


def test_a_scheduler_to_which_a_worker_is_back_is_told_before_it_is_asked(worker: Worker) -> None:
    passed = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    worker.answer(passed.sends[0], m.Met((), 3))
    waiting = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    asked = m.Barrier("b", 9.5, after=3)
    assert waiting.messages == [asked]
    worker.handle(st.PeerLost(SCHEDULER, "connection reset"))
    worker.handle(st.Connected(SCHEDULER))
    sends = [effect for effect in worker.publish() if isinstance(effect, ef.Send)]
    assert [(send.request, send.message) for send in sends] == [
        (0, m.Opened("b", (), 3)),
        (waiting.sends[0].request, asked),
    ]


def test_who_has_stopped_waiting_has_passed_it_too(worker: Worker) -> None:
    call = worker.call(st.EnterBarrier, name="b", timeout=10.0)
    worker.handle(st.Cancel(call.number))
    worker.answer(call.sends[0], m.Met((), 3))
    assert worker.call(st.EnterBarrier, name="b", timeout=10.0).messages == [m.Barrier("b", 9.5, after=3)]
