"""The command `aiokv sim`."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from aiokv.errors import AiokvError, MissingExtraError
from sim.checks import InvariantError
from sim.futures import Processes, cancelled_at_errors
from sim.scenario import json_schema, load_scenario, shipped_scenarios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sim.record import Run
    from sim.scenario import Scenario
    from sim.sweep import Comparison

Results = dict[str, list["Run"]]

MAX_WIDTH: Final = 1000
"""Characters of a line that is not printed on a terminal."""


@click.group()
def sim() -> None:
    """Simulate a cluster before you run it.

    The simulator runs the very code that decides in a real cluster, but in simulated time and without arrays.
    """


# --- run ---


@sim.command(epilog="Scenarios that come along: " + ", ".join(shipped_scenarios()) + ".")
@click.argument("scenario")
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal runs.")
@click.option(
    "--replications",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run this often, with seeds SEED, SEED + 1 and so on, and show means and their 95 % confidence intervals.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the picture, a report as HTML, JSON, CSV tables and traces for ui.perfetto.dev; made if it "
    "does not exist.  [default: only the picture, in the current directory]",
)
def run(scenario: str, seed: int, replications: int, as_json: bool, out: Path | None) -> None:
    """Run SCENARIO under each of its policies, and compare them.

    SCENARIO is a TOML file, or the name of a scenario that comes along. Prints step times, utilisation, updates per
    second and staleness, and draws the timeline of the first run as a PNG picture. The command fails when one of the
    scenario's assertions is not true of the results.
    """
    with _explained():
        _run(load_scenario(scenario), seed, replications, as_json, out)


def _run(scenario: Scenario, seed: int, replications: int, as_json: bool, out: Path | None) -> None:
    _require("simpy", "matplotlib")
    # They need what is checked for in the line above.
    from sim.files import write_files  # noqa: PLC0415
    from sim.job import simulate_job  # noqa: PLC0415
    from sim.learning import learns  # noqa: PLC0415
    from sim.page import page  # noqa: PLC0415
    from sim.picture import draw  # noqa: PLC0415
    from sim.problems import make_problem  # noqa: PLC0415
    from sim.report import notes, table, to_json  # noqa: PLC0415

    if learns(scenario):
        # What is wrong with it is said before anything runs.
        make_problem(scenario.learning, seed=seed, workers=scenario.cluster.workers)
    folder = out or Path()
    picture = folder / f"{scenario.name}.png"
    _make_directory(folder)
    results: Results = {policy: [] for policy in scenario.policies}
    total = scenario.steps * scenario.cluster.workers * len(scenario.policies) * replications
    with _progress("simulating", total) as on_step:
        for policy, runs in results.items():
            for replication in range(replications):
                runs.append(simulate_job(scenario, policy, seed + replication, on_step=on_step))
    files: list[str] = []
    try:
        draw([runs[0] for runs in results.values()], picture)
        if out is not None:
            files = write_files(results, out, picture, page(results))
    except OSError as error:
        raise click.ClickException(f"can't write into {folder}: {error.strerror or error}") from None
    if as_json:
        click.echo(to_json(results, str(picture), files))
    else:
        console = _print(table(results))
        lines = [*notes(results), f"timeline: {picture}", *(f"written: {file}" for file in files)]
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    _check(scenario, results)


def _check(scenario: Scenario, results: Results) -> None:
    """End the command with an error when the results are not as the scenario asserts."""
    from sim.assertions import broken_assertions  # noqa: PLC0415
    from sim.report import mean, summarise  # noqa: PLC0415

    summaries = {policy: mean([summarise(run) for run in runs]) for policy, runs in results.items()}
    broken = broken_assertions(scenario.assertions, summaries)
    if broken:
        raise click.ClickException("not as asserted:\n" + "\n".join(broken))


# --- sweep ---


@sim.command()
@click.argument("scenario")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="Run with each of these values of a key, as in cluster.workers=8,32 or policy=bsp,asp; several options give "
    "all combinations.",
)
@click.option("--seed", default=0, show_default=True, help="The first seed.")
@click.option("--replications", type=click.IntRange(min=1), default=5, show_default=True, help="Seeds a combination.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at the same time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead of the table.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory that keeps each result: the same command goes on there if it was stopped.",
)
def sweep(
    scenario: str,
    settings: tuple[str, ...],
    seed: int,
    replications: int,
    jobs: int,
    as_json: bool,
    out: Path | None,
) -> None:
    """Run SCENARIO with other values of its keys, and compare the combinations with the first one.

    Every combination gets the same random numbers, so that even small differences show.
    """
    with _explained():
        _require("simpy")
        from sim.sweep import Sweep  # noqa: PLC0415

        made = Sweep(scenario, settings, range(seed, seed + replications))
        if out is not None:
            _make_directory(out)
        kept = None if out is None else out / "results.jsonl"
        with _progress("sweeping", made.runs) as on_row, Processes(jobs) as executor:
            comparisons = made.carry_out(executor, kept, on_row)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(comparisons), indent=2))
    else:
        _print(_comparison_table(comparisons, replications))


def _comparison_table(comparisons: Sequence[Comparison], replications: int) -> Table:
    what = f"mean of {replications} runs ± half width at 95 %" if replications > 1 else "one run"
    made = Table(
        title=f"{what}; below it, the difference from the first line",
        show_lines=True,
    )
    # On a narrow terminal numbers are folded, and what they belong to is still whole.
    made.add_column("", no_wrap=True)
    for metric in comparisons[0].values:
        made.add_column(metric.replace("_", " "), justify="right", overflow="fold")
    for number, comparison in enumerate(comparisons):
        cells = [_estimate(*pair) for pair in comparison.values.values()]
        if number:
            cells = [
                f"{cell}\n{_estimate(*pair, sign='+')}"
                for cell, pair in zip(cells, comparison.differences.values(), strict=True)
            ]
        made.add_row(comparison.setting.replace(", ", "\n"), *cells)
    return made


def _estimate(value: float, width: float, sign: str = "") -> str:
    if math.isinf(value) and not sign:
        return "never"
    if not math.isfinite(value):
        return "-"
    return f"{value:{sign}.4g}" if math.isnan(width) else f"{value:{sign}.4g} ± {width:.2g}"


# --- advise ---


@sim.command()
@click.argument("scenario")
@click.option("--policy", help="Under which policy.  [default: the first of the scenario]")
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def advise(scenario: str, policy: str | None, seed: int, as_json: bool) -> None:
    """Run SCENARIO, and say with figures what would help.

    Also runs it again without each thing that may be to blame: a slow worker, a fault, the network, the servers.
    """
    with _explained():
        _require("simpy")
        from sim.advice import advise as advise_on  # noqa: PLC0415
        from sim.advice import to_json  # noqa: PLC0415
        from sim.blame import alternatives, blame  # noqa: PLC0415
        from sim.cluster import simulate  # noqa: PLC0415

        loaded = load_scenario(scenario)
        measured = simulate(loaded, policy or loaded.policies[0], seed)
        with _progress("looking for causes", sum(1 for _ in alternatives(measured))) as on_run:
            causes = blame(measured, on_run)
        advice = advise_on(measured)
    if as_json:
        click.echo(to_json(advice, causes))
        return
    for line in (f"{loaded.name} under {advice.policy}: a step takes {advice.step_s:.4g} s", *advice.sentences):
        click.echo(line)
    made = Table("without this", "step (s)", "saved (%)", "gradients/s", "failed")
    for cause in causes:
        numbers = (f"{cause.step_s:.4g}", f"{100.0 * cause.saved:.1f}", f"{cause.gradients_per_s:.4g}")
        made.add_row(cause.cause, *numbers, str(cause.failed_workers))
    if causes:
        _print(made)


# --- fuzz ---


@sim.command()
@click.option("--seeds", default="0..1999", show_default=True, metavar="FIRST..LAST", help="One scenario for each.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Directory for the smallest scenarios that fail; made if it does not exist.  [default: the current one]",
)
def fuzz(seeds: str, jobs: int, as_json: bool, out: Path) -> None:
    """Run small random scenarios in which much goes wrong, with all checks.

    Each must keep what must hold, and make progress once everything has healed. For each one that does not, prints the
    command that repeats it and writes the smallest scenario that fails in the same way. The command fails if there is
    one.
    """
    with _explained():
        _require("simpy")
        from sim.fuzz import fuzz as fuzz_all  # noqa: PLC0415
        from sim.fuzz import parse_seeds, to_json, write_scenarios  # noqa: PLC0415

        wanted = parse_seeds(seeds)
        begin = time.perf_counter()
        with _progress("fuzzing", len(wanted)) as on_seed, Processes(jobs) as executor:
            found = fuzz_all(wanted, executor, on_seed)
        seconds = time.perf_counter() - begin
        if found:
            _make_directory(out)
        files = write_scenarios(found, out)
    if as_json:
        click.echo(to_json(wanted, found, files, seconds))
    else:
        for finding, file in zip(found, files, strict=True):
            click.echo(f"seed {finding.seed} ({finding.policy}): {finding.what}")
            click.echo(f"  repeat it with: {finding.command}")
            click.echo(f"  smallest scenario: {file}")
        click.echo(f"{len(wanted)} scenarios in {seconds:.1f} s, {len(found)} with something wrong")
    if found:
        raise click.ClickException(f"something is wrong with {len(found)} of {len(wanted)} scenarios")


# --- validate, bench, schema ---


@sim.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=os.cpu_count() or 1,
    show_default="as many as there are cores",
    help="Groups at the same time.",
)
@click.option(
    "--traces",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory with further recorded jobs to replay: job_4_norm.csv of Alibaba's cluster-trace-gpu-v2020, "
    "trace-SE.parquet of ByteDance's StragglerAnalysis (needs the extra parquet).",
)
def validate(as_json: bool, jobs: int, traces: Path | None) -> None:
    """Compare the simulator with what is known on paper.

    Each number must be exact, within three standard errors, or within what its source leaves open; the command fails
    when one is not.
    """
    with _explained():
        _require("simpy")
        from sim.validation.traces import recorded  # noqa: PLC0415

        further = [] if traces is None else list(recorded(traces))
    from concurrent.futures import as_completed  # noqa: PLC0415

    from sim.validation.suite import GROUPS, run_group  # noqa: PLC0415

    with _progress("validating", len(GROUPS)) as on_group, Processes(jobs) as executor:
        futures = {name: executor.submit(run_group, name) for name in GROUPS}
        with cancelled_at_errors(futures.values()):
            for _ in as_completed(futures.values()):
                on_group()
        cases = [case for name in GROUPS for case in futures[name].result()] + further
    failed = sum(not case.ok for case in cases)
    if as_json:
        document = {"cases": cases, "passed": len(cases) - failed, "failed": failed}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
    else:
        made = Table("case", "simulated", "on paper", "allowed", "ok")
        for case in cases:
            numbers = (f"{number:.6g}" for number in (case.value, case.expected, case.tolerance))
            made.add_row(case.name, *numbers, "yes" if case.ok else "NO")
        _print(made)
        click.echo(f"{len(cases) - failed} passed, {failed} failed")
        if traces is None:
            click.echo("the largest recorded jobs were left out: they need --traces")
    if failed:
        raise click.ClickException(f"{failed} of {len(cases)} cases are not as on paper")


@sim.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--workers", type=click.IntRange(min=2), default=10_000, show_default=True, help="Of the large run.")
@click.option("--rounds", type=click.IntRange(min=1), default=100, show_default=True, help="Of the large run.")
def bench(as_json: bool, workers: int, rounds: int) -> None:
    """Measure how fast the simulator is on this machine."""
    with _explained():
        _require("simpy")
    from sim import bench as module  # noqa: PLC0415

    speed = msgspec.to_builtins(module.bench(workers, rounds))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(speed), indent=2))
    else:
        for name, value in speed.items():
            click.echo(f"{name}: {value:,.4g}")


@sim.command()
def schema() -> None:
    """Print the JSON schema of scenario files."""
    click.echo(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2))


# --- what they share ---


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn errors into one line for the user."""
    try:
        yield
    except AiokvError as error:
        raise click.ClickException(str(error)) from None
    except InvariantError as error:
        raise click.ClickException(f"the run breaks what must hold; please report this: {error}") from None


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"can't make the directory {path}: {error.strerror or error}") from None


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtraError(
            f"the simulator needs {' and '.join(missing)}: install the extra with pip install 'aiokv[sim]'",
            expected="aiokv[sim]",
        )


def _print(made: Table) -> Console:
    """Print a table, into a file or pipe as wide as it is, and return what it was printed on."""
    # What users write is shown as it is: [red] is no colour, and :x: is no picture.
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        wide = Console(width=MAX_WIDTH, markup=False, emoji=False)
        console.width = max(console.width, wide.measure(made).maximum)
    console.print(made)
    return console


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show how much is done on stderr if that is a terminal; yields what is to be called for each part."""
    columns = (TextColumn(what), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)
        # Redrawing for every part would take longer than the part.
        batch = max(1, total // 200)
        done = 0

        def on_part() -> None:
            nonlocal done
            done += 1
            if done % batch == 0:
                progress.update(task, completed=done)

        yield on_part
