"""What policies promise in a run that changes them: each, for what was pushed while it was in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.promises import Promises, phase_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.types import Key, Rank
    from sim.record import DropRecord, Run, UpdateRecord, WorkerRecord


class Phases:
    """Looks at the updates and drops of a run as `Promises` does.

    And no update holds gradients of different policies, or of one that is not in force any longer.

    Args:
        run: what is looked at.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._promises = [Promises(run, phase) for phase in range(len(run.policies))]
        self._reached: dict[tuple[Key, int], int] = {}
        """The newest phase of which a chunk has an update."""

    def on_update(self, update: UpdateRecord, ranks: list[Rank]) -> list[str]:
        """Return what is wrong with an update of a chunk that these ranks push."""
        phases = {phase_of(self._run, token) for token in update.tokens}
        place = update.key, update.start
        oldest, newest = min(phases), max(phases)
        reached = self._reached.get(place, 0)
        self._reached[place] = max(reached, newest)
        if oldest < newest:
            return [f"version {update.version} holds gradients of before and after a change of the policy"]
        if oldest < reached:
            policy = self._run.policies[oldest]
            return [f"version {update.version} holds gradients of policy {policy}, which is not in force any longer"]
        return self._promises[newest].on_update(update, ranks)

    def on_drop(self, drop: DropRecord) -> list[str]:
        """Return what is wrong with a dropped gradient."""
        return self._promises[phase_of(self._run, drop.token)].on_drop(drop)

    def on_step(self, worker: WorkerRecord, number: int) -> list[str]:
        """Return what is wrong with a worker going on after its push `number`."""
        return self._promises[phase_of(self._run, (worker.name, number))].on_step(worker, number)

    def divide(self, place: tuple[Key, int], keys: Iterable[Key]) -> None:
        """Take note that a chunk is now one chunk of each of these keys."""
        for promises in self._promises:
            promises.divide(place, keys)
        self._reached |= {(key, 0): self._reached.get(place, 0) for key in keys}

    def finish(self) -> list[str]:
        """Return what is wrong with the whole run."""
        return [text for promises in self._promises for text in promises.finish()]
