"""Whole jobs with tiny nodes: what they print, how they end, and that nothing is left."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from aiokv.launch import Job, LocalLauncher, Outcome
from aiokv.launch.output import TextOutput
from aiokv.launch.scratch import RESIDUAL_FOLDER
from tests.launch.fake_nodes import (
    CHILD,
    DEAF,
    PAUSE,
    SCHEDULER,
    Recorder,
    by_name,
    is_running,
    launch,
    make_job,
    python,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake nodes use POSIX signals and named pipes")

# --- how a job ends ---


def test_job_succeeds_when_all_workers_do() -> None:
    outcome, output = launch(make_job("print('trained')", servers=2))
    assert outcome == Outcome(0)
    assert sorted(output.lines) == [("worker-0", "stdout", "trained"), ("worker-1", "stdout", "trained")]
    assert len(output.pids()) == 5


def test_nodes_that_end_by_themselves_when_the_workers_are_done_are_not_disturbed(tmp_path: Path) -> None:
    pipes = [str(tmp_path / name) for name in ("scheduler", "server")]
    for pipe in pipes:
        os.mkfifo(pipe)
    worker = f"[open(pipe, 'w').close() for pipe in {pipes!r}]"
    scheduler = SCHEDULER.replace("signal.pause()", f"open({pipes[0]!r}).read()")
    server = f"open({pipes[1]!r}).read(); print('saved')"
    _, output = launch(make_job(worker, server=server, workers=1, settle=60.0, scheduler=scheduler))
    assert ("exited", {"node": "server-0", "exit_code": 0}) in output.notes
    assert output.printed("server-0") == ["saved"]


def test_failing_worker_ends_the_job_with_its_code_and_its_last_words() -> None:
    worker = by_name(
        worker_1="import sys; print('boom', file=sys.stderr); print(file=sys.stderr); sys.exit(3)", other=PAUSE
    )
    outcome, output = launch(make_job(worker))
    assert outcome == Outcome(3, "worker-1 exited with code 3; its last line on stderr: boom", "worker-1")
    assert ("exited", {"node": "worker-0", "exit_code": -signal.SIGTERM}) in output.notes


def test_server_is_not_asked_to_hand_over_what_it_has_when_all_servers_end() -> None:
    asked = (
        "import signal, sys\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM):\n"
        "    signal.signal(number, lambda number, _frame: sys.exit(print(signal.Signals(number).name)))\n"
        "print('ready')\n"
        "while True: signal.pause()\n"
    )
    output = Recorder(lambda _source, text: os.kill(os.getpid(), signal.SIGTERM) if text == "ready" else None)
    _, output = launch(make_job(PAUSE, server=asked), output)
    assert output.printed("server-0") == ["ready", "SIGUSR1"]


def test_last_words_are_cut_when_they_are_long() -> None:
    outcome, _ = launch(make_job("raise SystemExit('x' * 1000)", workers=1))
    assert outcome.reason == f"worker-0 exited with code 1; its last line on stderr: {'x' * 300}..."


def test_scenario_52_server_that_is_killed_ends_the_job_and_its_signal_is_named() -> None:
    outcome, _ = launch(make_job(PAUSE, server="import os; os.kill(os.getpid(), 9)"))
    assert outcome == Outcome(137, "server-0 was killed by SIGKILL", "server-0")


def test_scheduler_that_cannot_start_ends_the_job_before_anything_else_starts() -> None:
    outcome, output = launch(make_job(PAUSE, scheduler="raise SystemExit('error: the port is taken')"))
    assert outcome.reason == "scheduler exited with code 1; its last line on stderr: error: the port is taken"
    assert [event for event, _ in output.notes if event == "ending"] == [], "there is nothing to be ended"
    assert len(output.pids()) == 1


def test_scheduler_that_never_says_where_it_listens_ends_the_job() -> None:
    outcome, _ = launch(make_job(PAUSE, scheduler=PAUSE, start_timeout=0.1))
    assert outcome == Outcome(1, "the scheduler did not say within 0.1 s where it listens")


def test_job_that_takes_too_long_is_ended() -> None:
    outcome, _ = launch(make_job(PAUSE, workers=1, timeout=2.0))
    assert outcome == Outcome(124, "the job did not end within 2 s; still running: scheduler, server-0, worker-0")


def test_program_that_cannot_be_started_ends_the_job(tmp_path: Path) -> None:
    job = Job(command=[str(tmp_path)], server_command=python(PAUSE), scheduler_command=python(SCHEDULER))
    outcome, _ = launch(job)
    assert outcome == Outcome(127, "worker-0 could not be started: Permission denied", "worker-0")


def test_job_ends_when_nobody_reads_its_output() -> None:
    def closed(source: str, _text: str) -> None:
        if source == "worker-0":
            raise BrokenPipeError

    outcome, _ = launch(make_job("print('hello'); " + PAUSE), Recorder(closed))
    assert outcome.exit_code == 141


# --- nothing is left ---


def test_node_that_does_not_end_when_asked_is_killed() -> None:
    worker = by_name(worker_0=DEAF, worker_1="import sys; sys.stdin.close(); " + PAUSE)
    output = Recorder(lambda _source, text: os.kill(os.getpid(), signal.SIGTERM) if text == "deaf" else None)
    outcome, output = launch(make_job(worker, grace=0.2), output)
    assert outcome == Outcome(143, "ended by SIGTERM")
    assert ("killed", {"node": "worker-0"}) in output.notes
    assert ("exited", {"node": "worker-0", "exit_code": -signal.SIGKILL}) in output.notes


LEAVING = (
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('leaving')))\n"
    "print('working')\n"
    "while True: signal.pause()\n"
)


def test_workers_that_leave_are_asked_to_end_before_the_others() -> None:
    working: list[str] = []

    def on_show(_source: str, text: str) -> None:
        working.extend([text] if text == "working" else [])
        if text == "working" and len(working) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome, output = launch(make_job(LEAVING, drain=20.0), Recorder(on_show))
    assert outcome == Outcome(143, "ended by SIGTERM")
    ended = [facts["node"] for event, facts in output.notes if event == "exited"]
    assert (sorted(ended[:2]), sorted(ended[2:])) == (["worker-0", "worker-1"], ["scheduler", "server-0"])
    assert [output.printed(f"worker-{number}") for number in range(2)] == [["working", "leaving"]] * 2


def test_workers_that_take_too_long_to_leave_are_killed() -> None:
    output = Recorder(lambda _source, text: os.kill(os.getpid(), signal.SIGTERM) if text == "deaf" else None)
    outcome, output = launch(make_job(by_name(worker_0=DEAF, other=PAUSE), drain=0.1), output)
    assert outcome == Outcome(143, "ended by SIGTERM")
    assert ("exited", {"node": "worker-0", "exit_code": -signal.SIGKILL}) in output.notes


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "raise SystemExit(0)", "os.kill(os.getpid(), 9)"])
def test_what_a_node_started_ends_with_it(end: str) -> None:
    _, output = launch(make_job(CHILD + end))
    assert len([text for _, _, text in output.lines if text.startswith("child ")]) >= 1


def test_what_a_node_left_behind_ends_while_the_job_goes_on(tmp_path: Path) -> None:
    pipe = str(tmp_path / "pid")
    os.mkfifo(pipe)
    wait = (
        f"import contextlib, os, select; pid = int(open({pipe!r}).read())\n"
        "with contextlib.suppress(ProcessLookupError): select.select([os.pidfd_open(pid)], [], [])\n"
        "print('gone')"
    )
    worker = by_name(worker_0=CHILD + f"pipe = open({pipe!r}, 'w'); pipe.write(str(child.pid))", worker_1=wait)
    outcome, output = launch(make_job(worker, settle=0.0))
    assert outcome == Outcome(0)
    assert output.printed("worker-1") == ["gone"]


def test_second_ctrl_c_does_not_wait() -> None:
    def on_show(source: str, text: str) -> None:
        if text == "deaf" or source == "ending":
            os.kill(os.getpid(), signal.SIGINT)

    outcome, output = launch(make_job(by_name(worker_0=DEAF, other=PAUSE), grace=3600.0), Recorder(on_show))
    assert outcome == Outcome(130, "interrupted")
    assert ("exited", {"node": "worker-0", "exit_code": -signal.SIGKILL}) in output.notes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_scenario_52_signal_to_the_launcher_ends_everything(number: signal.Signals, code: int) -> None:
    program = (
        "import asyncio, signal, sys\n"
        "from aiokv.launch import Job, LocalLauncher\n"
        "from aiokv.launch.output import JsonOutput\n"
        "for name in ('SIGINT', 'SIGTERM', 'SIGHUP'):\n"
        "    signal.signal(getattr(signal, name), signal.SIG_DFL)\n"
        "worker, server, scheduler = sys.argv[1:]\n"
        "def python(code): return [sys.executable, '-S', '-c', code]\n"
        "job = Job(command=python(worker), server_command=python(server), scheduler_command=python(scheduler))\n"
        "sys.exit(asyncio.run(LocalLauncher(job, JsonOutput(sys.stdout.buffer)).run()).exit_code)\n"
    )
    command = [sys.executable, "-c", program, CHILD + PAUSE, PAUSE, SCHEDULER]
    pids = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            record = json.loads(line)
            if record["event"] == "started":
                pids.append(record["pid"])
            if record["event"] == "line":
                pids.append(int(record["text"].split()[1]))
                launcher.send_signal(number)
    assert launcher.returncode == code
    assert len(pids) == 4
    assert [pid for pid in pids if is_running(pid)] == []


# --- what is shown ---


def test_lines_of_several_nodes_are_never_mixed(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    os.mkfifo(one)
    os.mkfifo(two)
    worker = by_name(
        worker_0=f"print('first ', end=''); open({one!r}, 'w').close(); open({two!r}).read(); print('half')",
        worker_1=f"open({one!r}).read(); print('whole'); open({two!r}, 'w').close()",
    )
    out = io.BytesIO()
    job = make_job(worker)
    asyncio.run(LocalLauncher(job, TextOutput(list(job.names()), out, io.BytesIO())).run())
    assert sorted(out.getvalue().splitlines()) == [b"worker-0  | first half", b"worker-1  | whole"]


def test_progress_bar_is_shown_state_by_state() -> None:
    _, output = launch(make_job(r"print('\r10%\r50%\r100%', end='')", workers=1))
    assert output.printed("worker-0") == ["10%", "50%", "100%"]


def test_stderr_stays_apart() -> None:
    _, output = launch(make_job("import sys; print('a'); print('b', file=sys.stderr)", workers=1))
    assert sorted(output.lines) == [("worker-0", "stderr", "b"), ("worker-0", "stdout", "a")]


def test_line_is_shown_when_it_is_printed() -> None:
    output = Recorder(lambda _source, text: os.kill(os.getpid(), signal.SIGINT) if text == "now" else None)
    outcome, _ = launch(make_job("print('now'); " + PAUSE), output)
    assert outcome.exit_code == 130


def test_scheduler_s_other_lines_are_shown_and_its_address_reaches_the_workers() -> None:
    scheduler = (
        "print('hello'); print('[1]'); import json; print(json.dumps({'host': '0.0.0.0', 'port': 7})); print('bye'); "
        + PAUSE
    )
    worker = "import os; print(os.environ['AIOKV_SCHEDULER'], os.environ['DMLC_PS_ROOT_URI'])"
    _, output = launch(make_job(worker, scheduler=scheduler, workers=1))
    assert output.printed("scheduler") == ["hello", "[1]", "bye"]
    assert output.printed("worker-0") == ["127.0.0.1:7 127.0.0.1"]


def test_nodes_share_the_token_and_the_cluster() -> None:
    show = "import os; print(os.environ['AIOKV_TOKEN'] + ' ' + os.environ['AIOKV_CLUSTER']); "
    job = make_job(show, server=show, workers=1)
    _, output = launch(job)
    assert {text for _, _, text in output.lines} == {f"{job.token} {job.cluster}"}


async def test_launcher_runs_on_any_event_loop() -> None:
    outcome = await LocalLauncher(make_job("print(1)"), Recorder()).run()
    assert outcome == Outcome(0)


def test_the_token_is_in_no_command_line_and_in_nothing_that_is_shown(tmp_path: Path) -> None:
    """Every user of a machine can see command lines; a process's environment only its own user."""
    lines: list[str] = []
    looked = tmp_path / "looked"

    def look(event: str, _text: str) -> None:
        if event == "started":
            pid = output.notes[-1][1]["pid"]
            lines.append(" ".join(psutil.Process(pid).cmdline()))
            if len(lines) == len(job.names()):
                looked.touch()

    output = Recorder(look)
    wait = f"import os, time\nwhile not os.path.exists({str(looked)!r}): time.sleep(0.01)\n"
    job = make_job(wait + "print(len(os.environ['AIOKV_TOKEN']))")
    outcome = asyncio.run(LocalLauncher(job, output).run())
    assert outcome.exit_code == 0
    assert len(lines) == len(job.names())
    assert output.printed("worker-0") == [str(len(job.token))]
    assert job.token not in "".join(lines) + repr(output.notes) + repr(output.lines) + repr(job) + repr(outcome)


