"""The scheduler's part of the cluster's checkpoints: when one is asked for, when it is complete, which ones stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokv.core.cluster_checkpoints import name_of
from aiokv.core.effects import Effect, Log, RemoveCheckpoints, Send, WriteManifest
from aiokv.core.records import Record, field
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.roster import Roster
    from aiokv.core.stimuli import ManifestWritten
    from aiokv.types import Peer, Rank

MOST_AHEAD = 1 << 20
"""So many rounds ahead a checkpoint is asked for at most."""

PATIENCE = 60.0
"""Seconds for which the end of a job waits for a checkpoint that is under way, at most."""


@dataclass(slots=True, frozen=True)
class CheckpointPlan:
    """Where the cluster's checkpoints are, how often there is one, and what is there already.

    Args:
        folder: path or URL.
        run: how often a job was started in this folder, this time included.
        every: rounds between checkpoints; 0: none that are counted so.
        seconds: between checkpoints; 0: none that are counted so.
        keep: how many complete ones stay.
        names: of the complete ones, the oldest first.
        torn: names of others that are of no use.
        resume: the folder of the one with which the servers begin; empty: with nothing.
        clock: of that one.
    """

    folder: str = ""
    run: int = 0
    every: int = 0
    seconds: float = 0.0
    keep: int = 3
    names: tuple[str, ...] = ()
    torn: tuple[str, ...] = ()
    resume: str = ""
    clock: int = 0


class Gathering(Record, eq=False):
    """A checkpoint that is under way: which workers are past its clock, and what is written.

    `rests` is set when the servers were told that all workers are past it; `writing` when it is being completed.
    """

    clock: int
    passed: dict[Rank, None] = field(default_factory=dict)
    parts: dict[int, m.CheckpointFile] = field(default_factory=dict)
    residuals: dict[Rank, m.CheckpointFile] = field(default_factory=dict)
    rests: bool = False
    writing: bool = False


class Keeper:
    """The part of a `Membership` that deals with checkpoints.

    Args:
        plan: where and how often.
        workers: how many the cluster has.
        servers: how many of these.
    """

    def __init__(self, plan: CheckpointPlan, workers: int, servers: int) -> None:
        self._plan = plan
        self._num_workers = workers
        self._num_servers = servers
        self._names = list(plan.names)
        self._torn = list(plan.torn)
        """Names of what is to be deleted with the next one that is too old."""
        self._open: dict[int, Gathering] = {}
        self._complete = plan.clock
        """The clock of the last one that is complete."""
        self._dropped: dict[int, None] = {}
        """Later clocks of which there will be none."""
        self._servers: list[Peer] = []
        self._workers: list[Peer] = []
        self._counted: list[Rank] = []
        self._newcomers: dict[Rank, int] = {}
        """After which clock ranks count that do not do so from the beginning."""
        self._ask_at: float | None = None
        self._asked = 0
        self._ahead = 1
        self._newest = plan.clock
        self._silent: dict[Peer, None] = {}
        """Who has not said yet whether it can be at the clock that was asked for."""

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is under way that can still be completed."""
        return bool(self._open)

    @property
    def _lacks_parts(self) -> bool:
        """Whether parameters are lost, so that no checkpoint has all of them."""
        return len(self._servers) < self._num_servers

    def deadline(self) -> float | None:
        """Return the time at which `tick` wants to be called."""
        return self._ask_at

    def viewed(self, servers: list[Peer], workers: list[Peer], roster: Roster, now: float) -> list[Effect]:
        """Take note of who is there, which has changed.

        Args:
            servers: the connections of the servers that are alive, by index.
            workers: those of the workers that are here.
            roster: says who counts.
            now: the time.
        """
        self._servers, self._workers, self._counted = servers, workers, roster.members
        self._newcomers = roster.newcomers
        effects = self._drop(list(self._open), "a server is lost") if self._lacks_parts else []
        self._silent = {peer: None for peer in self._silent if peer in (*servers, *workers)}
        if self._ask_at is None and self._plan.seconds:
            self._ask_at = now + self._plan.seconds
        return effects + self._go_on()

    def interrupted(self, reason: str = "the connection to a server has ended") -> list[Effect]:
        """Take note that what a server has said, or was asked, may have got lost, with its connection or itself."""
        effects = self._drop(list(self._open), reason)
        if self._asked > self._complete and self._asked not in self._dropped:
            self._dropped[self._asked], self._silent = None, {}
            effects += [Send(peer, 0, m.CheckpointDropped(self._asked)) for peer in self._servers]
        return effects

    # --- every so many seconds ---

    def tick(self, now: float) -> list[Effect]:
        """Ask for a checkpoint when it is time, unless one is under way."""
        if self._ask_at is None or now < self._ask_at:
            return []
        self._ask_at = now + self._plan.seconds
        is_awaited = self._asked > self._complete and self._asked not in self._dropped
        if self._lacks_parts or self._open or self._silent or is_awaited:
            return []
        self._ahead = 1
        return self._ask()

    def _ask(self) -> list[Effect]:
        """Ask for one a little ahead of all; twice as far whenever somebody was past it."""
        self._asked = max(self._newest, self._asked) + self._ahead
        self._ahead = min(2 * self._ahead, MOST_AHEAD)
        peers = [*self._servers, *self._workers]
        self._silent = dict.fromkeys(peers)
        return [Send(peer, 0, m.CheckpointAt(self._asked)) for peer in peers]

    def answered(self, peer: Peer, answer: m.CheckpointClock) -> list[Effect]:
        """Take note whether somebody can be at the clock that was asked for; ask for a later one if not."""
        self._newest = max(self._newest, answer.newest)
        if answer.clock != self._asked or peer not in self._silent:
            return []
        del self._silent[peer]
        if answer.newest <= self._asked:
            return []
        too_early, self._silent = self._asked, {}
        self._dropped[too_early] = None
        self._open.pop(too_early, None)
        return [*(Send(peer, 0, m.CheckpointDropped(too_early)) for peer in self._servers), *self._ask()]

    # --- what the others have written ---

    def passed(self, rank: Rank, part: m.CheckpointPart) -> list[Effect]:
        """Take note that a worker is past a clock."""
        if part.reason:
            return self._failed(part.clock, f"rank {rank}: {part.reason}")
        gathering = self._gathering(part.clock)
        if gathering is None:
            return []
        gathering.passed[rank] = None
        if part.file is not None:
            gathering.residuals[rank] = part.file
        return self._go_on()

    def wrote(self, index: int, part: m.CheckpointPart) -> list[Effect]:
        """Take note of the part of a server."""
        if part.file is None:
            return self._failed(part.clock, f"server {index}: {part.reason}")
        gathering = self._gathering(part.clock)
        if gathering is None:
            return []
        gathering.parts[index] = part.file
        return self._go_on()

    def _gathering(self, clock: int) -> Gathering | None:
        """Return the checkpoint of a clock; None: it is over, or can't be."""
        if self._lacks_parts or clock <= self._complete or clock in self._dropped:
            return None
        if clock not in self._open:
            self._open[clock] = Gathering(clock)
        return self._open[clock]

    def _failed(self, clock: int, reason: str) -> list[Effect]:
        return [] if self._gathering(clock) is None else self._drop([clock], reason)

    def _go_on(self) -> list[Effect]:
        """Do what comes next for each checkpoint that is under way, the earliest first."""
        effects: list[Effect] = []
        for clock in sorted(self._open):
            gathering = self._open[clock]
            if any(rank not in gathering.passed for rank in self._counted if self._newcomers.get(rank, 0) < clock):
                break
            if not gathering.rests:
                gathering.rests = True
                effects += [Send(peer, 0, m.CheckpointRest(clock)) for peer in self._servers]
            elif not gathering.writing and len(gathering.parts) == self._num_servers:
                gathering.writing = True
                parts = [gathering.parts[index] for index in sorted(gathering.parts)]
                residuals = sorted(gathering.residuals.items())
                place = f"{self._plan.folder}/{name_of(self._plan.run, clock)}"
                effects.append(WriteManifest(clock, place, self._num_workers, parts, residuals))
        return effects

    def written(self, written: ManifestWritten) -> list[Effect]:
        """Take note that a checkpoint is complete; drop those that are older than the last few."""
        clock = written.clock
        gathering = self._open.get(clock)
        if gathering is None:
            return []
        if written.reason:
            return self._drop([clock], written.reason)
        del self._open[clock]
        nbytes = sum(file.nbytes for file in (*gathering.parts.values(), *gathering.residuals.values()))
        text, facts = f"the checkpoint of round {clock} is complete: {nbytes} bytes", {"clock": clock, "nbytes": nbytes}
        effects: list[Effect] = [Log("info", text, "checkpoint_complete", facts)]
        effects += self._drop([other for other in self._open if other < clock], "a later one is complete")
        self._complete = clock
        self._dropped = {other: None for other in self._dropped if other > clock}
        self._names.append(name_of(self._plan.run, clock))
        old, self._names = self._names[: -self._plan.keep], self._names[-self._plan.keep :]
        names, self._torn = self._torn + old, []
        places = [f"{self._plan.folder}/{name}" for name in names]
        return [*effects, RemoveCheckpoints(places)] if places else effects

    def _drop(self, clocks: list[int], reason: str) -> list[Effect]:
        """Do without checkpoints, and say so."""
        effects: list[Effect] = []
        for clock in clocks:
            del self._open[clock]
            self._dropped[clock] = None
            self._torn.append(name_of(self._plan.run, clock))
            text, facts = f"there is no checkpoint of round {clock}: {reason}", {"clock": clock, "reason": reason}
            effects.append(Log("warning", text, "checkpoint_dropped", facts))
            effects += [Send(peer, 0, m.CheckpointDropped(clock)) for peer in self._servers]
        return effects
