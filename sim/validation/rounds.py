"""Cases of rounds that the first K make: how long they take, and which K is best."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, Final

from sim import closed_forms as known
from sim.compute import Exponential, Law, Pareto, ShiftedExponential
from sim.sections import JobSection, StopSection
from sim.validation.case import Case, batched, estimated, exact, within
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.record import Run

CODED: Final = 12
"""Workers with gradient coding, and parts of a gradient."""

MANY: Final = 1_000_000
"""More steps than any worker takes before its run is stopped."""

SHIFTED: Final = ShiftedExponential(shift=0.5, scale=0.5)


def run_rounds(policy: str, workers: int, rounds: int, law: Law, *, cancel: bool = False, seed: int = 1) -> Run:
    """Run until so many updates are made, with all workers at work."""
    stop = StopSection(updates=rounds, departures=False)
    return run_ideal(policy, workers, MANY, law, seed, stop=stop, job=JobSection(cancel=cancel))


def _times(run: Run) -> list[float]:
    """Return how long each round took, from the update before it to its own."""
    begin = max(worker.begun for worker in run.workers)
    return [after - before for before, after in itertools.pairwise([begin, *(update.time for update in run.updates)])]


def first_of_all() -> Iterator[Case]:
    """Cases 3 and 4: the K-th smallest of N times, the rest being cancelled."""
    for workers, k, rounds in ((8, 4, 600), (50, 45, 60), (54, 50, 60), (100, 96, 40), (100, 90, 25), (1000, 960, 6)):
        times = _times(run_rounds(f"k_sync:{k}", workers, rounds, Exponential(mean=1.0), cancel=True))
        yield estimated(f"3 k_sync round, exponential, ({workers}, {k})", times, known.first_exponential(workers, k))
    for workers, k, shape, rounds in ((100, 100, 3.0, 40), (100, 96, 3.0, 40), (100, 96, 2.0, 40), (10, 9, 2.0, 400)):
        times = _times(run_rounds(f"k_sync:{k}", workers, rounds, Pareto(minimum=1.0, shape=shape), cancel=True))
        expected = known.first_pareto(workers, k, shape)
        # The tail is long: what a sample says of its own error is too little most of the time.
        error = math.sqrt((known.first_pareto(workers, k, shape, 2) - expected**2) / rounds)
        name = f"4 k_sync round, Pareto({shape:g}), ({workers}, {k})"
        yield within(name, statistics.fmean(times), expected, 3.0 * error)


def batches() -> Iterator[Case]:
    """Case 6: K gradients, whoever made them, take K/N of a step; K-async with exponential times is as K-sync."""
    law = Exponential(mean=1.0)
    for workers, k in ((8, 4), (20, 5)):
        times = _times(run_rounds(f"k_batch_sync:{k}", workers, 500, law, cancel=True))
        yield estimated(f"6 k_batch_sync round, exponential, ({workers}, {k})", times, k / workers)
    laws = (("exponential", law), ("0.5 + exponential(0.5)", SHIFTED), ("Pareto(3)", Pareto(minimum=2 / 3, shape=3.0)))
    for name, each in laws:
        for workers, k in ((8, 4), (20, 5)):
            times = _times(run_rounds(f"k_batch_async:{k}", workers, 700, each))[100:]
            yield batched(f"6 k_batch_async round, {name}, ({workers}, {k})", times, k / workers)
    times = _times(run_rounds("k_async:4", 8, 1100, law))[100:]
    yield batched("6 k_async round, exponential, (8, 4)", times, known.first_exponential(8, 4))
    times = _times(run_rounds("k_sync:4", 8, 500, SHIFTED, cancel=True))
    yield estimated("6 k_sync round, 0.5 + exponential(0.5), (8, 4)", times, 0.5 + 0.5 * known.first_exponential(8, 4))
    times = _times(run_rounds("k_async:4", 8, 2100, SHIFTED))[100:]
    # That number is itself a simulated one, with three digits.
    case = batched("6 k_async round, 0.5 + exponential(0.5), (8, 4)", times, 0.619)
    yield within(case.name, case.value, case.expected, case.tolerance + 0.0005)


def ratio() -> Iterator[Case]:
    """Case 7: a round of all over one of a single gradient takes N H_N times as long (Dutta and others 2018)."""
    law = Exponential(mean=1.0)
    sync = _times(run_rounds("k_sync:20", 20, 300, law))
    single = _times(run_rounds("k_async:1", 20, 5000, law))
    value = statistics.fmean(sync) / statistics.fmean(single)
    expected = 20.0 * known.harmonic(20)
    shares = [statistics.stdev(times) / statistics.fmean(times) / math.sqrt(len(times)) for times in (sync, single)]
    error = expected * math.hypot(*shares)
    yield within("7 time of a round, k_sync:20 over k_async:1, exponential, N=20", value, expected, 3.0 * error)


def best() -> Iterator[Case]:
    """Case 30: with which K a hundred workers make most gradients a second."""
    for shift, k in ((0.1, 34), (0.5, 58), (1.0, 69), (2.0, 78), (5.0, 88)):
        yield exact(f"30 best K of 100, {shift:g} + exponential(1)", known.best_first(100, shift), k)
        law = ShiftedExponential(shift=shift, scale=1.0)
        # Seconds a gradient: its mean has a standard error that is known from the rounds, its inverse has not.
        seconds = {
            n: [time / n for time in _times(run_rounds(f"k_sync:{n}", 100, 15, law, cancel=True))]
            for n in (k - 25, k, min(100, k + 12))
        }
        expected = (shift + known.first_exponential(100, k)) / k
        yield estimated(f"30 seconds a gradient, K={k}, {shift:g} + exponential(1)", seconds[k], expected)
        fewest = min(seconds, key=lambda n: statistics.fmean(seconds[n]))
        yield exact(f"30 best simulated K of {', '.join(map(str, seconds))}, {shift:g} + exponential(1)", fewest, k)


def _coded(spare: int, law: Law) -> list[float]:
    """Return the times of rounds that do not wait for so many workers."""
    return _times(run_rounds(f"k_sync:{CODED - spare}", CODED, 300, law, cancel=True))


def coded() -> Iterator[Case]:
    """Case 22: gradient coding where a worker's delay does not depend on how many parts it computes."""
    means = {}
    for spare in range(CODED):
        times = _coded(spare, ShiftedExponential(shift=spare + 1.0, scale=5.0))
        means[spare] = statistics.fmean(times)
        name = f"22 coded round, {spare + 1} + exponential(5), n={CODED}, s={spare}"
        yield estimated(name, times, known.coded_round(CODED, spare, 1.0, 5.0))
    # With 4 and 5 it takes equally long.
    best = min(means, key=lambda spare: means[spare])
    yield within(f"22 best simulated s, delay exponential(5), n={CODED}", best, 4.5, 0.5)


def coded_in_proportion() -> Iterator[Case]:
    """Case 22: where the delay grows with the number of parts, coding makes every round longer."""
    means = {}
    for spare in (0, 1, 3, 5, 8):
        parts = spare + 1.0
        times = _coded(spare, ShiftedExponential(shift=parts, scale=5.0 * parts))
        means[spare] = statistics.fmean(times)
        name = f"22 coded round, {parts:g} (1 + exponential(5)), n={CODED}, s={spare}"
        yield estimated(name, times, known.coded_round_in_proportion(CODED, spare, 1.0, 5.0))
    best = min(means, key=lambda spare: means[spare])
    yield exact(f"22 best simulated s of {', '.join(map(str, means))}, delay in proportion, n={CODED}", best, 0)
    best = min(range(CODED), key=lambda spare: known.coded_round_in_proportion(CODED, spare, 1.0, 5.0))
    yield exact(f"22 best s, delay in proportion, n={CODED}", best, 0)
