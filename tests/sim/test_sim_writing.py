"""Scenarios as TOML files."""

from __future__ import annotations

import math

import pytest

from sim.compute import Fleet
from sim.faults import Link, Slow
from sim.random_scenarios import random_scenario
from sim.scenario import Scenario, load_scenario, parse_scenario, shipped_scenarios
from sim.sections import ClusterSection, NetworkSection, TensorSection
from sim.writing import to_toml


@pytest.mark.parametrize("name", shipped_scenarios())
def test_a_shipped_scenario_is_the_same_after_writing_and_reading(name: str) -> None:
    scenario = load_scenario(name)
    assert parse_scenario(to_toml(scenario).encode(), "again.toml") == scenario


def test_random_scenarios_are_the_same_after_writing_and_reading() -> None:
    for seed in range(200):
        scenario = random_scenario(seed)
        assert parse_scenario(to_toml(scenario).encode(), "again.toml") == scenario


def test_unusual_values_are_kept() -> None:
    scenario = Scenario(
        name="odd",
        title='"quoted" \\ and\ttabbed, über alles\x7f',
        steps=3,
        cluster=ClusterSection(workers=2),
        compute=Fleet(mean=0.1, worker_sd=1e-20),
        slow={"worker-1": 3.0},
        network=NetworkSection(bandwidth=math.inf),
        tensor=(TensorSection(key=7, shape=()), TensorSection(key=8, shape=(2, 3), group=(0, 1))),
        fault=(
            Slow(node=("worker-0", "worker-1"), factor=2.0, duration=math.inf),
            Link(node="workers", to="server-0", both=False, at=1.5, duration=2.0, cut=True),
        ),
        assertions=("p95_step < 80 ms",),
    )
    assert parse_scenario(to_toml(scenario).encode(), "odd.toml") == scenario


def test_only_what_is_not_a_default_is_written() -> None:
    text = to_toml(Scenario(name="x", steps=3, cluster=ClusterSection(workers=2), compute=Fleet(mean=0.1)))
    assert text == 'name = "x"\nsteps = 3\n\n[cluster]\nworkers = 2\n\n[compute]\nlaw = "fleet"\nmean = 0.1\n'
