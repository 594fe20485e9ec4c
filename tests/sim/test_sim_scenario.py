"""Scenario files: what they mean, and what is said about one that is wrong."""

from __future__ import annotations

import math
import random
import statistics
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ConfigError
from aiokv.policy import policy_names
from sim.cluster import simulate
from sim.compute import (
    Erlang,
    Exponential,
    Hyperexponential,
    Lognormal,
    Normal,
    Pareto,
    ShiftedExponential,
    step_times,
)
from sim.models import MODELS
from sim.scenario import load_scenario, parse_scenario, shipped_scenarios
from sim.sections import TensorSection

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
            '"shifted-exp"',
            "my.toml, line 8: compute.law: expected constant, exponential, shifted-exponential, normal, lognormal, "
            "pareto, erlang, hyperexponential, fleet, quiet, skewed, shared, data-skew, trace, got 'shifted-exp'; "
            "did you mean 'shifted-exponential'?",
        ),
        ("shift = 1", "shift = nan", "my.toml, line 9: compute.shift: expected a number > 0.0, got nan"),
        ("shift = 1", "mean = 1", "my.toml, line 9: compute.mean: unknown key; known: shift, scale"),
        ("worker-2 = 4", "worker-2 = 0", "my.toml, line 13: slow.worker-2: expected a number > 0.0, got 0"),
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
            'warmup = 2\njob.model = "vgg"',
            "my.toml, line 3: job.model: expected resnet-50, vgg-16, got 'vgg'; did you mean 'vgg-16'?",
        ),
        (
            "warmup = 2",
            'policies = ["bps"]',
            "my.toml, line 2: policies: unknown policy 'bps'; known: " + ", ".join(policy_names()),
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
            '[[tensor]]\nkey = "b"\nshape = [1000000000, 1000000000, 1000000000]',
            "my.toml, line 20: tensor[1].shape: expected at most 1,000,000 chunks of all tensors together, got "
            "7,629,394,531,250,000,000,001 with cluster.chunk_bytes = 524,288",
        ),
        ("[learning]\nbatch = 8", "my.toml, line 18: learning.workload: is missing; expected quadratic, digits or "),
        (
            '[[tensor]]\nkey = "b"\nshape = [1]\ndtype = "float8"',
            "my.toml, line 18: tensor[1]: key 'b': dtype float8 is not supported",
        ),
        (
            '[[fault]]\nkind = "crsh"\nnode = "worker-1"\nat = 1',
            "my.toml, line 19: fault[0].kind: expected crash, hang, pause, late, join, leave, slow, bursts, spot, "
            "link, reset, heartbeat-loss, poison, torn, got 'crsh'; did you mean 'crash'?",
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


def test_what_is_wrong_with_changes_says_with_which() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scenario(GOOD.encode(), "my.toml", [("cluster.workers", 1)])
    assert str(caught.value).startswith("my.toml, line 13, with cluster.workers=1: slow.worker-2: no such worker")


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no scenario file 'stragler'; .*crash, .*; did you mean 'straggler'"):
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


def test_a_recorded_trace_is_replayed_step_by_step(tmp_path: Path) -> None:
    rows = {0: (3, 1, 5), 1: (2, 7, 1)}
    lines = ["0,1,9", *(f"{w},{i},{time}" for w, times in rows.items() for i, time in enumerate(times))]
    (tmp_path / "times.csv").write_text("worker,step,seconds\n" + "\n".join(lines))
    path = tmp_path / "my.toml"
    path.write_text('steps = 3\n[cluster]\nworkers = 2\n[compute]\nlaw = "trace"\nfile = "times.csv"\n')
    scenario = load_scenario(str(path))
    ends = {policy: [worker.ended for worker in simulate(scenario, policy, 1).workers] for policy in ("bsp", "asp")}
    assert ends == {"bsp": [3.0 + 7 + 5] * 2, "asp": [9.0, 10.0]}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("steps = 3", "steps = 4", "steps: expected at most the trace's 3 steps, got 4"),
        ("workers = 2", "workers = 3", "cluster.workers: expected at most the trace's 2 workers, got 3"),
        ("times.csv", "nothing.csv", "compute.file: can't read the trace"),
        ("times.csv", "empty.csv", "is empty"),
        ("times.csv", "bad.csv", "line 2: expected columns 'worker', 'step'"),
        ("times.csv", "binary.csv", "binary.csv' is not a CSV file: 'utf-8' codec can't decode byte 0xff"),
        ("times.csv", "negative.csv", "line 2: expected 'seconds' from 0 to 1e+09 seconds, got -1"),
        ("times.csv", "nan.csv", "line 2: expected 'seconds' from 0 to 1e+09 seconds, got nan"),
        ("times.csv", "long.csv", "line 2: expected 'seconds' from 0 to 1e+09 seconds, got 2e+09"),
        ('"times.csv"', '"long.csv"\nscale = 0.5', "cluster.workers: expected at most the trace's 1 workers, got 2"),
        ("times.csv", "marked.csv", "cluster.workers: expected at most the trace's 1 workers, got 2"),
    ],
)
def test_a_trace_that_does_not_fit_is_explained(tmp_path: Path, old: str, new: str, expected: str) -> None:
    (tmp_path / "times.csv").write_text("worker,step,seconds\n" + "".join(f"{i % 2},{i // 2},1\n" for i in range(6)))
    (tmp_path / "empty.csv").write_text("worker,step,seconds\n")
    (tmp_path / "bad.csv").write_text("worker,number,seconds\n1,2,3\n")
    (tmp_path / "binary.csv").write_bytes(b"worker,step,seconds\n\xff,2,3\n")
    (tmp_path / "negative.csv").write_text("worker,step,seconds\n1,2,-1\n")
    (tmp_path / "nan.csv").write_text("worker,step,seconds\n1,2,nan\n")
    (tmp_path / "long.csv").write_text("worker,step,seconds\n1,2,2e9\n")
    (tmp_path / "marked.csv").write_text("\ufeffworker,step,seconds\n1,2,3\n", encoding="utf-8")
    text = 'steps = 3\n[cluster]\nworkers = 2\n[compute]\nlaw = "trace"\nfile = "times.csv"\n'
    with pytest.raises(ConfigError) as caught:
        parse_scenario(text.replace(old, new).encode(), str(tmp_path / "my.toml"))
    assert expected in str(caught.value)


