"""Rounds that one server decides for all keys, in situations that the fuzzer has found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.cluster import simulate
from sim.compute import Constant, Exponential, ShiftedExponential
from sim.faults import Crash
from sim.progress import lacking_progress
from sim.sections import ClusterSection, JobSection, NetworkSection, ServerSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario


@pytest.mark.parametrize("seed", range(10))
def test_a_key_takes_part_in_rounds_that_were_closed_before_its_first_push_came(
    make_scenario: Callable[..., Scenario], seed: int
) -> None:
    # Layers are pushed one by one, and jitter lets workers overtake each other between two of them.
    scenario = make_scenario(
        3,
        4,
        ShiftedExponential(shift=0.25, scale=0.25),
        network=NetworkSection(jitter=0.2, bandwidth=20_000.0),
        job=JobSection(overlap=True),
        tensor=(TensorSection(key="first", shape=(1,)), TensorSection(key="last", shape=(40,))),
    )
    run = simulate(scenario, "round_robin", seed)
    assert lacking_progress(run) == []
    for key in ("first", "last"):
        assert [update.ranks[0] for update in run.updates if update.key == key] == [0, 1, 2] * 4


@pytest.mark.parametrize("seed", range(10))
def test_a_pull_during_an_update_is_answered_although_a_worker_is_lost(
    make_scenario: Callable[..., Scenario], seed: int
) -> None:
    scenario = make_scenario(
        4,
        6,
        Exponential(mean=0.1),
        server=ServerSection(apply=0.02, per_message=0.01),
        job=JobSection(separate=True),
        fault=(Crash(node="worker-3", at=0.1),),
    )
    run = simulate(scenario, "k_async:2", seed)
    # At the end, one of the three may be told that nobody is left to make a round with.
    assert lacking_progress(run) == []
    assert max(len(worker.steps) for worker in run.workers) == 6


def test_a_worker_whose_step_closes_a_round_reads_what_it_has_made(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(make_scenario(1, 5, Constant(mean=1.0), cluster=ClusterSection(workers=1)), "k_batch_async:1", 1)
    assert [update.staleness for update in run.updates] == [[0]] * 5
