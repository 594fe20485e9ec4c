"""Whole runs in which something goes wrong: who notices it, and how everybody ends. All checks are on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from aiokv.errors import CallTimeoutError, ClusterFullError, JoinTimeoutError, ServerLostError, WorkerLostError
from sim.cluster import simulate
from sim.compute import Constant, Exponential
from sim.faults import Bursts, Crash, Hang, HeartbeatLoss, Late, Link, Pause, Poison, Reset, Slow, Spot
from sim.progress import lacking_progress
from sim.report import notes, poisoned_updates, summarise
from sim.sections import ClusterSection, JobSection, NetworkSection, ServerSection, StopSection, TensorSection
from sim.split import end_of, split

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run
    from sim.scenario import Scenario

STEPS = 20
CLUSTER = ClusterSection(workers=3, servers=1, heartbeat=1.0, death_timeout=4.0, call_timeout=15.0, join_timeout=30.0)


@pytest.fixture
def run_with(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    def run(*faults: Any, policy: str = "bsp", seed: int = 1, **fields: Any) -> Run:
        fields.setdefault("cluster", CLUSTER)
        fields.setdefault("network", NetworkSection(latency=0.01))
        law = fields.pop("law", Constant(mean=1.0))
        return simulate(make_scenario(3, STEPS, law, fault=faults, **fields), policy, seed)

    return run


def is_complete(run: Run) -> bool:
    return all(worker.error is None and len(worker.steps) == STEPS for worker in run.workers)


def test_a_short_pause_costs_its_time_and_nothing_else(run_with: Callable[..., Run]) -> None:
    plain, paused = run_with(), run_with(Pause(node="worker-1", at=5.3, duration=2.0))
    assert is_complete(paused)
    assert paused.workers[0].ended - plain.workers[0].ended == pytest.approx(2.0)
    assert split(paused, paused.workers[1]).down == pytest.approx(2.0)


def test_a_long_pause_is_a_lost_worker(run_with: Callable[..., Run]) -> None:
    run = run_with(Pause(node="worker-1", at=5.3, duration=9.0))
    assert all(isinstance(worker.error, WorkerLostError) for worker in (run.workers[0], run.workers[2]))
    assert run.workers[1].error is not None


def test_a_paused_server_lets_everybody_wait(run_with: Callable[..., Run]) -> None:
    run = run_with(Pause(node="server-0", at=5.3, duration=2.0))
    assert is_complete(run)
    assert max(step.end - step.start for step in run.workers[0].steps) > 2.0


def test_a_slow_window_makes_the_steps_within_it_longer(run_with: Callable[..., Run]) -> None:
    run = run_with(Slow(node="worker-1", factor=3.0, at=5.0, duration=3.0))
    assert is_complete(run)
    # In 3 seconds only 1 is done, but for the moments in which messages are under way.
    assert run.workers[0].ended - run_with().workers[0].ended == pytest.approx(2.0, abs=0.05)


def test_a_worker_that_is_late_is_waited_for(run_with: Callable[..., Run]) -> None:
    run = run_with(Late(node="worker-2", at=7.0))
    assert is_complete(run)
    assert min(worker.begun for worker in run.workers) > 7.0


def test_a_worker_that_comes_back_is_refused_and_the_others_go_on(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="worker-1", at=5.3, restart=1.0), policy="asp")
    assert isinstance(run.workers[1].error, ClusterFullError)
    assert [len(worker.steps) for worker in (run.workers[0], run.workers[2])] == [STEPS, STEPS]
    # What it computed when it crashed counts for nothing.
    assert 0.0 < split(run, run.workers[1]).lost < 1.0


def test_a_flapping_worker_under_asp_harms_nobody_else(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="worker-1", at=5.3, restart=1.0, times=3, every=4.0), policy="asp")
    assert [len(worker.steps) for worker in (run.workers[0], run.workers[2])] == [STEPS, STEPS]
    assert run.workers[1].error is not None


def test_a_server_that_crashes_is_named(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="server-0", at=5.3, restart=0.5))
    assert all(isinstance(worker.error, ServerLostError) for worker in run.workers)


def test_without_heartbeats_a_worker_that_works_is_lost(run_with: Callable[..., Run]) -> None:
    run = run_with(HeartbeatLoss(node="worker-1", at=3.0), law=Constant(mean=6.0))
    assert isinstance(run.workers[0].error, WorkerLostError)
    assert run.workers[0].error.details["ranks"] == [1]


def test_a_rack_crashes_as_one(run_with: Callable[..., Run]) -> None:
    cluster = ClusterSection(workers=4, servers=1, racks=2, heartbeat=1.0, death_timeout=4.0)
    run = run_with(Crash(node="rack-1", at=5.3), policy="asp", cluster=cluster)
    assert [worker.struck for worker in run.workers] == [False, True, False, True]
    assert {worker.ended for worker in run.workers if worker.struck} == {5.3}


def test_spot_workers_are_taken_at_times_of_the_seed(run_with: Callable[..., Run]) -> None:
    def ends(seed: int) -> list[float]:
        run = run_with(Spot(node="workers", scale=8.0, shape=1.5), policy="asp", seed=seed)
        return [worker.ended for worker in run.workers]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


@pytest.mark.parametrize(
    "link",
    [
        {"latency": 0.2},
        {"bandwidth": 0.1},
        {"loss": 0.2},
        {"duplicate": 0.3},
        {"reorder": 0.5},
        {"clog": True, "at": 5.0, "duration": 2.0},
        {"cut": True, "at": 5.0, "duration": 2.0},
        {"cut": True, "at": 5.0, "duration": 2.0, "both": False},
    ],
)
@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_a_bad_link_slows_and_loses_nothing(run_with: Callable[..., Run], policy: str, link: dict[str, Any]) -> None:
    network = NetworkSection(latency=0.01, bandwidth=1e6)
    run = run_with(Link(node="worker-1", to="server-0", **link), policy=policy, network=network)
    assert is_complete(run)
    assert summarise(run).gradients_per_s > 0


def test_a_link_that_stays_cut_ends_in_an_error_before_the_deadline(run_with: Callable[..., Run]) -> None:
    run = run_with(Link(node="worker-1", to="server-0", cut=True, at=5.0), policy="asp")
    assert isinstance(run.workers[1].error, CallTimeoutError)
    assert run.workers[1].ended < 5.0 + 2.0 + 15.0
    assert len(run.workers[0].steps) == STEPS


def test_a_partition_from_the_scheduler_is_noticed_by_both_sides(run_with: Callable[..., Run]) -> None:
    run = run_with(Link(node="worker-1", to="scheduler", cut=True, at=5.0), policy="asp")
    assert len(run.workers[0].steps) == STEPS
    assert any("worker-1 is lost" in log.text for log in run.logs)


def test_the_first_poisoned_version_is_named(run_with: Callable[..., Run]) -> None:
    run = run_with(Poison(node="worker-1", step=4))
    assert [update.version for update in poisoned_updates(run)] == [4]
    assert any("version 4 of key 'weights'" in line and "NaN" in line for line in notes({"bsp": [run]}))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_whatever_happens_the_time_of_every_worker_adds_up(
    run_with: Callable[..., Run], policy: str, seed: int
) -> None:
    run = run_with(
        Bursts(node="workers", factor=4.0, gap=3.0, duration=1.0),
        Spot(node="worker-2", scale=12.0, restart=2.0),
        Pause(node="worker-0", at=4.2, duration=1.5),
        policy=policy,
        seed=seed,
        law=Exponential(mean=1.0),
        network=NetworkSection(latency=0.01, jitter=0.01, bandwidth=1e6, loss=0.02),
        job=JobSection(checkpoint_interval=5.0, checkpoint_cost=0.5),
    )
    for worker in run.workers:
        assert split(run, worker).total == pytest.approx(end_of(run, worker) - worker.begun)


def test_a_checkpoint_costs_its_time_in_every_interval(run_with: Callable[..., Run]) -> None:
    job = JobSection(checkpoint_interval=4.5, checkpoint_cost=0.5)
    run = run_with(job=job, network=NetworkSection())
    # Every 5 steps of one second; the last interval ends with the job.
    assert split(run, run.workers[0]).checkpoint == pytest.approx(1.5)


@pytest.mark.parametrize("stop", [StopSection(time=6.5), StopSection(updates=6)])
def test_a_stop_rule_ends_the_run_in_the_middle(run_with: Callable[..., Run], stop: StopSection) -> None:
    run = run_with(stop=stop)
    assert len(run.updates) == 6
    assert {len(worker.steps) for worker in run.workers} == {7} or stop.updates


def test_layers_that_leave_by_need_make_an_iteration_shorter(run_with: Callable[..., Run]) -> None:
    def elapsed(**job: Any) -> float:
        run = run_with(
            job=JobSection(**job),
            tensor=tuple(TensorSection(key=f"layer-{i}", shape=(50_000,)) for i in range(4)),
            network=NetworkSection(bandwidth=2e6),
            cluster=ClusterSection(workers=3, chunk_bytes=10_000),
        )
        return run.workers[0].ended

    alone, fifo, first = (
        elapsed(),
        elapsed(overlap=True, priorities=False),
        elapsed(overlap=True, priorities=True),
    )
    assert first < fifo < alone


# --- situations that users of such systems ran into ---


def test_a_job_that_is_bound_by_bandwidth_shows_it(make_scenario: Callable[..., Scenario]) -> None:
    """1 Gb/s, 2 workers, a model of 240 MB, 0.2 s of computing: nearly all time is communication."""

    def step(servers: int) -> Any:
        scenario = make_scenario(
            2,
            3,
            Constant(mean=0.2),
            cluster=ClusterSection(workers=2, servers=servers, chunk_bytes=4 << 20),
            network=NetworkSection(bandwidth=1.25e8),
            tensor=(TensorSection(key="model", shape=(60_000_000,)),),
        )
        return summarise(simulate(scenario, "bsp", 1))

    one, two = step(1), step(2)
    # Each server's card takes 2 x 240 MB a step: 3.84 s, while answers already go the other way.
    assert 0.2 + 3.84 < one.step_time_s.mean < 0.2 + 3.84 + 0.2
    assert one.split.communicate > 0.9
    assert 0.2 + 1.92 < two.step_time_s.mean < 0.2 + 1.92 + 0.2


def test_asp_is_not_slower_than_bsp_under_the_same_load(run_with: Callable[..., Run]) -> None:
    bsp, asp = (summarise(run_with(policy=policy, law=Exponential(mean=1.0))) for policy in ("bsp", "asp"))
    assert asp.gradients_per_s >= bsp.gradients_per_s


def test_no_rank_is_slower_than_another_with_equal_workers(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(
        4, 200, Constant(mean=0.1), network=NetworkSection(latency=0.001), server=ServerSection(apply=0.002)
    )
    for policy in ("bsp", "asp"):
        run = simulate(scenario, policy, 1)
        means = [sum(step.end - step.start for step in worker.steps) / 200 for worker in run.workers]
        assert max(means) / min(means) < 1.05


def test_a_scheduler_that_is_started_again_takes_the_cluster_over(run_with: Callable[..., Run]) -> None:
    """Training goes on without it; the workers meet at barriers again when it is back."""
    run = run_with(Crash(node="scheduler", at=3.3, restart=2.0), job=JobSection(barrier_every=2))
    assert is_complete(run)
    assert run.unstopped == []
    assert any("goes on from epoch 1" in line.text for line in run.logs)


def test_the_first_joins_wait_for_a_scheduler_that_is_started_again(run_with: Callable[..., Run]) -> None:
    """It ends while one worker is still missing; the others register again, and nobody has to be started again."""
    run = run_with(Crash(node="scheduler", at=2.0, restart=3.0), Late(node="worker-2", at=7.0))
    assert is_complete(run)
    assert run.unstopped == []
    assert all(worker.steps[0].start > 7.0 for worker in run.workers)


def test_a_worker_that_comes_while_there_is_no_scheduler_waits_for_it(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="scheduler", at=2.0, restart=6.0), Late(node="worker-2", at=4.0))
    assert is_complete(run)
    assert all(worker.steps[0].start > 8.0 for worker in run.workers)


def test_a_run_is_over_when_all_that_have_died_begin_another_cluster(run_with: Callable[..., Run]) -> None:
    """Nobody can say what the cluster was; its parameters are lost."""
    nodes = ("scheduler", "server-0", "worker-0", "worker-1", "worker-2")
    run = run_with(*(Crash(node=node, at=5.5, restart=1.0) for node in nodes))
    assert run.begun_anew
    assert run.elapsed < 10.0
    assert run.unstopped == lacking_progress(run) == []


def test_joins_that_no_scheduler_hears_end_at_their_deadline(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="scheduler", at=2.0), Late(node="worker-2", at=7.0))
    assert all(isinstance(worker.error, JoinTimeoutError) for worker in run.workers)
    assert all("within 30 s: waiting for the scheduler" in str(worker.error) for worker in run.workers)


@pytest.mark.parametrize("at", [2.0, 2.1, 2.15, 2.2, 2.25, 2.3])
def test_a_barrier_that_a_scheduler_has_opened_for_some_is_opened_for_the_others(
    run_with: Callable[..., Run], at: float
) -> None:
    """Rank 1 hears of what is opened after 0.2 s, or not at all, as its connection and the scheduler end meanwhile."""
    faults = (
        Link(node="worker-1", to="scheduler", latency=0.2),
        Reset(node="worker-1", to="scheduler", at=at),
        Crash(node="scheduler", at=at + 0.02, restart=2.0),
    )
    cluster = msgspec.structs.replace(CLUSTER, reconnect_grace=1.0)
    assert is_complete(run_with(*faults, job=JobSection(barrier_every=1), cluster=cluster))


@pytest.mark.parametrize("at", [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07])
def test_a_scheduler_may_end_at_any_moment_of_the_first_joins(run_with: Callable[..., Run], at: float) -> None:
    """Some may have the first view and others not; some may know a server, and it not them."""
    run = run_with(Crash(node="scheduler", at=at, restart=1.0))
    assert is_complete(run)
    assert run.unstopped == []


def test_survivors_are_told_the_same_within_the_death_time_out_and_a_heartbeat(
    run_with: Callable[..., Run],
) -> None:
    hung = 5.3
    run = run_with(Hang(node="worker-1", at=hung))
    survivors = [run.workers[0], run.workers[2]]
    errors = [worker.error for worker in survivors]
    assert all(isinstance(error, WorkerLostError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert error is not None
        assert error.details == {"ranks": [1], "key": "weights", "round": 6}
        assert "rank 1 (worker-1): no heartbeat for 4.0 s" in str(error)
    # What the death time-out counts from is the last heartbeat, and that is never older than the interval.
    assert all(worker.ended <= hung + CLUSTER.death_timeout + CLUSTER.heartbeat for worker in survivors)
