"""How often to save, against the published numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from sim.advice import advise
from sim.cluster import simulate
from sim.compute import Constant
from sim.faults import Crash, Pause, Spot
from sim.saving_advice import failures_per_s, saving_advice
from sim.sections import JobSection, StopSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.faults import AnyFault
    from sim.record import Run
    from sim.scenario import Scenario

DAY = 86_400.0


@pytest.fixture
def run_with(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    def run(job: JobSection, *faults: AnyFault, steps: int = 5) -> Run:
        tensor = (TensorSection(key="w", shape=(1000,)),)
        stop = StopSection(time=1000.0)
        return simulate(
            make_scenario(2, steps, Constant(mean=1.0), job=job, fault=faults, tensor=tensor, stop=stop), "asp", 1
        )

    return run


def test_the_best_interval_is_that_of_daly(run_with: Callable[..., Run]) -> None:
    # 300 s a save, a failure a day of any of two nodes, ten minutes until it is there again.
    job = JobSection(checkpoint_interval=3600.0, checkpoint_cost=300.0)
    found = saving_advice(run_with(job, Spot(node="workers", scale=2.0 * DAY, restart=600.0)), 1.0)
    assert found is not None
    assert [found.mtbf_s, found.restart_s] == pytest.approx([DAY, 600.0])
    assert found.best_interval_s == pytest.approx(7001.4, abs=0.1)
    assert found.best_useful == pytest.approx(0.91261, abs=1e-5)
    assert found.useful < found.best_useful


def test_what_a_save_takes_is_measured(run_with: Callable[..., Run]) -> None:
    # Four thousand bytes at two thousand a second, after every second step.
    run = run_with(
        JobSection(save_every=2, save_bandwidth=2000.0), Crash(node="server-0", at=1e6, times=2, every=DAY, restart=1.0)
    )
    found = saving_advice(run, 1.0)
    assert found is not None
    assert [found.cost_s, found.interval_s] == pytest.approx([2.0, 2.0])
    [sentence] = [text for text in advise(run).sentences if "save" in text]
    assert "of work between saves would be better than 2 s" in sentence


def test_an_interval_near_the_best_one_is_left_as_it_is(run_with: Callable[..., Run]) -> None:
    job = JobSection(checkpoint_interval=7000.0, checkpoint_cost=300.0)
    run = run_with(job, Spot(node="worker-0", scale=DAY, restart=600.0))
    assert any("is about right (91.3% useful)" in text for text in advise(run).sentences)


def test_lives_of_a_weibull_law_have_its_mean(make_scenario: Callable[..., Scenario]) -> None:
    spot = Spot(node="worker-1", scale=100.0, shape=2.0, restart=None)
    scenario = make_scenario(4, 1, fault=(spot, Crash(node="workers", at=1.0, times=3, every=400.0, restart=10.0)))
    rate, restart = failures_per_s(scenario)
    assert rate == pytest.approx(1.0 / (50.0 * math.sqrt(math.pi)) + 0.01)
    assert restart == pytest.approx(0.01 * 10.0 / rate)


@pytest.mark.parametrize(
    ("job", "fault"),
    [
        (JobSection(), Spot(node="workers", scale=DAY)),
        (JobSection(checkpoint_interval=100.0, checkpoint_cost=1.0), Pause(node="worker-0", at=1.0, duration=0.1)),
        (JobSection(checkpoint_interval=100.0, checkpoint_cost=1.0), Crash(node="worker-0", at=2000.0)),
        (JobSection(checkpoint_interval=100.0), Spot(node="workers", scale=DAY)),
    ],
)
def test_nothing_is_advised_where_nothing_fails_again_or_saving_is_free(
    run_with: Callable[..., Run], job: JobSection, fault: AnyFault
) -> None:
    assert saving_advice(run_with(job, fault), 1.0) is None
