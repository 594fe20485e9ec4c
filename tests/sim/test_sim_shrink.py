"""Making scenarios smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from sim.faults import Crash, Link, Pause
from sim.scenario import parse_scenario
from sim.sections import ClusterSection, JobSection, NetworkSection, TensorSection
from sim.shrink import shrink
from sim.writing import to_toml

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario


@pytest.fixture
def large(make_scenario: Callable[..., Scenario]) -> Scenario:
    return make_scenario(
        5,
        20,
        cluster=ClusterSection(workers=5, servers=3, racks=2),
        network=NetworkSection(latency=0.1, jitter=0.1),
        job=JobSection(separate=True),
        tensor=tuple(TensorSection(key=f"key-{i}", shape=(4,), group=(0, 1) if i == 2 else ()) for i in range(3)),
        uneven={"worker-4": 3},
        fault=(
            Pause(node="worker-0", at=1.0, duration=1.0),
            Crash(node="worker-2", at=2.0),
            Link(node="worker-1", to="server-2", cut=True),
        ),
    )


def test_what_a_failure_does_not_need_is_taken_away(large: Scenario) -> None:
    def fails(scenario: Scenario) -> bool:
        return scenario.steps >= 3 and any(isinstance(fault, Crash) for fault in scenario.fault)

    smallest = shrink(large, fails)
    assert smallest.fault == (Crash(node="worker-2", at=2.0),)
    # The third worker is named by the fault.
    assert smallest.cluster.workers == 3
    assert (smallest.cluster.servers, smallest.cluster.racks, smallest.steps) == (1, 1, 3)
    assert (smallest.network, smallest.job) == (NetworkSection(), JobSection())
    assert (len(smallest.tensor), smallest.uneven) == (1, {})


def test_what_a_failure_needs_stays(large: Scenario) -> None:
    def fails(scenario: Scenario) -> bool:
        return scenario.network.jitter > 0 and any(tensor.group for tensor in scenario.tensor)

    smallest = shrink(large, fails)
    assert smallest.network == NetworkSection(jitter=0.1)
    assert [tensor.group for tensor in smallest.tensor] == [(0, 1)]
    assert smallest.cluster.workers == 2
    assert smallest.fault == ()


def test_standbys_stay_only_where_the_failure_needs_them(large: Scenario) -> None:
    copied = structs.replace(large, cluster=structs.replace(large.cluster, replication=2))
    assert shrink(copied, lambda scenario: True).cluster.replication == 1
    smallest = shrink(copied, lambda scenario: scenario.cluster.replication == 2)
    # There is none without a second server.
    assert smallest.cluster.servers == 2


def test_it_is_tried_so_often_and_not_more(large: Scenario) -> None:
    asked = []

    def fails(scenario: Scenario) -> bool:
        asked.append(scenario)
        return True

    shrink(large, fails, tries=5)
    assert len(asked) == 5


def test_the_smallest_scenario_can_be_read_from_a_file(large: Scenario) -> None:
    """Without the keys of all, some workers would have none."""

    def fails(scenario: Scenario) -> bool:
        return len(scenario.workers) == 5 and any(tensor.group for tensor in scenario.tensor)

    smallest = shrink(large, fails)
    assert len(smallest.tensor) == 2
    assert parse_scenario(to_toml(smallest).encode(), "smallest.toml") == smallest
