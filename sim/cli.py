"""The command `aiokv sim`."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from aiokv.errors import AiokvError, MissingExtraError
from sim.scenario import load_scenario, shipped_scenarios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.record import Run
    from sim.scenario import Scenario

Results = dict[str, list["Run"]]


@click.group()
def sim() -> None:
    """Simulate a cluster before you run it.

    The simulator runs the very code that decides in a real cluster, but in simulated time and without arrays.
    """


@sim.command(epilog="Scenarios that come along: " + ", ".join(shipped_scenarios()) + ".")
@click.argument("scenario")
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal runs.")
@click.option(
    "--replications",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run this often, with seeds SEED, SEED + 1 and so on, and show means and standard errors.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Directory for the picture; made if it does not exist.  [default: current directory]",
)
def run(scenario: str, seed: int, replications: int, as_json: bool, out: Path) -> None:
    """Run SCENARIO under each of its policies, and compare them.

    SCENARIO is a TOML file, or the name of a scenario that comes along. Prints step times, utilisation, updates per
    second and staleness, and draws the timeline of the first run as a PNG picture.
    """
    try:
        _run(load_scenario(scenario), seed, replications, as_json, out)
    except AiokvError as error:
        raise click.ClickException(str(error)) from None


def _run(scenario: Scenario, seed: int, replications: int, as_json: bool, out: Path) -> None:
    _require("simpy", "matplotlib")
    # They need what is checked for in the line above.
    from sim.checks import find_violations  # noqa: PLC0415
    from sim.cluster import simulate  # noqa: PLC0415
    from sim.picture import draw  # noqa: PLC0415
    from sim.report import notes, table, to_json  # noqa: PLC0415

    picture = out / f"{scenario.name}.png"
    _make_directory(out)
    results: Results = {policy: [] for policy in scenario.policies}
    with _progress(scenario, replications) as on_step:
        for policy, runs in results.items():
            for replication in range(replications):
                runs.append(simulate(scenario, policy, seed + replication, on_step=on_step))
    try:
        draw([runs[0] for runs in results.values()], picture)
    except OSError as error:
        raise click.ClickException(f"can't write the picture {picture}: {error.strerror or error}") from None
    if as_json:
        click.echo(to_json(results, str(picture)))
    else:
        console = Console()
        console.print(table(results))
        for line in notes(results):
            console.print(line, markup=False, highlight=False)
        console.print(f"timeline: {picture}", markup=False, highlight=False, soft_wrap=True)
    violations = [
        f"{policy}, seed {run.seed}: {violation}"
        for policy, runs in results.items()
        for run in runs
        for violation in find_violations(run)
    ]
    if violations:
        raise click.ClickException("the run breaks what must hold; please report this:\n" + "\n".join(violations[:20]))


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


@contextlib.contextmanager
def _progress(scenario: Scenario, replications: int) -> Iterator[Callable[[], None]]:
    """Show how many steps are done on stderr if that is a terminal; yields what is to be called for each."""
    total = scenario.steps * scenario.cluster.workers * len(scenario.policies) * replications
    columns = (TextColumn("simulating"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)
        # Redrawing for every step would take longer than the step.
        batch = max(1, total // 200)
        done = 0

        def on_step() -> None:
            nonlocal done
            done += 1
            if done % batch == 0:
                progress.update(task, completed=done)

        yield on_step
