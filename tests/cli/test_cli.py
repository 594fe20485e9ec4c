"""The `aiokv` command as its user sees it: help, version, wrong usage."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from aiokv.cli import main
from tests.cli.calling import call, help_of


def test_help_lists_the_commands_with_a_sentence_each() -> None:
    text = help_of()
    assert "run         Run a training job, on this machine or on several hosts." in text
    assert "scheduler   Run the scheduler of a cluster." in text
    assert "server      Run one server of a cluster." in text


@pytest.mark.parametrize("command", ["run", "scheduler", "server"])
def test_help_of_a_command_fits_a_terminal_and_has_no_token_option(command: str) -> None:
    text = help_of(command)
    assert max(map(len, text.splitlines())) <= 80
    assert "--token" not in text


def test_help_of_run_says_what_the_exit_codes_mean_and_gives_an_example() -> None:
    text = help_of("run")
    assert "124  --timeout has passed" in text
    assert "aiokv run --servers 2 --workers 4 -- python train.py --epochs 10" in text


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "aiokv", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("aiokv ")


def test_output_that_finds_no_room_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dropped = []
    monkeypatch.setattr("aiokv.cli.drop_output", lambda: dropped.append(True))
    monkeypatch.setattr("aiokv.cli._version", lambda: fail_with(errno.ENOSPC))
    assert call("--version") == 1
    assert capfd.readouterr().err == "error: can't write the output: No space left on device\n"
    assert dropped
    monkeypatch.setattr("aiokv.cli._version", lambda: fail_with(errno.EBADF))
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["--version"])


def fail_with(number: int) -> str:
    raise OSError(number, os.strerror(number))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, aiokv.cli\n"
        "try: aiokv.cli.main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'numba', 'asyncio', 'rich', 'aiokv.net'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["fly"], "No such command 'fly'"),
        (["run"], "Missing argument 'COMMAND...'"),
        (["run", "-w", "0", "--", "true"], "0 is not in the range x>=1"),
        (["scheduler", "--port", "65536"], "65536 is not in the range 0<=x<=65535"),
        (["scheduler", "--token", "x"], "No such option '--token'"),
    ],
)
def test_wrong_usage_exits_with_2(args: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*args) == 2
    assert complaint in capsys.readouterr().err
