"""Nodes that die: who is told, when, and who goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.errors import JoinTimeoutError, ServerLostError, WorkerLostError
from sim.checks import find_violations
from sim.cluster import simulate
from sim.compute import Constant, ShiftedExponential
from sim.faults import Crash, Hang, Link, Pause, Reset, Slow
from sim.sections import ClusterSection, NetworkSection, ServerSection
from sim.timeline import draw_timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.faults import AnyFault
    from sim.record import Run
    from sim.scenario import Scenario

HEARTBEAT, DEATH = 1.0, 4.0
AT = 5.25
LATENCY = 0.01
STEPS = 20


@pytest.fixture
def run_with(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    """Return a function that runs a small cluster in which one node dies."""

    def run(policy: str, kind: str, node: str, at: float = AT) -> Run:
        scenario = make_scenario(
            3,
            STEPS,
            ShiftedExponential(shift=0.5, scale=0.5),
            cluster=ClusterSection(
                workers=3, servers=2, heartbeat=HEARTBEAT, death_timeout=DEATH, call_timeout=15.0, join_timeout=30.0
            ),
            network=NetworkSection(latency=LATENCY),
            fault=((Crash if kind == "crash" else Hang)(node=node, at=at),),
        )
        finished = simulate(scenario, policy, 3)
        assert find_violations(finished) == []
        return finished

    return run


@pytest.mark.parametrize(("kind", "limit"), [("crash", 0.0), ("hang", DEATH + HEARTBEAT)])
def test_bsp_survivors_are_told_which_worker_is_lost(run_with: Callable[..., Run], kind: str, limit: float) -> None:
    run = run_with("bsp", kind, "worker-1")
    first, lost, second = run.workers
    assert lost.struck
    for worker in (first, second):
        assert isinstance(worker.error, WorkerLostError)
        assert worker.error.details["ranks"] == [1]
        # Who is still computing is told at its push.
        asked = max(AT, worker.steps[-1].computed)
        assert worker.ended <= max(asked, AT + limit) + 4 * LATENCY


@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_asp_survivors_go_on(run_with: Callable[..., Run], kind: str) -> None:
    first, lost, second = run_with("asp", kind, "worker-1").workers
    assert lost.struck
    assert [worker.error for worker in (first, second)] == [None, None]
    assert [len(worker.steps) for worker in (first, second)] == [STEPS, STEPS]


@pytest.mark.parametrize("policy", ["bsp", "asp"])
@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_workers_are_told_which_server_is_lost(run_with: Callable[..., Run], policy: str, kind: str) -> None:
    for worker in run_with(policy, kind, "server-1").workers:
        assert isinstance(worker.error, ServerLostError)
        assert worker.error.details["server"] == 1


def test_workers_go_on_without_a_scheduler(run_with: Callable[..., Run]) -> None:
    run = run_with("bsp", "crash", "scheduler")
    assert [(worker.error, len(worker.steps)) for worker in run.workers] == [(None, STEPS)] * 3
    assert run.unstopped == []


def test_a_silent_scheduler_is_noticed_and_workers_go_on_without_it(run_with: Callable[..., Run]) -> None:
    run = run_with("bsp", "hang", "scheduler")
    assert [(worker.error, len(worker.steps)) for worker in run.workers] == [(None, STEPS)] * 3
    assert run.unstopped == []


def test_a_cluster_that_never_becomes_complete_gives_up(run_with: Callable[..., Run]) -> None:
    run = run_with("bsp", "crash", "worker-2", at=0.0)
    first, second, _ = run.workers
    assert all(isinstance(worker.error, JoinTimeoutError) for worker in (first, second))
    assert run.unstopped == ["scheduler"]


def test_a_fault_after_the_end_changes_nothing(run_with: Callable[..., Run]) -> None:
    run = run_with("asp", "crash", "worker-1", at=1000.0)
    assert [(worker.error, worker.struck) for worker in run.workers] == [(None, False)] * 3


@pytest.mark.parametrize("node", ["scheduler", "server-0", "server-1", "worker-0", "worker-2"])
@pytest.mark.parametrize("kind", ["crash", "hang"])
def test_whatever_dies_whenever_every_worker_ends(run_with: Callable[..., Run], kind: str, node: str) -> None:
    # While connecting, registering, attaching, initialising, training and leaving.
    for at in (0.005, 0.025, 0.035, 0.045, 0.065, AT, 22.2, 23.83, 26.99):
        run = run_with("asp", kind, node, at)
        ended = [worker.error is not None or worker.struck or len(worker.steps) == STEPS for worker in run.workers]
        assert ended == [True] * 3, (at, run.workers)


def test_drawn_faults_hit_each_node_by_itself_after_exponential_times(make_scenario: Callable[..., Scenario]) -> None:
    count, mean = 400, 30.0
    faults = (
        Crash(node=("worker-0", "server-0"), at=10.0, restart=2.0, times=count, every=mean, drawn=True),
        Pause(node="worker-1", at=0.0, duration=5.0, times=count, every=mean, drawn=True),
        Link(
            node="worker-2",
            to="server-0",
            both=False,
            at=0.0,
            duration=3.0,
            loss=0.5,
            times=count,
            every=mean,
            drawn=True,
        ),
        Reset(node="worker-2", to="server-0", at=0.0, times=count, every=mean, drawn=True),
    )
    scenario = make_scenario(3, STEPS, ShiftedExponential(shift=0.5, scale=0.5), fault=faults)
    timeline = draw_timeline(scenario, 1)
    again = draw_timeline(scenario, 1)
    assert (timeline.strikes, timeline.disturbances) == (again.strikes, again.disturbances)
    assert timeline.resets == again.resets
    crashes = [strike.at for strike in timeline.strikes if strike.node == "worker-0"]
    assert crashes != [strike.at for strike in timeline.strikes if strike.node == "server-0"]
    paused = [strike.at for strike in timeline.strikes if strike.kind == "pause"]
    bad = [disturbance.at for disturbance in timeline.disturbances]
    cut = [at for at, _, _ in timeline.resets]
    three_errors = 3.0 * mean / count**0.5
    for times, begin, lasts in ((crashes, 10.0, 2.0), (paused, 0.0, 5.0), (bad, 0.0, 3.0), (cut, 0.0, 0.0)):
        up = (times[-1] - begin - (count - 1) * lasts) / count
        assert abs(up - mean) < three_errors


def test_workers_and_servers_that_pause_at_random_lose_nothing(make_scenario: Callable[..., Scenario]) -> None:
    pauses = Pause(node=("workers", "servers"), at=0.0, duration=0.5, times=5, every=2.0, drawn=True)
    bad = Link(node="workers", to="servers", duration=1.0, loss=0.2, times=5, every=2.0, drawn=True)
    scenario = make_scenario(3, STEPS, ShiftedExponential(shift=0.5, scale=0.5), fault=(pauses, bad))
    run = simulate(scenario, "bsp", 3)
    assert find_violations(run) == []
    assert [len(worker.pushed) for worker in run.workers] == [STEPS] * 3


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        (Slow(node="server-0", factor=3.0), 1.3),
        (Slow(node="rack-0", factor=3.0), 3.3),
        (Slow(node="server-0", factor=3.0, at=0.5, duration=0.55), 1.1 + 0.05 * 2 / 3),
        (Pause(node="server-0", at=1.05, duration=0.5), 1.6),
    ],
)
def test_what_slows_a_server_slows_its_arithmetic(
    make_scenario: Callable[..., Scenario], fault: AnyFault, step: float
) -> None:
    scenario = make_scenario(1, 1, Constant(mean=1.0), server=ServerSection(apply=0.1), fault=(fault,))
    (taken,) = simulate(scenario, "bsp", 1).workers[0].steps
    assert taken.end - taken.start == pytest.approx(step)
