"""The launcher for one machine: every node is a process here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

from aiokv.config import format_address, is_wildcard
from aiokv.launch.base import Launcher, count
from aiokv.launch.process import NodeProcess
from aiokv.launch.signals import handle_signals
from aiokv.launch.supervisor import Outcome, Phase, Step, Supervisor, describe_exit
from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aiokv.launch.base import Job
    from aiokv.launch.output import Output, Stream

FINISH_GRACE = 1.0
"""The grace of the scheduler and the servers when the job is done: there is nothing left to lose."""
DRAIN_SECONDS = 1.0
"""How long to wait for the last lines of nodes that have ended."""
_MAX_QUOTE = 300


class LocalLauncher(Launcher):
    """Runs a job as processes on this machine.

    Args:
        job: what to run.
        output: where to show it.
        environ: the environment that the nodes inherit; None: that of this process.
    """

    def __init__(self, job: Job, output: Output, *, environ: Mapping[str, str] | None = None) -> None:
        self._job = job
        self._output = output
        self._environ = dict(os.environ if environ is None else environ)
        self._roles = job.names()
        self._supervisor = Supervisor(self._roles)
        self._nodes: dict[str, NodeProcess] = {}
        self._address: tuple[str, int] | None = None
        self._output_works = True
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._killed: set[str] = set()
        self._cleanups: list[asyncio.Task[None]] = []

    async def run(self) -> Outcome:
        """Run the job to its end; no process is left afterwards."""
        with handle_signals(self._on_signal), self._deadlines():
            try:
                await self._start([self._job.scheduler_name()])
                await self._follow()
            finally:
                for cleanup in self._cleanups:
                    cleanup.cancel()
                await asyncio.gather(*self._cleanups, return_exceptions=True)
                for node in self._nodes.values():
                    node.close()
        outcome = self._outcome()
        text = "" if outcome.reason else "all workers are done"
        self._note("ended", text, exit_code=outcome.exit_code, reason=outcome.reason)
        return outcome

    # --- events: the supervisor decides at once, `_follow` carries it out ---

    def _on_signal(self, number: int) -> None:
        self._steps.put_nowait(self._supervisor.signalled(number))

    def _on_exit(self, name: str, code: int) -> None:
        step = self._supervisor.exited(name, code)
        self._steps.put_nowait(step)
        is_ending = self._supervisor.phase is Phase.ENDING
        is_done = self._roles[name] is Role.WORKER and code == 0
        text = "" if is_ending else f"{name} {'is done' if is_done else describe_exit(code)}"
        self._note("exited", text, node=name, exit_code=code)
        if not is_ending:
            # What the node leaves behind is ended now, while the number of its group can't be somebody else's.
            self._cleanups.append(asyncio.create_task(self._end(name, settle=self._job.settle, grace=self._job.grace)))

    def _on_line(self, name: str, stream: Stream, line: bytes) -> None:
        if self._address is None and self._roles[name] is Role.SCHEDULER and stream == "stdout":
            self._address = _address_in(line)
            if self._address is not None:
                self._steps.put_nowait(self._supervisor.scheduler_ready())
                return
        self._show(lambda: self._output.line(name, stream, line))

    def _note(self, event: str, text: str, **facts: Any) -> None:
        self._show(lambda: self._output.note(event, text, **facts))

    def _show(self, write: Callable[[], None]) -> None:
        try:
            if self._output_works:
                write()
        except BrokenPipeError:
            self._output_works = False
            self._steps.put_nowait(self._supervisor.output_lost())

    @contextlib.contextmanager
    def _deadlines(self) -> Iterator[None]:
        """Let the supervisor know when time runs out."""
        loop, decide, put = asyncio.get_running_loop(), self._supervisor, self._steps.put_nowait
        start, whole = self._job.start_timeout, self._job.timeout
        timers = [loop.call_later(start, lambda: put(decide.not_ready(start)))]
        if whole is not None:
            timers.append(loop.call_later(whole, lambda: put(decide.timed_out(whole))))
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    # --- steps ---

    async def _follow(self) -> None:
        """Carry out what the supervisor decides, until every process has ended and its last line is shown."""
        ending: asyncio.Task[None] | None = None
        while ending is None or not ending.done():
            step = await self._steps.get()
            if step is Step.START:
                await self._start_rest()
            elif step is Step.KILL:
                for node in self._nodes.values():
                    node.kill()
            elif step is not Step.WAIT and ending is None:
                ending = asyncio.create_task(self._end_all(gently=step is Step.FINISH))
                ending.add_done_callback(lambda _: self._steps.put_nowait(Step.WAIT))
        await ending

    async def _start_rest(self) -> None:
        address = format_address(*self._address) if self._address else ""
        workers = count(self._job.workers, "worker")
        nodes = (
            f"{workers} that host servers"
            if self._job.colocate
            else f"{count(self._job.servers, 'server')} and {workers}"
        )
        self._note("ready", f"scheduler listening on {address}; starting {nodes}", address=address)
        await self._start([name for name in self._roles if name not in self._nodes])

    async def _start(self, names: list[str]) -> None:
        for name in names:
            if self._supervisor.phase is Phase.ENDING:
                return
            role = self._roles[name]
            node = self._nodes[name] = NodeProcess(name, self._on_line, self._on_exit)
            try:
                environ = self._job.environment(name, role, self._environ, self._address)
                await node.start(self._job.command_of(role), environ)
            except OSError as error:
                del self._nodes[name]
                self._steps.put_nowait(self._supervisor.not_started(name, error.strerror or str(error)))
                return
            self._note("started", "", node=name, role=role.value, pid=node.pid)

    async def _end_all(self, *, gently: bool) -> None:
        reason, running = self._supervisor.outcome.reason, self._supervisor.running
        if reason and running:
            self._note("ending", f"{reason}; ending {count(len(running), 'node')}", nodes=running)
        settle = self._job.settle if gently else 0.0
        grace = min(self._job.grace, FINISH_GRACE) if gently else self._job.grace
        await asyncio.gather(*(self._end(name, settle=settle, grace=grace) for name in self._nodes))
        with contextlib.suppress(TimeoutError):
            # A process that left its group may still hold a stream: don't wait for it.
            waiting = (node.closed.wait() for node in self._nodes.values())
            await asyncio.wait_for(asyncio.gather(*waiting), DRAIN_SECONDS)

    async def _end(self, name: str, *, settle: float, grace: float) -> None:
        was_killed = not await self._nodes[name].end(settle=settle, grace=grace)
        if was_killed and name not in self._killed:
            self._killed.add(name)
            self._note("killed", f"{name} did not end within {grace:g} s of being asked to; killed it", node=name)

    def _outcome(self) -> Outcome:
        outcome = self._supervisor.outcome
        node = self._nodes.get(outcome.node)
        if node is None or not node.last_error_line:
            return outcome
        line = node.last_error_line
        line = line if len(line) <= _MAX_QUOTE else f"{line[:_MAX_QUOTE]}..."
        return Outcome(outcome.exit_code, f"{outcome.reason}; its last line on stderr: {line}", outcome.node)


def _address_in(line: bytes) -> tuple[str, int] | None:
    """Read the address out of the line that a scheduler prints when it is ready; None for any other line."""
    try:
        record = json.loads(line)
        host, port = record["host"], record["port"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(host, str) or not isinstance(port, int):
        return None
    if is_wildcard(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return host, port
