"""Confidence intervals at 95 %."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BATCHES: Final = 10
"""Into so many parts a run is cut: neighbouring steps depend on each other, such long parts hardly."""

_SMALL: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's distribution for 1 to 10 degrees of freedom."""

_NORMAL: Final = 1.959964


def student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution (beyond 10 degrees: Fisher and Cornish 1960, to 1e-4)."""
    if degrees <= len(_SMALL):
        return _SMALL[degrees - 1]
    z, n = _NORMAL, degrees
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def half_width(samples: Sequence[float]) -> float:
    """Return how far the mean of independent samples may be off to either side; NaN for fewer than two."""
    n = len(samples)
    return student(n - 1) * statistics.stdev(samples) / math.sqrt(n) if n > 1 else math.nan


def batch_half_width(series: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> float:
    """Return the same for a statistic of a series whose neighbours depend on each other; NaN for a short one."""
    size = len(series) // BATCHES
    if size < 2:  # noqa: PLR2004 - a statistic of one value says nothing
        return math.nan
    return half_width([statistic(series[i * size : (i + 1) * size]) for i in range(BATCHES)])
