"""The checkpoints of a cluster as a table, or as lines of JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.checkpoint.folder import Found

MIN_WIDTH = 140
"""Columns of a table that does not go to a terminal."""


def facts_of(found: Found) -> dict[str, Any]:
    """Return what is shown of a checkpoint; `state` is "complete", "incomplete" or "damaged"."""
    manifest = found.manifest
    state = "damaged" if found.problem else "complete" if manifest is not None else "incomplete"
    return {
        "name": found.name,
        "run": found.run,
        "clock": found.clock,
        "time": "" if manifest is None else manifest.time,
        "nbytes": 0 if manifest is None else manifest.nbytes,
        "servers": 0 if manifest is None else len(manifest.parts),
        "workers": 0 if manifest is None else manifest.workers,
        "state": state,
        "problem": found.problem,
    }


def print_checkpoints(found: Sequence[Found], folder: str, *, as_json: bool) -> None:
    """Print the checkpoints of a folder, one a line."""
    all_facts = [facts_of(each) for each in found]
    if as_json:
        for facts in all_facts:
            click.echo(json.dumps(facts))
        return
    if not all_facts:
        click.echo(f"there are no checkpoints in {folder}")
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("name", "round", "time", "size", "servers", "workers", "state"):
        table.add_column(name, no_wrap=name != "state", overflow="fold")
    for facts in all_facts:
        state = f"{facts['state']}: {facts['problem']}" if facts["problem"] else facts["state"]
        size = decimal(facts["nbytes"])
        cells = [facts["name"], facts["clock"], facts["time"], size, facts["servers"], facts["workers"], state]
        table.add_row(*(Text(str(cell)) for cell in cells))
    console.print(table)
