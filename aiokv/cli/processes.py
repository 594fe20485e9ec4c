"""What commands have to do with processes: what those that they start inherit, and how their own one ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

EXIT_INTERRUPTED = 130
"""128 + SIGINT."""
EXIT_OUTPUT_LOST = 141
"""128 + SIGPIPE."""


def environment() -> dict[str, str]:
    """Return what the nodes inherit. The role is their own; a launcher that a node started may have inherited one."""
    return {name: value for name, value in os.environ.items() if name not in ("AIOKV_ROLE", "DMLC_ROLE")}


def finish(exit_code: int, reason: str) -> NoReturn:
    """End this process with an exit code; say why if it is another one than 0."""
    if exit_code == EXIT_OUTPUT_LOST:
        drop_output()
    elif exit_code != 0 and reason:
        click.echo(f"error: {one_line(reason)}", err=True)
    sys.exit(exit_code)


def drop_output() -> None:
    """Send what is left of stdout nowhere: Python flushes it when it ends, and would complain once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(text: object) -> str:
    """Return a text without line breaks."""
    return " ".join(str(text).split())
