"""Where the servers of a cluster of state machines write checkpoints, and begin with one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.saved_state import ChunkState
from aiokv.core.scheduler.checkpoint_keeper import CheckpointPlan
from aiokv.core.scheduler.cluster_plan import ClusterPlan
from aiokv.core.scheduler.membership import Membership
from aiokv.core.worker.session import Session
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.saved_state import RoundsState

Make = Callable[..., Any]
Saved = list[tuple[ChunkState, Any]]
"""Parts of keys with their values."""


class Disk:
    """Where the servers of a cluster write, at any time later, and read.

    Args:
        rounds: so many of them go by, by the name of a server, while that writes its part.
    """

    def __init__(self, **rounds: int) -> None:
        self.rounds = rounds
        self.held: dict[tuple[str, int], Saved] = {}
        self.parts: dict[str, dict[int, Saved]] = {}
        self.complete: dict[int, Saved] = {}
        self.decided: dict[int, list[RoundsState]] = {}
        """By the clock of a checkpoint, what was decided for all keys at once."""

    def of(self, clock: int) -> Disk:
        """Return another one that has the checkpoint of a clock."""
        other = Disk(**self.rounds)
        other.complete[clock], other.decided[clock] = self.complete[clock], self.decided[clock]
        return other


def with_disk(make_cluster: Make, disk: Disk, *, resume: int = 0, every: int = 2, **options: Any) -> Any:
    """Return a cluster with a checkpoint after every so many rounds, which begins with one if there is a clock."""

    class Cluster(make_cluster):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            workers, servers = options["workers"], options["servers"]
            super().__init__(**options)
            checkpoints = CheckpointPlan("/ck", 1, every, 0.0, 9, resume="/ck/old" if resume else "", clock=resume)
            plan = ClusterPlan(workers, servers, 0.5, 2.0, 16, 64, checkpoints=checkpoints)
            self.add("scheduler", Membership(plan, incarnation=1, started=0.0))
            self.writing: list[tuple[int, Any, st.Stimulus]] = []
            """What is being written: until which round, and what comes of it where."""

        @property
        def round(self) -> int:
            """The newest one of all workers; after the last one time goes on all the same."""
            machines = [node.machine for node in self.nodes.values() if isinstance(node.machine, Session)]
            return max(machine._directory.counts.clock for machine in machines) if self.scripts else 1 << 40

        def step(self) -> None:
            done = [each for each in self.writing if each[0] <= self.round]
            self.writing = [each for each in self.writing if each not in done]
            for _, node, stimulus in done:
                self.soon(node, stimulus)
            super().step()

        def soon(self, node: Any, stimulus: st.Stimulus) -> None:
            """Let something be done at any time."""
            self.ready.setdefault((node.name, -99), deque()).append((node, stimulus, None))

        def perform(self, node: Any, effect: Any) -> None:
            match effect:
                case ef.WriteManifest(clock, place):
                    disk.complete[clock] = [each for part in disk.parts[place].values() for each in part]
                    self.soon(node, st.ManifestWritten(clock))
                case ef.RemoveCheckpoints():
                    pass
                case _:
                    super().perform(node, effect)

        def perform_rule(self, node: Any, store: Any, effect: Any) -> None:
            if isinstance(effect, ef.Snapshot | ef.DropSnapshots | ef.WriteSnapshots):
                save(self, disk, node, effect)
            elif isinstance(effect, ef.ReadCheckpoint | ef.LoadSnapshots):
                load(self, disk, node, effect)
            else:
                super().perform_rule(node, store, effect)

    return Cluster()


def save(cluster: Any, disk: Disk, node: Any, effect: Any) -> None:
    """Hold, drop or write values."""
    match effect:
        case ef.Snapshot(clock, key, start, version, states):
            held = disk.held.setdefault((node.name, clock), [])
            held += zip(states, cut(cluster.stores[node.name], key, start, version), strict=True)
        case ef.DropSnapshots(clock):
            del disk.held[node.name, clock]
        case ef.WriteSnapshots(clock, place, index, rounds=rounds):
            disk.decided.setdefault(clock, []).extend(rounds)
            disk.parts.setdefault(place, {})[index] = disk.held.pop((node.name, clock), [])
            written = st.PartWritten(clock, m.CheckpointFile(str(index), 1, "", 0, ""))
            cluster.writing.append((cluster.round + disk.rounds.get(node.name, 0), node, written))


def load(cluster: Any, disk: Disk, node: Any, effect: Any) -> None:
    """Read what there is, or put it into chunks."""
    plan = cluster.nodes["scheduler"].machine._plan
    clock = plan.checkpoints.clock
    saved = disk.complete[clock]
    if isinstance(effect, ef.LoadSnapshots):
        for wanted in effect.chunks:
            value = join(wanted, [saved[number] for number in wanted.sources])
            cluster.stores[node.name].chunks[wanted.key, wanted.start] = {wanted.version: value}
        cluster.soon(node, st.SnapshotsLoaded())
    else:
        rules = m.RulesState("", {}, "sum", (), clock)
        states, decided = [state for state, _ in saved], disk.decided[clock]
        cluster.soon(node, st.CheckpointRead(clock, rules, states, plan.num_workers, rounds=decided))


def cut(store: Any, key: Any, start: int, version: int) -> list[Any]:
    """Return the values of the keys in a chunk."""
    ends = list(itertools.accumulate(piece.size for piece in store.pieces[key, start]))
    return np.split(store.chunks[key, start][version].copy(), ends[:-1])


def join(wanted: ef.WantedChunk, sources: Saved) -> Any:
    """Return the value of a chunk, made of parts."""
    value = np.full(wanted.stop, np.nan, np.float32)
    for state, part in sources:
        low, high = max(state.start, wanted.start), min(state.stop, wanted.stop)
        value[low:high] = part[low - state.start : high - state.start]
    return value[wanted.start :]
