"""Many runs of a scenario with some of its keys changed, and the same random numbers everywhere."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import statistics
import sys
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.errors import ConfigError
from sim.assertions import LEARNED, METRICS, OF_JOB
from sim.compute import Recorded
from sim.futures import cancelled_at_errors
from sim.intervals import half_width
from sim.job import simulate_job
from sim.learning import learns
from sim.problems import make_problem
from sim.report import Summary, summarise
from sim.scenario import parse_scenario, read_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sim.scenario import Scenario

Change = tuple[str, Any]

SHORT: Final = {"policy": "policies", "workers": "cluster.workers", "servers": "cluster.servers"}
"""Keys that may be written without their table."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run: the scenario's content, what is changed in it, and the seed. It can be sent to another process.

    `besides` stands for what else the result depends on, see `fingerprint`.
    """

    content: bytes
    file: str
    changes: tuple[Change, ...]
    seed: int
    besides: str = ""

    @property
    def key(self) -> str:
        """What tells this run from all others, in any sweep."""
        return hashlib.sha256(msgspec.json.encode((self.content, self.changes, self.seed, self.besides))).hexdigest()


class Row(msgspec.Struct, frozen=True):
    """The result of a run, as it is kept in a file."""

    key: str
    seed: int
    summary: dict[str, Any]
    digest: str


def parse_settings(texts: Iterable[str]) -> list[tuple[Change, ...]]:
    """Return all combinations of what texts such as "policy=bsp,asp" and "workers=8,32" allow.

    Raises:
        ConfigError: a text without a key or without values, or something that stands there twice.
    """
    axes: dict[str, list[Change]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign or not name.strip() or not values.strip():
            raise ConfigError(f"expected KEY=VALUE,VALUE..., got {text!r}", got=text)
        name = name.strip()
        key = SHORT.get(name, name)
        if key in axes:
            raise ConfigError(f"{name} is set twice; expected all its values in one text, got {text!r}", got=text)
        axes[key] = [(key, _value(key, value.strip())) for value in values.split(",")]
        if any(change in axes[key][:number] for number, change in enumerate(axes[key])):
            raise ConfigError(f"expected each value once, got {text!r}", got=text)
    return [tuple(combination) for combination in itertools.product(*axes.values())]


def _value(key: str, text: str) -> Any:
    if key == "policies":
        return (text,)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def label(changes: Sequence[Change], settings: Sequence[tuple[Change, ...]]) -> str:
    """Return in words what tells one combination from the others."""
    changes = [change for change in changes if any(change not in other for other in settings)]
    names = {long: short for short, long in SHORT.items()}
    texts = [f"{names.get(key, key)}={value[0] if isinstance(value, tuple) else value}" for key, value in changes]
    return ", ".join(texts) or "as it is"


def scenario_of(content: bytes, file: str, changes: Sequence[Change]) -> Scenario:
    """Return the scenario of one combination; what the file asserts is about its own policies and values.

    Raises:
        ConfigError: something in it that can't be.
    """
    return parse_scenario(content, file, (*changes, ("assertions", ())))


def fingerprint(scenario: Scenario) -> str:
    """Return the SHA-256 of what results depend on besides the file and the seed: the version, a trace, a workload.

    A policy of an installed package is not in it.
    """
    found = hashlib.sha256()
    with contextlib.suppress(PackageNotFoundError):
        found.update(version("aiokv").encode())
    if isinstance(scenario.compute, Recorded):
        found.update(Path(scenario.compute.file).read_bytes())
    module, is_own, _ = scenario.learning.workload.partition(":")
    if is_own:
        source = getattr(sys.modules.get(module), "__file__", None)
        found.update(Path(source).read_bytes() if source else b"")
    return found.hexdigest()


def run_task(task: Task) -> Row:
    """Carry out one run."""
    scenario = scenario_of(task.content, task.file, task.changes)
    run = simulate_job(scenario, scenario.policies[0], task.seed)
    return Row(task.key, task.seed, _for_json(msgspec.to_builtins(summarise(run))), run.digest)


def sweep(
    tasks: Sequence[Task], executor: Executor, kept: Path | None = None, on_row: Callable[[], None] = lambda: None
) -> dict[str, Row]:
    """Carry out all runs that a file does not hold yet, and return the results by the tasks' keys.

    Args:
        tasks: the runs.
        executor: where they are carried out; any of `concurrent.futures` or alike.
        kept: file to which each result is added as a line of JSON; a sweep that was stopped goes on from it.
        on_row: is called for each result.

    Raises:
        ConfigError: the file can't be read or written.
    """
    wanted = {task.key: task for task in tasks}
    rows: dict[str, Row] = {}
    if kept is not None:
        for row in _kept_rows(kept):
            if row.key in wanted:
                rows[row.key] = row
                on_row()
    futures = [executor.submit(run_task, task) for key, task in wanted.items() if key not in rows]
    with cancelled_at_errors(futures):
        for future in as_completed(futures):
            row = future.result()
            rows[row.key] = row
            if kept is not None:
                _keep(kept, msgspec.json.encode(row) + b"\n")
            on_row()
    return rows


def _kept_rows(kept: Path) -> list[Row]:
    """Return the results that a file holds, and let it end with a whole line."""
    try:
        content = kept.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"can't read the results that {kept} keeps: {error.strerror}") from None
    rows = []
    for line in content.splitlines():
        # What a sweep was just writing when it was killed is no row.
        with contextlib.suppress(msgspec.MsgspecError):
            rows.append(msgspec.json.decode(line, type=Row))
    if content and not content.endswith(b"\n"):
        _keep(kept, b"\n")
    return rows


def _keep(kept: Path, line: bytes) -> None:
    try:
        with kept.open("ab") as file:
            file.write(line)
    except OSError as error:
        raise ConfigError(f"can't keep results in {kept}: {error.strerror}") from None


class Sweep:
    """Runs of a scenario with all combinations of some settings, each with the same seeds.

    Args:
        scenario: path of a scenario file, or the name of one that comes along.
        settings: texts such as "policy=bsp,asp" and "workers=8,32"; the scenario's own policies if none is about these.
        seeds: of the runs of each combination.

    Raises:
        ConfigError: a text without a key or without values, or something in a scenario that can't be.
    """

    def __init__(self, scenario: str, settings: Iterable[str], seeds: Iterable[int]) -> None:
        content, file = read_source(scenario)
        combinations = parse_settings(settings)
        if not any(key == "policies" for key, _ in combinations[0]):
            policies = parse_scenario(content, file).policies
            combinations = [(("policies", (policy,)), *each) for policy in policies for each in combinations]
        seeds = list(seeds)
        self._combinations = combinations
        self._tasks = []
        for changes in combinations:
            # Whatever is wrong is said before anything runs.
            made = scenario_of(content, file, changes)
            if learns(made):
                make_problem(made.learning, seed=seeds[0], workers=made.cluster.workers)
            besides = fingerprint(made)
            self._tasks.append([Task(content, file, changes, seed, besides) for seed in seeds])

    @property
    def runs(self) -> int:
        """How many there are."""
        return sum(map(len, self._tasks))

    def carry_out(
        self, executor: Executor, kept: Path | None = None, on_row: Callable[[], None] = lambda: None
    ) -> list[Comparison]:
        """Return the results of all combinations; those that a file holds already are not computed again.

        Args:
            executor: where the runs are carried out; any of `concurrent.futures` or alike.
            kept: file to which each result is added.
            on_row: is called for each result.
        """
        rows = sweep([task for each in self._tasks for task in each], executor, kept, on_row)
        return compare(self._combinations, [[rows[task.key] for task in each] for each in self._tasks])


class Comparison(msgspec.Struct, frozen=True):
    """One combination: mean and half width at 95 % of some results, and of their differences from the first one."""

    setting: str
    values: dict[str, tuple[float, float]]
    differences: dict[str, tuple[float, float]]
    traces: list[str]


COMPARED: Final = ("mean_step", "p95_step", "gradients_per_s", "staleness_mean", "utilisation", "goodput")
"""Results that are shown."""

OTHERS: Final = (*LEARNED, *OF_JOB)
"""Those that are shown where there are some."""


def compare(settings: Sequence[tuple[Change, ...]], rows: Sequence[Sequence[Row]]) -> list[Comparison]:
    """Return the results of all combinations, side by side.

    Args:
        settings: the combinations.
        rows: for each of them, the results by seed, in the same order of seeds.
    """
    found = []
    results = [[_metrics(row) for row in each] for each in rows]
    every = [result for each in results for result in each]
    others = [metric for metric in OTHERS if any(not math.isnan(result[metric]) for result in every)]
    for setting, own, each in zip(settings, results, rows, strict=True):
        values, differences = {}, {}
        for metric in (*COMPARED, *others):
            values[metric] = _estimate([result[metric] for result in own])
            # The same seed has the same step times and faults everywhere, so pairs differ less than means.
            pairs = [result[metric] - base[metric] for result, base in zip(own, results[0], strict=True)]
            differences[metric] = _estimate(pairs)
        found.append(Comparison(label(setting, settings), values, differences, [row.digest for row in each]))
    return found


def _metrics(row: Row) -> dict[str, float]:
    summary = msgspec.convert(_from_json(row.summary), Summary)
    return {metric: METRICS[metric](summary) for metric in (*COMPARED, *OTHERS)}


def _for_json(value: Any) -> Any:
    """Return what JSON has a place for: null for NaN, and a text for the time until what never was."""
    if isinstance(value, dict):
        return {name: _for_json(part) for name, part in value.items()}
    return value if math.isfinite(value) else None if math.isnan(value) else str(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _from_json(part) for name, part in value.items()}
    return math.nan if value is None else float(value)


def _estimate(values: Sequence[float]) -> tuple[float, float]:
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values), math.nan
    return statistics.fmean(values), half_width(values)
