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
    FINISH = "let the others end by themselves for a moment, then end them"
    END = "end everything"
    KILL = "kill everything"


class Phase(enum.Enum):
    """Where the job is."""

    STARTING = "the scheduler has not said yet where it listens"
    RUNNING = "all nodes are started"
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


def describe_exit(code: int) -> str:
    """Say how a process ended; a negative code is the signal that killed it."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"


class Supervisor:
    """Decides, for one job, what each event means.

    The job succeeds when every worker has exited with code 0. It fails with the first node that exits with another code
    or by a signal. A scheduler or server that exits with code 0 while workers are running is no failure: the parameters
    are not needed any more when all workers have left the cluster, while a worker may still be writing its model.
    """

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._roles = dict(roles)
        self._running = set(self._roles)
        self.phase = Phase.STARTING
        self.outcome = Outcome(0)

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
        if self.phase is Phase.ENDING:
            return Step.WAIT
        if code != 0:
            exit_code = EXIT_SIGNAL_BASE - code if code < 0 else code
            return self._fail(exit_code if exit_code <= _MAX_EXIT_CODE else 1, f"{name} {describe_exit(code)}", name)
        if self.phase is Phase.STARTING:
            return self._fail(1, f"{name} exited with code 0 before it said where it listens", name)
        if any(self._roles[other] is Role.WORKER for other in self._running):
            return Step.WAIT
        self.phase = Phase.ENDING
        return Step.FINISH

    def not_started(self, name: str, problem: str) -> Step:
        """A node's program could not be started."""
        self._running.discard(name)
        return self._fail(EXIT_NOT_STARTED, f"{name} could not be started: {problem}", name)

    def not_ready(self, seconds: float) -> Step:
        """The scheduler has had its time to say where it listens."""
        if self.phase is not Phase.STARTING:
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
