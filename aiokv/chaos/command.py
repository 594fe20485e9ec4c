"""The command `aiokv chaos`."""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from aiokv.chaos.plan import DISTURBANCES, KILLABLE, FaultPlan, Kind, parse_words
from aiokv.chaos.report import show
from aiokv.chaos.run import ChaosPlan, Harm, Watch, run

if TYPE_CHECKING:
    from aiokv.chaos.report import Report

MINUTE = 60.0

Above0 = click.FloatRange(min=0, min_open=True)
Count = click.IntRange(min=1)


@click.command(epilog="docs/reliability.md says what the figures mean, and what a long run has given.")
@click.option("--minutes", type=Above0, default=2.0, show_default=True, metavar="N", help="For how long harm is done.")
@click.option("-w", "--workers", type=Count, default=4, show_default=True, metavar="N", help="Number of workers.")
@click.option("-s", "--servers", type=Count, default=3, show_default=True, metavar="N", help="Number of servers.")
@click.option(
    "--replication",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    metavar="N",
    help="On how many servers every parameter is.",
)
@click.option(
    "--kill",
    default=",".join(KILLABLE),
    show_default=True,
    metavar="ROLES",
    help='Whose processes are killed; or "none".',
)
@click.option(
    "--disturb",
    default=",".join(DISTURBANCES),
    show_default=True,
    metavar="KINDS",
    help='What is done besides: processes are stopped for a while, connections are cut or held up; or "none".',
)
@click.option(
    "--every", type=Above0, default=1.0, show_default=True, metavar="SECONDS", help="Mean time between two faults."
)
@click.option(
    "--longest", type=Above0, default=1.0, show_default=True, metavar="SECONDS", help="The longest stop or delay."
)
@click.option("--seed", type=int, metavar="N", help="Equal seeds draw equal faults.  [default: a new one]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def chaos(
    *,
    minutes: float,
    workers: int,
    servers: int,
    replication: int,
    kill: str,
    disturb: str,
    every: float,
    longest: float,
    seed: int | None,
    as_json: bool,
) -> None:
    """Kill a cluster's processes while it trains.

    All connections go through proxies. Workers and the scheduler are started again when they are killed; when a server
    is, the whole job goes on from its last checkpoint; or, with --replication 2, another server has a copy of what it
    had. None is killed while there is no such copy. Then the same number of steps is made on a cluster that nobody
    harms. The weights must have the same bits.

    \b
    Exit code:
      0  they have, and no contribution was lost
      1  they have not, or the job did not go on
    """
    faults = FaultPlan(
        kill=parse_words(kill, KILLABLE, "--kill"),
        disturb=tuple(Kind(word) for word in parse_words(disturb, DISTURBANCES, "--disturb")),
        every=every,
        longest=longest,
        seed=secrets.randbelow(1 << 31) if seed is None else seed,
    )
    size = {"workers": workers, "servers": servers, "replication": replication}
    report = _run(ChaosPlan(seconds=minutes * MINUTE, faults=faults, **size))
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 120, markup=False, emoji=False))
    sys.exit(0 if report.ok else 1)


def _run(plan: ChaosPlan) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("starting", total=plan.seconds)

        def shown(seconds: float, watch: Watch, harm: Harm) -> None:
            text = f"step {watch.step:,}, {harm.killed.total()} kills"
            progress.update(task, completed=seconds, description=text)

        return asyncio.run(run(plan, shown))
