"""What every launcher needs: the job, its nodes, and the environment by which a node learns its place. No processes."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.addresses import format_address
from aiokv.errors import ConfigError
from aiokv.launch.signals import END_AT_ONCE
from aiokv.launch.supervisor import Recovery
from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.launch.supervisor import Outcome

_INHERITED_NEVER = (
    "AIOKV_SCHEDULER",
    "AIOKV_SCHEDULER_HOST",
    "AIOKV_SCHEDULER_PORT",
    "AIOKV_INTERFACE",
    "DMLC_PS_ROOT_URI",
    "DMLC_PS_ROOT_PORT",
    "DMLC_INTERFACE",
)
"""Variables that would contradict what the launcher says."""


SSH = "ssh -o BatchMode=yes {host}"


def node_command(role: Role) -> list[str]:
    """Return the command line of this package's own scheduler or server."""
    return [sys.executable, "-m", "aiokv", role.value, *(["--json"] if role is Role.SCHEDULER else [])]


def asking(role: Role) -> signal.Signals:
    """Return the signal that asks a node to end, when all of them are to end.

    A server that gets SIGTERM would try to hand over what it has, to servers that end too.
    """
    return END_AT_ONCE if role is Role.SERVER else signal.SIGTERM


def unique_cluster() -> str:
    """Return a cluster id that no other job on this machine has."""
    return f"run-{os.getpid()}-{secrets.token_hex(3)}"


