"""Runs a measurement on a cluster of processes, and reads from the system what each of them used."""

from __future__ import annotations

import secrets
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiokv.bench.control import Control
from aiokv.bench.plan import Done, Plan, encode
from aiokv.bench.usage import cpu_seconds, peak_rss_mib
from aiokv.errors import AiokvError
from aiokv.launch import Job, LocalLauncher
from aiokv.launch.base import node_command
from aiokv.launch.output import Output
from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from aiokv.launch import Outcome
    from aiokv.launch.output import Stream

KEPT_LINES = 30
"""How many of a node's last lines on stderr are kept."""


@dataclass(slots=True)
class Usage:
    """What one node used: CPU-seconds during the timed rounds, and the peak of its resident memory in MiB."""

    cpu_s: float
    peak_rss_mib: float


@dataclass(slots=True)
class Measurement:
    """What came out: by the names of the workers and of all nodes. Both are empty when the job failed."""

    outcome: Outcome
    results: dict[str, Done] = field(default_factory=dict)
    usage: dict[str, Usage] = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)
    """What the nodes that failed wrote last on stderr, with their names in front; when the job failed."""


class Recorder(Output):
    """Remembers what a benchmark needs to know of its nodes, and shows nothing."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.lines: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))

    def line(self, node: str, stream: Stream, text: bytes) -> None:
        """Keep the last lines of stderr."""
        if stream == "stderr":
            self.lines[node].append(text.decode(errors="replace"))

    def note(self, event: str, text: str, **facts: Any) -> None:
        """Keep the process ids."""
        if event == "started":
            self.pids[facts["node"]] = facts["pid"]

    def last_lines(self, failed: str) -> list[str]:
        """Return the last lines of the node that failed, and of all that reported an error: it may not be to blame."""
        others = [name for name in self.pids if name != failed and any(map(_is_trouble, self.lines[name]))]
        return [f"{name} | {line}" for name in [failed, *others] for line in self.lines[name]]


def _is_trouble(line: str) -> bool:
    return " ERROR " in line or line.startswith("Traceback ")


class Meter:
    """Reads what the nodes use.

    Args:
        pids: process ids by name; filled in while the nodes start.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self.usage: dict[str, Usage] = {}
        self._pids = pids
        self._before: dict[str, float] = {}

    def start(self) -> None:
        """The timed rounds begin."""
        self._before = {name: cpu_seconds(pid) for name, pid in self._pids.items()}

    def stop(self) -> None:
        """The timed rounds have ended, and all nodes are still there."""
        self.usage = {
            name: Usage(cpu_seconds(pid) - self._before[name], peak_rss_mib(pid)) for name, pid in self._pids.items()
        }


def worker_command() -> list[str]:
    """Return the command line of a worker, without its arguments."""
    return [sys.executable, "-m", "aiokv.bench.worker"]


async def measure(
    plan: Plan,
    *,
    environ: Mapping[str, str],
    timeout: float,
    on_progress: Callable[[int], None] = lambda rounds: None,
    profile: str | None = None,
) -> Measurement:
    """Run a measurement on a new cluster; no process is left afterwards.

    Args:
        plan: what to measure.
        environ: the environment of the nodes.
        timeout: seconds after which all nodes are ended.
        on_progress: called now and then with the number of timed rounds that are done.
        profile: directory into which every node writes a profile of itself; None: none does.

    Raises:
        AiokvError: the job ended well, but a worker did not say what it measured.
    """
    recorder = Recorder()
    meter = Meter(recorder.pids)
    token = secrets.token_hex(16)
    control = Control(plan.workers, token, on_start=meter.start, on_end=meter.stop, on_progress=on_progress)
    async with control:
        job = _make_job(plan, token, control.address, timeout=timeout, profile=profile)
        outcome = await LocalLauncher(job, recorder, environ=environ).run()
    if outcome.exit_code != 0:
        return Measurement(outcome, last_lines=recorder.last_lines(outcome.node))
    if len(control.results) != plan.workers:
        raise AiokvError(f"only {len(control.results)} of {plan.workers} workers said what they measured")
    for name, result in control.results.items():
        # The worker timed its calls alone; what it used to make and check the values is not the store's.
        meter.usage[name].cpu_s = result.cpu_s
    return Measurement(outcome, dict(sorted(control.results.items(), key=lambda item: item[1].rank)), meter.usage)


def _make_job(plan: Plan, token: str, address: str, *, timeout: float, profile: str | None) -> Job:
    def command(words: Sequence[str]) -> list[str]:
        if profile is None:
            return list(words)
        python, dash_m, *module = words
        return [python, dash_m, "aiokv.bench.profiled", profile, *module]

    return Job(
        command=command([*worker_command(), address, encode(plan).decode()]),
        workers=plan.workers,
        servers=plan.servers,
        colocate=plan.colocate,
        scheduler_command=command(node_command(Role.SCHEDULER)),
        server_command=command(node_command(Role.SERVER)),
        token=token,
        timeout=timeout,
    )
