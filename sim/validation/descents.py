"""Cases of optimisation: what staleness and averaging do to gradient descent on a parabola."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from sim import closed_forms as known
from sim.compute import Constant, Exponential
from sim.learning import descend
from sim.sections import StopSection
from sim.validation.case import Case, batched, estimated, within
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.record import Run
    from sim.tokens import Token


def _slope(x: float, token: Token) -> float:
    return x


def _grows(run: Run, rate: float) -> bool:
    values = [abs(x) for x in descend(run, _slope, start=1.0, rate=rate)]
    quarter = len(values) // 4
    return max(values[-quarter:]) > max(values[quarter : 2 * quarter])


def delayed() -> Iterator[Case]:
    """Case 23: with equal workers asp is gradient descent with a constant delay; up to which rate is it stable?"""
    for staleness in (1, 2, 3, 7, 15, 31):
        workers = staleness + 1
        run = run_ideal("asp", workers, 3000 // workers, Constant(mean=1.0))
        expected = known.delayed_descent_limit(staleness)
        low, high = 0.5 * expected, 1.5 * expected
        for _ in range(12):
            middle = (low + high) / 2.0
            low, high = (low, middle) if _grows(run, middle) else (middle, high)
        yield within(f"23 largest stable rate, staleness {staleness}", (low + high) / 2.0, expected, 2e-3 * expected)


def momentum() -> Iterator[Case]:
    """Case 24: the mean of x under asp with exponential workers is that of heavy ball."""
    stop = StopSection(updates=100, departures=False)
    paths = []
    for seed in range(300):
        run = run_ideal("asp", 16, 100, Exponential(mean=1.0), seed=seed, stop=stop)
        paths.append(descend(run, _slope, start=1.0, rate=0.1))
    for updates in (10, 50, 100):
        values = [path[updates] for path in paths]
        yield estimated(
            f"24 mean x after {updates} updates, N=16, rate 0.1", values, known.heavy_ball(16, 0.1, updates)
        )


def floor() -> Iterator[Case]:
    """Case 25: the variance at which synchronous stochastic gradient descent stays."""
    run = run_ideal("bsp", 8, 3000, Constant(mean=1.0))
    squares = []
    for seed in range(8):
        stream = random.Random(f"{seed}:noise")
        values = descend(run, lambda x, token, stream=stream: x + stream.gauss(0.0, 1.0), start=0.0, rate=0.1)  # type: ignore[misc]
        squares += [x * x for x in values[200:]]
    yield batched("25 variance of x, bsp, rate 0.1, 8 gradients", squares, known.noise_floor(0.1, 1.0, 1.0, 8))
