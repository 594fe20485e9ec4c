"""Cases of policies between bsp and asp: bounded staleness, and rounds of the first K."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, Final

from sim import closed_forms as known
from sim.advice import barrier, step_matrix
from sim.compute import Constant, Exponential, Law, Pareto, ShiftedExponential
from sim.validation.case import Case, batched, estimated, exact, within
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.record import Run


def _common_end(run: Run) -> float:
    """Return until when all workers are at work."""
    return min(worker.ended for worker in run.workers)


def _between(run: Run, warm: int) -> list[float]:
    """Return the seconds from each update to the next, from one on, while all workers are at work."""
    end = _common_end(run)
    times = [update.time for update in run.updates[warm:] if update.time <= end]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def first_k() -> Iterator[Case]:
    """Case 6: rounds of the first K that are not cancelled take as long as K-sync, or K E[X]/N if anybody counts."""
    exponential, shifted = Exponential(mean=1.0), ShiftedExponential(shift=0.5, scale=0.5)
    for workers, k, law, steps in ((8, 4, exponential, 1500), (20, 5, exponential, 400), (8, 4, shifted, 1500)):
        name = f"6 k_batch_async time of an update, {law.__class__.__name__}, N={workers}, K={k}"
        yield batched(name, _between(run_ideal(f"k_batch_async:{k}", workers, steps, law), 20), k / workers)
    for workers, k, steps in ((8, 4, 1500), (50, 45, 300)):
        expected = known.harmonic(workers) - known.harmonic(workers - k)
        run = run_ideal(f"k_async:{k}", workers, steps, exponential)
        yield batched(f"6 k_async time of an update, exponential, N={workers}, K={k}", _between(run, 20), expected)


def staleness() -> Iterator[Case]:
    """Case 8: the mean staleness follows from N and K alone (Zhang and others 2015 saw 29, 14.5 and 0.967 for N=30)."""
    law = Exponential(mean=1.0)
    for policy, workers, expected in (
        ("k_async:4", 8, (8 - 4) / 4),
        ("k_async:6", 8, (8 - 6) / 6),
        ("k_batch_async:4", 8, (8 - 1) / 4),
        ("k_batch_async:2", 30, 29 / 2),
        ("k_batch_async:30", 30, 29 / 30),
    ):
        run = run_ideal(policy, workers, 800, law)
        end = _common_end(run)
        values = [value for u in run.updates[100:] if u.time <= end for value in u.staleness]
        # Versions telescope; what is left is at the two ends.
        yield within(
            f"8 {policy} mean staleness, N={workers}", statistics.fmean(values), expected, 2 * workers**2 / len(values)
        )


def order_statistics() -> Iterator[Case]:
    """Cases 3, 4 and 30: when the first K of N are done, as `aiokv sim advise` takes it from the steps of a run."""
    exponential = _columns(100, 300, Exponential(mean=1.0))
    for k in (96, 90, 50):
        expected = known.harmonic(100) - known.harmonic(100 - k)
        yield estimated(f"3 time of the first {k} of 100, exponential", _kth(exponential, k), expected)
    eight = _columns(8, 2000, Exponential(mean=1.0))
    yield estimated("3 time of the first 4 of 8, exponential", _kth(eight, 4), known.harmonic(8) - known.harmonic(4))
    heavy = _columns(100, 300, Pareto(minimum=1.0, shape=3.0))
    for k in (96, 90):
        expected = known.pareto_order_statistic(100, k, 3.0)
        yield estimated(f"4 time of the first {k} of 100, Pareto(3)", _kth(heavy, k), expected)
    for shift, best in ((0.1, 34), (0.5, 58), (1.0, 69), (2.0, 78), (5.0, 88)):
        rates = {k: k / (shift + known.harmonic(100) - known.harmonic(100 - k)) for k in range(1, 101)}
        yield exact(
            f"30 K with most gradients a second, N=100, shift {shift:g}", max(rates, key=rates.__getitem__), best
        )
        measured = best / (shift + barrier(exponential, 100 - best))
        error = statistics.stdev(_kth(exponential, best)) / math.sqrt(300)
        allowed = 3.0 * error * rates[best] / (best / rates[best])
        yield within(f"30 gradients a second with K={best}, shift {shift:g}", measured, rates[best], allowed)


def _columns(workers: int, rounds: int, law: Law) -> list[list[float]]:
    return list(step_matrix(run_ideal("bsp", workers, rounds, law)).values())


def _kth(columns: list[list[float]], k: int) -> list[float]:
    return [sorted(row)[k - 1] for row in zip(*columns, strict=True)]


WARM: Final = 20.0
"""Seconds after which it is forgotten that all workers have started together."""


def _rate(run: Run) -> float:
    """Return the steps a second of a worker while all are at work."""
    end = _common_end(run)
    count = sum(WARM < step.end <= end for worker in run.workers for step in worker.steps)
    return count / len(run.workers) / (end - WARM)


MEASURED: Final = {0: 0.3414, 1: 0.532, 2: 0.639, 3: 0.713}
"""Steps of a worker in a mean step time with 10 exponential workers, by the bound; from another simulation."""
MEASURED_WITHIN: Final = 0.006
"""How far these may be off: twice what is said of them."""


PAIRS, PAIR_STEPS = 16, 400
"""How often two workers are run, and for how many steps of each."""


def bounded() -> Iterator[Case]:
    """Cases 10 and 11: throughput under SSP; for two workers it is a birth-death chain."""
    for pair in ((1.0, 1.0), (2.0, 1.0)):
        for bound in (0, 1, 3):
            slow = {f"worker-{i}": 1.0 / rate for i, rate in enumerate(pair)}
            law = Exponential(mean=1.0)
            values = [
                _rate(run_ideal(f"ssp:{bound}", 2, PAIR_STEPS, law, seed=seed, slow=slow)) for seed in range(PAIRS)
            ]
            expected = known.bounded_pair(*pair, bound)
            # The slower one sets the pace, and the mean of so many exponential times is off by that.
            allowed = 3.0 / math.sqrt(PAIRS * PAIR_STEPS)
            name = f"10 ssp:{bound} steps a second, rates {pair[0]:g} and {pair[1]:g}"
            yield within(name, statistics.fmean(values), expected, allowed)
    for bound, expected in MEASURED.items():
        law = Exponential(mean=1.0)
        rates = [_rate(run_ideal(f"ssp:{bound}", 10, 600, law, seed=seed)) for seed in range(3)]
        error = 3.0 * statistics.stdev(rates) / math.sqrt(len(rates)) + MEASURED_WITHIN
        yield within(f"11 ssp:{bound} steps in a mean step time, N=10", statistics.fmean(rates), expected, error)


def persistent() -> Iterator[Case]:
    """Case 12: a worker that is always twice as slow sets the pace for every bound, which says only from when on."""
    for bound, first in ((1, 3), (3, 7), (10, 21)):
        run = run_ideal(f"ssp:{bound}", 2, 200, Constant(mean=1.0), slow={"worker-1": 2.0})
        fast = run.workers[0].steps
        blocked = next(number for number, step in enumerate(fast, start=1) if step.end > step.computed)
        yield exact(f"12 ssp:{bound} first step at which the fast worker waits", blocked, first)
        late = fast[100:180]
        yield exact(f"12 ssp:{bound} steps a second in the long run", 79 / (late[-1].end - late[0].end), 0.5)
