"""Runs a job on a cluster of processes, does it harm, and compares what it ends with to an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from aiokv.addresses import format_address
from aiokv.chaos.copies import wait_for_copies
from aiokv.chaos.job import JobPlan
from aiokv.chaos.plan import Fault, FaultPlan, Kind
from aiokv.chaos.proxy import Proxy
from aiokv.chaos.report import Report, count_contributions
from aiokv.config import load_config
from aiokv.errors import AiokvError
from aiokv.launch import Job, LocalLauncher
from aiokv.launch.base import node_command
from aiokv.launch.output import Output
from aiokv.launch.supervisor import EXIT_SIGNAL_BASE, Recovery
from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from aiokv.launch import Outcome
    from aiokv.launch.output import Stream

    OnProgress = Callable[[float, "Watch", "Harm"], None]

STEP_PAUSE = 0.01
"""Seconds that a step computes while harm is done."""

CHECKPOINT_EVERY = 10
"""Steps from one checkpoint to the next."""

MARGIN = 30
"""How many steps after the newest one the job is told to end: no worker is that far ahead of what is known of it."""

SETTLE_SECONDS = 60.0
"""How long the job may take to go on after a fault; then the run has failed."""

END_SECONDS = 90.0
"""How long the job may take to end after the last fault."""

KEPT_LINES = 30
"""How many of the last lines that the nodes write on stderr are kept."""

SETTINGS = {
    "AIOKV_HEARTBEAT": "0.2",
    "AIOKV_DEATH_TIMEOUT": "1.5",
    "AIOKV_CALL_TIMEOUT": "60",
    "AIOKV_JOIN_TIMEOUT": "60",
    "AIOKV_SHARED_MEMORY": "off",
}
"""Short time-outs, so that there is time for many faults; all that is sent goes through sockets, which can be cut."""


class ChaosPlan(msgspec.Struct, frozen=True):
    """A run: how long and how large it is, and what is done to it."""

    seconds: float
    workers: int
    servers: int
    faults: FaultPlan
    replication: int = 1


class Watch(Output):
    """Knows from what the nodes print which processes there are, and how far the job is."""

    def __init__(self, on_port: Callable[[str, str, int], None] = lambda name, host, port: None) -> None:
        self.pids: dict[str, int] = {}
        self.step = 0
        """The newest step that a worker has made."""
        self.longest_pause = 0.0
        self.ends: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.resumes = 0
        self._on_port = on_port
        self._stepped = 0.0
        self.moved = asyncio.Event()

    def line(self, node: str, stream: Stream, text: bytes) -> None:
        """Read what a node says."""
        if stream == "stderr":
            self.errors = [*self.errors[1 - KEPT_LINES :], f"{node} | {text.decode(errors='replace')}"]
            return
        with contextlib.suppress(ValueError):
            self._said(node, json.loads(text))

    def _said(self, node: str, facts: dict[str, Any]) -> None:
        match facts:
            case {"event": "step", "step": int(step)}:
                self._progress(step)
            case {"event": "end"}:
                self.ends.append(facts)
            case {"role": "server", "host": host, "port": port}:
                self._on_port(node, host, port)

    def _progress(self, step: int) -> None:
        if step == self.step:
            return
        # After a checkpoint was loaded it is a smaller one.
        now = time.monotonic()
        if self._stepped:
            self.longest_pause = max(self.longest_pause, now - self._stepped)
        self.step, self._stepped = step, now
        self.moved.set()

    def note(self, event: str, text: str, **facts: Any) -> None:
        """Keep the process ids."""
        match event:
            case "started":
                self.pids[facts["node"]] = facts["pid"]
            case "exited":
                self.pids.pop(facts["node"], None)
            case "ready":
                host, _, port = facts["address"].rpartition(":")
                self._on_port("scheduler", host, int(port))
            case "resuming":
                self.resumes += 1


class Harm:
    """Does faults to the nodes of a job.

    Args:
        watch: who knows the processes.
        proxies: through which the nodes are reached, by name.
        copied: waits until a server can be killed without losing what it has; is told when the last one was.
    """

    def __init__(
        self, watch: Watch, proxies: Mapping[str, Proxy], copied: Callable[[float], Coroutine[Any, Any, None]]
    ) -> None:
        self.killed: Counter[str] = Counter()
        self.disturbed: Counter[str] = Counter()
        self._watch = watch
        self._proxies = proxies
        self._copied = copied
        self._server_killed = -math.inf
        self._lasting: set[asyncio.Task[None]] = set()

    async def go_on(self, plan: FaultPlan, names: list[str]) -> None:
        """Do one fault after the other, until it is cancelled.

        Raises:
            AiokvError: the job did not go on after one.
        """
        try:
            for fault in plan.faults(names):
                await asyncio.sleep(fault.wait)
                if fault.settled:
                    await self.settled()
                if fault.kind is Kind.KILL and fault.node.startswith("server"):
                    await self._copied(self._server_killed)
                    self._server_killed = time.monotonic()
                self._do(fault)
        finally:
            for task in self._lasting:
                task.cancel()
            await asyncio.gather(*self._lasting, return_exceptions=True)

    async def settled(self) -> None:
        """Wait until the job makes a step.

        Raises:
            AiokvError: it makes none.
        """
        moved = self._watch.moved
        moved.clear()
        try:
            await asyncio.wait_for(moved.wait(), SETTLE_SECONDS)
        except TimeoutError:
            text = f"the job made no step for {SETTLE_SECONDS:g} s; the last was step {self._watch.step}"
            raise AiokvError(text) from None

    def _do(self, fault: Fault) -> None:
        if fault.kind is Kind.KILL:
            if self._signal(fault.node, signal.SIGKILL):
                self.killed[fault.node.partition("-")[0]] += 1
            return
        self.disturbed[fault.kind] += 1
        match fault.kind:
            case Kind.STOP:
                self._last(self._stop(fault))
            case Kind.CUT:
                self._last(self._proxies[fault.node].cut())
            case Kind.DELAY:
                self._last(self._proxies[fault.node].hold(fault.seconds))

    def _last(self, lasting: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(lasting)
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)

    async def _stop(self, fault: Fault) -> None:
        pid = self._watch.pids.get(fault.node)
        if not self._signal(fault.node, signal.SIGSTOP):
            return
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            if pid == self._watch.pids.get(fault.node):
                self._signal(fault.node, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> bool:
        # It may be dead, and about to be started again. A process that was not waited for keeps its number.
        pid = self._watch.pids.get(name)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False


async def run(plan: ChaosPlan, on_progress: OnProgress = lambda seconds, watch, harm: None) -> Report:
    """Train under faults, then the same number of steps without any, and compare.

    Args:
        plan: what to do.
        on_progress: called now and then while faults are done, with the seconds since the first one could come.
    """
    began = time.monotonic()
    report = Report(seed=plan.faults.seed, workers=plan.workers, servers=plan.servers)
    with tempfile.TemporaryDirectory(prefix="aiokv-chaos-") as folder:
        await _disturbed(plan, Path(folder), report, on_progress)
    if not report.problems:
        await _compare(plan, report)
    report.seconds = time.monotonic() - began
    return report


async def _disturbed(plan: ChaosPlan, folder: Path, report: Report, on_progress: OnProgress) -> None:
    async with contextlib.AsyncExitStack() as stack:
        names = ["scheduler", *(f"server-{index}" for index in range(plan.servers))]
        proxies = {name: await stack.enter_async_context(Proxy()) for name in names}

        def listens(name: str, host: str, port: int) -> None:
            proxies[name].target = (host, port)

        watch = Watch(listens)
        job = _job(plan, JobPlan(plan.faults.seed, 0, STEP_PAUSE, str(folder / "steps")), proxies)

        async def copied(since: float) -> None:
            target = proxies["scheduler"].target
            if plan.replication > 1 and target is not None:
                asks = load_config(environ=SETTINGS, scheduler=format_address(*target), cluster=job.cluster)
                await wait_for_copies(structs.replace(asks, token=job.token), plan.servers, since)

        harm = Harm(watch, proxies, copied)
        environ = SETTINGS | _recovery_settings(folder, plan.replication)
        launched = asyncio.create_task(LocalLauncher(job, watch, environ=dict(os.environ) | environ).run())
        try:
            await _harm(plan, launched, watch, harm, on_progress)
            (folder / "steps").write_text(str(watch.step + MARGIN))
            outcome = await asyncio.wait_for(launched, END_SECONDS)
        except (AiokvError, TimeoutError) as error:
            report.problems.append(str(error) or "the job did not end")
        else:
            _check_ends(report, outcome, watch)
        finally:
            launched.cancel()
            await asyncio.gather(launched, return_exceptions=True)
    report.kills, report.killed, report.disturbed = harm.killed.total(), dict(harm.killed), dict(harm.disturbed)
    report.longest_pause_s, report.resumes = watch.longest_pause, watch.resumes
    if report.problems:
        report.problems += watch.errors


async def _harm(
    plan: ChaosPlan,
    launched: asyncio.Task[Outcome],
    watch: Watch,
    harm: Harm,
    on_progress: OnProgress,
) -> None:
    """Do faults for as long as the plan says, or until the job has ended."""
    await _either(launched, harm.settled())
    harming = asyncio.create_task(harm.go_on(plan.faults, _names(plan)))
    began = time.monotonic()
    try:
        while time.monotonic() - began < plan.seconds and not launched.done() and not harming.done():
            await asyncio.wait((launched, harming), timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            on_progress(time.monotonic() - began, watch, harm)
    finally:
        harming.cancel()
        ended = await asyncio.gather(harming, return_exceptions=True)
    if isinstance(ended[0], AiokvError):
        raise ended[0]
    await _either(launched, harm.settled())


async def _either(launched: asyncio.Task[Outcome], settled: Coroutine[Any, Any, None]) -> None:
    """Wait until the job goes on, or has ended."""
    waiting = asyncio.create_task(settled)
    await asyncio.wait((launched, waiting), return_when=asyncio.FIRST_COMPLETED)
    if waiting.done():
        waiting.result()
    waiting.cancel()


def _names(plan: ChaosPlan) -> list[str]:
    servers = [f"server-{index}" for index in range(plan.servers)]
    return ["scheduler", *servers, *(f"worker-{index}" for index in range(plan.workers))]


def _job(plan: ChaosPlan, job: JobPlan, proxies: Mapping[str, Proxy] | None = None) -> Job:
    """Return the job, all of whose connections go through the proxies."""
    single: dict[str, dict[str, str]] = {}
    if proxies is not None:
        through = {"AIOKV_SCHEDULER": f"127.0.0.1:{proxies['scheduler'].port}"}
        for name in _names(plan)[1:]:
            single[name] = dict(through)
            if name in proxies:
                single[name]["AIOKV_ADVERTISE_PORT"] = str(proxies[name].port)
    return Job(
        command=[sys.executable, "-m", "aiokv.chaos.job", msgspec.json.encode(job).decode()],
        server_command=[*node_command(Role.SERVER), "--json"],
        workers=plan.workers,
        servers=plan.servers,
        single=single,
        recovery=_recovery(plan) if proxies else Recovery(),
    )


def _recovery(plan: ChaosPlan) -> Recovery:
    replicated = plan.replication > 1
    return Recovery(restarts=1_000_000, on_worker_loss="respawn", replicated=replicated, resumable=not replicated)


def _recovery_settings(folder: Path, replication: int) -> dict[str, str]:
    if replication > 1:
        return {"AIOKV_ON_WORKER_LOSS": "respawn", "AIOKV_REPLICATION": str(replication)}
    return {
        "AIOKV_ON_WORKER_LOSS": "respawn",
        "AIOKV_CHECKPOINT_FOLDER": str(folder / "checkpoints"),
        "AIOKV_CHECKPOINT_EVERY": str(CHECKPOINT_EVERY),
    }


def _check_ends(report: Report, outcome: Outcome, watch: Watch) -> None:
    _check_interrupt(outcome)
    if outcome.exit_code != 0:
        report.problems.append(f"the job failed: {outcome.reason}")
    elif len(watch.ends) < report.workers:
        report.problems.append(f"{len(watch.ends)} of {report.workers} workers said what they ended with")
    else:
        ends = watch.ends
        report.steps = ends[0]["step"]
        if len({end["digest"] for end in ends}) > 1:
            report.problems.append("the workers ended with different weights")
        counted = next(end for end in ends if end["rank"] == 0)
        count_contributions(report, counted["updates"], counted["tallies"])
        report.digest = ends[0]["digest"]


async def _compare(plan: ChaosPlan, report: Report) -> None:
    """Make the same steps on a cluster that nobody harms."""
    watch = Watch()
    job = _job(plan, JobPlan(plan.faults.seed, report.steps, 0.0))
    outcome = await LocalLauncher(job, watch, environ=dict(os.environ)).run()
    _check_interrupt(outcome)
    if outcome.exit_code != 0 or not watch.ends:
        report.problems += [f"the undisturbed run failed: {outcome.reason}", *watch.errors]
        return
    report.bit_equal = watch.ends[0]["digest"] == report.digest


def _check_interrupt(outcome: Outcome) -> None:
    """Go on with a Ctrl-C that the launcher has taken."""
    if outcome.exit_code == EXIT_SIGNAL_BASE + signal.SIGINT:
        raise KeyboardInterrupt
