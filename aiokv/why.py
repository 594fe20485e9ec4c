"""The command `aiokv why`: for what does everything wait?"""

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
    from aiokv.wire.messages import WaitingCall

MOST_ROWS = 30
"""So many rows are shown; who needs more reads JSON."""

Answers = dict[str, Waiting | str]


@click.command()
@click.option("--scheduler", metavar="HOST:PORT", help="Where the scheduler listens.  [default: 127.0.0.1:9091]")
@click.option("--cluster", metavar="ID", help="The cluster's name.")
@click.option("--config", metavar="FILE", help="TOML file with settings.  [default: AIOKV_CONFIG]")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for answers.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def why(*, timeout: float, as_json: bool, **settings: Any) -> None:
    """Ask a live cluster what it waits for.

    Shows its members, and every request that is not answered yet: whose it is, what it is about, for what it waits and
    since when. The longest waits come first. The cluster does not notice it. It needs the token: set AIOKV_TOKEN.
    """
    config = load_config(**settings)
    answers = runner.run(ask_waiting(config, timeout=timeout), loop=config.loop)
    if as_json:
        sys.stdout.write(msgspec.json.encode(as_facts(answers)).decode() + "\n")
    else:
        show(answers, Console(width=None if sys.stdout.isatty() else 160))


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
    for node, reason in facts["silent"].items():
        console.print(f"{node} says nothing: {reason}")
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
