"""Joining: back-off, words for the operator, and how long the other side gets."""

from __future__ import annotations

import pytest

from aiokv.core import effects as ef
from aiokv.core.joiner import Joiner, answer_time, retry_delay
from aiokv.errors import JoinTimeoutError
from aiokv.types import SCHEDULER, Role
from aiokv.wire import messages as m


@pytest.fixture
def joiner() -> Joiner:
    """A worker's joiner."""
    return Joiner(role=Role.WORKER, name="worker-0", incarnation=7, scheduler=("host", 9091), advertised=("", 0))


def test_back_off_doubles_up_to_a_second() -> None:
    delays = [retry_delay(attempt) for attempt in (1, 2, 3, 4, 5, 6, 10_000)]
    assert delays == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(("timeout", "left"), [(0.0, 0.0), (1.0, 0.9), (5.0, 4.5), (60.0, 59.5)])
def test_other_side_has_to_answer_a_little_earlier(timeout: float, left: float) -> None:
    assert answer_time(timeout) == left


def test_registration_carries_the_time_that_is_left(joiner: Joiner) -> None:
    joiner.join(1, 20.0, now=100.0)
    (send,) = joiner.on_connected(now=110.0)
    assert send == ef.Send(SCHEDULER, 1, m.Register(Role.WORKER, "worker-0", 7, "", 0, 9.5))


def test_a_standby_says_of_what_it_is_to_have_a_copy() -> None:
    standby = Joiner(
        role=Role.SERVER, name="s/1.4", incarnation=7, scheduler=("host", 9091), advertised=("h", 5), standby=1
    )
    standby.join(1, 20.0, now=100.0)
    (send,) = standby.on_connected(now=100.0)
    assert send == ef.Send(SCHEDULER, 1, m.Register(Role.SERVER, "s/1.4", 7, "h", 5, 19.5, standby=1))
    view = m.View(4, (), (m.ServerEntry(1, "t", 1, "h", 4),), 1.0, 64, 64, 10.0)
    assert standby.on_view(view, now=100.0)
    standby.complete()
    standby.on_lost("connection reset")
    send, found = standby.on_connected(now=101.0)
    assert send == ef.Send(SCHEDULER, 1, m.Register(Role.SERVER, "s/1.4", 7, "h", 5, 10.0, -1, 4, 1))
    text = "s/1.4 is connected to the scheduler at host:9091 again"
    assert found == ef.Log("warning", text, "scheduler_found", {"address": "host:9091"})


def test_attempts_go_on_and_the_log_stays_short(joiner: Joiner) -> None:
    joiner.join(1, 60.0, now=0.0)
    logged = []
    for second in range(12):
        effects = joiner.on_connect_failed("connection refused", None, now=float(second))
        assert isinstance(effects[0], ef.Connect)
        logged += [second] * (len(effects) - 1)
    assert logged == [0, 5, 10]


def test_log_says_who_waits_for_whom_and_for_how_long(joiner: Joiner) -> None:
    joiner.join(1, 60.0, now=0.0)
    _, log = joiner.on_connect_failed("connection refused", None, now=10.0)
    text = "worker-0 waits for the scheduler at host:9091 (connection refused); tries again for 50 s"
    facts = {"reason": "connection refused", "seconds_left": 50.0}
    assert log == ef.Log("warning", text, "scheduler_unreachable", facts)


def test_connection_that_comes_too_late_is_closed(joiner: Joiner) -> None:
    joiner.join(1, 1.0, now=0.0)
    joiner.tick(1.0)
    assert joiner.on_connected(1.5) == [ef.Disconnect(SCHEDULER, "the join is over")]
    assert joiner.on_connect_failed("connection refused", None, now=1.5) == []
    assert not joiner.connected


def test_incomplete_cluster_is_told_from_a_missing_scheduler(joiner: Joiner) -> None:
    joiner.join(1, 1.0, now=0.0)
    joiner.on_connected(0.5)
    effects = joiner.tick(1.0)
    assert isinstance(effects[-1], ef.Fail)
    assert isinstance(effects[-1].error, JoinTimeoutError)
    assert "could not join within 1 s" in str(effects[-1].error)
    assert "registered, but the cluster is not complete" in str(effects[-1].error)


def test_a_join_outlives_its_scheduler(joiner: Joiner) -> None:
    """It connects and registers again, later and later, and the error at its end says what it waited for."""
    joiner.join(1, 20.0, now=0.0)
    joiner.on_connected(now=0.0)
    assert joiner.on_lost("connection reset") == [ef.Connect(SCHEDULER, "host", 9091, delay=0.05)]
    again, _ = joiner.on_connect_failed("connection refused", None, now=1.0)
    assert again == ef.Connect(SCHEDULER, "host", 9091, delay=0.1)
    (send,) = joiner.on_connected(now=10.0)
    assert send == ef.Send(SCHEDULER, 1, m.Register(Role.WORKER, "worker-0", 7, "", 0, 9.5))
    joiner.on_lost("connection reset")
    assert joiner.due == 20.0
    *_, failed = joiner.tick(20.0)
    assert isinstance(failed, ef.Fail)
    assert isinstance(failed.error, JoinTimeoutError)
    text = "worker-0 could not join within 20 s: waiting for the scheduler at host:9091"
    assert str(failed.error) == f"{text} (the connection has ended: connection reset)"


def test_join_is_over_once(joiner: Joiner) -> None:
    joiner.join(1, 1.0, now=0.0)
    assert joiner.complete() == [ef.Complete(1)]
    assert joiner.complete() == []
    assert joiner.fail(JoinTimeoutError("late")) == []
    assert joiner.joined
    assert joiner.due is None
