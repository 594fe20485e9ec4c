"""Workers that do other work between push and pull: under essp what they read has come by then. All checks are on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.errors import ConfigError
from sim.cluster import simulate
from sim.compute import Constant
from sim.scenario import parse_scenario
from sim.sections import ClusterSection, JobSection, NetworkSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario

LATENCY = 0.01


@pytest.fixture
def waits(make_scenario: Callable[..., Scenario]) -> Callable[..., list[float]]:
    """Return a function that says how long a worker waits in each of its steps, each of which takes a second."""

    def run(policy: str, between: float) -> list[float]:
        scenario = make_scenario(
            3,
            4,
            Constant(mean=1.0),
            job=JobSection(between=between),
            # One is cut over both servers.
            tensor=(TensorSection(key="small", shape=(3,)), TensorSection(key="cut", shape=(100,))),
            network=NetworkSection(latency=LATENCY),
            cluster=ClusterSection(workers=3, servers=2, chunk_bytes=64, split_bytes=64),
        )
        return [step.end - step.computed for step in simulate(scenario, policy, 1).workers[0].steps]

    return run


@pytest.mark.parametrize("staleness", [0, 1])
def test_read_that_is_sent_ahead_is_not_waited_for(waits: Callable[..., list[float]], staleness: int) -> None:
    """A pull takes there and back. The first one is what makes a worker a reader."""
    there_and_back = 2 * LATENCY
    assert waits(f"ssp:{staleness}", 0.2) == pytest.approx([there_and_back] * 4)
    assert waits(f"essp:{staleness}", 0.2) == pytest.approx([there_and_back, 0.0, 0.0, 0.0])


def test_read_that_is_under_way_is_waited_for(waits: Callable[..., list[float]]) -> None:
    between = 0.5 * LATENCY
    left = 2 * LATENCY - between
    assert waits("essp:1", between) == pytest.approx([2 * LATENCY, left, left, left])


def test_work_between_push_and_pull_changes_nothing_else(waits: Callable[..., list[float]]) -> None:
    assert waits("bsp", 0.2) == waits("bsp", 0.5) == pytest.approx([2 * LATENCY] * 4)


@pytest.mark.parametrize("other", ["overlap", "cancel"])
def test_step_that_is_no_push_and_pull_has_nothing_between(other: str) -> None:
    text = 'steps = 3\n[cluster]\nworkers = 2\n[compute]\nlaw = "constant"\nmean = 1.0\n'
    text += f"[job]\nbetween = 0.2\n{other} = true\n"
    with pytest.raises(ConfigError, match=r"x\.toml, line 8: job\.between: .*set it to 0"):
        parse_scenario(text.encode(), "x.toml")
