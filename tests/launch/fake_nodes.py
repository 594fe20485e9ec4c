"""Jobs of tiny nodes, for tests of launchers."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import psutil

from aiokv.launch import Job, LocalLauncher, Outcome
from aiokv.launch.output import Output, Stream

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE = "import signal; signal.pause()"
SCHEDULER = "import json, signal; print(json.dumps({'host': '127.0.0.1', 'port': 4321})); signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); signal.pause()"
CHILD = "import os, subprocess; child = subprocess.Popen(['sleep', '1000']); print('child', child.pid); "


def python(code: str) -> list[str]:
    """Return a command line that runs a piece of Python and starts quickly."""
    return [sys.executable, "-S", "-c", code]


def by_name(**codes: str) -> str:
    """Return code that does something else in each worker, `worker_0` for "worker-0"; `other` for the rest."""
    table = {name.replace("_", "-"): code for name, code in codes.items()}
    return f"import os; codes = {table!r}; exec(codes.get(os.environ['AIOKV_NAME'], codes.get('other', '')))"


def make_job(worker: str, *, server: str = PAUSE, scheduler: str = SCHEDULER, **settings: Any) -> Job:
    """Return a job of fake nodes."""
    return Job(
        command=python(worker),
        server_command=python(server),
        scheduler_command=python(scheduler),
        **{"workers": 2, "settle": 0.0} | settings,
    )


class Recorder(Output):
    """Keeps what is shown, and calls back for each line and each note."""

    def __init__(self, on_show: Callable[[str, str], None] = lambda _source, _text: None) -> None:
        self.lines: list[tuple[str, Stream, str]] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self._on_show = on_show

    def line(self, node: str, stream: Stream, text: bytes) -> None:
        """Keep a line."""
        self.lines.append((node, stream, text.decode()))
        self._on_show(node, text.decode())

    def note(self, event: str, text: str, **facts: Any) -> None:
        """Keep a note."""
        self.notes.append((event, facts))
        self._on_show(event, text)

    def printed(self, node: str) -> list[str]:
        """Return the lines of one node."""
        return [text for name, _, text in self.lines if name == node]

    def pids(self) -> list[int]:
        """Return the process ids of all nodes that were started, and of the children that they told about."""
        told = [int(text.split()[1]) for _, _, text in self.lines if text.startswith("child ")]
        return [facts["pid"] for event, facts in self.notes if event == "started"] + told


def is_running(pid: int) -> bool:
    """Say whether a process is alive; one that is dead and waits to be collected by its parent is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def launch(job: Job, output: Recorder | None = None) -> tuple[Outcome, Recorder]:
    """Run a job and check that none of its processes is left."""
    output = output or Recorder()
    outcome = asyncio.run(LocalLauncher(job, output).run())
    assert [pid for pid in output.pids() if is_running(pid)] == []
    return outcome, output
