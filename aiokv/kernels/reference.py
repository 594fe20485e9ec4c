"""The arithmetic in NumPy: short, plain, and what the other backends are compared with, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Scalar = np.floating[Any]


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`."""
    # A gradient that overflows shows it in its values; compiled code does not warn either.
    with np.errstate(all="ignore"):
        np.add(target, source, out=target)


def sgd(
    weight: Array,
    gradient: Array,
    momentum_state: Array | None,
    out: Array,
    learning_rate: Scalar,
    momentum: Scalar,
    wd: Scalar,
    rescale_grad: Scalar,
) -> None:
    """Write the new weight to `out`, computed in the dtype of the scalars."""
    dtype = learning_rate.dtype
    with np.errstate(all="ignore"):
        w = weight.astype(dtype, copy=False)
        g = rescale_grad * gradient.astype(dtype, copy=False) + wd * w
        if momentum_state is None:
            out[...] = w - learning_rate * g
        else:
            m = momentum * momentum_state.astype(dtype, copy=False) - learning_rate * g
            momentum_state[...] = m
            out[...] = w + m
