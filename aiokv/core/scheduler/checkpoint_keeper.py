"""The scheduler's part of the cluster's checkpoints: when one is asked for, when it is complete, which ones stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokv.core.checkpoint_names import name_of
from aiokv.core.deadlines import earliest
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
"""Seconds for which is waited, at most: by the end of a job for a checkpoint that is under way, and by servers for
what has come and is not made when all workers are past a checkpoint."""


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
    """The checkpoint that is asked for: who can be at its clock, which workers are past it, and what is written.

    `timed`: it is one of those every so many seconds. `rests` is set when the servers were told that all workers are
    past it; `writing` when it is being completed.
    """

    clock: int
    timed: bool = False
    silent: dict[Peer, None] = field(default_factory=dict)
    """Who has not said yet whether it can be at this clock."""
    passed: dict[Rank, None] = field(default_factory=dict)
    parts: dict[int, m.CheckpointFile] = field(default_factory=dict)
    residuals: dict[Rank, m.CheckpointFile] = field(default_factory=dict)
    rests: bool = False
    writing: bool = False


class Keeper:
    """The part of a `Membership` that deals with checkpoints.

    All nodes are asked for the same one, and for the next one when that is complete, or dropped everywhere: servers
    that each chose among those that are due could choose differently for ever, and none would be complete.

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
        self._complete = plan.clock
        """The clock of the last one that is complete."""
        self._newest = plan.clock
        """The newest clock that anybody is known to have."""
        # The first view says so, so that nobody can be past it.
        self._open = Gathering(self._multiple(plan.clock + 1)) if plan.every else None
        self._ahead = 0
        self._servers: list[Peer] = []
        self._workers: list[Peer] = []
        self._counted: list[Rank] = []
        self._newcomers: dict[Rank, int] = {}
        """After which clock ranks count that do not do so from the beginning."""
        self._ask_at: float | None = None
        self._makes_up = False
        """Whether one is wanted at once, instead of one that may have been under way at another scheduler."""
        self._rest_by: float | None = None
        """When servers are told that what they still wait for will not come."""

    def _multiple(self, clock: int) -> int:
        """Return the first clock from one on after which a regular checkpoint may be."""
        every = self._plan.every
        return -(-clock // every) * every

    @property
    def due(self) -> int:
        """The clock of the checkpoint that is asked for; 0: there is none."""
        return 0 if self._open is None else self._open.clock

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is under way that can still be completed."""
        return self._open is not None and bool(self._open.passed)

    @property
    def _lacks_parts(self) -> bool:
        """Whether a server is not reached, or is lost, so that no checkpoint has all parameters."""
        return len(self._servers) < self._num_servers

    def deadline(self) -> float | None:
        """Return the time at which `tick` wants to be called."""
        return earliest(self._ask_at, self._rest_by)

    # --- who is there ---

    def restarted(self) -> None:
        """Go on where nothing is known of what was asked for before; if that was to be a checkpoint, it is made now."""
        self._open = None
        self._makes_up = bool(self._plan.every or self._plan.seconds)

    def viewed(self, servers: list[Peer], workers: list[Peer], roster: Roster, now: float) -> list[Effect]:
        """Take note of who is there, which has changed.

        Args:
            servers: the connections of the servers that are there, by index.
            workers: those of the workers.
            roster: says who counts.
            now: the time.
        """
        known = dict.fromkeys((*self._servers, *self._workers))
        self._servers, self._workers, self._counted = servers, workers, roster.members
        self._newcomers = roster.newcomers
        if self._ask_at is None and self._plan.seconds:
            self._ask_at = now + self._plan.seconds
        if self._lacks_parts:
            return self.interrupted("a server is not there")
        if self._makes_up:
            self._makes_up = False
            return self._ask_now()
        if self._open is None:
            return self._ask_regular()
        here = dict.fromkeys((*servers, *workers))
        self._open.silent = {peer: None for peer in self._open.silent if peer in here}
        # What was asked over an earlier connection, or answered, may have got lost with that.
        again = [peer for peer in here if peer not in known] if known else []
        return self._ask_all(again) + self._go_on(now)

    def interrupted(self, reason: str = "the connection to a server has ended") -> list[Effect]:
        """Take note that what a server has said, or was asked, may have got lost, with its connection or itself.

        The next one is asked for when it is known who is there now.
        """
        # When all is written the server is not needed.
        return [] if self._open is None or self._open.writing else self._drop(reason)

    # --- asking ---

    def _ask_regular(self) -> list[Effect]:
        """Ask for the first one after so many rounds that nobody is past, as far as is known."""
        self._ahead = 0
        return self._ask(timed=False) if self._plan.every else []

    def _ask(self, *, timed: bool) -> list[Effect]:
        """Ask for one that nobody is past; a little ahead, and twice as far whenever somebody was past it."""
        if self._lacks_parts:
            return []
        clock = max(self._newest + self._ahead, self._complete + 1)
        self._open = Gathering(clock if timed else self._multiple(clock), timed)
        self._ahead = min(max(1, 2 * self._ahead), MOST_AHEAD)
        return self._ask_all([*self._servers, *self._workers])

    def _ask_all(self, peers: list[Peer]) -> list[Effect]:
        assert self._open is not None, "there is one to ask for"
        self._open.silent |= dict.fromkeys(peers)
        return [Send(peer, 0, m.CheckpointAt(self._open.clock)) for peer in peers]

    def answered(self, peer: Peer, answer: m.CheckpointClock, now: float) -> list[Effect]:
        """Take note whether somebody can be at the clock that is asked for; ask for a later one if not."""
        self._newest = max(self._newest, answer.newest)
        asked = self._open
        if asked is None or answer.clock != asked.clock:
            # It is about an earlier one.
            return []
        if answer.newest > asked.clock:
            return self._let_go(asked.clock) + self._ask(timed=asked.timed)
        asked.silent.pop(peer, None)
        return self._go_on(now)

    def tick(self, now: float) -> list[Effect]:
        """Do what it is time for: ask for one every so many seconds, and have servers wait no longer."""
        effects: list[Effect] = []
        if self._rest_by is not None and now >= self._rest_by:
            self._rest_by = None
            effects += self._rest()
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at = now + self._plan.seconds
            effects += self._ask_timed()
        return effects

    def _ask_timed(self) -> list[Effect]:
        """Ask for one now, unless one is under way, or as good as that."""
        asked = self._open
        if asked is not None and (asked.timed or asked.silent or asked.passed):
            return []
        if asked is not None and asked.clock <= self._newest + 1:
            return []
        # A regular one that nobody is past is asked for again afterwards.
        return self._ask_now()

    def _ask_now(self) -> list[Effect]:
        self._ahead = 1
        return self._ask(timed=True)

    # --- what the others have written ---

    def passed(self, rank: Rank, part: m.CheckpointPart, now: float) -> list[Effect]:
        """Take note that a worker is past a clock."""
        gathering = self._gathering(part)
        if gathering is None:
            return []
        if part.reason:
            return self._drop(f"rank {rank}: {part.reason}") + self._ask_regular()
        gathering.passed[rank] = None
        if part.file is not None:
            gathering.residuals[rank] = part.file
        return self._go_on(now)

    def wrote(self, index: int, part: m.CheckpointPart, now: float) -> list[Effect]:
        """Take note of the part of a server."""
        gathering = self._gathering(part)
        if gathering is None:
            return []
        if part.file is None:
            return self._drop(f"server {index}: {part.reason}") + self._ask_regular()
        gathering.parts[index] = part.file
        return self._go_on(now)

    def _gathering(self, part: m.CheckpointPart) -> Gathering | None:
        """Return the checkpoint to which a part belongs, of a node that is past its clock; None: it is over."""
        self._newest = max(self._newest, part.clock + 1)
        return self._open if part.clock == self.due else None

    def _go_on(self, now: float) -> list[Effect]:
        """Do what comes next for the checkpoint that is under way."""
        gathering = self._open
        if gathering is None or gathering.silent or not gathering.passed:
            return []
        clock = gathering.clock
        if any(rank not in gathering.passed for rank in self._counted if self._newcomers.get(rank, 0) < clock):
            return []
        if not gathering.rests:
            gathering.rests, self._rest_by = True, now + PATIENCE
            return self._rest()
        if gathering.writing or len(gathering.parts) < self._num_servers:
            return []
        gathering.writing, self._rest_by = True, None
        parts = [gathering.parts[index] for index in sorted(gathering.parts)]
        place = f"{self._plan.folder}/{name_of(self._plan.run, clock)}"
        return [WriteManifest(clock, place, self._num_workers, parts, sorted(gathering.residuals.items()))]

    def _rest(self) -> list[Effect]:
        return [Send(peer, 0, m.CheckpointRest(self.due)) for peer in self._servers]

    def written(self, written: ManifestWritten) -> list[Effect]:
        """Take note that a checkpoint is complete; drop those that are older than the last few, ask for the next."""
        clock = written.clock
        gathering = self._open
        if gathering is None or gathering.clock != clock:
            return []
        if written.reason:
            return self._drop(written.reason) + self._ask_regular()
        self._open, self._complete = None, clock
        nbytes = sum(file.nbytes for file in (*gathering.parts.values(), *gathering.residuals.values()))
        text, facts = f"the checkpoint of round {clock} is complete: {nbytes} bytes", {"clock": clock, "nbytes": nbytes}
        effects: list[Effect] = [Log("info", text, "checkpoint_complete", facts)]
        self._names.append(name_of(self._plan.run, clock))
        old, self._names = self._names[: -self._plan.keep], self._names[-self._plan.keep :]
        names, self._torn = self._torn + old, []
        places = [f"{self._plan.folder}/{name}" for name in names]
        return [*effects, *([RemoveCheckpoints(places)] if places else []), *self._ask_regular()]

    def _drop(self, reason: str) -> list[Effect]:
        """Do without the checkpoint that is asked for, and say so if it was begun."""
        assert self._open is not None, "there is one to drop"
        clock, is_begun = self._open.clock, bool(self._open.passed)
        effects = self._let_go(clock)
        if not is_begun:
            return effects
        self._torn.append(name_of(self._plan.run, clock))
        text, facts = f"there is no checkpoint of round {clock}: {reason}", {"clock": clock, "reason": reason}
        return [Log("warning", text, "checkpoint_dropped", facts), *effects]

    def _let_go(self, clock: int) -> list[Effect]:
        self._open, self._rest_by = None, None
        return [Send(peer, 0, m.CheckpointDropped(clock)) for peer in self._servers]
