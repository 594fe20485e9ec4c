"""What looks at a live cluster: `aiokv why`, for what does everything wait; `aiokv metrics`, what has been counted."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from aiokv.config import load_config
from aiokv.net import runner
from aiokv.net.inquiry import ask_waiting
from aiokv.wire.messages import MemberState, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.wire.messages import WaitingCall

MOST_ROWS = 30
"""So many rows are shown; who needs more reads JSON."""

Answers = dict[str, Waiting | str]

_OPTIONS = (
    click.option("--scheduler", metavar="HOST:PORT", help="Where the scheduler listens.  [default: 127.0.0.1:9091]"),
    click.option("--cluster", metavar="ID", help="The cluster's name."),
    click.option("--tls-cert", metavar="FILE", help="A certificate of the cluster's authority, as PEM; turns TLS on."),
    click.option("--tls-key", metavar="FILE", help="The private key of the certificate, as PEM."),
    click.option("--tls-ca", metavar="FILE", help="The certificate of the cluster's own authority, as PEM."),
    click.option("--config", metavar="FILE", help="TOML file with settings.  [default: AIOKV_CONFIG]"),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for answers.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables."),
)


def _looks_on(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of one that asks a live cluster."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@_looks_on
def why(*, timeout: float, as_json: bool, **settings: Any) -> None:
    """Ask a live cluster what it waits for.

    Shows its members, and every request that is not answered yet: whose it is, what it is about, for what it waits and
    since when. The longest waits come first. The cluster does not notice it. It needs the token: set AIOKV_TOKEN.
    """
    answers = _ask(timeout, settings)
    if as_json:
        _print_json(as_facts(answers))
    else:
        show(answers, plain_console())


@click.command()
@_looks_on
def metrics(*, timeout: float, as_json: bool, **settings: Any) -> None:
    """Ask a live cluster how often what has happened.

    Shows the counters of the scheduler and of every server: what was refused and why, connections that have ended, and
    members, copies and checkpoints that were lost. Each is also a line in the log of its node. It needs the token: set
    AIOKV_TOKEN.
    """
    answers = _ask(timeout, settings)
    if as_json:
        _print_json(as_counters(answers))
    else:
        show_counters(answers, plain_console())


def _ask(timeout: float, settings: dict[str, Any]) -> Answers:
    config = load_config(**settings)
    return runner.run(ask_waiting(config, timeout=timeout), loop=config.loop)


def _print_json(facts: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")


def plain_console() -> Console:
    """Return a console that shows names and keys as they are: [red] is no colour, and :x: is no picture."""
    return Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)


def as_counters(answers: Answers) -> dict[str, dict[str, int] | str]:
    """Return each node's counters, by name; text: why it says nothing."""
    return {
        node: answer if isinstance(answer, str) else dict(sorted(answer.counters.items()))
        for node, answer in answers.items()
    }


def show_counters(answers: Answers, console: Console) -> None:
    """Print a table with a column for each node."""
    counters = {node: counted for node, counted in as_counters(answers).items() if isinstance(counted, dict)}
    table = Table(box=None)
    table.add_column("counter")
    for node in counters:
        table.add_column(node, justify="right")
    for name in sorted({name for counted in counters.values() for name in counted}):
        table.add_row(name, *(f"{counted.get(name, 0):,}" for counted in counters.values()))
    console.print(table)
    _show_silent(answers, console)


def as_facts(answers: Answers) -> dict[str, Any]:
    """Return what is known, for programs."""
    calls = [_facts(call) | {"at": node} for node, call in _calls(answers)]
    silent = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
    scheduler = answers["scheduler"]
    assert isinstance(scheduler, Waiting), "without the scheduler there is no answer at all"
    members = [_facts(member) for member in scheduler.members]
    return {"epoch": scheduler.epoch, "members": members, "waiting": calls, "silent": silent}


def show(answers: Answers, console: Console) -> None:
    """Print tables."""
    facts = as_facts(answers)
    table = Table(title=f"Members, epoch {facts['epoch']}", title_justify="left", box=None)
    for name in ("member", "state", "last heard", "reason"):
        table.add_column(name)
    for member in sorted(facts["members"], key=lambda member: (member["role"], member["number"], member["name"])):
        number = "" if member["number"] < 0 else f" {member['number']}"
        label = f"{member['role']}{number} ({member['name']})"
        table.add_row(label, member["state"], f"{member['seconds']:.1f} s ago", member["reason"])
    console.print(table)
    _show_silent(answers, console)
    console.print()
    if not facts["waiting"]:
        console.print("Nothing waits.")
        return
    table = Table(title="What waits", title_justify="left", box=None)
    for name in ("since", "requests", "whose", "what", "for what"):
        table.add_column(name, justify="right" if name in ("since", "requests") else "left")
    groups = _groups(answers)
    for calls in groups[:MOST_ROWS]:
        first, whose = calls[0], dict.fromkeys(call.who or "-" for call in calls)
        table.add_row(f"{first.seconds:.1f} s", f"{len(calls):,}", ", ".join(whose), first.what, first.reason)
    console.print(table)
    if len(groups) > MOST_ROWS:
        console.print(f"and {len(groups) - MOST_ROWS:,} more, which --json shows")


def _show_silent(answers: Answers, console: Console) -> None:
    for node, answer in answers.items():
        if isinstance(answer, str):
            console.print(f"{node} says nothing: {answer}")


def _groups(answers: Answers) -> list[list[WaitingCall]]:
    """Return the requests, those together that wait for the same; the longest waits first."""
    groups: dict[tuple[str, str], list[WaitingCall]] = {}
    for _, call in _calls(answers):
        groups.setdefault((call.what, call.reason), []).append(call)
    return list(groups.values())


def _calls(answers: Answers) -> list[tuple[str, WaitingCall]]:
    """Return all requests with the nodes that have not answered them, the longest waits first."""
    calls = [(node, call) for node, answer in answers.items() if isinstance(answer, Waiting) for call in answer.calls]
    return sorted(calls, key=lambda named: -named[1].seconds)


def _facts(record: WaitingCall | MemberState) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}
