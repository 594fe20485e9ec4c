"""Sweeps: combinations, common random numbers, and going on after an interruption."""

from __future__ import annotations

import json
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from aiokv.errors import ConfigError
from sim import cli
from sim.compute import read_trace
from sim.problems import make_problem
from sim.scenario import parse_scenario
from sim.sweep import Sweep, Task, compare, fingerprint, parse_settings, run_task, sweep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTENT = b"""
steps = 15
[cluster]
workers = 3
[compute]
law = "exponential"
mean = 0.5
"""


class Refusing(Executor):
    """An executor that must not be asked for anything."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise AssertionError("nothing is left to be done")


class Slow(Executor):
    """An executor that carries out what it was asked for first, and nothing else."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.futures:
            future.set_result(fn(*args, **kwargs))
        self.futures.append(future)
        return future


def tasks(*policies: str, seeds: int = 2) -> list[Task]:
    return [Task(CONTENT, "my.toml", (("policies", (policy,)),), seed) for policy in policies for seed in range(seeds)]


def test_settings_give_all_combinations() -> None:
    assert parse_settings(["policy=bsp,asp", "workers=2,4"]) == [
        (("policies", ("bsp",)), ("cluster.workers", 2)),
        (("policies", ("bsp",)), ("cluster.workers", 4)),
        (("policies", ("asp",)), ("cluster.workers", 2)),
        (("policies", ("asp",)), ("cluster.workers", 4)),
    ]
    assert parse_settings(["compute.law=quiet", "network.latency=0.5"]) == [
        (("compute.law", "quiet"), ("network.latency", 0.5))
    ]


@pytest.mark.parametrize("text", ["policy", "policy=", "=3"])
def test_a_setting_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse_settings([text])


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["policy=bsp", "policy=asp"], "policy is set twice; expected all its values in one text, got 'policy=asp'"),
        (["workers=2", "cluster.workers=3"], "cluster.workers is set twice"),
        (["workers=2,3,2"], "expected each value once, got 'workers=2,3,2'"),
    ],
)
def test_a_setting_that_stands_there_twice_is_refused(texts: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(texts)
    assert expected in str(caught.value)


def test_results_are_those_of_single_runs_whatever_the_executor() -> None:
    wanted = tasks("bsp", "asp")
    with ThreadPoolExecutor(1) as executor:
        rows = sweep(wanted, executor)
    assert [rows[task.key].digest for task in wanted] == [run_task(task).digest for task in wanted]


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    kept = tmp_path / "results.jsonl"
    with ThreadPoolExecutor(1) as executor:
        first = sweep(tasks("bsp"), executor, kept)
        # What a killed sweep was just writing.
        kept.write_bytes(kept.read_bytes() + b'{"key": "12')
    assert sweep(tasks("bsp"), Refusing(), kept) == first


def test_what_is_kept_after_half_a_line_can_be_read_again(tmp_path: Path) -> None:
    kept = tmp_path / "results.jsonl"
    kept.write_bytes(b'{"key": "12')
    with ThreadPoolExecutor(1) as executor:
        first = sweep(tasks("bsp"), executor, kept)
    assert sweep(tasks("bsp"), Refusing(), kept) == first


def test_a_file_that_cannot_keep_results_is_named(tmp_path: Path) -> None:
    path, out = tmp_path / "my.toml", tmp_path / "out"
    path.write_bytes(CONTENT)
    (out / "results.jsonl").mkdir(parents=True)
    result = invoke("sweep", str(path), "--replications", "1", "--out", str(out))
    assert result.exit_code == 1
    assert f"can't read the results that {out / 'results.jsonl'} keeps: Is a directory" in result.stderr
    with ThreadPoolExecutor(1) as executor, pytest.raises(ConfigError, match="can't keep results in"):
        sweep(tasks("bsp"), executor, tmp_path / "nowhere" / "results.jsonl")


def test_results_are_not_kept_for_another_trace(tmp_path: Path) -> None:
    path, times, kept = tmp_path / "my.toml", tmp_path / "times.csv", tmp_path / "results.jsonl"
    path.write_text('steps = 2\n[cluster]\nworkers = 1\n[compute]\nlaw = "trace"\nfile = "times.csv"\n')
    means = []
    for seconds in (1, 3):
        times.write_text(f"worker,step,seconds\n0,0,{seconds}\n0,1,{seconds}\n")
        read_trace.cache_clear()
        with ThreadPoolExecutor(1) as executor:
            (found,) = Sweep(str(path), ["policy=bsp"], range(1)).carry_out(executor, kept)
        means.append(found.values["mean_step"][0])
    assert means == [1.0, 3.0]


def test_results_are_not_kept_for_another_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path, module = tmp_path / "my.toml", tmp_path / "my_own_problem.py"
    path.write_bytes(CONTENT + b'[learning]\nworkload = "my_own_problem:problem"\n')
    prints = []
    for number in (1, 2):
        module.write_text(
            f"def problem(seed, workers):\n    return [{number}.0], lambda x, worker, push: x, lambda x: x[0]\n"
        )
        scenario = parse_scenario(path.read_bytes(), str(path))
        make_problem(scenario.learning, seed=0, workers=1)
        prints.append(fingerprint(scenario))
    assert len(set(prints)) == 2


def test_a_sweep_that_is_interrupted_waits_for_nothing_that_is_not_begun(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    executor, kept = Slow(), tmp_path / "results.jsonl"
    with pytest.raises(KeyboardInterrupt):
        sweep(tasks("bsp", "asp"), executor, kept, interrupt)
    assert [future.cancelled() for future in executor.futures] == [False, True, True, True]
    assert len(kept.read_bytes().splitlines()) == 1


def test_differences_are_taken_seed_by_seed() -> None:
    wanted = tasks("bsp", "asp", seeds=3)
    rows = [run_task(task) for task in wanted]
    settings = [wanted[0].changes, wanted[3].changes]
    bsp, asp = compare(settings, [rows[:3], rows[3:]])
    assert (bsp.setting, asp.setting) == ("policy=bsp", "policy=asp")
    assert bsp.differences["mean_step"] == (0.0, 0.0)
    difference, width = asp.differences["mean_step"]
    assert difference == pytest.approx(asp.values["mean_step"][0] - bsp.values["mean_step"][0])
    assert difference + width < 0.0


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.sim, list(arguments))


def test_the_command_gives_the_same_for_any_number_of_jobs(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(CONTENT)
    common = ("sweep", str(path), "--set", "workers=2,3", "--replications", "2", "--json")
    one, two = (json.loads(invoke(*common, "--jobs", jobs).stdout) for jobs in ("1", "2"))
    assert one == two
    assert [row["setting"] for row in one] == [
        f"policy={policy}, workers={workers}" for policy in ("bsp", "asp") for workers in (2, 3)
    ]


def test_the_table_names_each_setting(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(CONTENT)
    settings = ("--set", "policy=bsp,asp", "--set", "network.latency=0.125,0.25")
    result = invoke("sweep", str(path), *settings, "--replications", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for setting in ("policy=bsp", "policy=asp", "network.latency=0.125", "network.latency=0.25"):
        assert result.stdout.count(f" {setting} ") == 2
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 4


def test_a_wrong_value_is_explained_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(CONTENT)
    result = invoke("sweep", str(path), "--set", "workers=2,-1")
    assert result.exit_code == 1
    expected = "my.toml, with policies=bsp, cluster.workers=-1: cluster.workers: expected a whole number >= 1, got -1"
    assert expected in result.stderr
