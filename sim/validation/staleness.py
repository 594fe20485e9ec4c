"""Cases of asp: throughput and staleness."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from sim.closed_forms import harmonic
from sim.compute import Constant, Exponential, ShiftedExponential
from sim.validation.case import Case, exact, proportion, within
from sim.validation.runs import run_ideal

WARM: Final = 30
"""From this version on the slow worker takes part; in a period of it 29 versions are made."""

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.record import Run


def _behind(run: Run, first: int) -> list[tuple[int, int]]:
    """Return rank and staleness of each gradient from a version on, while all workers are at work."""
    end = min(worker.ended for worker in run.workers)
    return [
        (update.ranks[0], update.staleness[0])
        for update in run.updates
        if update.version >= first and update.time <= end
    ]


def throughput() -> Iterator[Case]:
    """Cases 6 and 7: an update takes E[X]/N, whatever the law; sync over async is N H_N."""
    for name, law, scv in (
        ("exponential(1)", Exponential(mean=1.0), 1.0),
        ("0.5 + exponential(0.5)", ShiftedExponential(shift=0.5, scale=0.5), 0.25),
    ):
        run = run_ideal("asp", 8, 1500, law)
        end = min(worker.ended for worker in run.workers)
        count = sum(update.time <= end for update in run.updates)
        error = math.sqrt(scv / count) / 8
        yield within(f"6 asp time of an update, {name}, N=8", end / count, 1.0 / 8, 3.0 * error)
    sync = run_ideal("bsp", 20, 800, Exponential(mean=1.0))
    asynchronous = run_ideal("asp", 20, 600, Exponential(mean=1.0))
    end = min(worker.ended for worker in asynchronous.workers)
    count = sum(update.time <= end for update in asynchronous.updates)
    bsp_step = sync.workers[0].ended / 800
    ratio = bsp_step / (end / count)
    expected = 20 * harmonic(20)
    error = expected * math.sqrt(1.0 / count + 1.6 / harmonic(20) ** 2 / 800)
    yield within("7 time of an update, bsp over asp, exponential, N=20", ratio, expected, 3.0 * error)


def conservation() -> Iterator[Case]:
    """Case 8: mean staleness is N - 1 for any law, and (R - r)/r for a worker of rate r."""
    for workers, law in (
        (8, Exponential(mean=1.0)),
        (8, ShiftedExponential(shift=0.5, scale=0.5)),
        (30, Exponential(mean=1.0)),
    ):
        rows = _behind(run_ideal("asp", workers, 800, law), 20 * workers)
        mean = sum(staleness for _, staleness in rows) / len(rows)
        # Versions telescope; what is left is at the two ends.
        yield within(f"8 asp mean staleness, N={workers}, {law}", mean, workers - 1.0, 2.0 * workers**2 / len(rows))
    run = run_ideal("asp", 8, 400, Constant(mean=1.0), slow={"worker-7": 4.0})
    rows = [(update.ranks[0], update.staleness[0]) for update in run.updates if WARM <= update.version < WARM + 50 * 29]
    for name, ranks, expected in (("fast", range(7), 6.25), ("slow", [7], 28.0)):
        own = [staleness for rank, staleness in rows if rank in ranks]
        yield exact(f"8 asp staleness of the {name}, 7 of rate 1 and one of 1/4", sum(own) / len(own), expected)
    mean = sum(staleness for _, staleness in rows) / len(rows)
    yield exact("8 asp mean staleness, 7 of rate 1 and one of 1/4", mean, 7.0)


def conservation_of_rounds() -> Iterator[Case]:
    """Case 8: with rounds of K distinct workers it is (N - K)/K, with rounds of any K gradients (N - 1)/K."""
    exponential, shifted = Exponential(mean=1.0), ShiftedExponential(shift=0.5, scale=0.5)
    for policy, workers, expected, law, slow in (
        ("k_async:4", 8, 1.0, exponential, {}),
        ("k_async:2", 8, 3.0, shifted, {"worker-7": 4.0}),
        ("k_async:5", 20, 3.0, exponential, {}),
        ("k_batch_async:4", 8, 1.75, exponential, {}),
        ("k_batch_async:2", 8, 3.5, shifted, {"worker-7": 4.0}),
        # Zhang and others 2015, 30 learners: 15-softsync and 1-softsync.
        ("k_batch_async:2", 30, 14.5, exponential, {}),
        ("k_batch_async:30", 30, 29.0 / 30.0, exponential, {}),
    ):
        run = run_ideal(policy, workers, 300, law, slow=slow)
        end = min(worker.ended for worker in run.workers)
        updates = [update for update in run.updates if update.version > 2 * workers and update.time <= end]
        values = [staleness for update in updates for staleness in update.staleness]
        uneven = ", one 4 times slower" if slow else ""
        name = f"8 {policy} mean staleness, N={workers}, {type(law).__name__}{uneven}"
        # What a worker has read at the two ends is left of the sum.
        tolerance = 2.0 * workers * (max(values) + 1) / len(values)
        yield within(name, sum(values) / len(values), expected, tolerance)


def geometric() -> Iterator[Case]:
    """Case 9: with exponential workers staleness is geometric; with equal constant ones it is N - 1."""
    values = [staleness for _, staleness in _behind(run_ideal("asp", 16, 2000, Exponential(mean=1.0)), 500)]
    for staleness in (0, 1, 2):
        expected = (15.0 / 16.0) ** staleness / 16.0
        name = f"9 asp P(staleness = {staleness}), exponential, N=16"
        yield proportion(name, values.count(staleness), len(values), expected)
    values = [staleness for _, staleness in _behind(run_ideal("asp", 16, 50, Constant(mean=1.0)), 17)]
    yield exact("9 asp smallest staleness, constant, N=16", min(values), 15.0)
    yield exact("9 asp largest staleness, constant, N=16", max(values), 15.0)
