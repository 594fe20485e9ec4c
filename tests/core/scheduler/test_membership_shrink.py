"""The scheduler with `on_worker_loss = "shrink"`: the others go on without a lost worker, down to a smallest number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.errors import WorkerLostError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Scheduler

EVERYBODY = ("worker-0", "worker-1", "worker-2", "server-0")


def shrinking(make_scheduler: type[Scheduler], min_workers: int = 1) -> Scheduler:
    """Return a scheduler of three workers and one server, who have joined; the death time-out is 2 s."""
    rig = make_scheduler(workers=3, servers=1, on_worker_loss="shrink", respawn_timeout=3.0, min_workers=min_workers)
    rig.form(*EVERYBODY)
    return rig


def states(scheduler: Scheduler) -> list[str]:
    """Return the workers' states in the last view."""
    return [entry.state for entry in scheduler.views["server-0"][-1].workers]


def test_a_lost_worker_is_evicted(make_scheduler: type[Scheduler]) -> None:
    scheduler = shrinking(make_scheduler)
    scheduler.drop("worker-1", "connection reset")
    assert states(scheduler) == ["alive", "evicted", "alive"]
    assert "connection reset" in scheduler.views["worker-0"][-1].workers[1].reason
    assert scheduler.views["worker-0"][-1].on_worker_loss == "shrink"


def test_barriers_open_without_it(make_scheduler: type[Scheduler]) -> None:
    scheduler = shrinking(make_scheduler)
    asked = [scheduler.barrier("worker-0"), scheduler.barrier("worker-2")]
    scheduler.drop("worker-1")
    assert [each.answer for each in asked] == [m.Met((), 1)] * 2


def test_at_the_smallest_number_the_others_wait_and_then_fail(make_scheduler: type[Scheduler]) -> None:
    scheduler = shrinking(make_scheduler, 2)
    scheduler.drop("worker-1")
    waiting = scheduler.barrier("worker-0", timeout=20.0)
    scheduler.drop("worker-2")
    assert states(scheduler) == ["alive", "evicted", "away"]
    scheduler.beat("worker-0", "server-0")
    scheduler.tick(1.9)
    scheduler.beat("worker-0", "server-0")
    assert waiting.pending
    scheduler.tick(3.0)
    assert states(scheduler) == ["alive", "evicted", "lost"]
    assert isinstance(waiting.error, WorkerLostError)
    for word in ("2 (worker-2)", "nobody has taken its place within 3 s", "at least 2 workers"):
        assert word in str(waiting.error)


@pytest.mark.parametrize("last", ["left", "lost"])
def test_the_job_has_failed_unless_a_worker_comes_to_its_end(
    make_scheduler: type[Scheduler], like: type[Like], last: str
) -> None:
    scheduler = shrinking(make_scheduler)
    scheduler.drop("worker-1")
    scheduler.drop("worker-2")
    if last == "left":
        scheduler.ask("worker-0", m.Leave())
        assert ef.Stop("all workers have left; gone before: worker-1, worker-2") in scheduler.effects
    else:
        scheduler.drop("worker-0")
        assert ef.Stop("no worker is left; lost: worker-0, worker-1, worker-2", failed=True) in scheduler.effects


def test_nobody_has_to_stay_for_workers_that_have_finished(make_scheduler: type[Scheduler], like: type[Like]) -> None:
    scheduler = shrinking(make_scheduler, 2)
    scheduler.ask("worker-0", m.Finish())
    scheduler.ask("worker-1", m.Leave())
    scheduler.drop("worker-2")
    assert states(scheduler) == ["finished", "left", "evicted"]
