"""The command `aiokv run`: what it starts, prints and refuses."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click
import pytest

from aiokv.cli import cli
from aiokv.errors import ConfigError
from aiokv.types import Role
from tests.cli.calling import call
from tests.launch.fake_nodes import PAUSE, SCHEDULER

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def _fake_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `aiokv run` start tiny processes instead of real schedulers and servers."""
    codes = {Role.SCHEDULER: SCHEDULER, Role.SERVER: PAUSE}
    monkeypatch.setattr("aiokv.launch.base.node_command", lambda role: [sys.executable, "-S", "-c", codes[role]])


@pytest.mark.usefixtures("_fake_nodes")
def test_run_shows_the_workers_lines_and_exits_with_0(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; print(os.environ['AIOKV_NAME'], os.environ['AIOKV_NUM_SERVERS'])"
    assert call("run", "-w", "2", "-s", "1", "--name-prefix", "a-", "python", "-S", "-c", code) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["a-worker-0  | a-worker-0 1", "a-worker-1  | a-worker-1 1"]
    assert "aiokv       | scheduler listening on 127.0.0.1:4321; starting 1 server and 2 workers\n" in err
    assert err.endswith("aiokv       | all workers are done\n")


@pytest.mark.usefixtures("_fake_nodes")
def test_run_ends_with_the_reason_and_the_code_of_the_worker_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('ValueError: no data', file=sys.stderr); sys.exit(7)"
    assert call("run", "--", "python", "-S", "-c", code) == 7
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "error: worker-0 exited with code 7; its last line on stderr: ValueError: no data"


@pytest.mark.usefixtures("_fake_nodes")
def test_run_takes_defaults_from_the_environment_and_hands_the_file_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text("num_servers = 2\nscheduler = '10.0.0.1:9'", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLC_NUM_WORKER", "3")
    monkeypatch.setenv("DMLC_ROLE", "scheduler")
    monkeypatch.setenv("AIOKV_CLUSTER", "blue")
    names = ("AIOKV_CONFIG", "AIOKV_BIND_HOST", "AIOKV_ON_WORKER_LOSS", "AIOKV_CLUSTER")
    code = f"import os; print(*[os.environ[name] for name in {names}])"
    options = ("--config", "c.toml", "--on-worker-loss", "respawn", "--json")
    assert call("run", *options, "--", "python", "-S", "-c", code) == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    lines = [event["text"] for event in events if event["event"] == "line"]
    assert lines == [f"{tmp_path / 'c.toml'} 127.0.0.1 respawn blue"] * 3
    assert [event["node"] for event in events if event["event"] == "started" and event["role"] == "server"] == [
        "server-0",
        "server-1",
    ]
    assert events[-1] == {"event": "ended", "exit_code": 0, "reason": "", "text": "all workers are done"}


def test_run_refuses_copies_for_which_there_is_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--replication", "2", "--", "python", "-c", "") == 1
    assert "replication = 2 needs at least 2 servers, got 1" in capsys.readouterr().err


def test_run_refuses_a_program_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "nosuchprogram") == 1
    assert capsys.readouterr().err == "error: cannot find the program 'nosuchprogram' that the workers shall run\n"


@pytest.mark.parametrize("token", ["", "secret"])
def test_workers_that_join_have_the_token_of_the_job_and_no_fresh_one(
    token: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIOKV_TOKEN", token)
    code = "import os; print('token:', os.environ['AIOKV_TOKEN'])"
    assert call("run", "--join", "127.0.0.1:9", "--cluster", "c", "--", "python", "-S", "-c", code) == 0
    assert capfd.readouterr().out.rstrip().endswith(f"token: {token}".rstrip())


def test_run_refuses_fewer_workers_than_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", "--workers", "2", "--min-workers", "3", "--", "python", "-c", "") == 1
    assert capsys.readouterr().err == "error: min_workers = 3 is more than num_workers = 2\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--remote", "ssh {host}"], "give both"),
        (["--hosts", ","], "names no host"),
        (["--hosts", "no-such-host.invalid"], "'no-such-host.invalid' reaches this machine .*: give --advertise"),
    ],
)
def test_hosts_that_can_not_be_used_are_an_error_before_anything_starts(options: list[str], words: str) -> None:
    with pytest.raises((click.UsageError, ConfigError), match=words):
        cli.main(["run", *options, "--", "python", "-c", ""], standalone_mode=False)
