"""Scenarios in which calls that count as a whole once got stuck, or were told wrong; the fuzzer has found them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from sim.checks import find_violations
from sim.cluster import simulate
from sim.compute import Constant, Erlang, Normal, ShiftedExponential
from sim.faults import Crash, Hang
from sim.progress import lacking_progress
from sim.sections import ClusterSection, JobSection, NetworkSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sim.scenario import Scenario


def cluster(workers: int, servers: int, **changes: Any) -> ClusterSection:
    """Return a cluster that goes on without lost workers."""
    return ClusterSection(
        workers=workers,
        servers=servers,
        heartbeat=1.0,
        death_timeout=6.0,
        call_timeout=20.0,
        join_timeout=30.0,
        on_worker_loss="shrink",
        respawn_timeout=6.0,
        chunk_bytes=64,
        split_bytes=32,
        **changes,
    )


def all_steps(scenario: Scenario, policy: str, seed: int) -> bool:
    """Run a scenario with all checks; say whether every worker has taken all its steps."""
    run = simulate(scenario, policy, seed)
    assert lacking_progress(run) == []
    return all(sum(step.answered for step in worker.steps) == scenario.steps for worker in run.workers)


def test_small_keys_between_large_ones(make_scenario: Callable[..., Scenario]) -> None:
    """A call to one server alone comes before one to all of them, and after another."""
    tensors = (TensorSection(key="a", shape=(40,)), TensorSection(key="b", shape=(1,)))
    scenario = make_scenario(
        2,
        2,
        Erlang(phases=3, mean=0.5 / 3),
        cluster=cluster(2, 2),
        tensor=(*tensors, TensorSection(key="c", shape=(40,), dtype="float64")),
        network=NetworkSection(jitter=0.02),
        job=JobSection(overlap=True),
    )
    assert all(all_steps(scenario, "ringmaster:1", seed) for seed in range(22440, 22450))


def test_urgent_keys_that_overtake_others_on_the_way_to_some_servers(make_scenario: Callable[..., Scenario]) -> None:
    tensors = tuple(TensorSection(key=key, shape=(3, 5), dtype="float64") for key in "abcd")
    scenario = make_scenario(
        2,
        2,
        Normal(mean=0.5, sd=0.125),
        cluster=cluster(2, 3),
        tensor=tensors,
        network=NetworkSection(bandwidth=2000.0),
        job=JobSection(overlap=True, separate=True),
    )
    assert all(all_steps(scenario, "round_robin", seed) for seed in range(2795, 2805))


def test_job_ends_although_its_last_checkpoints_wait_for_what_is_never_made(
    make_scenario: Callable[..., Scenario],
) -> None:
    """The workers that are left bring too few gradients for a round."""
    scenario = make_scenario(
        3,
        5,
        Normal(mean=0.5, sd=0.125),
        cluster=cluster(3, 1, checkpoint_every=1, checkpoint_write=0.01),
        tensor=(TensorSection(key="a", shape=(1,)),),
        job=JobSection(barrier_every=1),
        fault=(Hang(node="worker-2", at=2.037), Hang(node="worker-0", at=0.735)),
    )
    assert lacking_progress(simulate(scenario, "k_batch_async:3", 1152)) == []


def test_gradient_of_a_lost_worker_may_be_too_late_for_one_group_alone(make_scenario: Callable[..., Scenario]) -> None:
    """Nobody is told so; what a policy does not drop is in all groups or in none."""
    for tenths in range(3, 23):
        scenario = make_scenario(
            2,
            1,
            ShiftedExponential(shift=0.25, scale=0.25),
            cluster=cluster(2, 2),
            tensor=(TensorSection(key="key-0", shape=(1,)), TensorSection(key="key-1", shape=(1,), group=(1,))),
            network=NetworkSection(bandwidth=2000.0),
            fault=(Crash(node="worker-1", at=tenths / 10),),
        )
        simulate(scenario, "quorum:2:0.25:0", 29670)


def test_key_without_a_round_that_a_lost_worker_alone_has_brought_is_not_behind_for_that(
    make_scenario: Callable[..., Scenario],
) -> None:
    """Its first version is what the second round has made, of which the policy wants more."""
    scenario = make_scenario(
        3,
        1,
        Constant(mean=0.5),
        cluster=cluster(3, 1),
        tensor=(
            TensorSection(key="key-0", shape=(40,), dtype="int32"),
            TensorSection(key="key-2", shape=(3, 5), dtype="float64"),
        ),
        network=NetworkSection(bandwidth=2000.0, sharing="fifo"),
        job=JobSection(overlap=True),
        fault=(Hang(node="worker-0", at=1.368),),
    )
    assert lacking_progress(simulate(scenario, "adasync:1", 107104)) == []


def test_where_nobody_waits_for_others_they_go_on_whatever_a_lost_worker_was_sending(
    make_scenario: Callable[..., Scenario],
) -> None:
    """Its last call is in all keys or in none, although nobody takes it out (`on_worker_loss = "fail"`)."""
    for tenths in range(21, 31, 3):
        scenario = make_scenario(
            3,
            3,
            Constant(mean=0.5),
            cluster=structs.replace(cluster(3, 2), on_worker_loss="fail"),
            tensor=tuple(TensorSection(key=f"key-{number}", shape=(40,)) for number in range(3)),
            network=NetworkSection(bandwidth=2000.0),
            fault=(Crash(node="worker-2", at=tenths / 10),),
        )
        run = simulate(scenario, "ringmaster:9", 1)
        assert lacking_progress(run) == []
        assert find_violations(run) == []
