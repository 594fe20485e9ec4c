"""What happened in a run, as its observers wrote it down. All times are simulated seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.errors import AiokvError
    from aiokv.types import Key, Rank, Version
    from sim.scenario import Scenario

Token = tuple[str, int]
"""Stands for a gradient: the name of its worker and the number of the push (from 1) that brought it."""


@dataclass(slots=True)
class Step:
    """A worker computed from `start` to `computed`, and waited for the servers until `end`."""

    start: float
    computed: float
    end: float
    answered: bool = True
    """False for a last step whose push failed, or that a fault cut short."""


@dataclass(slots=True)
class WorkerRecord:
    """What a worker's loop did."""

    name: str
    rank: Rank = -1
    begun: float = 0.0
    ended: float = 0.0
    steps: list[Step] = field(default_factory=list)
    error: AiokvError | None = None
    """Why the loop ended early."""
    struck: bool = False
    """A fault hit this worker."""


@dataclass(slots=True)
class UpdateRecord:
    """A server made `version` of a chunk out of these contributions."""

    time: float
    key: Key
    start: int
    version: Version
    ranks: list[Rank]
    staleness: list[int]
    tokens: list[Token]


@dataclass(slots=True)
class LogRecord:
    """A line that a node wrote for its operator."""

    time: float
    node: str
    level: str
    text: str


@dataclass(slots=True)
class Run:
    """One simulated run of a scenario under a policy."""

    scenario: Scenario
    policy: str
    seed: int
    workers: list[WorkerRecord] = field(default_factory=list)
    updates: list[UpdateRecord] = field(default_factory=list)
    logs: list[LogRecord] = field(default_factory=list)
    in_flight: list[Token] = field(default_factory=list)
    """Gradients that arrived at a server but were in no update when the run ended; one entry a chunk."""
    unstopped: list[str] = field(default_factory=list)
    """Nodes that went on although all workers had ended long ago."""
    elapsed: float = 0.0
    """When the last node that stopped did so."""
    digest: str = ""
    """SHA-256 of the trace of effects."""
