"""The commands `aiokv checkpoint list` and `aiokv checkpoint verify`."""

# ruff: noqa: PLC0415 - imports stand inside functions, so that `aiokv --help` is quick

from __future__ import annotations

import click

from aiokv.cli.processes import finish


@click.group()
def checkpoint() -> None:
    """Look at the checkpoints of a cluster."""


@checkpoint.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each checkpoint, one a line.")
@click.argument("folder", metavar="URL")
def list_checkpoints(*, folder: str, as_json: bool) -> None:
    """Print the checkpoints in a folder, the oldest first: round, time, size, and whether they are complete.

    What is incomplete was being written when its job ended. That files are whole is not looked at: see verify.
    """
    from aiokv.checkpoint.folder import find_checkpoints
    from aiokv.checkpoint.table import print_checkpoints

    print_checkpoints(find_checkpoints(folder), folder, as_json=as_json)


@checkpoint.command("verify")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each checkpoint, one a line.")
@click.argument("folder", metavar="URL")
def verify_checkpoints(*, folder: str, as_json: bool) -> None:
    """Read all files of the checkpoints in a folder, or of one, and compare them with their checksums.

    The exit code is 1 if one is damaged, or if none is complete.
    """
    from aiokv.checkpoint.folder import find_checkpoints, verified
    from aiokv.checkpoint.table import print_checkpoints

    found = [verified(each) for each in find_checkpoints(folder)]
    print_checkpoints(found, folder, as_json=as_json)
    damaged = [each.name for each in found if each.problem]
    if damaged:
        finish(1, f"damaged: {', '.join(damaged)}")
    if not any(each.is_complete for each in found):
        finish(1, f"there is no complete checkpoint in {folder}")
