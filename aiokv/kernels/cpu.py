"""The arithmetic in one pass over memory, compiled by Numba, without the interpreter's lock.

Without `fastmath` LLVM neither reorders nor fuses operations, so that every bit is as in `reference`.
Imported only by `aiokv.kernels.get_backend`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from aiokv.kernels import reference

Array = NDArray[Any]
Scalar = np.floating[Any]

@njit(nogil=True, cache=False, error_model="numpy")
def _accumulate(target: Array, source: Array) -> None:
    for i in range(target.size):
        target[i] += source[i]


@njit(nogil=True, cache=False, error_model="numpy")
def _sgd(weight, gradient, out, learning_rate, wd, rescale_grad) -> None:
    for i in range(weight.size):
        w = weight[i]
        g = rescale_grad * gradient[i] + wd * w
        out[i] = w - learning_rate * g


@njit(nogil=True, cache=False, error_model="numpy")
def _sgd_momentum(weight, gradient, state, out, learning_rate, momentum, wd, rescale_grad) -> None:
    for i in range(weight.size):
        w = weight[i]
        g = rescale_grad * gradient[i] + wd * w
        m = momentum * state[i] - learning_rate * g
        state[i] = m
        out[i] = w + m
