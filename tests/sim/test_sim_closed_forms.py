"""The simulator against what is known on paper: the numbers come from closed forms, not from the simulator."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from sim.checks import find_violations
from sim.cluster import simulate
from sim.compute import Constant, Exponential, ShiftedExponential
from sim.report import summarise
from sim.sections import ServerSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run
    from sim.scenario import Scenario

# Mean of the maximum of N exponential times with mean 1: H_N = 1 + 1/2 + ... + 1/N.
EXPECTED_MAXIMUM = {8: 2.717857, 16: 3.380729, 100: 5.187378}


def deviation_of_maximum(workers: int) -> float:
    return math.sqrt(sum(1.0 / i**2 for i in range(1, workers + 1)))


def staleness_by_rank(run: Run, first: int, last: int) -> dict[int, list[int]]:
    """Return the staleness of all gradients in the versions first to last, by the rank that sent them."""
    found: dict[int, list[int]] = {}
    for update in run.updates:
        if first <= update.version <= last:
            for rank, staleness in zip(update.ranks, update.staleness, strict=True):
                found.setdefault(rank, []).append(staleness)
    return found


@pytest.mark.parametrize(("workers", "rounds"), [(8, 500), (16, 250), (100, 50)])
def test_a_bsp_step_takes_as_long_as_the_slowest_worker(
    make_scenario: Callable[..., Scenario], workers: int, rounds: int
) -> None:
    summary = summarise(simulate(make_scenario(workers, rounds), "bsp", 1))
    error = deviation_of_maximum(workers) / math.sqrt(rounds)
    assert summary.step_time_s.mean == pytest.approx(EXPECTED_MAXIMUM[workers], abs=3 * error)


def test_a_shift_is_added_to_the_bsp_step_time(make_scenario: Callable[..., Scenario]) -> None:
    rounds = 250
    scenario = make_scenario(16, rounds, ShiftedExponential(shift=1.0, scale=0.5))
    error = 0.5 * deviation_of_maximum(16) / math.sqrt(rounds)
    assert summarise(simulate(scenario, "bsp", 1)).step_time_s.mean == pytest.approx(2.690364, abs=3 * error)


@pytest.mark.parametrize("workers", [8, 16])
def test_mean_asp_staleness_is_one_less_than_the_number_of_workers(
    make_scenario: Callable[..., Scenario], workers: int
) -> None:
    # Between two updates of a worker all others make one on average, whatever the law of the step times.
    summary = summarise(simulate(make_scenario(workers, 500, warmup=50), "asp", 1))
    assert summary.staleness.mean == pytest.approx(workers - 1, rel=0.005)


def test_asp_staleness_of_exponential_workers_is_geometric(make_scenario: Callable[..., Scenario]) -> None:
    workers = 16
    run = simulate(make_scenario(workers, 500), "asp", 1)
    last = max(update.version for update in run.updates if update.time <= min(w.ended for w in run.workers))
    values = [value for row in staleness_by_rank(run, 500, last).values() for value in row]
    error = math.sqrt(0.0625 * 0.9375 / len(values))
    assert values.count(0) / len(values) == pytest.approx(0.0625, abs=3 * error)


def test_asp_staleness_adds_up_to_the_versions_between_first_and_last_push(
    make_scenario: Callable[..., Scenario],
) -> None:
    run = simulate(make_scenario(8, 200, slow={"worker-7": 4.0}), "asp", 1)
    for worker in run.workers:
        own = [update for update in run.updates if update.ranks == [worker.rank]]
        assert sum(update.staleness[0] + 1 for update in own) == own[-1].version


def test_a_slow_exponential_worker_governs_the_bsp_step_time(make_scenario: Callable[..., Scenario]) -> None:
    rounds = 500
    run = simulate(make_scenario(8, rounds, slow={"worker-7": 4.0}), "bsp", 1)
    # E max(X, M) for X of mean 4 and M the maximum of 7 of mean 1: H_7 + B(1/4, 8).
    expected = sum(1 / i for i in range(1, 8)) + math.gamma(0.25) * math.gamma(8) / math.gamma(8.25)
    # The step time varies a little less than the slow worker's alone, whose deviation is its mean.
    assert summarise(run).step_time_s.mean == pytest.approx(expected, abs=3 * 4.0 / math.sqrt(rounds))


def test_a_slow_exponential_worker_costs_asp_its_own_rate_only(make_scenario: Callable[..., Scenario]) -> None:
    summary = summarise(simulate(make_scenario(8, 300, slow={"worker-7": 4.0}, warmup=20), "asp", 1))
    # A Poisson process of rate 7 + 1/4.
    error = math.sqrt(7.25 / summary.window_s)
    assert summary.updates_per_s == pytest.approx(7.25, abs=3 * error)


def test_staleness_of_workers_of_different_speed(make_scenario: Callable[..., Scenario]) -> None:
    # (R - r) / r for a worker of rate r where all together have rate R.
    run = simulate(make_scenario(8, 400, Constant(mean=1.0), slow={"worker-7": 4.0}), "asp", 1)
    rows = staleness_by_rank(run, 30, 29 + 29 * 50)
    means = {rank: sum(values) / len(values) for rank, values in rows.items()}
    assert means == pytest.approx({**dict.fromkeys(range(7), 6.25), 7: 28.0})


def test_constant_times_give_exact_rates(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(8, 40, Constant(mean=1.0), slow={"worker-7": 4.0})
    bsp, asp = (summarise(simulate(scenario, policy, 1)) for policy in ("bsp", "asp"))
    assert bsp.step_time_s.mean == 4.0
    assert bsp.updates_per_s == 0.25
    assert bsp.utilisation == (7 + 4) / (8 * 4)
    assert asp.updates_per_s == 7.25
    assert asp.utilisation == 1.0


def test_one_worker_waits_for_its_server_in_every_step(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(1, 100, Constant(mean=0.1), server=ServerSection(apply=0.005))
    assert summarise(simulate(scenario, "asp", 1)).updates_per_s == pytest.approx(9.524, abs=0.0005)


def test_a_saturated_server_makes_one_update_per_service_time(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(50, 60, Exponential(mean=0.1), warmup=10, server=ServerSection(apply=0.005))
    # In a window of any length, one update more or less is counted.
    assert summarise(simulate(scenario, "asp", 1)).updates_per_s == pytest.approx(200.0, rel=0.002)


def test_a_step_takes_the_same_time_under_every_policy(make_scenario: Callable[..., Scenario]) -> None:
    runs = [simulate(make_scenario(4, 30), policy, 5) for policy in ("bsp", "asp")]
    bsp, asp = ([[step.computed - step.start for step in worker.steps] for worker in run.workers] for run in runs)
    assert [pytest.approx(times) for times in bsp] == asp


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_nothing_is_lost_or_doubled(make_scenario: Callable[..., Scenario], policy: str) -> None:
    run = simulate(make_scenario(8, 50, slow={"worker-2": 3.0}), policy, 3)
    assert find_violations(run) == []
    assert run.in_flight == []
