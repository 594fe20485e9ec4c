"""The kernels of `1bit` and `2bit` in NumPy: short, plain, and what the compiled ones are compared with, bit by bit.

Arguments are checked by who calls: arrays are one-dimensional and contiguous, payloads have the right length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

FLOAT32_MAX = np.finfo(np.float32).max
ONE = np.float32(1)
ZERO = np.float32(0)


def fits(gradient: Array, residual: Array | None) -> bool:
    """Tell whether the gradient with the residual has only numbers that float32 can hold: no NaN, no infinity."""
    corrected = _corrected(gradient, residual)
    # A NaN is neither.
    return bool(np.all(np.abs(corrected) <= FLOAT32_MAX))


def encode_1bit(gradient: Array, residual: Array | None, threshold: np.float32, payload: Array) -> None:
    """Write the payload, which is all zeros, and the new residual."""
    corrected = _corrected(gradient, residual)
    high = corrected > threshold
    _write(payload, np.packbits(high))
    if residual is not None:
        residual[...] = np.where(high, corrected - ONE, corrected + ONE)


def encode_2bit(gradient: Array, residual: Array | None, threshold: np.float32, payload: Array) -> None:
    """Write the payload, which is all zeros, and the new residual."""
    corrected = _corrected(gradient, residual)
    high, low = corrected >= threshold, corrected <= -threshold
    _write(payload, np.packbits(np.stack([high | low, high], axis=1)))
    if residual is not None:
        residual[...] = np.where(high, corrected - threshold, np.where(low, corrected + threshold, corrected))


def decode_1bit(payload: Array, out: Array) -> None:
    """Write the values that the payload says."""
    out[...] = _values_1bit(payload, out.size)


def decode_2bit(payload: Array, threshold: np.float32, out: Array) -> None:
    """Write the values that the payload says."""
    out[...] = _values_2bit(payload, threshold, out.size)


def accumulate_1bit(payload: Array, target: Array) -> None:
    """Add the values that the payload says."""
    target += _values_1bit(payload, target.size)


def accumulate_2bit(payload: Array, threshold: np.float32, target: Array) -> None:
    """Add the values that the payload says."""
    target += _values_2bit(payload, threshold, target.size)


def _corrected(gradient: Array, residual: Array | None) -> Array:
    return gradient if residual is None else gradient + residual


def _write(payload: Array, packed: Array) -> None:
    payload[: packed.size] = packed


def _values_1bit(payload: Array, size: int) -> Array:
    return np.where(np.unpackbits(payload, count=size), ONE, -ONE)


def _values_2bit(payload: Array, threshold: np.float32, size: int) -> Array:
    bits = np.unpackbits(payload, count=2 * size).reshape(size, 2)
    return np.where(bits[:, 0], np.where(bits[:, 1], threshold, -threshold), ZERO)