@dataclass(slots=True, frozen=True, kw_only=True)
class Job:
    """One training job: how many nodes of which kind, and what they run.

    `command` is what the workers run. Times are seconds; `timeout` is for the whole job, None: no limit.
    """

    command: Sequence[str]
    workers: int = 1
    servers: int = 1
    colocate: bool = False
    """Every worker's process also hosts a server; no server processes are started."""
    scheduler_command: Sequence[str] = field(default_factory=lambda: node_command(Role.SCHEDULER))
    server_command: Sequence[str] = field(default_factory=lambda: node_command(Role.SERVER))
    cluster: str = field(default_factory=unique_cluster)
    token: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    name_prefix: str = ""
    bind_host: str = "127.0.0.1"
    port: int = 0
    """Where the scheduler listens; 0: any free port."""
    joins: tuple[str, int] | None = None
    """Where the scheduler of a running job listens, which the workers join. No other nodes are started then."""
    label: str = field(default_factory=lambda: f"{socket.gethostname()}-run{os.getpid()}")
    """Is in the names of workers that join, so that no others have them."""
    timeout: float | None = None
    hosts: Sequence[str] = ()
    """Where the servers run, and the workers, in turn; the scheduler runs here. Empty: all of them run here."""
    remote: str = SSH
    """The command line that runs on `{host}` the command that is put behind it, with the same stdin."""
    advertise_host: str = ""
    """The address of this machine for the other hosts; only with these."""
    single: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What single nodes, by their names, find in their environment besides, or instead of what all find there."""
    recovery: Recovery = field(default_factory=Recovery)
    """What is done when a node fails."""
    start_timeout: float = 30.0
    """How long the scheduler may take to say where it listens."""
    settle: float = 0.5
    """How long the scheduler and the servers may take to end by themselves when all workers are done."""
    grace: float = 2.0
    """How long a node that was asked to end may take before it is killed."""
    drain: float = 0.0
    """How long workers may take to leave when the launcher gets a signal, before all others are asked to end; 0: all
    are asked at once."""

    def scheduler_name(self) -> str:
        """Return the scheduler's name."""
        return f"{self.name_prefix}scheduler"

    def names(self) -> dict[str, Role]:
        """Return the names of all nodes with their roles: the scheduler, the servers, the workers."""
        if self.joins is not None:
            return {f"{self.name_prefix}worker-{self.label}-{index}": Role.WORKER for index in range(self.workers)}
        names = {self.scheduler_name(): Role.SCHEDULER}
        servers = 0 if self.colocate else self.servers
        names |= {f"{self.name_prefix}server-{index}": Role.SERVER for index in range(servers)}
        return names | {f"{self.name_prefix}worker-{index}": Role.WORKER for index in range(self.workers)}

    def host_of(self, name: str) -> str:
        """Return the host on which a node runs; empty: here."""
        names = self.names()
        role = names[name]
        if role is Role.SCHEDULER or not self.hosts:
            return ""
        alike = [other for other, of in names.items() if of is role]
        return self.hosts[alike.index(name) % len(self.hosts)]

    def command_of(self, role: Role) -> Sequence[str]:
        """Return what a node of that role runs."""
        commands = {Role.SCHEDULER: self.scheduler_command, Role.SERVER: self.server_command, Role.WORKER: self.command}
        return commands[role]

    def environment(
        self, name: str, role: Role, inherited: Mapping[str, str], scheduler: tuple[str, int] | None = None
    ) -> dict[str, str]:
        """Return the environment of one node.

        Args:
            name: the node's name.
            role: the node's role.
            inherited: the launcher's own environment; what is not about the node's place is kept.
            scheduler: where the scheduler listens; None for the scheduler itself, until it has.
        """
        environ = {key: value for key, value in inherited.items() if key not in _INHERITED_NEVER}
        servers = self.workers if self.colocate else self.servers
        port = self.port if scheduler is None else scheduler[1]
        environ |= {
            "AIOKV_ROLE": role.value,
            "AIOKV_NAME": name,
            "AIOKV_CLUSTER": self.cluster,
            "AIOKV_TOKEN": self.token,
            "AIOKV_NUM_WORKERS": str(self.workers),
            "AIOKV_NUM_SERVERS": str(servers),
            "AIOKV_COLOCATE": str(int(self.colocate)),
            "AIOKV_BIND_HOST": self.bind_host,
            "AIOKV_BIND_PORT": str(port if role is Role.SCHEDULER else 0),
            "DMLC_ROLE": role.value,
            "DMLC_NUM_WORKER": str(self.workers),
            "DMLC_NUM_SERVER": str(servers),
            # A line must show up when it is printed, not when a buffer of the node is full.
            "PYTHONUNBUFFERED": "1",
        }
        if self.hosts:
            # What was said of this machine does not hold for the others.
            environ["AIOKV_ADVERTISE_HOST"] = self.advertise_host if role is Role.SCHEDULER else ""
        if role is Role.SCHEDULER and scheduler is None:
            # There was none before it whose cluster it could go on with.
            environ.setdefault("AIOKV_SETTLE_TIME", "0")
        if scheduler is not None:
            host, port = scheduler
            environ |= {
                "AIOKV_SCHEDULER": format_address(host, port),
                "DMLC_PS_ROOT_URI": host,
                "DMLC_PS_ROOT_PORT": str(port),
            }
        return environ | dict(self.single.get(name, {}))


class Launcher(ABC):
    """Starts the nodes of a job, shows what they print, and ends them all together."""

    @abstractmethod
    async def run(self) -> Outcome:
        """Run the job to its end; no node is left afterwards."""


def resolve_command(command: Sequence[str]) -> list[str]:
    """Check that a worker's command can be started.

    A bare `python` or `python3` means the interpreter that runs this package, whatever is first on PATH: another one
    would most likely not have aiokv installed. Who wants another interpreter gives its path.

    Raises:
        ConfigError: there is no such program.
    """
    program = command[0]
    if program in ("python", "python3"):
        return [sys.executable, *command[1:]]
    if shutil.which(program) is None:
        hint = f"; to run a script: python {program}" if program.endswith(".py") else ""
        raise ConfigError(f"cannot find the program {program!r} that the workers shall run{hint}", got=program)
    return list(command)


def count(number: int, noun: str) -> str:
    """Write a number of things, "1 server" or "2 servers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
