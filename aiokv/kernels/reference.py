"""The arithmetic in NumPy: short, plain, and what the other backends are compared with, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Array = NDArray[Any]
Scalar = np.floating[Any]


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`."""
    # A gradient that overflows shows it in its values; compiled code does not warn either.
    with np.errstate(all="ignore"):
        np.add(target, source, out=target)


def update(kernel: str, weight: Array, total: Array, state: Sequence[Array], scalars: tuple[Scalar, ...]) -> None:
    """Write the new weight over `total`, computed in the dtype of the state and the scalars."""
    dtype = scalars[0].dtype
    w, summed = weight.astype(dtype, copy=False), total.astype(dtype, copy=False)
    with np.errstate(all="ignore"):
        total[...] = KERNELS[kernel](w, summed, *state, scalars)


def _sgd(w: Array, total: Array, scalars: tuple[Scalar, ...]) -> Array:
    learning_rate, wd, rescale_grad = scalars
    g = rescale_grad * total + wd * w
    return w - learning_rate * g


def _sgd_with_momentum(w: Array, total: Array, m: Array, scalars: tuple[Scalar, ...]) -> Array:
    learning_rate, momentum, wd, rescale_grad = scalars
    g = rescale_grad * total + wd * w
    m[...] = momentum * m - learning_rate * g
    return w + m


def _adam(w: Array, total: Array, m: Array, v: Array, scalars: tuple[Scalar, ...]) -> Array:
    rate, beta1, rest1, beta2, rest2, epsilon, wd, rescale_grad = scalars
    g = rescale_grad * total + wd * w
    m[...] = beta1 * m + rest1 * g
    v[...] = beta2 * v + rest2 * (g * g)
    return w - rate * m / (np.sqrt(v) + epsilon)


KERNELS: Mapping[str, Callable[..., Array]] = {"adam": _adam, "sgd": _sgd, "sgd_with_momentum": _sgd_with_momentum}
