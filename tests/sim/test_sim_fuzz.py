"""Random scenarios: what they cover, and what the user gets when one of them fails."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from aiokv.core.scheduler.barriers import Barriers
from aiokv.errors import ConfigError
from aiokv.policy import policy_names
from sim import cli
from sim.cluster import simulate
from sim.faults import AnyFault, Crash, Link
from sim.fuzz import fuzz, parse_seeds, wrong_with
from sim.mistakes import first_mistake
from sim.random_scenarios import random_scenario
from sim.scenario import parse_scenario
from sim.sections import SCHEDULER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def early_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let barriers open before the last worker is there."""
    original: Callable[..., list[int]] = Barriers._absent
    monkeypatch.setattr(Barriers, "_absent", lambda self, place, roster: original(self, place, roster)[1:])


def test_nothing_is_wrong_with_the_first_scenarios() -> None:
    with ThreadPoolExecutor(1) as executor:
        assert fuzz(range(200), executor) == []


def test_a_seed_gives_the_same_scenario_and_the_same_run_everywhere() -> None:
    one, two = random_scenario(7), random_scenario(7)
    assert one == two
    assert one != random_scenario(8)
    assert simulate(one, one.policies[0], 7).digest == simulate(two, two.policies[0], 7).digest


def test_every_scenario_can_be_read_from_a_file() -> None:
    assert [first_mistake(random_scenario(seed)) for seed in range(500)] == [None] * 500


def test_the_scenarios_have_all_policies_and_all_that_can_go_wrong() -> None:
    scenarios = [random_scenario(seed) for seed in range(500)]
    faults = [fault for scenario in scenarios for fault in scenario.fault]
    assert {type(fault) for fault in faults} == set(AnyFault.__args__)
    links = [fault for fault in faults if isinstance(fault, Link)]
    for field in ("latency", "loss", "duplicate", "reorder", "clog", "cut"):
        assert any(getattr(link, field) for link in links), field
    assert {scenario.policies[0].split(":")[0] for scenario in scenarios} == set(policy_names())
    assert any(tensor.group for scenario in scenarios for tensor in scenario.tensor)
    assert {scenario.cluster.workers for scenario in scenarios} == {1, 2, 3, 4, 5}
    ends = [fault for fault in faults if isinstance(fault, Crash) and fault.node == SCHEDULER]
    assert len(ends) > 50
    assert {end.restart is None for end in ends} == {True, False}
    copied = [scenario for scenario in scenarios if scenario.cluster.replication == 2]
    assert any(isinstance(fault, Crash) and "server" in fault.node for one in copied for fault in one.fault)


@pytest.mark.usefixtures("early_barriers")
def test_a_failing_scenario_is_shrunk_to_what_the_failure_needs() -> None:
    with ThreadPoolExecutor(1) as executor:
        finding = fuzz(range(6), executor)[0]
    smallest = parse_scenario(finding.scenario.encode(), "fuzz.toml")
    # Two workers that meet are all that it takes.
    assert smallest.cluster.workers == 2
    assert smallest.steps == smallest.job.barrier_every
    assert (smallest.fault, len(smallest.tensor)) == ((), 1)
    assert finding.command == f"aiokv sim fuzz --seeds {finding.seed}..{finding.seed}"
    assert "opens without" in finding.what
    assert "opens without" in wrong_with(smallest, finding.seed)


@pytest.mark.usefixtures("early_barriers")
def test_the_command_fails_and_leaves_the_smallest_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other processes would not know of the bug on all platforms.
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", ThreadPoolExecutor)
    out = tmp_path / "new"
    result = CliRunner().invoke(cli.sim, ["fuzz", "--seeds", "0..5", "--out", str(out)])
    assert result.exit_code == 1
    assert "repeat it with: aiokv sim fuzz --seeds" in result.stdout
    [first, *_] = sorted(out.iterdir())
    assert str(first) in result.stdout
    assert parse_scenario(first.read_bytes(), first.name).cluster.workers == 2
    assert "of 6 scenarios" in result.stderr


def test_the_command_counts_the_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", ThreadPoolExecutor)
    result = CliRunner().invoke(cli.sim, ["fuzz", "--seeds", "3..4", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["first"], document["last"], document["seeds"], document["failed"]) == (3, 4, 2, 0)
    assert document["findings"] == []
    assert document["seeds_per_s"] > 0


@pytest.mark.parametrize("text", ["", "a..b", "5..3", "1..2..3", "0..99999999"])
def test_seeds_that_are_none_are_explained(text: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_seeds(text)


def test_seeds_are_given_by_the_first_and_the_last_one() -> None:
    assert parse_seeds("2..5") == range(2, 6)
    assert parse_seeds("7") == range(7, 8)
