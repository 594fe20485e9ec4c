"""Situations that users of parameter servers ran into, by number; `tests/net` has them over TCP, with values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import (
    ClusterFullError,
    JoinTimeoutError,
    RoundTimeoutError,
    ServerLostError,
    StaleEpochError,
    WorkerLostError,
)
from sim.cluster import simulate
from sim.compute import Constant
from sim.faults import Crash, Join, Late, Pause, Reset, Slow
from sim.job import simulate_job
from sim.sections import ClusterSection, JobSection, NetworkSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run
    from sim.scenario import Scenario

TIMES: dict[str, Any] = {"heartbeat": 0.25, "death_timeout": 1.0, "call_timeout": 20.0, "join_timeout": 20.0}

IN_ROUND_2 = 1.5
"""Seconds after which a fault comes: steps take a second."""


@pytest.fixture
def run_with(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    """Return a function that runs a cluster whose steps take a second, but for those of workers that are slow."""

    def run(workers: int, steps: int, *faults: Any, policy: str = "bsp", **fields: Any) -> Run:
        settings = {name: fields.pop(name) for name in list(fields) if name in ClusterSection.__struct_fields__}
        cluster = ClusterSection(workers=workers, **(TIMES | settings))
        fields.setdefault("network", NetworkSection(latency=0.01))
        scenario = make_scenario(workers, steps, Constant(mean=1.0), fault=faults, cluster=cluster, **fields)
        return (simulate_job if cluster.restarts else simulate)(scenario, policy, 1)

    return run


def rounds(run: Run) -> list[list[int]]:
    """Return whose contributions are in each update of the only chunk."""
    return [update.ranks for update in run.updates]


def answered(run: Run) -> list[int]:
    """Return how many steps of each worker were answered."""
    return [sum(step.answered for step in worker.steps) for worker in run.workers]


def test_scenario_1_with_fail_both_are_told_who_is_missing_and_the_value_stays(run_with: Callable[..., Run]) -> None:
    run = run_with(3, 2, Crash(node="worker-2", at=IN_ROUND_2))
    assert rounds(run) == [[0, 1, 2]]
    for worker in run.workers[:2]:
        assert isinstance(worker.error, WorkerLostError)
        assert worker.error.details == {"ranks": [2], "key": "weights", "round": 2}
        assert worker.ended <= 2.0 + TIMES["death_timeout"] + TIMES["heartbeat"]


def test_scenario_1_with_shrink_the_round_closes_without_it(run_with: Callable[..., Run]) -> None:
    run = run_with(3, 2, Crash(node="worker-2", at=IN_ROUND_2), on_worker_loss="shrink")
    assert rounds(run) == [[0, 1, 2], [0, 1]]
    assert answered(run)[:2] == [2, 2]
    assert list(run.evicted) == ["worker-2"]


def test_scenario_2_who_comes_to_again_late_changes_nothing(run_with: Callable[..., Run]) -> None:
    run = run_with(3, 9, Pause(node="worker-2", at=IN_ROUND_2, duration=4.0), on_worker_loss="shrink")
    assert rounds(run) == [[0, 1, 2]] + [[0, 1]] * 8
    assert isinstance(run.workers[2].error, StaleEpochError)


def test_scenario_4_a_worker_with_more_batches_goes_on_alone(run_with: Callable[..., Run]) -> None:
    run = run_with(2, 11, uneven={"worker-0": 10})
    assert rounds(run) == [[0, 1]] * 10 + [[1]]


def test_scenario_5_async_workers_leave_one_by_one_and_the_server_ends_with_the_last(
    run_with: Callable[..., Run],
) -> None:
    run = run_with(2, 5, policy="asp", uneven={"worker-0": 1})
    assert sorted(rounds(run)) == [[0]] + [[1]] * 5
    assert run.unstopped == []
    assert run.elapsed >= run.workers[1].ended


def test_scenario_6_who_comes_to_a_barrier_twice_does_not_open_it(run_with: Callable[..., Run]) -> None:
    """Its connection ends while it waits there, and it asks again; that nobody is let through early is checked."""
    again = Reset(node="worker-0", to="scheduler", at=IN_ROUND_2, times=3, every=0.3)
    run = run_with(
        3,
        4,
        again,
        policy="asp",
        slow={"worker-1": 2.0, "worker-2": 3.0},
        reconnect_grace=0.5,
        job=JobSection(barrier_every=1),
    )
    assert answered(run) == [4, 4, 4]
    assert run.workers[0].ended == pytest.approx(12.0, abs=0.5)


def test_scenario_11_round_of_three_of_four_leaves_the_late_one_out_and_tells_it(run_with: Callable[..., Run]) -> None:
    run = run_with(4, 1, policy="k_sync:3", slow={"worker-3": 2.0})
    assert rounds(run) == [[0, 1, 2]]
    assert run.dropped == {("worker-3", 1): "late"}


def test_scenario_14_job_goes_on_from_its_checkpoint_when_a_server_is_killed(run_with: Callable[..., Run]) -> None:
    fields: dict[str, Any] = {"servers": 2, "checkpoint_every": 5, "restarts": 1, "restart_seconds": 3.0}
    run = run_with(2, 10, Crash(node="server-1", at=6.5), **fields)
    assert run.job is not None
    assert [(life.kept, life.made, life.error) for life in run.job.lives] == [
        (10, 12, "server-1 crashed"),
        (10, 10, ""),
    ]


def test_scenario_15_lost_keys_are_named_and_nothing_is_taken_for_their_first_value(
    run_with: Callable[..., Run],
) -> None:
    tensors = tuple(TensorSection(key=f"key-{number}", shape=(4,)) for number in range(6))
    run = run_with(2, 10, Crash(node="server-1", at=6.5), servers=2, tensor=tensors)
    placed = {
        server: {update.key for update in run.updates if update.node == server} for server in ("server-0", "server-1")
    }
    assert placed["server-1"]
    for worker in run.workers:
        assert isinstance(worker.error, ServerLostError)
        assert worker.error.details["server"] == 1
    assert max(update.time for update in run.updates if update.node == "server-1") <= 6.5


def test_scenario_16_one_worker_too_many_is_told_so_and_the_others_go_on(run_with: Callable[..., Run]) -> None:
    run = run_with(2, 6, Join(node="worker-2", at=2.5), max_workers=2)
    assert isinstance(run.workers[2].error, ClusterFullError)
    assert run.workers[2].ended <= 2.5 + 1.0
    assert rounds(run) == [[0, 1]] * 6


@pytest.mark.parametrize("restart", [0.1, 2.0])
def test_scenario_17_worker_that_is_killed_in_round_6_makes_it_in_its_next_life(
    run_with: Callable[..., Run], restart: float
) -> None:
    crash = Crash(node="worker-1", at=5.5, restart=restart)
    run = run_with(2, 8, crash, on_worker_loss="respawn", respawn_timeout=5.0)
    assert rounds(run) == [[0, 1]] * 8
    assert run.evicted == {}


def test_scenario_40_workers_may_start_before_the_server(run_with: Callable[..., Run]) -> None:
    run = run_with(2, 3, Late(node="server-0", at=2.0))
    assert answered(run) == [3, 3]
    assert run.workers[0].begun >= 2.0


def test_scenario_42_nothing_is_under_way_after_many_small_pushes(run_with: Callable[..., Run]) -> None:
    run = run_with(2, 300, policy="asp")
    assert len(run.updates) == 600
    assert (run.in_flight, run.dropped, run.unstopped) == ([], {}, [])


def test_scenario_64_one_of_two_is_no_cluster_and_who_was_killed_meanwhile_is_not_counted(
    run_with: Callable[..., Run],
) -> None:
    """Worker-0 is there first, and killed before the other one comes; it takes its place in its next life."""
    run = run_with(2, 3, Crash(node="worker-0", at=0.5, restart=6.0), Late(node="worker-1", at=3.0))
    assert min(update.time for update in run.updates) > 6.5
    assert rounds(run) == [[0, 1]] * 3
    assert run.evicted == {}


def test_scenario_64_one_of_two_never_forms_a_cluster(run_with: Callable[..., Run]) -> None:
    run = run_with(2, 3, Crash(node="worker-0", at=0.5), Late(node="worker-1", at=3.0))
    assert isinstance(run.workers[1].error, JoinTimeoutError)
    assert run.updates == []


def test_scenario_67_late_contributions_are_counted_for_each_worker(run_with: Callable[..., Run]) -> None:
    run = run_with(4, 100, policy="k_sync:3", slow={"worker-3": 2.5})
    late = {name for name, _ in run.dropped}
    assert late == {"worker-3"}
    assert set(run.dropped.values()) == {"late"}
    applied = sum(3 in ranks for ranks in rounds(run))
    assert len(run.dropped) == answered(run)[3] - applied > 0


def test_scenario_80_one_who_never_comes_is_waited_for_until_the_deadline(run_with: Callable[..., Run]) -> None:
    run = run_with(2, 1, Late(node="worker-1", at=100.0))
    error = run.workers[0].error
    assert isinstance(error, JoinTimeoutError)
    assert "missing 1 of 2 workers" in str(error)
    assert run.updates == []


def test_scenario_80_a_round_that_stays_open_names_whom_it_waits_for(run_with: Callable[..., Run]) -> None:
    run = run_with(2, 1, Slow(node="worker-1", factor=100.0))
    error = run.workers[0].error
    assert isinstance(error, RoundTimeoutError)
    assert error.details == {"ranks": [1], "key": "weights", "round": 1}
    assert all(update.time > run.workers[0].ended for update in run.updates), "what was pushed stays counted"