def test_nodes_end_when_their_launcher_is_killed() -> None:
    program = (
        "import asyncio, sys\n"
        "from aiokv.launch import Job, LocalLauncher\n"
        "from aiokv.launch.output import JsonOutput\n"
        "worker, server, scheduler = sys.argv[1:]\n"
        "def python(code): return [sys.executable, '-S', '-c', code]\n"
        "job = Job(command=python(worker), server_command=python(server), scheduler_command=python(scheduler))\n"
        "asyncio.run(LocalLauncher(job, JsonOutput(sys.stdout.buffer)).run())\n"
    )
    command = [sys.executable, "-c", program, CHILD + DEAF, PAUSE, SCHEDULER]
    nodes: list[psutil.Process] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            record = json.loads(line)
            if record["event"] == "started":
                nodes.append(psutil.Process(record["pid"]))
            if record["event"] == "line" and record["text"].startswith("child "):
                nodes.append(psutil.Process(int(record["text"].split()[1])))
            if record["event"] == "line" and record["text"] == "deaf":
                break
        launcher.kill()
    assert len(nodes) == 4
    _, left = psutil.wait_procs(nodes, timeout=30)
    left = [node for node in left if is_running(node.pid)]
    for node in left:
        node.kill()
    assert left == []


def test_folder_for_what_compression_leaves_is_deleted_when_the_launcher_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(RESIDUAL_FOLDER, raising=False)
    program = (
        "import asyncio, sys\n"
        "from aiokv.launch import Job, LocalLauncher\n"
        "from aiokv.launch.output import JsonOutput\n"
        "from aiokv.launch.supervisor import Recovery\n"
        "worker, scheduler = ([sys.executable, '-S', '-c', code] for code in sys.argv[1:])\n"
        "recovery = Recovery(restarts=1, on_worker_loss='respawn')\n"
        "job = Job(command=worker, servers=0, server_command=[], scheduler_command=scheduler, recovery=recovery)\n"
        "asyncio.run(LocalLauncher(job, JsonOutput(sys.stdout.buffer)).run())\n"
    )
    worker = (
        "import os, time; folder = os.environ['AIOKV_RESIDUAL_FOLDER']; open(folder + '/w', 'w').close(); "
        "print(folder, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, worker, SCHEDULER]
    folder = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            record = json.loads(line)
            if record["event"] == "line" and record["node"] == "worker-0":
                folder = record["text"]
                break
        helpers = psutil.Process(launcher.pid).children()
        launcher.kill()
    psutil.wait_procs(helpers, timeout=30)
    assert folder
    assert not os.path.exists(folder)
