"""What is made of contributions instead of their sum, so that one that is far off does little harm.

Median and trimmed mean of each element (Yin et al. 2018, "Byzantine-Robust Distributed Learning"). NumPy computes them
for every backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.kernels.reference import Array

TRIMMED = 4
"""One of so many contributions is left out at each end, at least one if there are three."""


def combine(arrays: Sequence[Array], reduction: str) -> Array:
    """Return one array for several, of the same length, elementwise.

    Args:
        arrays: floats of one dtype; float16 and bfloat16 are computed in float32.
        reduction: "median" (the mean of the middle two if their number is even), or "trimmed_mean": the mean without
            the largest and the smallest quarter, without one at each end from three on.
    """
    stack = np.stack(arrays)
    if stack.dtype.itemsize < np.dtype(np.float32).itemsize:
        stack = stack.astype(np.float32)
    # NaN and infinities show themselves in the values; nothing warns.
    with np.errstate(all="ignore"):
        if reduction == "median":
            return np.asarray(np.median(stack, axis=0))
        number = len(arrays)
        cut = max(1, number // TRIMMED) if number > 2 else 0  # noqa: PLR2004 - of two none can be left out
        stack.sort(axis=0)
        return np.asarray(stack[cut : number - cut].mean(axis=0, dtype=stack.dtype))
