"""The arithmetic in one pass over memory: compiled by Numba, without the interpreter's lock.

Without `fastmath` LLVM neither reorders nor fuses operations, so that every bit is as in `reference`. Numba has no
half-precision arithmetic on the CPU: float16 is left to `reference`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from aiokv.kernels import reference

if TYPE_CHECKING:
    from aiokv.kernels.reference import Array, Scalar


def _can_cache() -> bool:
    """Tell whether there is a folder where compiled code can be kept for the next process."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        # Numba says so when no folder can be written, as in a container with a read-only file system.
        return False
    return True


_CACHE = _can_cache()


@njit(nogil=True, cache=_CACHE, error_model="numpy")
def _accumulate(target: Array, source: Array) -> None:
    for i in range(target.size):
        target[i] += source[i]


@njit(nogil=True, cache=_CACHE, error_model="numpy")
def _sgd(weight: Array, gradient: Array, out: Array, learning_rate: Scalar, wd: Scalar, rescale_grad: Scalar) -> None:
    for i in range(weight.size):
        w = weight[i]
        g = rescale_grad * gradient[i] + wd * w
        out[i] = w - learning_rate * g


@njit(nogil=True, cache=_CACHE, error_model="numpy")
def _sgd_with_momentum(
    weight: Array,
    gradient: Array,
    momentum_state: Array,
    out: Array,
    learning_rate: Scalar,
    momentum: Scalar,
    wd: Scalar,
    rescale_grad: Scalar,
) -> None:
    for i in range(weight.size):
        w = weight[i]
        g = rescale_grad * gradient[i] + wd * w
        m = momentum * momentum_state[i] - learning_rate * g
        momentum_state[i] = m
        out[i] = w + m


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`."""
    if target.dtype == np.float16:
        reference.accumulate(target, source)
    else:
        _accumulate(target, source)


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
    if weight.dtype == np.float16:
        reference.sgd(weight, gradient, momentum_state, out, learning_rate, momentum, wd, rescale_grad)
    elif momentum_state is None:
        _sgd(weight, gradient, out, learning_rate, wd, rescale_grad)
    else:
        _sgd_with_momentum(weight, gradient, momentum_state, out, learning_rate, momentum, wd, rescale_grad)
