"""The command `aiokv config`: all settings, and where they come from."""

# ruff: noqa: PLC0415 - imports stand inside functions, so that `aiokv --help` is quick

from __future__ import annotations

import click

from aiokv.cli.options import CONFIG, with_options


@click.command("config")
@with_options(
    CONFIG,
    click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each setting, one a line."),
)
def show_config(*, config: str | None, as_json: bool) -> None:
    """Print all settings: their values, and where they come from.

    They are those that a node and a training program would have that are started here with the same file and
    environment. The token is not shown.
    """
    from aiokv.config_table import print_json, print_table, read_settings

    settings = read_settings(config=config)
    if as_json:
        print_json(settings)
    else:
        print_table(settings)
