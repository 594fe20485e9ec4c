"""What is kept for each row of a tensor instead of each element."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aiokv.kernels.reference import Array


def add_row_means(history: Array, gradient: Array, row_size: int) -> Array:
    """Add to each row's history the mean of its squares, and return the histories by element.

    Squares of a row are added from left to right, which is what accumulating means.
    """
    with np.errstate(all="ignore"):
        rows = gradient.reshape(-1, row_size)
        sums = np.add.accumulate(rows * rows, axis=1)[:, -1]
        history += sums / history.dtype.type(row_size)
    return np.repeat(history, row_size)
