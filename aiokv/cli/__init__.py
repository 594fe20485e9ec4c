"""The `aiokv` command: a module for each of its commands, which imports what it needs when it runs.

So `aiokv --help` is quick.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import click

import aiokv
from aiokv.cli import bench, checkpoint, config, nodes, run
from aiokv.cli.plugins import Commands
from aiokv.cli.processes import drop_output, finish
from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cli", "main"]


def _version() -> str:
    return str(getattr(aiokv, "__version__", "unknown"))


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"aiokv {_version()}")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """A parameter server for training with asyncio.

    Settings come, in rising order, from a TOML file (--config or AIOKV_CONFIG), the environment (AIOKV_*, or DMLC_*
    as for MXNet) and the options.
    """


for _own in (nodes.scheduler, nodes.server, run.run, bench.bench, checkpoint.checkpoint, config.show_config):
    cli.add_command(_own)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command, and leave with its exit code: 1 and a line on stderr for an error, 2 for wrong usage."""
    try:
        cli.main(args=args, prog_name="aiokv")
    except AiokvError as error:
        finish(1, str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        drop_output()
        finish(1, f"can't write the output: {error.strerror}")
