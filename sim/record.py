"""What happened in a run, as its observers wrote it down. All times are simulated seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.core.records import Record
from aiokv.policy import get_policy
from sim.steps import Step, Steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.core.saved_state import ChunkState
    from aiokv.errors import AiokvError
    from aiokv.types import Key, Rank, Version
    from sim.learning import Curve
    from sim.scenario import Scenario
    from sim.sections import ChangeSection
    from sim.tokens import Token


@dataclass(slots=True)
class WorkerRecord:
    """What a worker's loop did."""

    name: str
    rank: Rank = -1
    begun: float = 0.0
    ended: float = 0.0
    steps: Steps = field(default_factory=Steps)
    error: AiokvError | None = None
    """Why the loop ended early."""
    number: int = 0
    """Of its last push, also of those that others had made before it joined."""
    left: bool = False
    """It has left before all steps were taken."""
    struck: bool = False
    """A fault has ended this worker for good."""
    torn_reads: int = 0
    """How many of its calls have got values of several rounds."""
    outages: list[tuple[float, float]] = field(default_factory=list)
    """When it was down and came back into the training."""
    saving: float = 0.0
    """Seconds spent on checkpoints."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    """When it asked for each change of the policy, and how many pushes it had made."""

    @property
    def numbered(self) -> list[tuple[int, Step]]:
        """The steps that were not abandoned, with the numbers of their pushes."""
        return [(step.number or number, step) for number, step in enumerate(self.pushed, start=1)]

    @property
    def last_push(self) -> int:
        """The number of its last push, answered or not."""
        last = next((step for step in reversed(self.steps) if not step.cancelled), None)
        return 0 if last is None else last.number or self.steps.pushed

    @property
    def pushed(self) -> list[Step]:
        """The steps that were not abandoned: number i, from 1, made push number i."""
        return [step for step in self.steps if not step.cancelled]


class UpdateRecord(Record):
    """A server made `version` of a chunk out of these contributions."""

    time: float
    key: Key
    start: int
    version: Version
    ranks: list[Rank]
    staleness: list[int]
    tokens: Sequence[Token]
    node: str = ""
    """The server that made it."""


class DivideRecord(Record):
    """A chunk of several keys became one chunk of each of them."""

    updates: int
    """How many of the run's updates were made before."""
    key: Key
    start: int
    keys: list[Key]


class SaveRecord(Record):
    """All workers have saved together, from when the first one came until rank 0 was done."""

    begin: float
    end: float
    steps: int
    """How many each worker had taken."""


class DropRecord(Record):
    """A server answered that a push is in no update, and why."""

    time: float
    key: Key
    start: int
    token: Token
    reason: str
    read: Version
    """The version that it was computed at."""
    node: str


class LogRecord(Record):
    """A line that a node wrote for its operator."""

    time: float
    node: str
    level: str
    text: str


class Life(Record):
    """A job from one start to its end or failure. Times are those of the job, steps those of all workers together."""

    begin: float
    end: float
    done: int
    """Steps that were done before, and saved."""
    made: int
    kept: int
    """How many of these a later life has, or the job at its end."""
    error: str
    """Why it failed; empty for the last one of a job that is done."""

    @property
    def lost(self) -> int:
        """Steps that were made in vain."""
        return max(0, self.made - self.kept)


@dataclass(slots=True, frozen=True)
class Job:
    """All lives of a job, how long it took (infinite: it was never done), and the share of useful time."""

    lives: list[Life]
    seconds: float
    useful: float


@dataclass(slots=True)
class LinkRecord:
    """Bytes that went from one node to another."""

    source: str
    target: str
    messages: int
    sent: int
    delivered: int
    lost: int
    duplicate: int


@dataclass(slots=True)
class Run:
    """One simulated run of a scenario under a policy."""

    scenario: Scenario
    policy: str
    seed: int
    workers: list[WorkerRecord] = field(default_factory=list)
    updates: list[UpdateRecord] = field(default_factory=list)
    saves: list[SaveRecord] = field(default_factory=list)
    divisions: list[DivideRecord] = field(default_factory=list)
    drops: list[DropRecord] = field(default_factory=list)
    """One entry for each message that was dropped."""
    dropped: dict[Token, str] = field(default_factory=dict)
    """Why a gradient is in no update."""
    held: dict[Rank, float] = field(default_factory=dict)
    """Seconds for which the policy held a worker's reads back, as the server counted that did so longest; the mean
    over its chunks.
    """
    duplicates: dict[Rank, int] = field(default_factory=dict)
    """How many pushes to a chunk came more than once, as the servers counted them."""
    logs: list[LogRecord] = field(default_factory=list)
    checkpoints: dict[str, list[ChunkState]] = field(default_factory=dict)
    """What the checkpoints of the cluster have that are complete, by their folders."""
    torn: dict[str, list[str]] = field(default_factory=dict)
    """Whose parts of checkpoints are torn without anybody knowing, by their folders."""
    in_flight: list[Token] = field(default_factory=list)
    """Gradients that arrived at a server but were in no update when the run ended; one entry a chunk."""
    evicted: dict[str, float] = field(default_factory=dict)
    """When the others were told to go on without a worker."""
    since: dict[str, list[int]] = field(default_factory=dict)
    """The last round that a worker was not in, each time that it joined, as the others were told."""
    until: dict[str, int] = field(default_factory=dict)
    """The clock up to which a worker counts in rounds that has planned to leave."""
    crashed: str = ""
    """The node whose crash has ended it, if the whole job is started again then."""
    begun_anew: bool = False
    """Whether nobody of the cluster was left, and those who came then have made another one: that has ended the run."""
    unstopped: list[str] = field(default_factory=list)
    """Nodes that went on although all workers had ended long ago."""
    links: list[LinkRecord] = field(default_factory=list)
    poisoned: set[Token] = field(default_factory=set)
    """Gradients that hold NaN."""
    elapsed: float = 0.0
    """When the last node that stopped did so."""
    digest: str = ""
    """SHA-256 of the trace of effects."""
    job: Job | None = None
    """What became of the job that begins with this run, if it may be started again."""
    curve: Curve | None = None
    """What came of its workload; `sim.learning.curve_of` fills it in."""
    _applied: set[Token] = field(default_factory=set, repr=False)
    _by_name: dict[str, WorkerRecord] = field(default_factory=dict, repr=False)

    def is_through(self, worker: WorkerRecord) -> bool:
        """Say whether a worker has taken all its steps, or has left in good order before that."""
        if self.scenario.cluster.max_workers:
            return worker.left or worker.number >= self.scenario.steps_of(worker.name)
        return worker.left or worker.steps.answered == self.scenario.steps_of(worker.name)

    @property
    def changes(self) -> list[ChangeSection]:
        """The changes of the policy that make a difference."""
        found, before = [], str(get_policy(self.policy))
        for change in self.scenario.change:
            policy = str(get_policy(change.policy))
            if policy != before:
                found.append(change)
            before = policy
        return found

    @property
    def policies(self) -> list[str]:
        """The policies of the run, in the order in which they are in force."""
        return [self.policy, *(change.policy for change in self.changes)]

    @property
    def applied(self) -> set[Token]:
        """The gradients that are in any update; to be asked for when the run is over."""
        if not self._applied:
            self._applied = {token for update in self.updates for token in update.tokens}
        return self._applied

    @property
    def worker_by_name(self) -> dict[str, WorkerRecord]:
        """The workers' records by name."""
        if len(self._by_name) != len(self.workers):
            self._by_name = {worker.name: worker for worker in self.workers}
        return self._by_name
