"""Simulated servers that join while workers train, and get places of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ConfigError
from sim.checks import find_violations
from sim.cluster import simulate
from sim.compute import Normal
from sim.faults import Crash, Join, Late, Link
from sim.progress import lacking_progress
from sim.scenario import Scenario, parse_scenario
from sim.sections import ChangeSection, ClusterSection, TensorSection
from tests.sim.growing import growing

if TYPE_CHECKING:
    from sim.record import Run

STEPS = 12


def train(*faults: Any, **cluster: Any) -> Run:
    """Run two workers and two servers, and those that the faults bring."""
    settings = {"workers": 2, "servers": 2, "places": 4} | cluster
    run = simulate(growing(STEPS, faults, **settings), "bsp", 1)
    assert find_violations(run) == []
    assert lacking_progress(run) == []
    return run


def successors(run: Run) -> list[str]:
    """Return the processes of the nodes that have taken a place."""
    taken = [log.text.split(" takes the place of ")[0] for log in run.logs if " takes the place of " in log.text]
    return [name.partition("/")[0] for name in taken]


def test_two_servers_become_four_and_no_update_is_lost() -> None:
    run = train(Join(node="server-2", at=3.5), Join(node="server-3", at=5.5))
    assert successors(run) == ["server-2", "server-3"]
    chunks = {(update.key, update.start) for update in run.updates}
    assert len(chunks) > 4
    for chunk in chunks:
        versions = [update.version for update in run.updates if (update.key, update.start) == chunk]
        assert versions == list(range(1, STEPS + 1))


@pytest.mark.parametrize("at", [3.6, 3.8, 4.0, 4.5, 5.0, 6.0])
@pytest.mark.parametrize("lost", ["server-0", "server-1", "server-2"])
def test_with_copies_any_server_may_be_lost_while_places_move(lost: str, at: float) -> None:
    """Whatever moves, two nodes have everything that a worker was told."""
    run = train(Join(node="server-2", at=3.5), Crash(node=lost, at=at), replication=2)
    assert all(len(worker.steps) == STEPS for worker in run.workers)


def test_a_cluster_becomes_complete_although_the_scheduler_is_started_again_before() -> None:
    """The nodes that servers have started for places come to the other scheduler before the servers do."""
    late = Link(node="servers", to="scheduler", latency=0.3, at=0.4, duration=0.8)
    run = train(Crash(node="scheduler", at=0.5, restart=0.1), Late(node="worker-1", at=1.5), late)
    assert all(len(worker.steps) == STEPS for worker in run.workers)


def test_a_checkpoint_says_nothing_of_who_has_joined_and_pushed_nothing_wherever_places_are() -> None:
    """One of the parts of a key goes over to another server when a worker has joined and before its policy changes."""
    scenario = Scenario(
        policies=("backup:0",),
        steps=3,
        cluster=ClusterSection(
            workers=2, servers=2, places=5, max_workers=4, checkpoint_every=2, chunk_bytes=64, split_bytes=32
        ),
        compute=Normal(mean=2.0, sd=0.5),
        tensor=(TensorSection(key="w", shape=(3, 5), dtype="int32"),),
        fault=(
            Join(node="worker-2", at=0.11),
            Join(node="worker-3", at=2.509),
            Join(node="server-2", at=1.796),
            Join(node="server-3", at=4.99),
        ),
        change=(ChangeSection(after=2, policy="bsp"),),
    )
    run = simulate(scenario, "backup:0", 6535)
    [states] = run.checkpoints.values()
    assert {state.counts for state in states} == {((0, 2), (1, 2), (2, 2))}


TEXT = """
policies = ["bsp"]
steps = 5
[cluster]
workers = 1
servers = 2
places = 3
[compute]
law = "constant"
mean = 1.0
[[fault]]
kind = "join"
node = "server-2"
at = 2.5
"""


def test_a_file_says_which_servers_join() -> None:
    scenario = parse_scenario(TEXT.encode(), "my.toml")
    assert scenario.servers == ["server-0", "server-1", "server-2"]
    assert (scenario.cluster.cuts, scenario.workers) == (3, ["worker-0"])


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("places = 3", "places = 1", "cluster.places: expected 2 at least, one for each server, got 1"),
        ("places = 3", "", "cluster.places: expected more than 2, for servers join, got 0"),
        ('node = "server-2"', 'node = "server-7"', "fault[0].node: expected server-2, in the order in which they come"),
    ],
)
def test_a_file_that_can_not_be(before: str, after: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(TEXT.replace(before, after).encode(), "my.toml")
    assert problem in str(caught.value)
