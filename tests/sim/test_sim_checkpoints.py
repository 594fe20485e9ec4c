"""Checkpoints of a simulated cluster: nobody waits for them, and what is in them is checked against what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core.checkpoint_names import name_of
from aiokv.core.effects import WriteManifest
from aiokv.core.saved_state import ChunkState
from aiokv.errors import ConfigError
from aiokv.wire.messages import CheckpointFile
from sim.checks import InvariantError
from sim.cluster import simulate
from sim.compute import Constant
from sim.disk import Disk, steps_since_checkpoint, whole
from sim.faults import Crash, Slow, Torn
from sim.record import Run, UpdateRecord, WorkerRecord
from sim.report import notes
from sim.scenario import parse_scenario
from sim.sections import ClusterSection, NetworkSection, TensorSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario

TENSORS = (TensorSection(key="large", shape=(40_000,)), TensorSection(key="small", shape=(4,)))


def scenario_of(make_scenario: Callable[..., Scenario], steps: int = 12, **cluster: Any) -> Scenario:
    """Return a scenario of three workers and two servers."""
    section = ClusterSection(workers=3, servers=2, **cluster)
    return make_scenario(3, steps, cluster=section, network=NetworkSection(latency=0.01), tensor=TENSORS)


def clocks(run: Run) -> list[int]:
    """Return the clocks of the complete checkpoints."""
    return [int(place.rpartition("-")[2]) for place in run.checkpoints]


@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp:2", "k_sync:2", "backup:1", "sum"])
def test_nobody_waits_for_a_checkpoint(make_scenario: Callable[..., Scenario], policy: str) -> None:
    runs = [
        simulate(scenario_of(make_scenario, checkpoint_every=every, checkpoint_write=50.0), policy, 1)
        for every in (0, 3)
    ]
    without, having = ([[(step.start, step.end) for step in worker.steps] for worker in run.workers] for run in runs)
    assert having == without
    assert clocks(runs[0]) == []
    assert 3 in clocks(runs[1])


def test_last_few_of_all_are_kept(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(scenario_of(make_scenario, checkpoint_every=2), "bsp", 1)
    assert clocks(run) == [8, 10, 12]
    assert {(state.key, state.counts) for state in run.checkpoints[f"disk/{name_of(1, 8)}"]} == {
        (key, ((0, 8), (1, 8), (2, 8))) for key in ("large", "small")
    }


def test_one_every_so_many_seconds(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(scenario_of(make_scenario, 30, checkpoint_seconds=4.0), "bsp", 1)
    assert len(clocks(run)) == 3
    assert len([log for log in run.logs if "is complete" in log.text]) > 3


@pytest.mark.parametrize("seconds", [3.0, 5.0])
def test_they_go_on_being_made_when_writing_takes_longer_than_an_interval(
    make_scenario: Callable[..., Scenario], seconds: float
) -> None:
    # Rounds take a second each.
    section = ClusterSection(workers=3, servers=2, checkpoint_every=2, checkpoint_write=seconds)
    run = simulate(make_scenario(3, 40, Constant(mean=1.0), cluster=section, tensor=TENSORS), "bsp", 1)
    complete = [log.text for log in run.logs if "is complete" in log.text]
    # One is written, then all go on to the next one.
    assert len(complete) >= 40 / (seconds + 2 + 1)
    assert not [log for log in run.logs if "there is no checkpoint" in log.text]


def test_cut_of_async_keys_has_less_of_who_is_slow(make_scenario: Callable[..., Scenario]) -> None:
    section = ClusterSection(workers=2, checkpoint_every=20)
    slow = Slow(node="worker-1", factor=4.0)
    run = simulate(make_scenario(2, 25, cluster=section, tensor=TENSORS, fault=(slow,)), "asp", 1)
    (states,) = run.checkpoints.values()
    for state in states:
        counts = dict(state.counts)
        assert counts[0] == 20
        assert 0 < counts[1] < 20


@pytest.mark.parametrize("restart", [0.5, 4.0])
def test_one_that_was_under_way_when_the_scheduler_ended_is_made_up_for_at_once(
    make_scenario: Callable[..., Scenario], restart: float
) -> None:
    """Rounds take a second each. The first one is being written when the scheduler ends."""
    section = ClusterSection(workers=3, servers=2, checkpoint_every=10, checkpoint_write=1.0)
    crash = Crash(node="scheduler", at=10.5, restart=restart)
    run = simulate(make_scenario(3, 20, Constant(mean=1.0), cluster=section, tensor=TENSORS, fault=(crash,)), "bsp", 1)
    # All nodes have found it after a second, and nobody is past the next step.
    first, last = clocks(run)
    assert 10.5 + restart < first < 10.5 + restart + 3.0
    assert last == 20


def test_there_are_no_more_of_them_when_a_server_is_lost(make_scenario: Callable[..., Scenario]) -> None:
    section = ClusterSection(workers=3, servers=2, checkpoint_every=1)
    crash = Crash(node="server-1", at=8.0)
    run = simulate(make_scenario(3, 12, cluster=section, tensor=TENSORS, fault=(crash,)), "bsp", 1)
    ends = [log.time for log in run.logs if "is complete" in log.text]
    assert ends
    assert max(ends) <= 8.0


# --- files that are torn ---


def test_torn_files_that_nobody_has_noticed_are_passed_over(make_scenario: Callable[..., Scenario]) -> None:
    # Rounds take a second each; the checkpoints of the last two are torn on one of the servers.
    section = ClusterSection(workers=3, servers=2, checkpoint_every=2)
    torn = Torn(node="server-1", at=9.5)
    scenario = make_scenario(3, 12, Constant(mean=1.0), cluster=section, tensor=TENSORS, fault=(torn,))
    run = simulate(scenario, "bsp", 1)
    assert clocks(run) == [8, 10, 12]
    assert whole(run) == [f"disk/{name_of(1, 8)}"]
    assert steps_since_checkpoint(run) == 3 * 4
    text = f"3 complete checkpoints at the end, 2 of them torn: the newest whole one is {name_of(1, 8)}; 12 steps"
    assert any(text in line for line in notes({"bsp": [run]}))


def test_torn_files_that_a_server_has_noticed_are_of_no_complete_checkpoint(
    make_scenario: Callable[..., Scenario],
) -> None:
    section = ClusterSection(workers=3, servers=2, checkpoint_every=2)
    torn = Torn(node="servers", at=3.5, duration=4.0, noticed=True)
    scenario = make_scenario(3, 12, Constant(mean=1.0), cluster=section, tensor=TENSORS, fault=(torn,))
    run = simulate(scenario, "bsp", 1)
    assert [log.text for log in run.logs if "there is no checkpoint of round" in log.text] == [
        f"there is no checkpoint of round {clock}: server {index}: server-{index}'s part is torn"
        for clock, index in ((4, 0), (6, 0))
    ]
    assert clocks(run) == [8, 10, 12]
    assert run.torn == {}


def test_writing_is_torn_when_the_fault_begins_in_the_middle_of_it(make_scenario: Callable[..., Scenario]) -> None:
    section = ClusterSection(workers=3, checkpoint_every=4, checkpoint_write=3.0)
    torn = Torn(node="server-0", at=6.0, duration=0.5)
    run = simulate(make_scenario(3, 12, Constant(mean=1.0), cluster=section, tensor=TENSORS, fault=(torn,)), "bsp", 1)
    assert [int(place[-2:]) for place in run.torn] == [4]


def test_without_a_whole_checkpoint_all_is_lost(make_scenario: Callable[..., Scenario]) -> None:
    section = ClusterSection(workers=2, checkpoint_every=3)
    torn = Torn(node="server-0")
    run = simulate(make_scenario(2, 4, Constant(mean=1.0), cluster=section, fault=(torn,)), "bsp", 1)
    assert steps_since_checkpoint(run) == 8
    assert any("1 of them torn: none is whole" in line for line in notes({"bsp": [run]}))


def test_only_servers_write_checkpoints() -> None:
    text = 'steps = 3\n[cluster]\nworkers = 2\n[compute]\nlaw = "quiet"\nmean = 1\n'
    text += '[[fault]]\nkind = "torn"\nnode = "workers"\n'
    with pytest.raises(ConfigError, match="expected servers, got 'workers'"):
        parse_scenario(text.encode(), "my.toml")


# --- the check itself ---


@pytest.fixture
def disk(make_scenario: Callable[..., Scenario]) -> Disk:
    """A disk after two updates of "w" with a push of both workers each."""
    run = Run(make_scenario(2, 2), "bsp", 0)
    run.workers = [WorkerRecord("worker-0"), WorkerRecord("worker-1")]
    tokens = [[("worker-0", number), ("worker-1", number)] for number in (1, 2)]
    run.updates = [UpdateRecord(0.0, "w", 0, 1 + i, [0, 1], [0, 0], tokens[i]) for i in range(2)]
    return Disk(run, 0.0)


def written(disk: Disk, *states: ChunkState) -> WriteManifest:
    """Write parts of keys to a checkpoint."""
    disk._parts["ck"] = {0: list(states)}
    return WriteManifest(2, "ck", 2, [CheckpointFile("0", 0, "", 0, "")], [])


def state(key: str, *counts: int) -> ChunkState:
    """Return what is saved of a key at version 2."""
    return ChunkState(key, (1,), "float32", 0, 1, 2, tuple(enumerate(counts)), "bsp")


def decided(key: str, number: int) -> ChunkState:
    """Return what is saved of a key whose value has all rounds up to one that are decided for all keys."""
    return ChunkState(key, (1,), "float32", 0, 1, 2, ((0, 2), (1, 2)), "k_sync:2", round=number)


def test_checkpoint_that_counts_what_was_pushed_is_accepted(disk: Disk) -> None:
    disk.finish(written(disk, state("w", 2, 2)))
    assert list(disk.complete) == ["ck"]


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        ([state("w", 2, 1)], "has push 2 of rank 1, and says 1"),
        ([state("w", 2, 2), state("v", 1, 1)], "are not of one round"),
        ([decided("w", 2), decided("v", 1)], "key 'v' has round 1 of k_sync:2, others 2"),
    ],
)
def test_checkpoint_that_counts_wrongly_is_found(disk: Disk, states: list[ChunkState], problem: str) -> None:
    with pytest.raises(InvariantError, match=problem):
        disk.finish(written(disk, *states))


def test_checkpoint_that_lacks_a_part_is_found(disk: Disk) -> None:
    manifest = written(disk, state("w", 2, 2))
    manifest.parts.append(CheckpointFile("1", 0, "", 0, ""))
    with pytest.raises(InvariantError, match="parts"):
        disk.finish(manifest)
