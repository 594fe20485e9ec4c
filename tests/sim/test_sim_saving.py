"""Workers that save together: what it costs, what is lost without it, and that it is one moment that is saved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from aiokv.errors import ConfigError
from sim import cli
from sim.checks import InvariantError
from sim.cluster import simulate
from sim.compute import Constant
from sim.faults import Crash
from sim.random_scenarios import random_scenario
from sim.report import notes
from sim.saving import steps_since_save
from sim.scenario import parse_scenario
from sim.sections import ClusterSection, JobSection, NetworkSection, TensorSection
from sim.split import split

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sim.record import Run
    from sim.scenario import Scenario

LARGE = TensorSection(key="w", shape=(1000, 1000))
"""Four million bytes of float32."""


@pytest.fixture
def saving(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    """Return a function that runs two workers for ten steps of a second each, which save after every third."""

    def run(policy: str, job: dict[str, Any], **fields: Any) -> Run:
        section = JobSection(**{"save_every": 3, **job})
        scenario = make_scenario(2, 10, Constant(mean=1.0), job=section, tensor=(LARGE,), **fields)
        return simulate(scenario, policy, 1)

    return run


def test_all_wait_while_the_first_worker_writes(saving: Callable[..., Run]) -> None:
    # Four megabytes of weights and as much momentum, at a megabyte a second.
    run = saving("bsp", {"save_state": 1.0, "save_bandwidth": 1e6})
    assert [save.steps for save in run.saves] == [3, 6, 9]
    assert [save.end - save.begin for save in run.saves] == pytest.approx([8.0] * 3)
    assert [worker.ended for worker in run.workers] == pytest.approx([34.0] * 2)
    assert [split(run, worker).checkpoint for worker in run.workers] == pytest.approx([24.0] * 2)


def test_what_is_read_comes_over_the_network_card(saving: Callable[..., Run]) -> None:
    # Both servers send at once, so what the card of the first worker carries is all that counts.
    network = NetworkSection(bandwidth=1e6)
    run = saving("bsp", {}, network=network, cluster=ClusterSection(workers=2, servers=2))
    assert run.saves[0].end - run.saves[0].begin == pytest.approx(4.0, rel=0.01)


def test_workers_that_save_meet_under_a_policy_that_waits_for_nobody(saving: Callable[..., Run]) -> None:
    run = saving("asp", {}, slow={"worker-1": 2.0})
    assert [save.end for save in run.saves] == pytest.approx([6.0, 12.0, 18.0])
    assert [len(worker.steps) for worker in run.workers] == [10, 10]


def test_what_came_after_the_last_save_is_lost(saving: Callable[..., Run]) -> None:
    run = saving("bsp", {}, fault=(Crash(node="server-0", at=8.5),))
    # Eight steps were made by each of two workers, six are saved.
    assert steps_since_save(run) == 4
    assert any(
        "for the last time after 6 steps each; 4 steps of all workers are in no file" in line
        for line in notes({"bsp": [run]})
    )


def test_a_save_that_a_crash_interrupts_is_none(saving: Callable[..., Run]) -> None:
    run = saving("bsp", {"save_bandwidth": 1e6}, fault=(Crash(node="worker-0", at=5.0),))
    # It began to write at three seconds, and would have been done at seven.
    assert run.saves == []
    assert any("nothing was saved; 6 steps of all workers are in no file" in line for line in notes({"bsp": [run]}))


def test_updates_while_values_are_saved_are_found(saving: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.saving.Saves._meet", lambda *_: iter(()))
    with pytest.raises(InvariantError, match="updates of chunks were made while their values were saved"):
        saving("asp", {"save_bandwidth": 1e6}, slow={"worker-1": 1.5})


def test_bundled_tensors_are_saved_one_by_one(make_scenario: Callable[..., Scenario]) -> None:
    tensors = tuple(TensorSection(key=f"t{i}", shape=(100,)) for i in range(3))
    job = JobSection(save_every=1, save_bandwidth=400.0)
    run = simulate(make_scenario(2, 2, Constant(mean=1.0), job=job, tensor=tensors), "bsp", 1)
    assert [save.end - save.begin for save in run.saves] == pytest.approx([3.0])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("[job]\nsave_every = 2\noverlap = true", "job.save_every: nobody may push while all save"),
        ("[uneven]\nworker-0 = 2\n[job]\nsave_every = 2", "job.save_every: worker-0 writes"),
    ],
)
def test_a_scenario_in_which_nobody_can_save_is_an_error(lines: str, expected: str) -> None:
    text = f'steps = 3\n[cluster]\nworkers = 2\n[compute]\nlaw = "constant"\nmean = 1\n{lines}\n'
    with pytest.raises(ConfigError, match="my") as caught:
        parse_scenario(text.encode(), "my.toml")
    assert expected in str(caught.value)


def test_the_results_say_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    lines = ("steps = 5", 'policies = ["bsp"]', "[cluster]", "workers = 2", "[compute]", 'law = "constant"', "mean = 1")
    path.write_text("\n".join((*lines, "[job]", "save_every = 2", "")))
    result = CliRunner().invoke(cli.sim, ["run", str(path), "--json", "--out", str(tmp_path)])
    numbers = json.loads(result.stdout)["policies"]["bsp"]
    assert [save["steps"] for save in numbers["saves"]] == [2, 4]
    assert numbers["steps_since_save"] == 2


def test_random_scenarios_save() -> None:
    assert {random_scenario(seed).job.save_every for seed in range(100)} == {0, 1, 2}
