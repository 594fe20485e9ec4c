"""All settings as a table: what they are, where they come from, what they may be and what they are for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aiokv.config import Config, trace_config
from aiokv.layers import SECRETS, TRAINING, allowed, meaning, types_of
from aiokv.training.config import TrainingConfig, trace_training_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MIN_WIDTH = 140
"""Columns of a table that does not go to a terminal."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    table: str
    """Of the TOML file: "" for the top, "training"."""
    name: str
    value: Any
    """As plain data; a secret is "***"."""
    origin: str
    """"default", "derived" from other settings, "file" or "environment"."""
    source: str
    """The path of the file, or the name of the variable; empty for others."""
    allowed: str
    meaning: str


def read_settings(*, environ: Mapping[str, str] | None = None, config: str | None = None) -> list[Setting]:
    """Return all settings of a node and of training.

    Args:
        environ: the environment; None: that of this process.
        config: path of the TOML file; None: that of the environment.

    Raises:
        ConfigError: a setting can't be.
    """
    node, node_origins = trace_config(environ=environ, config=config)
    training, training_origins = trace_training_config(environ=environ, config=config)
    return [*_settings("", node, node_origins), *_settings(TRAINING, training, training_origins)]


def _settings(table: str, record: Config | TrainingConfig, origins: Mapping[str, str]) -> Iterable[Setting]:
    plain: dict[str, Any] = msgspec.to_builtins(record)
    defaults: dict[str, Any] = msgspec.to_builtins(type(record)())
    for name, kind in types_of(type(record)).items():
        value = plain[name]
        source = origins.get(name, "")
        if source:
            origin = "environment" if source.startswith(("AIOKV_", "DMLC_")) else "file"
        else:
            origin = "default" if value == defaults[name] else "derived"
        if name in SECRETS and value:
            value = "***"
        yield Setting(table, name, value, origin, source, allowed(kind), meaning(kind))


def print_json(settings: Iterable[Setting]) -> None:
    """Print a JSON object for each setting, one a line."""
    for setting in settings:
        click.echo(json.dumps(asdict(setting)))


def print_table(settings: Iterable[Setting]) -> None:
    """Print a table for each table of the TOML file; in a terminal, what is not a default is bold."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, MIN_WIDTH)
    by_table: dict[str, Table] = {}
    for setting in settings:
        table = by_table.setdefault(setting.table, _new_table())
        value = setting.value if isinstance(setting.value, str) else json.dumps(setting.value)
        value = "-" if setting.value is None else value
        origin = f"{setting.origin} {setting.source}".strip()
        about = f"{setting.meaning} {setting.allowed[0].upper()}{setting.allowed[1:]}."
        # Plain text: square brackets mean something to rich.
        cells = [Text(cell) for cell in (setting.name, value, origin, about)]
        table.add_row(*cells, style="" if setting.origin == "default" else "bold")
    for name, table in by_table.items():
        console.print(Text(f"table [{name}]:" if name else "a node, at the top of the file:"))
        console.print(table)
        console.print()


def _new_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    table.add_column("what for, and what it may be", ratio=1)
    return table
