"""Runs what the command line asked for, and shows it: progress on a terminal, then JSON or a table."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from aiokv.bench import kernels
from aiokv.bench.cluster import measure
from aiokv.bench.kernels import kernels_json, kernels_table, run_kernels
from aiokv.bench.limits import DEFAULT_ROUNDS, LABELS, Limits, measure_limits
from aiokv.bench.report import make_report, make_summary, make_table
from aiokv.errors import ConfigError
from aiokv.launch import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.bench.plan import Plan

EXIT_WRONG = 1
_MAX_WIDTH = 120


def run_workload(
    plan: Plan, *, environ: Mapping[str, str], timeout: float, as_json: bool, profile: str | None = None
) -> Outcome:
    """Measure a workload and show the figures.

    Args:
        plan: what to measure.
        environ: the environment of the nodes.
        timeout: seconds for everything.
        as_json: show one line of JSON instead of a table.
        profile: directory for the nodes' profiles; made when it does not exist.

    Returns:
        The exit code with its reason: EXIT_WRONG when a worker received a wrong number.

    Raises:
        ConfigError: the directory can't be made.
    """
    if profile is not None:
        profile = _make_directory(profile)
    with _Bar(plan.rounds, plan.workload) as bar:
        plan = msgspec.structs.replace(plan, shows_progress=bar.is_shown)
        run = measure(plan, environ=environ, timeout=timeout, on_progress=bar.update, profile=profile)
        measurement = asyncio.run(run)
    outcome = measurement.outcome
    if outcome.exit_code != 0:
        for line in measurement.last_lines:
            sys.stderr.write(f"{line}\n")
        return outcome
    report = make_report(plan, measurement.results, measurement.usage)
    if as_json:
        _write(report.to_json())
    else:
        _print_table(make_table(report))
        _write(make_summary(report))
    if report.ok:
        return outcome
    return Outcome(EXIT_WRONG, f"wrong numbers: {'; '.join(report.problems)}")


def run_limits(*, mib: float, rounds: int | None, as_json: bool) -> Outcome:
    """Measure the machine and show the figures.

    Args:
        mib: size of the messages in MiB.
        rounds: how often each figure is timed; the usual number when not given.
        as_json: show one line of JSON instead of a table.

    Returns:
        The exit code with its reason.

    Raises:
        AiokvError: a process that was started for it failed.
    """
    with _Bar(len(LABELS), "starting") as bar:
        limits = measure_limits(mib=mib, rounds=rounds or DEFAULT_ROUNDS, on_progress=bar.next)
    if as_json:
        _write(limits.to_json())
    else:
        _print_table(_limits_table(limits))
    return Outcome(0)


def run_kernel_bench(*, mib: float, rounds: int | None, as_json: bool) -> Outcome:
    """Measure the CUDA kernels and show the figures. See `run_kernels`."""
    with _Bar(0, "compiling") as bar:
        figures = run_kernels(mib=mib, rounds=rounds or kernels.DEFAULT_ROUNDS, on_figure=bar.next)
    if as_json:
        _write(kernels_json(figures, mib))
    else:
        _print_table(kernels_table(figures, mib))
    return Outcome(0)


class _Bar:
    """A progress bar on stderr, when that is a terminal; without a thread, which would disturb the measurement."""

    def __init__(self, total: int, text: str) -> None:
        console = Console(stderr=True)
        self.is_shown = console.is_terminal
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bar = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not self.is_shown)
        self._task = self._bar.add_task(text, total=total)
        self._begun = -1

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int) -> None:
        """So many steps are done."""
        self._bar.update(self._task, completed=done, refresh=True)

    def next(self, text: str) -> None:
        """The next step begins, under this name."""
        self._begun += 1
        self._bar.update(self._task, completed=self._begun, description=text, refresh=True)


def _limits_table(limits: Limits) -> Table:
    table = Table(title=f"this machine, messages of {limits.mib:g} MiB", title_justify="left")
    table.add_column("what")
    table.add_column("median", justify="right")
    for name, label in LABELS.items():
        table.add_row(label, f"{getattr(limits, name):.2f}")
    return table


def _print_table(table: Table) -> None:
    # In a file or a pipe it may be as wide as it needs to be.
    console = Console() if sys.stdout.isatty() else Console(width=_MAX_WIDTH)
    console.print(table)


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _make_directory(path: str) -> str:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot make the directory {path!r} for the profiles: {reason}", got=path) from None
    return os.path.abspath(path)