@pytest.mark.parametrize("law", ["quiet", "skewed", "shared", "data-skew"])
def test_presets_have_their_mean_and_their_spread(law: str) -> None:
    text = GOOD.replace('law = "shifted-exponential"\nshift = 1\nscale = 0.5', f'law = "{law}"\nmean = 2.0')
    compute = parse_scenario(text.encode(), "my.toml").compute
    workers = [step_times(compute, factor=1.0, seed=seed, worker="worker-0") for seed in range(3000)]
    times = [next(worker) for worker in workers]
    deviation = {"quiet": 0.070, "skewed": 0.088, "shared": 0.750, "data-skew": 0.117}[law]
    assert statistics.pstdev(map(math.log, times)) == pytest.approx(deviation, rel=0.06)
    assert statistics.fmean(times) == pytest.approx(2.0, rel=0.06)


@pytest.mark.parametrize(
    ("law", "mean", "deviation"),
    [
        (Normal(mean=3.0, sd=0.5), 3.0, 0.5),
        (Lognormal(mean=3.0, sd=0.5), 3.0, 3.0 * math.sqrt(math.expm1(0.25))),
        (Pareto(minimum=1.0, shape=5.0), 1.25, math.sqrt(5.0 / 3.0) / 4.0),
        (Erlang(phases=4, mean=0.5), 2.0, 1.0),
        (Hyperexponential(mean=1.0, scv=4.0), 1.0, 2.0),
    ],
)
def test_laws_have_their_mean_and_deviation(law: Any, mean: float, deviation: float) -> None:
    stream = random.Random("laws")
    draws = [law.sample(stream) for _ in range(60_000)]
    assert statistics.fmean(draws) == pytest.approx(mean, rel=0.03)
    assert statistics.pstdev(draws) == pytest.approx(deviation, rel=0.06)


