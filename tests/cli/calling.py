"""Runs the `aiokv` command in this process."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from aiokv.cli import cli, main


def call(*args: str) -> int:
    """Run the command in this process; return its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    return int(caught.value.code or 0)


def help_of(*args: str) -> str:
    """Return a help text."""
    result = CliRunner().invoke(cli, [*args, "--help"], prog_name="aiokv")
    assert result.exit_code == 0
    return result.output
