"""All workers save together, as `save` of a store does: rank 0 reads all servers and writes, the others wait for it."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from aiokv.core.keys import BUNDLE_START
from aiokv.core.placement import Chunk, place
from aiokv.core.stimuli import EnterBarrier, KeyOptions, KeyRecord, ReadRules, ReadState, StatePart
from aiokv.policy import get_policy
from sim.record import SaveRecord
from sim.waiting import Waiting, finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.core.effects import StoredState
    from aiokv.types import Key, Rank
    from sim.checks import Checks
    from sim.node import Node
    from sim.record import Run
    from sim.scenario import Scenario
    from sim.sections import TensorSection

MOST_PARTS: Final = 256
MOST_BYTES: Final = 16 * 1024 * 1024
"""So many parts of keys, and about so many bytes of weights, are read at once, as by `save`."""

HEAD_BYTES: Final = 200
"""An answer says about so long what it has."""


class States:
    """How many bytes the servers have of the parts of keys: weights, and what the update rule keeps for them."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._sizes: dict[tuple[Key, int], int] = {}

    def nbytes(self, payload: StoredState) -> int:
        """Return the bytes of an answer."""
        if not payload.arrays:
            return HEAD_BYTES
        if not self._sizes:
            self._sizes = {(part.record.key, part.start): _nbytes(part) for part in _parts(self._scenario)}
        # The keys of a bundle are in one piece each.
        start = max(payload.chunk_start, BUNDLE_START + 1)
        return HEAD_BYTES + round(self._sizes[payload.key, start] * (1.0 + self._scenario.job.save_state))


class Saves:
    """Saves one after the other; each worker does its part with `save`.

    What is saved are the values of one moment: nobody pushes meanwhile, so nothing may change.

    Args:
        run: is told of each that has come to its end.
        checks: are told when something has changed.
    """

    def __init__(self, run: Run, checks: Checks | None = None) -> None:
        self._run = run
        self._checks = checks
        self._waits = all(get_policy(policy).waits for policy in run.policies)
        self._timeout = run.scenario.cluster.call_timeout

    def save(self, node: Node, rank: Rank, steps: int) -> Waiting:
        """Do a worker's part, as a part of a process.

        Args:
            node: where the worker runs.
            rank: its rank; 0 reads and writes.
            steps: how many it has taken.

        Raises:
            AiokvError: a call of it has failed.
        """
        begun = node.env.now
        yield from self._meet(node, "save")
        if rank == 0:
            yield from self._write(node)
        yield from self._meet(node, "write")
        # The file gets its name; all hear whether it has.
        yield from self._meet(node, "name")
        if rank == 0:
            self._run.saves.append(SaveRecord(begun, node.env.now, steps))

    def _meet(self, node: Node, name: str) -> Waiting:
        yield from finish(node.call(EnterBarrier(node.new_call(), name, self._timeout)))

    def _write(self, node: Node) -> Waiting:
        before = len(self._run.updates)
        yield from finish(node.call(ReadRules(node.new_call(), self._timeout)))
        parts = list(_parts(self._run.scenario))
        for first in range(0, len(parts), MOST_PARTS):
            some = parts[first : first + MOST_PARTS]
            yield from finish(node.call(ReadState(node.new_call(), some, self._timeout, arrays=False)))
        for some, nbytes in _batches(parts):
            yield from finish(node.call(ReadState(node.new_call(), some, self._timeout)))
            job = self._run.scenario.job
            yield node.env.timeout(nbytes * (1.0 + job.save_state) / job.save_bandwidth)
        made = len(self._run.updates) - before
        # Otherwise a push is answered before it is in an update.
        if made and self._waits and self._checks is not None:
            self._checks.report([f"{made} updates of chunks were made while their values were saved"])


def steps_since_save(run: Run) -> int:
    """Return how many steps of all workers are lost if the servers are lost now: those since the last save."""
    saved = run.saves[-1].steps if run.saves else 0
    answered = [worker.steps.answered for worker in run.workers]
    return sum(max(0, count - saved) for count in answered)


def describe(run: Run) -> str:
    """Return in words what was saved; nothing if workers do not save."""
    if not run.scenario.job.save_every:
        return ""
    if not run.saves:
        return f"nothing was saved; {steps_since_save(run)} steps of all workers are in no file"
    mean = statistics.fmean(save.end - save.begin for save in run.saves)
    last = f"after {run.saves[-1].steps} steps each; {steps_since_save(run)} steps of all workers are in no file"
    return f"saved {len(run.saves)} times, which took {mean:.4g} s on average, for the last time {last}"


def _parts(scenario: Scenario) -> Iterator[StatePart]:
    for tensor in scenario.tensors:
        record = KeyRecord(tensor.key, tensor.spec, is_sparse=False, options=KeyOptions(group=tensor.group))
        for chunk in _chunks(scenario, tensor):
            yield StatePart(record, chunk.start, chunk.stop)


def _chunks(scenario: Scenario, tensor: TensorSection) -> list[Chunk]:
    cluster = scenario.cluster
    return place(
        tensor.key,
        tensor.spec,
        servers=cluster.cuts,
        chunk_bytes=cluster.chunk_bytes,
        split_bytes=cluster.split_bytes,
    )


def _nbytes(part: StatePart) -> int:
    return (part.stop - part.start) * part.record.spec.itemsize


def _batches(parts: list[StatePart]) -> Iterator[tuple[list[StatePart], int]]:
    """Yield parts that are read at once, and how many bytes their weights have."""
    some: list[StatePart] = []
    nbytes = 0
    for part in parts:
        some.append(part)
        nbytes += _nbytes(part)
        if len(some) == MOST_PARTS or nbytes >= MOST_BYTES:
            yield some, nbytes
            some, nbytes = [], 0
    if some:
        yield some, nbytes
