"""Scenario files: what they mean, and what is said about one that is wrong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import ConfigError
from sim.compute import Exponential, ShiftedExponential, step_times
from sim.scenario import TensorSection, load_scenario, parse_scenario, shipped_scenarios

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
steps = 20
warmup = 2

[cluster]
workers = 3

[compute]
law = "shifted-exponential"
shift = 1
scale = 0.5

[slow]
worker-2 = 4

[[tensor]]
key = "a"
shape = [2, 3]
"""


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(text.encode(), "my.toml")
    return str(caught.value)


def test_a_file_becomes_a_typed_scenario() -> None:
    scenario = parse_scenario(GOOD.encode(), "some/where/my.toml")
    assert scenario.name == "my"
    assert scenario.policies == ("bsp", "asp")
    assert scenario.compute == ShiftedExponential(shift=1.0, scale=0.5)
    assert scenario.slow == {"worker-2": 4.0}
    assert scenario.tensor == (TensorSection(key="a", shape=(2, 3)),)
    assert scenario.network.bandwidth == math.inf
    assert scenario.workers == ["worker-0", "worker-1", "worker-2"]


@pytest.mark.parametrize("name", shipped_scenarios())
def test_every_shipped_scenario_can_be_read_by_its_name(name: str) -> None:
    assert load_scenario(name).name == name


def test_the_straggler_is_shipped() -> None:
    scenario = load_scenario("straggler")
    assert scenario.cluster.workers == 8
    assert list(scenario.slow.values()) == [4.0]


def test_a_file_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(GOOD)
    assert load_scenario(str(path)).name == "own"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("workers = 3", "workers = 0", "my.toml, line 5: cluster.workers: expected a whole number >= 1, got 0"),
        ("workers = 3", 'workers = "3"', "my.toml, line 5: cluster.workers: expected a whole number, got '3'"),
        ("workers = 3", "worker = 3", "my.toml, line 5: cluster.worker: unknown key; did you mean 'workers'?"),
        ("workers = 3", "", "my.toml, line 4: cluster.workers: is missing"),
        ("steps = 20", "", "my.toml: steps: is missing"),
        ("[slow]", "[slowly]", "my.toml, line 12: slowly: unknown key; did you mean 'slow'?"),
        (
            '"shifted-exponential"',
            '"shifted"',
            "my.toml, line 8: compute.law: expected constant, exponential, shifted-exponential, got 'shifted'; "
            "did you mean 'shifted-exponential'?",
        ),
        ("shift = 1", "shift = nan", "my.toml, line 9: compute.shift: expected a number > 0.0, got nan"),
        ("shift = 1", "mean = 1", "my.toml, line 9: compute.mean: unknown key; known: shift, scale"),
        ("worker-2 = 4", "worker-2 = 0", "my.toml, line 12: slow: expected a number > 0.0 for each"),
        (
            "worker-2 = 4",
            "worker-3 = 4",
            "my.toml, line 13: slow.worker-3: no such worker; did you mean 'worker-2'?; there are worker-0 to worker-2",
        ),
        (
            "shape = [2, 3]",
            "shape = [2, 0]",
            "my.toml, line 17: tensor[0].shape[1]: expected a whole number >= 1, got 0",
        ),
        ("warmup = 2", "warmup = 20", "my.toml, line 2: warmup: expected less than steps = 20, got 20"),
        (
            "warmup = 2",
            'policies = ["bps"]',
            "my.toml, line 2: policies: unknown policy 'bps'; known: asp, bsp, sum",
        ),
        (
            "warmup = 2",
            'policies = ["bsp", "bsp"]',
            "my.toml, line 2: policies: a policy stands there twice: bsp, bsp",
        ),
        (
            "workers = 3",
            "workers = 3\nheartbeat = 20.0",
            "my.toml, line 4: cluster: expected heartbeat < death_timeout < call_timeout <= join_timeout, "
            "got heartbeat = 20, death_timeout = 10, call_timeout = 60, join_timeout = 120",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line_and_what_was_expected(old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert complaint(GOOD.replace(old, new)) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ('[[tensor]]\nkey = "a"\nshape = [1]', "my.toml, line 19: tensor[1].key: key 'a' stands there twice"),
        (
            "[[tensor]]\nkey = 1\nshape = [1]",
            "my.toml, line 18: tensor[1]: key 1 is int, but this cluster uses str keys",
        ),
        (
            '[[tensor]]\nkey = "b"\nshape = [1]\ndtype = "float8"',
            "my.toml, line 18: tensor[1]: key 'b': dtype float8 is not supported",
        ),
        (
            '[[fault]]\nkind = "crsh"\nnode = "worker-1"\nat = 1',
            "my.toml, line 19: fault[0].kind: expected crash, hang, got 'crsh'; did you mean 'crash'?",
        ),
        (
            '[[fault]]\nkind = "crash"\nnode = "worker1"\nat = 1',
            "my.toml, line 20: fault[0].node: no node 'worker1'; did you mean 'worker-1'?",
        ),
    ],
)
def test_a_mistake_in_one_of_several_tables_is_found_there(more: str, expected: str) -> None:
    assert complaint(GOOD + more).startswith(expected)


def test_what_is_no_toml_is_refused_with_the_place() -> None:
    assert complaint("steps = x") == "my.toml is not a TOML file: Invalid value (at line 1, column 9)"


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no scenario file 'stragler'; .*crash, straggler; did you mean 'straggler'"):
        load_scenario("stragler")


def test_step_times_are_the_same_for_the_same_seed_and_worker() -> None:
    def first(seed: int, worker: str) -> list[float]:
        times = step_times(Exponential(mean=2.0), factor=1.0, seed=seed, worker=worker)
        return [next(times) for _ in range(5)]

    assert first(1, "worker-0") == first(1, "worker-0")
    assert first(1, "worker-0") != first(1, "worker-1")
    assert first(1, "worker-0") != first(2, "worker-0")


def test_a_slow_worker_takes_the_factor_longer() -> None:
    fast, slow = (step_times(Exponential(mean=2.0), factor=factor, seed=1, worker="w") for factor in (1.0, 4.0))
    assert [next(slow) for _ in range(5)] == [4.0 * next(fast) for _ in range(5)]
