"""Nodes on other hosts: what runs them there stands in for ssh, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from aiokv.errors import ConfigError
from aiokv.launch import Outcome, scratch
from aiokv.launch.remote import make_order
from aiokv.launch.signals import END_AT_ONCE
from aiokv.launch.supervisor import Recovery
from tests.launch.fake_nodes import CHILD, PAUSE, Recorder, is_running, launch, make_job
from tests.launch.test_launch_recovery import KILL_ME, first_time

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake nodes use POSIX signals")

STAND_IN = "env HOST_IS={host}"
"""Runs a command "on a host": it is told which one it is on."""


def remote_job(worker: str, **settings: Any) -> Any:
    """Return a job on two hosts."""
    places = {"hosts": ["a", "b"], "remote": STAND_IN, "advertise_host": "127.0.0.1"}
    return make_job(worker, **places | settings)


def test_scenario_54_nodes_are_spread_over_the_hosts_in_turn() -> None:
    where = "import os; print(os.environ['HOST_IS'])"
    job = remote_job(where, server=f"{where}; {PAUSE}", workers=5, servers=3, settle=2.0)
    hosts = {name: job.host_of(name) for name in job.names()}
    assert Counter(host for name, host in hosts.items() if name.startswith("worker")) == {"a": 3, "b": 2}
    assert Counter(host for name, host in hosts.items() if name.startswith("server")) == {"a": 2, "b": 1}
    outcome, output = launch(job)
    assert outcome == Outcome(0)
    assert {name: output.printed(name) for name in hosts if name.startswith("worker")} == {
        name: [host] for name, host in hosts.items() if name.startswith("worker")
    }


def test_exit_code_of_a_node_on_another_host_is_that_of_the_job() -> None:
    outcome, _ = launch(remote_job("import sys; print('boom', file=sys.stderr); sys.exit(3)", workers=1))
    assert outcome == Outcome(3, "worker-0 exited with code 3; its last line on stderr: boom", "worker-0")


def test_node_there_ends_with_all_that_it_started_when_the_job_does() -> None:
    output = Recorder(lambda _source, text: os.kill(os.getpid(), signal.SIGTERM) if text.startswith("child") else None)
    outcome, output = launch(remote_job(CHILD + PAUSE, workers=1), output)
    assert outcome.exit_code == 143


@pytest.mark.parametrize(("role", "number"), [("worker", signal.SIGTERM), ("server", END_AT_ONCE)])
def test_node_there_ends_when_the_launcher_is_killed(role: str, number: int) -> None:
    code = f"import os; print(os.getpid(), flush=True); {PAUSE}"
    order = make_order((sys.executable, "-S", "-c", code), {"AIOKV_ROLE": role})
    there = subprocess.Popen([sys.executable, "-m", "aiokv.launch.host"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert there.stdin is not None
    assert there.stdout is not None
    there.stdin.write(order.line())
    there.stdin.flush()
    pid = int(there.stdout.readline())
    assert is_running(pid)
    # Its end of the pipe goes with the process that had it.
    there.stdin.close()
    assert there.wait(30) == 128 + number
    assert not is_running(pid)
    there.stdout.close()


def test_command_line_of_another_host_shows_no_token_and_only_what_belongs_to_the_job_is_handed_over() -> None:
    order = make_order(("python",), {"AIOKV_TOKEN": "secret", "DMLC_ROLE": "worker", "HOME": "/home/me"})
    assert order.environ == {"AIOKV_TOKEN": "secret", "DMLC_ROLE": "worker"}
    lines: list[str] = []

    def look(event: str, _text: str) -> None:
        if event == "started":
            facts = output.notes[-1][1]
            lines.append(" ".join(psutil.Process(facts["pid"]).cmdline()))

    output = Recorder(look)
    job = remote_job("import os; print(len(os.environ['AIOKV_TOKEN']))", workers=1)
    _, output = launch(job, output)
    assert output.printed("worker-0") == [str(len(job.token))]
    assert job.token not in "".join(lines)


def test_host_keeps_what_compression_leaves_for_workers_that_are_replaced_and_deletes_it_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIOKV_RESIDUAL_FOLDER", raising=False)
    say = "import os; f = os.environ['AIOKV_RESIDUAL_FOLDER']; print(f, os.listdir(f), flush=True); "
    keeps = f"{say}open(f + '/kept', 'w').close(); {KILL_ME}"
    job = remote_job(
        first_time(tmp_path / "mark", keeps, say), workers=1, recovery=Recovery(restarts=1, on_worker_loss="respawn")
    )
    outcome, output = launch(job)
    assert outcome == Outcome(0)
    folder = output.printed("worker-0")[0].partition(" ")[0]
    assert output.printed("worker-0") == [f"{folder} []", f"{folder} ['kept']"]
    assert job.token not in folder
    assert not Path(folder).exists()


def test_folder_that_somebody_else_has_put_there_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "parent", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "aiokv-job").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder of this user"):
        scratch.make("aiokv-job")


def test_program_that_is_not_there_is_named() -> None:
    order = make_order(("no-such-program",), {})
    there = subprocess.run(
        [sys.executable, "-m", "aiokv.launch.host"], input=order.line(), capture_output=True, check=False
    )
    assert there.returncode == 1
    assert b"error: no-such-program: No such file or directory" in there.stderr


def test_stdin_that_ends_too_early_is_an_error() -> None:
    there = subprocess.run([sys.executable, "-m", "aiokv.launch.host"], input=b"", capture_output=True, check=False)
    assert there.returncode == 1
    assert b"stdin has ended" in there.stderr