def test_models_have_as_many_elements_as_published() -> None:
    sizes = {name: sum(math.prod(shape) for _, shape in shapes()) for name, shapes in MODELS.items()}
    assert sizes == {"vgg-16": 138_357_544, "resnet-50": 25_557_032}
    assert [len(shapes()) for shapes in MODELS.values()] == [161, 32]


def test_a_model_stands_in_for_tensors() -> None:
    scenario = parse_scenario(GOOD.encode() + b'[job]\nmodel = "vgg-16"\n', "my.toml")
    assert len(scenario.tensors) == 32
    assert len(parse_scenario(GOOD.encode(), "my.toml").tensors) == 1


def test_changes_stand_in_for_what_the_file_says() -> None:
    changes = [("cluster.workers", 5), ("network.latency", 0.5), ("policies", ("asp",))]
    scenario = parse_scenario(GOOD.encode(), "my.toml", changes)
    assert (scenario.cluster.workers, scenario.network.latency, scenario.policies) == (5, 0.5, ("asp",))
    with pytest.raises(ConfigError, match="steps is not a table"):
        parse_scenario(GOOD.encode(), "my.toml", [("steps.more", 1)])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ('[[fault]]\nkind = "poison"\nnode = "server-0"\nstep = 1', "line 20: fault[0].node: expected workers"),
        ('[[fault]]\nkind = "link"\nnode = "workers"\nto = "server-9"', "fault[0].to: no node 'server-9'"),
        ('[[fault]]\nkind = "pause"\nnode = "workers"\nat = 1', "fault[0].duration: is missing"),
        (
            '[[fault]]\nkind = "poison"\nnode = "worker-1"\nstep = 99',
            "line 21: fault[0].step: 'worker-1' takes only 20 steps, got 99",
        ),
        (
            '[[fault]]\nkind = "leave"\nnode = "worker-1"\nafter = 21',
            "fault[0].after: 'worker-1' takes only 20 steps, got 21",
        ),
        (
            '[[fault]]\nkind = "slow"\nnode = "servers"\nfactor = 2.0',
            "line 20: fault[0].node: expected nodes that compute, got 'servers'; servers take no time here, see "
            "[server]",
        ),
        (
            '[[fault]]\nkind = "bursts"\nnode = "scheduler"\nfactor = 2.0\ngap = 1.0\nduration = 1.0',
            "fault[0].node: expected nodes that compute, got 'scheduler'",
        ),
        (
            '[[fault]]\nkind = "slow"\nshape = "ramp"\nnode = "worker-1"\nfactor = 2.0',
            "fault[0].duration: expected the seconds until a ramp has reached its factor, got inf",
        ),
        (
            '[[fault]]\nkind = "crash"\nnode = "worker-1"\nat = 1\ntimes = 3',
            "line 22: fault[0].times: who is not started again crashes once, got 3; set restart",
        ),
        (
            '[[fault]]\nkind = "reset"\nnode = "worker-1"\nto = "worker-1"\nat = 1',
            "line 21: fault[0].to: expected another node than 'worker-1', got 'worker-1'",
        ),
        (
            '[[fault]]\nkind = "link"\nnode = "worker-1"\nto = "servers"\nat = 1',
            "line 19: fault[0].kind: says nothing that is wrong with the way; expected one of latency, bandwidth, ",
        ),
    ],
)
def test_a_fault_that_cannot_be_is_explained(more: str, expected: str) -> None:
    assert expected in complaint(GOOD + more)


def test_an_assertion_that_says_nothing_is_found_in_its_line() -> None:
    text = GOOD.replace("warmup = 2", 'assertions = ["p95_step < 80 parsecs"]')
    assert complaint(text).startswith("my.toml, line 2: assertions[0]: no unit 'parsecs'")
