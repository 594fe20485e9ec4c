"""Simulated schedulers that are started again where processes join: none contradicts what the one before has said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import StaleEpochError
from sim.checks import find_violations
from sim.cluster import simulate
from sim.faults import Crash, Join, Link, Pause
from sim.progress import lacking_progress
from tests.sim.growing import growing

if TYPE_CHECKING:
    from sim.record import Run

STEPS = 16


def train(*faults: Any, check: bool = True, **cluster: Any) -> Run:
    """Run a worker and a server, and those that the faults bring."""
    settings = {"workers": 1, "servers": 1, "places": 3, "max_workers": 3} | cluster
    run = simulate(growing(STEPS, faults, **settings), "bsp", 1, validated=1, check=check)
    assert not check or find_violations(run) == []
    return run


@pytest.mark.parametrize("at", [9.5, 9.8, 9.9, 9.99, 10.0])
def test_those_who_wait_to_join_make_no_cluster_of_their_own(at: float) -> None:
    """They look for the scheduler more often than its members, who have done so for eight seconds, once a second."""
    run = train(
        Crash(node="scheduler", at=2.0, restart=8.0), Join(node="worker-1", at=at), Join(node="server-1", at=at)
    )
    assert lacking_progress(run) == []
    assert not run.begun_anew
    sizes = [len(update.ranks) for update in run.updates if (update.key, update.start) == ("big", 0)]
    assert len(sizes) == STEPS
    assert set(sizes) == {1, 2}, "worker-1 counts when it has joined"


@pytest.mark.parametrize("late", [0.5, 1.0, 1.4, 2.0, 2.6])
def test_who_alone_has_heard_that_it_has_joined_counts_all_the_same(late: float) -> None:
    """What the others were told is lost with their connections; and it is back after them, later or much later."""
    run = train(
        *(Link(node="scheduler", to=name, cut=True, at=3.4, duration=3.6) for name in ("worker-0", "server-0")),
        Join(node="worker-1", at=3.5),
        Crash(node="scheduler", at=6.0, restart=0.8),
        Link(node="worker-1", to="scheduler", both=True, cut=True, at=6.0, duration=1.0 + late),
        places=0,
        heartbeat=0.5,
        death_timeout=3.0,
    )
    assert lacking_progress(run) == []
    worker = run.worker_by_name["worker-1"]
    assert (worker.error, worker.rank) == (None, 1)
    assert len(run.since["worker-1"]) == 1


def stopped(*, check: bool) -> Run:
    """Let a whole cluster be stopped, its scheduler be started again, and enough processes come to make another one."""
    pauses = [Pause(node=name, at=2.0, duration=15.0) for name in ("worker-0", "server-0")]
    joins = [Join(node=name, at=9.0) for name in ("worker-1", "server-1")]
    return train(*pauses, Crash(node="scheduler", at=2.0, restart=8.0), *joins, check=check)


def test_members_that_are_not_back_in_time_are_told_that_another_cluster_has_begun() -> None:
    """Nothing that they do counts there."""
    assert stopped(check=True).begun_anew
    run = stopped(check=False)
    error = run.worker_by_name["worker-0"].error
    assert isinstance(error, StaleEpochError)
    assert "worker-0 belongs to an earlier cluster: it was not back when this one began without it" in str(error)
    assert run.worker_by_name["worker-1"].error is None
    assert len(run.worker_by_name["worker-1"].steps) == STEPS
    assert run.unstopped == []
