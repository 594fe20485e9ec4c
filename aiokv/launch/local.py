"""The launcher: every node is a process here, or one here stands for it that runs it on another host."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import tempfile
from typing import TYPE_CHECKING, Any

from aiokv.addresses import format_address, is_wildcard
from aiokv.launch import scratch
from aiokv.launch.base import Launcher, asking, count
from aiokv.launch.process import NodeProcess
from aiokv.launch.remote import command_line, make_order
from aiokv.launch.signals import handle_signals
from aiokv.launch.supervisor import Outcome, Phase, Step, Supervisor, describe_exit
from aiokv.launch.watch import Watch
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
CLEANING_SECONDS = 10.0
"""How long the hosts may take, when a job is over, to delete what they have kept for workers that are replaced."""


class LocalLauncher(Launcher):
    """Runs a job as processes on this machine, or on several hosts.

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
        self._supervisor = Supervisor(self._roles, job.recovery)
        self._nodes: dict[str, NodeProcess] = {}
        self._address: tuple[str, int] | None = None
        self._output_works = True
        self._steps: asyncio.Queue[Step] = asyncio.Queue()
        self._killed: set[NodeProcess] = set()
        self._cleanups: list[asyncio.Task[None]] = []
        self._watch = Watch()
        self._started: list[NodeProcess] = []
        """All nodes, those too that others have replaced."""
        self._timers: list[asyncio.TimerHandle] = []
        self._drains = False
        self._scratch = scratch.name_of(job.token) if job.hosts and self._keeps_residuals else ""
        """Name of the folder for what compression leaves, on the other hosts."""

    async def run(self) -> Outcome:
        """Run the job to its end; no process is left afterwards."""
        with handle_signals(self._on_signal), self._residual_folder() as folder:
            await self._watch.start()
            if folder:
                self._watch.delete(folder)
            try:
                if self._job.timeout is not None:
                    self._after(self._job.timeout, self._supervisor.timed_out)
                await self._begin()
                await self._follow()
            finally:
                for timer in self._timers:
                    timer.cancel()
                for cleanup in self._cleanups:
                    cleanup.cancel()
                await asyncio.gather(*self._cleanups, return_exceptions=True)
                for node in self._started:
                    node.close()
                    self._watch.remove(node.pid)
                await self._watch.close()
                await self._clean_hosts()
        outcome = self._outcome()
        text = "" if outcome.reason else "all workers are done"
        self._note("ended", text, exit_code=outcome.exit_code, reason=outcome.reason)
        return outcome

    @contextlib.contextmanager
    def _residual_folder(self) -> Iterator[str]:
        """Give workers that are replaced a folder for what compression leaves; in memory, if that can be.

        Its path; empty: there is none, or each host has one.
        """
        if self._job.hosts or not self._keeps_residuals:
            yield ""
            return
        with tempfile.TemporaryDirectory(prefix="aiokv-", dir=scratch.parent()) as folder:
            self._environ[scratch.RESIDUAL_FOLDER] = folder
            yield folder

    @property
    def _keeps_residuals(self) -> bool:
        """Whether it is this launcher that gives workers a folder."""
        return self._job.recovery.on_worker_loss == "respawn" and not self._environ.get(scratch.RESIDUAL_FOLDER)

    async def _clean_hosts(self) -> None:
        """Let the other hosts delete the folders that they have made. Who can't be reached any longer keeps it."""
        if not self._scratch:
            return
        order = make_order((), {}, self._scratch).line()
        await asyncio.gather(*(self._clean(host, order) for host in dict.fromkeys(self._job.hosts)))

    async def _clean(self, host: str, order: bytes) -> None:
        command, pipe, quiet = command_line(self._job.remote, host), asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        streams: dict[str, Any] = {"stdin": pipe, "stdout": quiet, "stderr": quiet}
        try:
            process = await asyncio.create_subprocess_exec(*command, env=self._environ, **streams)
        except OSError:
            # Then nothing could be started there either.
            return
        try:
            await asyncio.wait_for(process.communicate(order), CLEANING_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()

    # --- events: the supervisor decides at once, `_follow` carries it out ---

    def _on_signal(self, number: int) -> None:
        step = self._supervisor.signalled(number)
        self._drains = self._drains or (step is Step.END and self._job.drain > 0)
        self._steps.put_nowait(step)

    def _on_exit(self, name: str, code: int) -> None:
        is_ending = self._supervisor.phase is Phase.RESUMING
        self._steps.put_nowait(self._supervisor.exited(name, code))
        is_ending = is_ending or self._supervisor.phase is Phase.ENDING
        is_done = self._roles[name] is Role.WORKER and code == 0
        text = "" if is_ending else f"{name} {'is done' if is_done else describe_exit(code)}"
        self._note("exited", text, node=name, exit_code=code)
        if not is_ending:
            # What the node leaves behind is ended now, while the number of its group can't be somebody else's.
            cleanup = self._end(self._nodes[name], settle=self._job.settle, grace=self._job.grace)
            self._cleanups.append(asyncio.create_task(cleanup))

    def _on_line(self, name: str, stream: Stream, line: bytes) -> None:
        if self._roles[name] is Role.SCHEDULER and stream == "stdout" and self._scheduler_said(line):
            return
        self._show(lambda: self._output.line(name, stream, line))

    def _scheduler_said(self, line: bytes) -> bool:
        """Take in what a scheduler prints for its launcher; return False when it is something else."""
        try:
            said = json.loads(line)
        except ValueError:
            return False
        match said:
            case {"host": str(host), "port": int(port)}:
                self._address = _reachable(host), port
                self._steps.put_nowait(self._supervisor.scheduler_ready())
            case {"event": "silent", "node": str(node), "seconds": float(seconds)} if self._supervisor.is_hung(node):
                self._note("hung", f"{node} has not answered for {seconds:.1f} s; killing it", node=node)
                self._nodes[node].kill()
            case {"event": "parameters_lost", "node": str(node)}:
                self._steps.put_nowait(self._supervisor.parameters_lost(node))
            case {"event": str()}:
                pass
            case _:
                return False
        return True

    def _note(self, event: str, text: str, **facts: Any) -> None:
        self._show(lambda: self._output.note(event, text, **facts))

    def _show(self, write: Callable[[], None]) -> None:
        try:
            if self._output_works:
                write()
        except BrokenPipeError:
            self._output_works = False
            self._steps.put_nowait(self._supervisor.output_lost())

    def _after(self, seconds: float, decide: Callable[[float], Step]) -> None:
        """Let the supervisor know when time has run out."""
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(seconds, lambda: self._steps.put_nowait(decide(seconds))))

    # --- steps ---

    async def _begin(self) -> None:
        """Start the scheduler; the others follow when it says where it listens, or at once where there is one."""
        if self._job.joins is not None:
            self._address = self._job.joins
            self._steps.put_nowait(self._supervisor.scheduler_ready())
            return
        await self._start_scheduler()

    async def _start_scheduler(self) -> None:
        life = self._supervisor.life
        self._after(self._job.start_timeout, lambda seconds: self._supervisor.not_ready(seconds, life))
        await self._start([self._job.scheduler_name()])

    async def _follow(self) -> None:
        """Carry out what the supervisor decides, until every process has ended and its last line is shown."""
        ending: asyncio.Task[None] | None = None
        while ending is None or not ending.done():
            match await self._steps.get():
                case Step.WAIT:
                    pass
                case Step.START:
                    await self._start_rest()
                case Step.RESTART:
                    await self._restart()
                case Step.RESUME:
                    await self._resume()
                case Step.RESEED:
                    await self._reseed()
                case Step.KILL:
                    for node in self._nodes.values():
                        node.kill()
                case step if ending is None:
                    ending = asyncio.create_task(self._end_job(gently=step is Step.FINISH))
                    ending.add_done_callback(lambda _: self._steps.put_nowait(Step.WAIT))
        await ending

    async def _restart(self) -> None:
        """Start nodes again that have failed; the others go on meanwhile."""
        failed, self._supervisor.failed = self._supervisor.failed, []
        left = self._supervisor.restarts_left
        for name in failed:
            self._note("restarting", f"starting {name} again; {count(left, 'restart')} left", node=name, left=left)
            del self._nodes[name]
        await self._start(failed)

    async def _resume(self) -> None:
        """End everything, and start all again from the last checkpoint."""
        left = self._supervisor.restarts_left
        text = f"starting all nodes again, from the last checkpoint; {count(left, 'restart')} left"
        self._note("resuming", text, left=left)
        await self._end_all(settle=0.0, grace=self._job.grace)
        self._supervisor.begin_again()
        if self._supervisor.phase is not Phase.STARTING:
            return
        self._nodes, self._address = {}, None
        await asyncio.to_thread(self._choose_checkpoint)
        await self._begin()

    async def _reseed(self) -> None:
        """Start the scheduler again where it was, and then the servers, for workers that bring what they have."""
        left, workers = self._supervisor.restarts_left, count(self._supervisor.workers, "worker")
        text = (
            f"starting the scheduler and the servers again, for the weights of {workers}; {count(left, 'restart')} left"
        )
        self._note("reseeding", text, left=left)
        self._nodes = {name: node for name, node in self._nodes.items() if self._roles[name] is Role.WORKER}
        await self._start_scheduler()

    def _choose_checkpoint(self) -> None:
        """Go on from the job's own checkpoints; as long as there is none, from the one that it began with."""
        from aiokv.checkpoint.folder import LATEST, find_checkpoints  # noqa: PLC0415 - a job seldom needs it, and NumPy

        folder = self._environ.get("AIOKV_CHECKPOINT_FOLDER", "")
        has_own = bool(folder) and any(found.is_complete for found in find_checkpoints(folder))
        if has_own or not self._environ.get("AIOKV_RESUME"):
            self._environ["AIOKV_RESUME"] = LATEST

    async def _start_rest(self) -> None:
        address = format_address(*self._address) if self._address else ""
        missing = [name for name in self._roles if name not in self._nodes]
        workers = count(self._job.workers, "worker")
        nodes = (
            f"{workers} that host servers"
            if self._job.colocate
            else f"{count(self._job.servers, 'server')} and {workers}"
        )
        if all(self._roles[name] is not Role.WORKER for name in missing):
            nodes = count(len(missing), "server")
        text = f"scheduler listening on {address}; starting {nodes}"
        if self._job.joins is not None:
            text = f"starting {workers} to join the job at {address}"
        self._note("ready", text, address=address)
        await self._start(missing)

    @property
    def _present_job(self) -> Job:
        """The job with as many workers as there are still; with fewer than it needs the scheduler waits for more."""
        workers = max(self._supervisor.workers, int(self._environ.get("AIOKV_MIN_WORKERS") or 1))
        return dataclasses.replace(self._job, workers=workers)

    async def _start(self, names: list[str]) -> None:
        job = self._present_job
        for name in names:
            if self._supervisor.phase in (Phase.ENDING, Phase.RESUMING):
                return
            role = self._roles[name]
            node = self._nodes[name] = NodeProcess(name, self._on_line, self._on_exit, ask=asking(role))
            self._started.append(node)
            try:
                environ = job.environment(name, role, self._environ, self._address)
                await self._start_node(node, role, environ)
                self._watch.add(node.pid)
            except OSError as error:
                del self._nodes[name]
                self._steps.put_nowait(self._supervisor.not_started(name, error.strerror or str(error)))
                return
            host = self._job.host_of(name)
            self._note("started", "", node=name, role=role.value, pid=node.pid, **({"host": host} if host else {}))

    async def _start_node(self, node: NodeProcess, role: Role, environ: dict[str, str]) -> None:
        command, host = self._job.command_of(role), self._job.host_of(node.name)
        if not host:
            await node.start(command, environ)
            return
        order = make_order(tuple(command), environ, self._scratch if role is Role.WORKER else "")
        await node.start(command_line(self._job.remote, host), self._environ, order.line())

    async def _end_job(self, *, gently: bool) -> None:
        reason = self._supervisor.outcome.reason
        running = [name for name in self._supervisor.running if name in self._nodes]
        if reason and running:
            self._note("ending", f"{reason}; ending {count(len(running), 'node')}", nodes=running)
        if self._drains:
            workers = [node for name, node in self._nodes.items() if self._roles[name] is Role.WORKER]
            await asyncio.gather(*(self._end(node, settle=0.0, grace=self._job.drain) for node in workers))
        settle = self._job.settle if gently else 0.0
        await self._end_all(settle=settle, grace=min(self._job.grace, FINISH_GRACE) if gently else self._job.grace)

    async def _end_all(self, *, settle: float, grace: float) -> None:
        nodes = list(self._nodes.values())
        await asyncio.gather(*(self._end(node, settle=settle, grace=grace) for node in nodes))
        with contextlib.suppress(TimeoutError):
            # A process that left its group may still hold a stream: don't wait for it.
            await asyncio.wait_for(asyncio.gather(*(node.closed.wait() for node in nodes)), DRAIN_SECONDS)

    async def _end(self, node: NodeProcess, *, settle: float, grace: float) -> None:
        was_killed = not await node.end(settle=settle, grace=grace)
        self._watch.remove(node.pid)
        if was_killed and node not in self._killed:
            self._killed.add(node)
            text = f"{node.name} did not end within {grace:g} s of being asked to; killed it"
            self._note("killed", text, node=node.name)

    def _outcome(self) -> Outcome:
        outcome = self._supervisor.outcome
        node = self._nodes.get(outcome.node)
        if node is None or not node.last_error_line:
            return outcome
        line = node.last_error_line
        line = line if len(line) <= _MAX_QUOTE else f"{line[:_MAX_QUOTE]}..."
        return Outcome(outcome.exit_code, f"{outcome.reason}; its last line on stderr: {line}", outcome.node)


def _reachable(host: str) -> str:
    """Return the address of this machine at which a listener is reached."""
    if not is_wildcard(host):
        return host
    return "::1" if ":" in host else "127.0.0.1"
