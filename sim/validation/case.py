"""One comparison of a simulated number with a known one."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDING: Final = 1e-9
"""What an exact number may be off, as a share."""

BATCHES: Final = 20
"""Into so many parts a series is cut whose neighbours depend on each other."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A number from the simulator, the one from paper, and how far they may be apart."""

    name: str
    value: float
    expected: float
    tolerance: float
    ok: bool


def exact(name: str, value: float, expected: float) -> Case:
    """Return a case in which nothing is random."""
    return within(name, value, expected, ROUNDING * max(1.0, abs(expected)))


def within(name: str, value: float, expected: float, tolerance: float) -> Case:
    """Return a case with a tolerance that is known."""
    return Case(name=name, value=value, expected=expected, tolerance=tolerance, ok=abs(value - expected) <= tolerance)


def estimated(name: str, samples: Sequence[float], expected: float) -> Case:
    """Return a case whose value is the mean of independent samples; three standard errors are allowed."""
    error = statistics.stdev(samples) / math.sqrt(len(samples))
    return within(name, statistics.fmean(samples), expected, 3.0 * error)


def batched(name: str, series: Sequence[float], expected: float) -> Case:
    """Return a case whose value is the mean of a stationary series; three standard errors are allowed, of batches."""
    size = len(series) // BATCHES
    means = [statistics.fmean(series[i * size : (i + 1) * size]) for i in range(BATCHES)]
    return estimated(name, means, expected)


def proportion(name: str, hits: int, count: int, expected: float) -> Case:
    """Return a case whose value is a share of independent trials; three standard errors are allowed."""
    error = math.sqrt(expected * (1.0 - expected) / count)
    return within(name, hits / count, expected, 3.0 * error)
