"""What to do when a node ends, a signal comes or time runs out. Decisions only: no processes, no clock, no asyncio."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

EXIT_TIMEOUT = 124
EXIT_NOT_STARTED = 127
EXIT_SIGNAL_BASE = 128
"""Exit codes as shells and `timeout` use them; a signal's number is added to the last."""

_MAX_EXIT_CODE = 255
_SIGPIPE = 13


class Step(enum.Enum):
    """What the launcher does next."""

    WAIT = "nothing"
    START = "start the servers and the workers"
    RESTART = "start the nodes in `failed` again"
    RESUME = "end everything, then start all again from the last checkpoint"
    RESEED = "start the scheduler again, and then the servers; the workers go on, and bring what they have"
    FINISH = "let the others end by themselves for a moment, then end them"
    END = "end everything"
    KILL = "kill everything"


class Phase(enum.Enum):
    """Where the job is."""

    STARTING = "the scheduler has not said yet where it listens"
    RUNNING = "all nodes are started"
    RESUMING = "all nodes are being ended, and will be started again"
    RESEEDING = "parameters are lost; scheduler and servers will be started again when the workers have left them"
    ENDING = "all nodes are being ended; what they do now changes nothing"


@dataclass(slots=True)
class Outcome:
    """How the job ended. `node` is the one that caused a failure; reason is empty when all is well."""

    exit_code: int
    reason: str = ""
    node: str = ""


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, or "signal 99" for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_code(code: int) -> int:
    """Return what a shell would return for a node's exit code."""
    exit_code = EXIT_SIGNAL_BASE - code if code < 0 else code
    return exit_code if exit_code <= _MAX_EXIT_CODE else 1


