"""Nodes that are started again while a job goes on, and jobs that are started again as a whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aiokv.launch import Outcome
from aiokv.launch.supervisor import Recovery
from tests.launch.fake_nodes import PAUSE, by_name, launch, make_job

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake nodes use POSIX signals")

KILL_ME = "import os; os.kill(os.getpid(), 9)"

SAY_PORT = """
import json, os
print(json.dumps({"host": "127.0.0.1", "port": int(os.environ["AIOKV_BIND_PORT"]) or 4321}), flush=True)
"""

WAIT_FOR_FILE = """
import pathlib, time
path = pathlib.Path({path!r})
while not path.exists() or not path.read_text():
    time.sleep(0.01)
print(path.read_text())
"""

SAY_RESUME_OR_WAIT = """
import os, signal
if "AIOKV_RESUME" not in os.environ:
    signal.pause()
print(os.environ["AIOKV_RESUME"])
"""


def first_time(mark: Path, then: str, later: str) -> str:
    """Return code that does one thing when it runs for the first time, and another one afterwards."""
    return f"""
import pathlib
mark = pathlib.Path({str(mark)!r})
code = {later!r} if mark.exists() else {then!r}
mark.touch()
exec(code)
"""


def test_worker_that_is_killed_is_started_again_under_its_name_and_the_job_ends_well(tmp_path: Path) -> None:
    dies = first_time(tmp_path / "mark", KILL_ME, "import os; print('again as ' + os.environ['AIOKV_NAME'])")
    job = make_job(by_name(worker_0=dies), recovery=Recovery(restarts=3, on_worker_loss="respawn"))
    outcome, output = launch(job)
    assert outcome == Outcome(0)
    assert output.printed("worker-0") == ["again as worker-0"]
    assert ("restarting", {"node": "worker-0", "left": 2}) in output.notes


@pytest.mark.parametrize("own", [False, True])
def test_workers_that_are_replaced_find_the_same_folder_for_what_compression_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, own: bool
) -> None:
    if own:
        monkeypatch.setenv("AIOKV_RESIDUAL_FOLDER", str(tmp_path))
    say = "import os; f = os.environ['AIOKV_RESIDUAL_FOLDER']; print(f, os.path.isdir(f), flush=True); "
    dies = first_time(tmp_path / "mark", say + KILL_ME, say)
    job = make_job(dies, workers=1, recovery=Recovery(restarts=1, on_worker_loss="respawn"))
    outcome, output = launch(job)
    assert outcome == Outcome(0)
    first, second = output.printed("worker-0")
    assert first == second
    folder, _, is_there = first.rpartition(" ")
    assert is_there == "True"
    assert Path(folder).exists() is own
    assert (folder == str(tmp_path)) is own


def test_last_lines_of_a_node_that_is_replaced_are_shown(tmp_path: Path) -> None:
    dies = first_time(tmp_path / "mark", "import sys; print('my reason', file=sys.stderr); sys.exit(1)", "")
    job = make_job(dies, workers=1, recovery=Recovery(restarts=1, on_worker_loss="respawn"))
    _, output = launch(job)
    assert ("worker-0", "stderr", "my reason") in output.lines


def test_scheduler_is_started_again_at_its_port(tmp_path: Path) -> None:
    told = str(tmp_path / "told")
    tell = f"import os; open({told!r}, 'w').write(os.environ['AIOKV_BIND_PORT']); {PAUSE}"
    scheduler = SAY_PORT + first_time(tmp_path / "mark", KILL_ME, tell)
    job = make_job(WAIT_FOR_FILE.format(path=told), workers=1, scheduler=scheduler, recovery=Recovery(restarts=1))
    outcome, output = launch(job)
    assert outcome == Outcome(0)
    assert output.printed("worker-0") == ["4321"]


def test_job_ends_when_the_scheduler_says_that_parameters_are_lost() -> None:
    say = f'print(json.dumps({{"event": "parameters_lost", "node": "server-0"}}), flush=True); {PAUSE}'
    outcome, _ = launch(make_job(PAUSE, workers=1, scheduler=SAY_PORT + say, recovery=Recovery(replicated=True)))
    assert outcome == Outcome(1, "server-0 is lost, and nobody has a copy of its parameters", "server-0")


def test_job_whose_server_is_lost_is_started_again_as_a_whole_and_told_to_resume(tmp_path: Path) -> None:
    server = first_time(tmp_path / "mark", KILL_ME, PAUSE)
    job = make_job(SAY_RESUME_OR_WAIT, server=server, recovery=Recovery(restarts=1, resumable=True))
    outcome, output = launch(job)
    assert outcome == Outcome(0)
    assert [output.printed(name) for name in ("worker-0", "worker-1")] == [["latest"], ["latest"]]
    assert ("resuming", {"left": 0}) in output.notes


def test_node_that_always_fails_ends_the_job_when_no_restart_is_left() -> None:
    job = make_job("raise SystemExit(3)", workers=1, recovery=Recovery(restarts=2, on_worker_loss="respawn"))
    outcome, output = launch(job)
    assert (outcome.exit_code, outcome.node) == (3, "worker-0")
    assert len([event for event, facts in output.notes if event == "started" and facts["node"] == "worker-0"]) == 3


HUNG = """
import json, pathlib, signal, sys, time
print(json.dumps({"host": "127.0.0.1", "port": 4321}), flush=True)
while not pathlib.Path(PATH).exists():
    time.sleep(0.01)
print(json.dumps({"event": "silent", "node": "worker-0", "seconds": 2.5}), flush=True)
signal.pause()
"""


def test_node_that_does_not_answer_the_scheduler_is_killed_and_replaced(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    worker = first_time(mark, PAUSE, "print('again')")
    scheduler = HUNG.replace("PATH", repr(str(mark)))
    job = make_job(worker, workers=1, scheduler=scheduler, recovery=Recovery(restarts=1, on_worker_loss="respawn"))
    outcome, output = launch(job)
    assert outcome == Outcome(0)
    assert output.printed("worker-0") == ["again"]
    assert ("hung", {"node": "worker-0"}) in output.notes
