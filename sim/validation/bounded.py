"""Cases of ssp: throughput, and when a worker has to wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim import closed_forms as known
from sim.compute import Constant, Exponential
from sim.validation.case import Case, batched, exact, within
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.record import Run

PARTS: Final = 20


def _rates(run: Run, warm: int) -> list[float]:
    """Return the steps a second of a worker in equal parts of a run, without its first steps."""
    begin = run.workers[0].steps[warm].end
    end = min(worker.ended for worker in run.workers)
    length = (end - begin) / PARTS
    counts = [0] * PARTS
    for worker in run.workers:
        for step in worker.steps:
            if begin < step.end < end:
                counts[int((step.end - begin) / length)] += 1
    return [count / length / len(run.workers) for count in counts]


def pair() -> Iterator[Case]:
    """Case 10: two exponential workers; the lead of one over the other is a birth-death chain."""
    for slower, bounds in ((1.0, (0, 1, 3)), (2.0, (0, 1, 3))):
        for bound in bounds:
            # Equal numbers of steps, so the rate of both is that of one.
            run = run_ideal(f"ssp:{bound}", 2, 3000, Exponential(mean=1.0 / slower), slow={"worker-1": slower})
            rate, blocked = known.stale_pair(slower, 1.0, bound)
            name = f"ssp:{bound}, two workers of rates {slower:g} and 1"
            yield batched(f"10 steps a second, {name}", _rates(run, 100), rate)
            first = run.workers[0]
            waits = [step.end - step.computed for step in first.steps[100:]]
            # The share of time is the wait of a step over its mean length.
            yield batched(f"10 wait of the first after a step, {name}", waits, blocked / rate)


TEN: Final = {1: 0.532, 2: 0.639, 3: 0.713, 5: 0.796, 10: 0.883, 20: 0.935}
"""Steps of one of ten workers in a mean step time, by bound; simulated, to 0.003."""


def ten() -> Iterator[Case]:
    """Case 11: ten exponential workers."""
    run = run_ideal("ssp:0", 10, 600, Exponential(mean=1.0))
    times = [step.end - step.start for step in run.workers[0].steps]
    yield batched("11 step, ssp:0, exponential, N=10", times, known.harmonic(10))
    for bound, expected in TEN.items():
        # Each with numbers of its own: it would be the same luck otherwise.
        run = run_ideal(f"ssp:{bound}", 10, 600, Exponential(mean=1.0), seed=bound)
        case = batched(f"11 steps in a mean step time, ssp:{bound}, exponential, N=10", _rates(run, 100), expected)
        yield within(case.name, case.value, expected, case.tolerance + 0.003)


def persistent() -> Iterator[Case]:
    """Case 12: no bound helps against a worker that always is half as fast, it only delays the wait."""
    for bound, first in ((1, 3), (3, 7), (10, 21)):
        run = run_ideal(f"ssp:{bound}", 4, 200, Constant(mean=1.0), slow={"worker-3": 2.0})
        fast = run.workers[0].steps
        blocked = next(number for number, step in enumerate(fast, start=1) if step.end > step.computed)
        yield exact(f"12 first step after which the fast wait, ssp:{bound}, one of 4 twice as slow", blocked, first)
        rate = 100.0 / (fast[150].end - fast[50].end)
        yield exact(f"12 steps a second of the fast, ssp:{bound}, one of 4 twice as slow", rate, 0.5)
