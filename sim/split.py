"""Where a worker's time went. The parts add up to the time from its first step to its end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.record import Run, WorkerRecord
    from sim.steps import Step


class Split(msgspec.Struct, frozen=True):
    """Seconds, or shares of the whole."""

    busy: float
    """It computed, and the gradient counted."""
    communicate: float
    """It waited, and something from or to it was under way."""
    wait: float
    """It waited for servers or for other workers."""
    checkpoint: float
    """It saved."""
    down: float
    """It was stopped, or not there."""
    lost: float
    """It computed in vain: the gradient was dropped or abandoned, or it never heard that it counted."""

    @property
    def total(self) -> float:
        """All of it."""
        return math.fsum(msgspec.structs.astuple(self))


def end_of(run: Run, worker: WorkerRecord) -> float:
    """Return when a worker's time is over: with its own end, or with that of the last one if a fault has ended it."""
    return max(other.ended for other in run.workers) if worker.struck else worker.ended


def judged(run: Run, worker: WorkerRecord) -> Iterator[tuple[Step, bool]]:
    """Yield each step, and whether its gradient counted, as far as its worker knows."""
    number = 0
    for step in worker.steps:
        number += not step.cancelled
        yield step, step.answered and not step.cancelled and (worker.name, number) not in run.dropped


def split(run: Run, worker: WorkerRecord) -> Split:
    """Return where the time of one worker went, in seconds."""
    steps: list[Step] = []
    busy: list[float] = []
    lost: list[float] = []
    for step, counts in judged(run, worker):
        steps.append(step)
        (busy if counts else lost).append(step.work)
    outages = math.fsum(end - begin for begin, end in worker.outages)
    if worker.struck:
        outages += end_of(run, worker) - worker.ended
    return Split(
        busy=math.fsum(busy),
        communicate=math.fsum([step.communicated for step in steps]),
        # It is a difference, so rounding may leave less than nothing.
        wait=max(0.0, math.fsum([step.waiting for step in steps])),
        checkpoint=worker.saving,
        down=outages + math.fsum([step.paused + step.halted for step in steps]),
        lost=math.fsum(lost),
    )


def shares(run: Run) -> Split:
    """Return where the time of all workers together went, as shares that add up to 1; NaN when there was none."""
    rows = [msgspec.structs.astuple(split(run, worker)) for worker in run.workers]
    sums = [math.fsum(column) for column in zip(*rows, strict=True)]
    whole = math.fsum(sums)
    return Split(*(value / whole if whole > 0 else math.nan for value in sums))
