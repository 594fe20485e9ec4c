"""What became of each worker's gradients: applied and how stale, dropped and why, or still on a server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.record import Run

CANCELLED: Final = "cancelled"

REASONS: Final = ("late", "stale", "evicted", CANCELLED)
"""Why gradients are in no update, as far as the policies that are here can say."""
"""Stands among the reasons for steps that were abandoned."""


@dataclass(slots=True)
class Fate:
    """The gradients of one worker, counted; they are as many as the steps that it has computed or abandoned."""

    applied: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason: what servers say, and `CANCELLED`."""
    open: int = 0
    """Neither: they failed, or servers held them when the run ended."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many parts (one a chunk) were applied at so many versions behind."""

    @property
    def steps(self) -> int:
        """All of them."""
        return self.applied + self.dropped.total() + self.open


def fates(run: Run) -> dict[str, Fate]:
    """Return what became of each worker's gradients, by name."""
    applied = {token for update in run.updates for token in update.tokens}
    found: dict[str, Fate] = {}
    for worker in run.workers:
        fate = found[worker.name] = Fate()
        fate.dropped[CANCELLED] = len(worker.steps) - worker.steps.pushed
        for number in range(1, worker.steps.pushed + 1):
            token = (worker.name, number)
            if token in run.dropped:
                fate.dropped[run.dropped[token]] += 1
            elif token in applied:
                fate.applied += 1
            else:
                fate.open += 1
    for update in run.updates:
        for (name, _), staleness in zip(update.tokens, update.staleness, strict=True):
            found[name].staleness[staleness] += 1
    return found


def staleness_rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield how many parts of gradients were how stale, for each worker."""
    for name, fate in fates(run).items():
        for staleness, count in sorted(fate.staleness.items()):
            yield {"worker": name, "staleness": staleness, "gradients": count}
