"""What has to come of a run in which something goes wrong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ProtocolError, UnknownKeyError
from sim.cluster import simulate
from sim.compute import Constant
from sim.faults import Crash, Hang, HeartbeatLoss, Late, Link, Pause, Slow
from sim.progress import heals, lacking_progress, lost_time
from sim.sections import ClusterSection
from sim.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.faults import AnyFault
    from sim.record import Run
    from sim.scenario import Scenario

CLUSTER = ClusterSection(workers=3, heartbeat=1.0, death_timeout=10.0, call_timeout=20.0, join_timeout=30.0)


@pytest.fixture
def run_with(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    def run(*faults: AnyFault, policy: str = "asp", **fields: Any) -> Run:
        scenario = make_scenario(3, 4, Constant(mean=1.0), cluster=CLUSTER, fault=faults, **fields)
        return simulate(scenario, policy, 1)

    return run


def test_the_time_that_faults_can_take_adds_up(run_with: Callable[..., Run]) -> None:
    run = run_with(
        Pause(node="worker-0", at=1.0, duration=1.5),
        Link(node="worker-1", to="server-0", latency=0.25, at=1.0, duration=9.0),
        Link(node="worker-2", to="server-0", cut=True, at=1.0, duration=1.0),
        HeartbeatLoss(node="worker-0", at=1.0, duration=1.0),
        Slow(node="worker-0", factor=2.0),
    )
    assert lost_time(run.scenario) == 1.5 + 0.25 + 1.0 + 1.0
    assert heals(run)
    assert lacking_progress(run) == []


@pytest.mark.parametrize(
    "fault",
    [
        Crash(node="worker-1", at=2.0),
        Pause(node="worker-1", at=2.0, duration=8.0),
        Slow(node="worker-1", factor=15.0),
        Late(node="worker-1", at=16.0),
    ],
)
def test_what_lasts_does_not_heal(run_with: Callable[..., Run], fault: AnyFault) -> None:
    assert not heals(run_with(fault))


def test_a_crash_takes_time_for_good(run_with: Callable[..., Run]) -> None:
    assert lost_time(run_with(Crash(node="worker-1", at=2.0)).scenario) == math.inf


def test_a_worker_that_stops_short_without_a_reason(run_with: Callable[..., Run]) -> None:
    run = run_with()
    steps = run.workers[1].steps
    last = steps[-1]
    last.answered = False
    steps[-1] = last
    [found] = lacking_progress(run)
    assert found == "worker-1 ended with None after 3 of 4 steps, although all faults heal in time"


def test_others_that_are_lost_are_no_reason_under_asp(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="worker-1", at=2.5))
    assert lacking_progress(run) == []
    run.workers[2].steps = Steps(run.workers[2].steps[:-1])
    [found] = lacking_progress(run)
    assert found.endswith("although nothing happened to it and no update waits for others")


def test_others_that_are_lost_are_a_reason_under_bsp(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="worker-1", at=2.5), policy="bsp")
    assert run.workers[0].error is not None
    assert lacking_progress(run) == []
    run.workers[0].error = ProtocolError("what is this?")
    [found] = lacking_progress(run)
    assert found.endswith("that is no reason which faults can give")


def test_a_node_that_goes_on_when_all_is_over(run_with: Callable[..., Run]) -> None:
    run = run_with()
    run.unstopped = ["server-0"]
    assert lacking_progress(run) == ["server-0 goes on, although all workers have ended"]


def test_a_scheduler_may_wait_for_a_cluster_that_never_was(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="worker-2", at=0.0))
    assert run.unstopped == ["scheduler"]
    assert lacking_progress(run) == []


def test_a_server_that_comes_late_is_waited_for_before_others_are_said_to_go_on(run_with: Callable[..., Run]) -> None:
    """Only then the cluster is complete, and notices that all of its workers are dead."""
    dead = [Hang(node=f"worker-{number}", at=0.2) for number in range(3)]
    run = run_with(*dead, Late(node="server-0", at=25.5))
    assert lacking_progress(run) == []
    assert run.unstopped == []


def test_a_worker_without_keys_is_told_so_for_no_fault(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="worker-0", at=2.5))
    run.workers[1].error = UnknownKeyError("initialise the keys first")
    [found] = [text for text in lacking_progress(run) if "worker-1" in text]
    assert "although nothing happened to it" in found


def test_a_key_that_is_not_there_is_a_reason_only_when_who_was_to_bring_it_is_lost(
    run_with: Callable[..., Run],
) -> None:
    for lost, found in (("worker-0", False), ("worker-2", True)):
        run = run_with(Crash(node=lost, at=2.5), policy="bsp")
        told = run.workers[1]
        [key] = {tensor.key for tensor in run.scenario.tensors}
        told.error = UnknownKeyError(f"key {key!r} is not initialized", key=key)
        assert any("no reason" in text for text in lacking_progress(run)) == found


def test_a_key_may_be_missing_when_who_was_to_bring_it_has_never_come(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="worker-2", at=0.0))
    [key] = {tensor.key for tensor in run.scenario.tensors}
    told = run.workers[1]
    told.error = UnknownKeyError(f"key {key!r} is not initialized", key=key)
    assert lacking_progress(run) == []
