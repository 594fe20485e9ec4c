"""Connections that end, and workers that die and come back into their places: every gradient counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.cluster import simulate
from sim.compute import Constant
from sim.faults import Crash, Reset, Slow
from sim.sections import ClusterSection, NetworkSection, ServerSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run
    from sim.scenario import Scenario

WORKERS = 3
STEPS = 12
POLICIES = ["bsp", "asp", "ssp:1", "k_async:2"]


@pytest.fixture
def run_with(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    def run(
        *faults: Any, policy: str = "bsp", on_worker_loss: str = "fail", seed: int = 1, replication: int = 1
    ) -> Run:
        cluster = ClusterSection(
            workers=WORKERS,
            servers=2,
            heartbeat=1.0,
            death_timeout=4.0,
            call_timeout=30.0,
            join_timeout=30.0,
            chunk_bytes=64,
            split_bytes=64,
            on_worker_loss=on_worker_loss,  # type: ignore[arg-type]
            respawn_timeout=8.0,
            replication=replication,  # type: ignore[arg-type]
        )
        tensors = tuple(TensorSection(key=f"key-{number}", shape=(20,)) for number in range(2))
        fields = {
            "cluster": cluster,
            "network": NetworkSection(latency=0.05),
            "server": ServerSection(apply=0.02),
            "tensor": tensors,
        }
        return simulate(make_scenario(WORKERS, STEPS, Constant(mean=1.0), fault=faults, **fields), policy, seed)

    return run


def counted(run: Run) -> dict[tuple[str, int], int]:
    """Return in how many updates of chunks each gradient is."""
    counts: dict[tuple[str, int], int] = {}
    for update in run.updates:
        for token in update.tokens:
            counts[token] = counts.get(token, 0) + 1
    return counts


def assert_all_counted(run: Run) -> None:
    """Check that every gradient of every step is in one update of every chunk."""
    chunks = len({(update.key, update.start) for update in run.updates})
    expected = {(worker.name, step): chunks for worker in run.workers for step in range(1, STEPS + 1)}
    assert counted(run) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_under_way_over_a_connection_that_ends_counts_once(run_with: Callable[..., Run], policy: str) -> None:
    run = run_with(Reset(node="workers", to="servers", at=1.0, times=40, every=0.27), policy=policy)
    assert all(worker.error is None for worker in run.workers)
    assert_all_counted(run)
    assert sum(run.duplicates.values()) > 0


@pytest.mark.parametrize("policy", ["k_sync:2", "backup:1", "k_batch_async:3", "round_robin"])
def test_decided_rounds_go_on_when_the_connections_between_servers_end(
    run_with: Callable[..., Run], policy: str
) -> None:
    run = run_with(Reset(node="server-1", to="server-0", at=1.0, times=40, every=0.27), policy=policy)
    assert all(worker.error is None for worker in run.workers)
    assert sum("server-1 is connected" in log.text or "it is made again" in log.text for log in run.logs) > 5
    steps = {(worker.name, step) for worker in run.workers for step in range(1, STEPS + 1)}
    in_rounds = {token for update in run.updates for token in update.tokens}
    assert in_rounds | run.dropped.keys() == steps
    assert not in_rounds & run.dropped.keys()


def test_others_go_on_without_a_worker_although_the_connections_between_servers_end(
    run_with: Callable[..., Run],
) -> None:
    resets = Reset(node="server-1", to="server-0", at=1.0, times=40, every=0.27)
    run = run_with(Crash(node="worker-2", at=5.13), resets, on_worker_loss="shrink")
    assert [worker.error for worker in run.workers[:2]] == [None, None]
    counts, chunks = counted(run), len({(update.key, update.start) for update in run.updates})
    assert {counts[f"worker-{rank}", step] for rank in range(2) for step in range(1, STEPS + 1)} == {chunks}
    assert {count for (name, _), count in counts.items() if name == "worker-2"} == {chunks}, "in all chunks, or in none"


def test_connection_that_ends_costs_little_time(run_with: Callable[..., Run]) -> None:
    plain, reset = run_with(), run_with(Reset(node="worker-1", to="server-0", at=5.0))
    assert reset.elapsed - plain.elapsed < 1.0


@pytest.mark.parametrize("policy", ["bsp", "asp"])
@pytest.mark.parametrize("moment", [0.02, 0.07, 0.12, 0.17, 0.5])
def test_worker_that_dies_at_any_moment_of_a_step_goes_on_in_its_place(
    run_with: Callable[..., Run], policy: str, moment: float
) -> None:
    """Steps take a second; then a push is under way for 0.05 s, the updates take some time, and the answer 0.05 s."""
    step = run_with(policy=policy).workers[1].steps[4]
    crash = Crash(node="worker-1", at=step.computed + moment, restart=0.5)
    run = run_with(crash, policy=policy, on_worker_loss="respawn")
    assert all(worker.error is None for worker in run.workers)
    assert_all_counted(run)
    assert len(run.worker_by_name["worker-1"].outages) == 1


@pytest.mark.parametrize("policy", ["bsp", "k_sync:3", "k_batch_async:3"])
def test_what_a_lost_worker_had_pushed_is_not_lost_with_a_server(run_with: Callable[..., Run], policy: str) -> None:
    """All of a step of a worker has come to the servers when it dies, and then a server, before the others' has."""
    step = run_with(policy=policy, replication=2).workers[1].steps[4]
    slow = [Slow(node=name, factor=8.0, at=step.start, duration=4.0) for name in ("worker-0", "worker-2")]
    lost = Crash(node="worker-1", at=step.computed + 0.3, restart=0.5), Crash(node="server-0", at=step.computed + 2.5)
    run = run_with(*slow, *lost, policy=policy, on_worker_loss="respawn", replication=2)
    assert all(worker.error is None for worker in run.workers)
    assert_all_counted(run)


def test_bsp_is_in_step_although_a_worker_dies(run_with: Callable[..., Run]) -> None:
    run = run_with(Crash(node="worker-2", at=5.13, restart=0.5), on_worker_loss="respawn")
    assert all(update.staleness == [0] * WORKERS for update in run.updates)


def test_worker_that_the_others_wait_for_makes_each_step_once_in_its_lives(
    make_scenario: Callable[..., Scenario],
) -> None:
    """It is lost in its first step, and again in the same step: its last life begins with that."""
    cluster = ClusterSection(workers=2, death_timeout=10.0, on_worker_loss="shrink", respawn_timeout=6.0, min_workers=2)
    crash = Crash(node="worker-0", at=0.5, restart=1.0, times=2, every=2.0)
    run = simulate(make_scenario(2, 3, Constant(mean=1.0), fault=(crash,), cluster=cluster), "asp", 1)
    assert [worker.error for worker in run.workers] == [None, None]
    assert [number for number, _ in run.worker_by_name["worker-0"].numbered] == [1, 2, 3]
