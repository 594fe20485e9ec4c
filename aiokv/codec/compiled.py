"""The kernels in one pass over memory: compiled by Numba, without the interpreter's lock.

Without `fastmath` LLVM neither reorders nor fuses operations, so that every bit is as in `reference`. There are no
branches on values: gradients are noise, and every second guess would be wrong. `compiled_whole` has the kernels of
the formats that compress whole tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from aiokv.codec.compiled_whole import (
    accumulate_fp8,
    accumulate_half,
    accumulate_levels,
    decode_fp8,
    decode_half,
    decode_levels,
    encode_fp8,
    encode_half,
    encode_levels,
    has_code,
    largest,
    largest_places,
    pack,
    subtract_levels,
    unpack,
)
from aiokv.kernels.cpu import CACHE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


__all__ = [
    "accumulate_1bit",
    "accumulate_2bit",
    "accumulate_fp8",
    "accumulate_half",
    "accumulate_levels",
    "decode_1bit",
    "decode_2bit",
    "decode_fp8",
    "decode_half",
    "decode_levels",
    "encode_1bit",
    "encode_2bit",
    "encode_fp8",
    "encode_half",
    "encode_levels",
    "fits",
    "has_code",
    "largest",
    "largest_places",
    "pack",
    "subtract_levels",
    "unpack",
]

_FLOAT32_MAX = np.finfo(np.float32).max
_ONE = np.float32(1)
_ZERO = np.float32(0)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def fits(gradient: Array, residual: Array | None) -> bool:
    """Tell whether the gradient with the residual has only numbers that float32 can hold: no NaN, no infinity."""
    outside = 0
    for i in range(gradient.size):
        corrected = gradient[i] if residual is None else gradient[i] + residual[i]
        # No early end: a loop without one uses the processor's vectors.
        outside |= not (abs(corrected) <= _FLOAT32_MAX)
    return outside == 0


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _code_1bit(gradient: Array, residual: Array | None, threshold: np.float32, i: int) -> int:
    corrected = gradient[i] if residual is None else gradient[i] + residual[i]
    high = corrected > threshold
    if residual is not None:
        residual[i] = corrected - _ONE if high else corrected + _ONE
    return 1 if high else 0


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _code_2bit(gradient: Array, residual: Array | None, threshold: np.float32, i: int) -> int:
    corrected = gradient[i] if residual is None else gradient[i] + residual[i]
    high, low = corrected >= threshold, corrected <= -threshold
    if residual is not None:
        residual[i] = corrected - threshold if high else (corrected + threshold if low else corrected)
    return 3 if high else (2 if low else 0)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def encode_1bit(gradient: Array, residual: Array | None, threshold: np.float32, payload: Array) -> None:
    """Write the payload, which is all zeros, and the new residual."""
    whole = gradient.size // 8
    for byte in range(whole):
        code = 0
        for j in range(8):
            code = code << 1 | _code_1bit(gradient, residual, threshold, 8 * byte + j)
        payload[byte] = code
    for i in range(8 * whole, gradient.size):
        payload[whole] |= _code_1bit(gradient, residual, threshold, i) << (7 - i % 8)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def encode_2bit(gradient: Array, residual: Array | None, threshold: np.float32, payload: Array) -> None:
    """Write the payload, which is all zeros, and the new residual."""
    whole = gradient.size // 4
    for byte in range(whole):
        code = 0
        for j in range(4):
            code = code << 2 | _code_2bit(gradient, residual, threshold, 4 * byte + j)
        payload[byte] = code
    for i in range(4 * whole, gradient.size):
        payload[whole] |= _code_2bit(gradient, residual, threshold, i) << (6 - 2 * (i % 4))


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _value_1bit(byte: np.int32, place: int) -> np.float32:
    return _ONE if byte >> (7 - place) & 1 else -_ONE


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _value_2bit(byte: np.int32, place: int, threshold: np.float32) -> np.float32:
    code = byte >> (6 - 2 * place) & 3
    return threshold if code == 3 else (-threshold if code == 2 else _ZERO)  # noqa: PLR2004 - the codes


@njit(nogil=True, cache=CACHE, error_model="numpy")
def decode_1bit(payload: Array, out: Array) -> None:
    """Write the values that the payload says."""
    whole = out.size // 8
    for byte in range(whole):
        code = np.int32(payload[byte])
        for j in range(8):
            out[8 * byte + j] = _value_1bit(code, j)
    for i in range(8 * whole, out.size):
        out[i] = _value_1bit(np.int32(payload[whole]), i % 8)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def decode_2bit(payload: Array, threshold: np.float32, out: Array) -> None:
    """Write the values that the payload says."""
    whole = out.size // 4
    for byte in range(whole):
        code = np.int32(payload[byte])
        for j in range(4):
            out[4 * byte + j] = _value_2bit(code, j, threshold)
    for i in range(4 * whole, out.size):
        out[i] = _value_2bit(np.int32(payload[whole]), i % 4, threshold)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def accumulate_1bit(payload: Array, target: Array) -> None:
    """Add the values that the payload says."""
    whole = target.size // 8
    for byte in range(whole):
        code = np.int32(payload[byte])
        for j in range(8):
            target[8 * byte + j] += _value_1bit(code, j)
    for i in range(8 * whole, target.size):
        target[i] += _value_1bit(np.int32(payload[whole]), i % 8)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def accumulate_2bit(payload: Array, threshold: np.float32, target: Array) -> None:
    """Add the values that the payload says."""
    whole = target.size // 4
    for byte in range(whole):
        code = np.int32(payload[byte])
        for j in range(4):
            target[4 * byte + j] += _value_2bit(code, j, threshold)
    for i in range(4 * whole, target.size):
        target[i] += _value_2bit(np.int32(payload[whole]), i % 4, threshold)
