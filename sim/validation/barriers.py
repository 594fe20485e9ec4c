"""Cases of bsp: a step takes as long as the slowest worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim import closed_forms as known
from sim.compute import Erlang, Exponential, Law, Normal, ShiftedExponential
from sim.validation.case import Case, estimated
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator


def _steps(workers: int, rounds: int, law: Law, slow: dict[str, float] | None = None) -> list[float]:
    """Return the times of all rounds: they are independent of each other."""
    run = run_ideal("bsp", workers, rounds, law, slow=slow or {})
    return [step.end - step.start for step in run.workers[0].steps]


def exponential() -> Iterator[Case]:
    """Case 1: the largest of N exponential times, with mean H_N."""
    for workers, rounds in ((8, 1500), (10, 1500), (32, 400), (100, 150), (1000, 20)):
        times = _steps(workers, rounds, Exponential(mean=1.0))
        yield estimated(f"1 bsp step, exponential, N={workers}", times, known.harmonic(workers))
    times = _steps(8, 1500, Exponential(mean=1.0), {"worker-7": 4.0})
    yield estimated("1 bsp step, exponential, one of 8 four times slower", times, known.exponential_with_slow(8, 4.0))


def shifted() -> Iterator[Case]:
    """Case 2: a shift is added to the largest of N exponential times."""
    times = _steps(16, 800, ShiftedExponential(shift=1.0, scale=0.5))
    yield estimated("2 bsp step, 1 + exponential(0.5), N=16", times, 1.0 + 0.5 * known.harmonic(16))


def normal() -> Iterator[Case]:
    """Case 5: the largest of N normal times."""
    for workers, rounds in ((8, 800), (32, 200), (100, 80)):
        expected = known.mean_of_largest(workers, known.normal_cdf(1.0, 0.1), 2.0)
        yield estimated(
            f"5 bsp step, normal(1, 0.1), N={workers}", _steps(workers, rounds, Normal(mean=1.0, sd=0.1)), expected
        )


def local_steps() -> Iterator[Case]:
    """Case 21: local SGD with H steps between averages, which is bsp with Erlang times."""
    for workers, local, rounds in (
        (10, 1, 800),
        (10, 2, 800),
        (10, 5, 800),
        (10, 10, 800),
        (10, 50, 800),
        (100, 10, 80),
    ):
        cdf = known.erlang_cdf(local)
        expected = known.mean_of_largest(workers, cdf, local + 40.0 + 12.0 * local**0.5) / local
        times = [time / local for time in _steps(workers, rounds, Erlang(phases=local, mean=1.0))]
        yield estimated(f"21 local steps H={local}, N={workers}, time of one", times, expected)
