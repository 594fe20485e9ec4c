"""Where the checkpoints of a simulated cluster lie, and whether each has every push once, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.stimuli import PartWritten
from aiokv.policy import get_policy
from aiokv.wire.messages import CheckpointFile
from sim.checks import InvariantError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aiokv.core import effects as fx
    from aiokv.core.saved_state import ChunkState
    from aiokv.types import Rank
    from sim.faults import Torn
    from sim.record import Run


class Disk:
    """What servers hold for checkpoints, what they have written, and which of it is complete.

    Args:
        run: whose updates the checkpoints are compared with; it is told which ones are torn.
        seconds: to write a part.
        torn: what tears the files of each server.
    """

    def __init__(self, run: Run, seconds: float, torn: Mapping[str, list[Torn]] | None = None) -> None:
        self.seconds = seconds
        self.complete: dict[str, list[ChunkState]] = {}
        """By the folder of a complete checkpoint, what all servers have written."""
        self._run = run
        self._torn = torn or {}
        self._held: dict[tuple[str, int], list[ChunkState]] = {}
        self._parts: dict[str, dict[int, list[ChunkState]]] = {}

    def hold(self, node: str, effect: fx.Snapshot) -> None:
        """Keep what a server holds on to."""
        self._held.setdefault((node, effect.clock), []).extend(effect.states)

    def drop(self, node: str, clock: int) -> None:
        """Forget what a server has held on to."""
        self._held.pop((node, clock), None)

    def write(self, node: str, effect: fx.WriteSnapshots, now: float) -> PartWritten:
        """Write what a server has held on to, beginning now; return what the server knows of it."""
        states = self._held.pop((node, effect.clock), [])
        torn = [each for each in self._torn.get(node, ()) if _covers(each, now, now + self.seconds)]
        if any(each.noticed for each in torn):
            return PartWritten(effect.clock, None, f"{node}'s part is torn")
        if torn:
            self._run.torn.setdefault(effect.place, []).append(node)
        self._parts.setdefault(effect.place, {})[effect.index] = states
        return PartWritten(effect.clock, CheckpointFile(str(effect.index), len(states), "", 0, ""))

    def finish(self, effect: fx.WriteManifest) -> None:
        """Make a checkpoint complete.

        Raises:
            InvariantError: it is no cut through all updates.
        """
        parts = self._parts[effect.place]
        if sorted(parts) != [int(file.name) for file in effect.parts]:
            raise InvariantError(f"{effect.place}: is of the parts {sorted(parts)}, not of {effect.parts}")
        states = [state for index in sorted(parts) for state in parts[index]]
        cuts: dict[tuple[str, tuple[int, ...]], ChunkState] = {}
        rounds: dict[tuple[str, tuple[int, ...]], int] = {}
        for state in states:
            self._check(effect.place, state)
            policy = get_policy(state.policy)
            if policy.decides and rounds.setdefault((state.policy, state.group), state.round) != state.round:
                # So it goes on from one cut through all keys.
                text = f"{effect.place}: key {state.key!r} has round {state.round} of {state.policy}"
                raise InvariantError(f"{text}, others {rounds[state.policy, state.group]}")
            if policy.in_step:
                # All keys of a job are pushed in each step.
                other = cuts.setdefault((state.policy, state.group), state)
                if self._whole(other.counts) != self._whole(state.counts):
                    text = f"{effect.place}: keys {other.key!r} and {state.key!r} are not of one round"
                    raise InvariantError(f"{text}: {other.counts} and {state.counts}")
        self.complete[effect.place] = states

    def _whole(self, counts: Iterable[tuple[Rank, int]]) -> list[tuple[Rank, int]]:
        """Return how many pushes of each rank count, without ranks of whose last step only some may."""
        gone: set[Rank] = set()
        if self._run.scenario.job.overlap:
            # A call counts as a whole where the others go on without its worker, but a step is several calls.
            gone = {worker.rank for worker in self._run.workers if worker.name in self._run.evicted}
        return [(rank, count) for rank, count in counts if rank not in gone]

    def _check(self, place: str, state: ChunkState) -> None:
        """Compare what a checkpoint says of pushes with the updates that were made by then."""
        # Who has not joined in the end does not know its rank; those go by the names.
        ranks = {one.name: one.rank if one.rank >= 0 else rank for rank, one in enumerate(self._run.workers)}
        made: dict[int, list[int]] = {}
        for update in self._run.updates:
            if update.key == state.key and update.version <= state.version and update.start in (state.start, -1):
                for name, sequence in update.tokens:
                    made.setdefault(ranks[name], []).append(sequence)
        for rank, sequences in made.items():
            count = dict(state.counts).get(rank, 0)
            if max(sequences) > count:
                text = f"{place}: key {state.key!r} has push {max(sequences)} of rank {rank}, and says {count}"
                raise InvariantError(text)

    def remove(self, places: list[str]) -> None:
        """Delete checkpoints, complete or not."""
        for place in places:
            self._parts.pop(place, None)
            self.complete.pop(place, None)


def _covers(fault: Torn, begin: float, end: float) -> bool:
    """Tell whether something of a time lies in the window of a fault."""
    return fault.at <= end and begin < fault.at + fault.duration


def whole(run: Run) -> list[str]:
    """Return the folders of the checkpoints that a job could go on from, the oldest first."""
    return [place for place in run.checkpoints if place not in run.torn]


def saved_pushes(run: Run) -> dict[Rank, int]:
    """Return how many pushes of each rank all keys of the newest whole checkpoint have."""
    saved: dict[Rank, int] = {}
    for place in whole(run)[-1:]:
        for state in run.checkpoints[place]:
            for rank, count in state.counts:
                saved[rank] = min(count, saved.get(rank, count))
    return saved


def steps_since_checkpoint(run: Run) -> int:
    """Return how many steps of all workers are not in the newest whole checkpoint: lost with the servers."""
    saved = saved_pushes(run)
    answered = {worker.rank: worker.steps.answered for worker in run.workers}
    return sum(max(0, count - saved.get(rank, 0)) for rank, count in answered.items())


def describe(run: Run) -> str:
    """Return in words which checkpoints of the cluster there are; nothing if none are made."""
    cluster = run.scenario.cluster
    if not (cluster.checkpoint_every or cluster.checkpoint_seconds):
        return ""
    good, torn = whole(run), [place for place in run.checkpoints if place in run.torn]
    lost = f"{steps_since_checkpoint(run)} steps of all workers are not in it"
    newest = f"the newest whole one is {good[-1].rpartition('/')[2]}; {lost}" if good else "none is whole"
    damaged = f", {len(torn)} of them torn" if torn else ""
    return f"{len(run.checkpoints)} complete checkpoints at the end{damaged}: {newest}"