def describe_exit(code: int) -> str:
    """Say how a process ended; a negative code is the signal that killed it."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


@dataclass(slots=True, frozen=True, kw_only=True)
class Recovery:
    """What may be done when a node fails.

    `restarts` is how often nodes may be started again, all together. `on_worker_loss` is the cluster's rule.
    `replicated`: the servers hold each other's parameters, so that one of them can be started again. `colocated`: with
    a worker a server fails. `resumable`: a job whose parameters are lost goes on from a checkpoint, if there is one.
    `reseeds`: then the workers leave, and bring their weights to another scheduler and other servers.
    """

    restarts: int = 0
    on_worker_loss: str = "fail"
    replicated: bool = False
    colocated: bool = False
    resumable: bool = False
    reseeds: bool = False


class Supervisor:
    """Decides, for one job, what each event means.

    The job succeeds when every worker has exited with code 0. It fails with the first node that exits with another code
    or by a signal, unless it can do without that node, or start it again. A scheduler or server that exits with code 0
    while workers are running is no failure: the parameters are not needed any more when all workers have left the
    cluster, while a worker may still be writing its model.

    Args:
        roles: the names of all nodes, with their roles.
        recovery: what may be done when one fails; None: nothing.
    """

    def __init__(self, roles: Mapping[str, Role], recovery: Recovery | None = None) -> None:
        self._roles = dict(roles)
        self._recovery = recovery or Recovery()
        self._running = set(self._roles)
        self.restarts_left = self._recovery.restarts
        self.failed: list[str] = []
        """The nodes that are to be started again; who does so takes them out."""
        self.phase = Phase.STARTING
        self.outcome = Outcome(0)
        self.life = 0
        """How often all nodes, or all but the workers, were started again."""
        self.workers = self._workers_running
        """How many workers the cluster is made of."""

    @property
    def running(self) -> list[str]:
        """The nodes that have not ended, in the order of their start."""
        return [name for name in self._roles if name in self._running]

    def scheduler_ready(self) -> Step:
        """The scheduler has said where it listens."""
        if self.phase is not Phase.STARTING:
            return Step.WAIT
        self.phase = Phase.RUNNING
        return Step.START

    def exited(self, name: str, code: int) -> Step:
        """A node ended."""
        self._running.discard(name)
        if self.phase in (Phase.ENDING, Phase.RESUMING):
            return Step.WAIT
        if self.phase is Phase.RESEEDING and self._roles[name] is not Role.WORKER:
            return self._reseed_if_left()
        if code != 0:
            return self._recover(name) or self._fail(_exit_code(code), f"{name} {describe_exit(code)}", name)
        if self.phase is Phase.STARTING and self._roles[name] is Role.SCHEDULER:
            return self._fail(1, f"{name} exited with code 0 before it said where it listens", name)
        if self._workers_running > 0:
            return Step.WAIT
        self.phase = Phase.ENDING
        return Step.FINISH

    def is_hung(self, name: str) -> bool:
        """Tell whether a node that does not answer the scheduler is one to be killed, so that it can be replaced."""
        return self.phase is Phase.RUNNING and name in self._running

    def begin_again(self) -> None:
        """All nodes have ended, and the first is started again."""
        if self.phase is Phase.RESUMING:
            self.phase, self._running, self.life = Phase.STARTING, set(self._roles), self.life + 1
            self.workers = self._workers_running

    @property
    def _workers_running(self) -> int:
        return sum(self._roles[name] is Role.WORKER for name in self._running)

    def _recover(self, name: str) -> Step | None:
        """Return what is done so that the job goes on although a node has failed; None: it can't."""
        role, rule = self._roles[name], self._recovery
        if self.phase is Phase.RESEEDING and rule.on_worker_loss == "shrink" and self._workers_running > 0:
            # The others bring what they have.
            return Step.WAIT
        if self.phase is not Phase.RUNNING:
            return None
        if role is Role.SERVER and rule.reseeds and not rule.replicated and self.restarts_left:
            return self._reseed()
        keeps_parameters = rule.replicated or not rule.colocated
        if role is Role.WORKER and rule.on_worker_loss == "shrink" and keeps_parameters and self._workers_running > 0:
            return Step.WAIT
        can_be_replaced = {
            Role.SCHEDULER: True,
            Role.SERVER: rule.replicated,
            Role.WORKER: rule.on_worker_loss == "respawn" and keeps_parameters,
        }[role]
        if role is Role.SERVER and rule.replicated and not self.restarts_left:
            # Others go on with what it had; if they can't, the scheduler says so.
            return Step.WAIT
        if not self.restarts_left or not (can_be_replaced or rule.resumable):
            return None
        self.restarts_left -= 1
        if not can_be_replaced:
            self.phase = Phase.RESUMING
            return Step.RESUME
        self._running.add(name)
        self.failed.append(name)
        return Step.RESTART

    def parameters_lost(self, node: str) -> Step:
        """The scheduler has said that a server is lost and that nobody has a copy of what it had."""
        if self.phase is not Phase.RUNNING:
            return Step.WAIT
        if self._recovery.reseeds and self.restarts_left:
            return self._reseed()
        if not self._recovery.resumable or not self.restarts_left:
            return self._fail(1, f"{node} is lost, and nobody has a copy of its parameters", node)
        self.restarts_left -= 1
        self.phase = Phase.RESUMING
        return Step.RESUME

    def _reseed(self) -> Step:
        self.restarts_left -= 1
        self.phase = Phase.RESEEDING
        return self._reseed_if_left()

    def _reseed_if_left(self) -> Step:
        """Start scheduler and servers again as soon as all of them have ended, which they do when the workers leave.

        Workers that have ended before are not waited for: there is nobody who would come in their place.
        """
        others = [name for name, role in self._roles.items() if role is not Role.WORKER]
        if not self._running.isdisjoint(others):
            return Step.WAIT
        self._running.update(others)
        self.phase, self.life = Phase.STARTING, self.life + 1
        self.workers = self._workers_running
        return Step.RESEED

    def not_started(self, name: str, problem: str) -> Step:
        """A node's program could not be started."""
        self._running.discard(name)
        return self._fail(EXIT_NOT_STARTED, f"{name} could not be started: {problem}", name)

    def not_ready(self, seconds: float, life: int = 0) -> Step:
        """The scheduler has had its time to say where it listens."""
        if self.phase is not Phase.STARTING or life != self.life:
            return Step.WAIT
        return self._fail(1, f"the scheduler did not say within {seconds:g} s where it listens")

    def timed_out(self, seconds: float) -> Step:
        """The job has had its time."""
        text = f"the job did not end within {seconds:g} s; still running: {', '.join(self.running)}"
        return self._fail(EXIT_TIMEOUT, text)

    def signalled(self, number: int) -> Step:
        """The launcher got a signal; a second one means that the user will not wait any longer."""
        if self.phase is Phase.ENDING:
            return Step.KILL
        text = "interrupted" if number == signal.SIGINT else f"ended by {signal_name(number)}"
        return self._fail(EXIT_SIGNAL_BASE + number, text)

    def output_lost(self) -> Step:
        """Nobody reads the launcher's output any more."""
        return self._fail(EXIT_SIGNAL_BASE + _SIGPIPE, "nobody reads the output any more")

    def _fail(self, exit_code: int, reason: str, node: str = "") -> Step:
        if self.phase is Phase.ENDING:
            return Step.WAIT
        self.phase = Phase.ENDING
        self.outcome = Outcome(exit_code, reason, node)
        return Step.END
