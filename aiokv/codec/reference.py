"""The kernels in NumPy: short, plain, and what the compiled ones are compared with, bit by bit.

Arguments are checked by who calls: arrays are one-dimensional and contiguous, payloads have the right length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

FLOAT32_MAX = np.finfo(np.float32).max
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = np.float32(448)
ONE = np.float32(1)
ZERO = np.float32(0)

LANES = 1024
"""Into how many sums numbers are added: that of element i goes to lane i mod LANES, in the order of i."""


def fits(gradient: Array, residual: Array | None) -> bool:
    """Tell whether the gradient with the residual has only numbers that float32 can hold: no NaN, no infinity."""
    corrected = _corrected(gradient, residual)
    # A NaN is neither.
    return bool(np.all(np.abs(corrected) <= FLOAT32_MAX))


def largest(gradient: Array, residual: Array | None) -> np.floating[Any]:
    """Return the largest magnitude, in the precision of the gradient, which has at least one element."""
    magnitude: np.floating[Any] = np.max(np.abs(_corrected(gradient, residual)))
    return magnitude


def has_code(codes: Array, mask: np.unsignedinteger[Any]) -> bool:
    """Tell whether one of the codes has all bits of the mask."""
    return bool((codes & mask == mask).any())


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


def encode_half(gradient: Array, residual: Array | None, codes: Array) -> None:
    """Round to the dtype of the codes, float16 or bfloat16, and write the new residual."""
    corrected = _corrected(gradient, residual)
    most = float(ml_dtypes.finfo(codes.dtype).max)  # type: ignore[no-untyped-call]
    codes[...] = np.clip(corrected, -most, most).astype(codes.dtype)
    if residual is not None:
        residual[...] = corrected - codes.astype(corrected.dtype)


def decode_half(codes: Array, out: Array) -> None:
    """Write the values of float16 or bfloat16."""
    out[...] = codes.astype(np.float32)


def accumulate_half(codes: Array, target: Array) -> None:
    """Add the values of float16 or bfloat16."""
    target += codes.astype(np.float32)


def encode_fp8(gradient: Array, residual: Array | None, scale: np.float32, codes: Array) -> None:
    """Round to 8-bit floats in units of the scale, and write the new residual."""
    corrected = _corrected(gradient, residual)
    # The largest quotient may be a little over 448, and much over it where the scale is a subnormal number.
    units = np.clip(corrected / scale, -FLOAT8_MAX, FLOAT8_MAX)
    codes.view(FLOAT8)[...] = units.astype(FLOAT8)
    if residual is not None:
        residual[...] = corrected - _values_fp8(scale, codes)


def decode_fp8(scale: np.float32, codes: Array, out: Array) -> None:
    """Write the values of 8-bit floats in units of the scale."""
    out[...] = _values_fp8(scale, codes)


def accumulate_fp8(scale: np.float32, codes: Array, target: Array) -> None:
    """Add the values of 8-bit floats in units of the scale."""
    target += _values_fp8(scale, codes)


def largest_places(corrected: Array, count: int) -> Array:
    """Return the places of the largest magnitudes, increasing; of equal ones the first. `count` is at least one."""
    magnitudes = np.abs(corrected)
    # The smallest magnitude that is sent: which of several equal ones `argpartition` returns is its own affair.
    least = np.partition(magnitudes, corrected.size - count)[corrected.size - count]
    larger = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)[: count - larger.size]
    return np.sort(np.concatenate([larger, equal]))


def encode_levels(
    gradient: Array,
    residual: Array | None,
    unit: np.float32,
    levels: np.float32,
    generator: np.random.Generator,
    codes: Array,
) -> float:
    """Round each value at random to a neighbouring level, and write the codes.

    Args:
        gradient: what is rounded, with the residual.
        residual: stays as it is.
        unit: the distance of two levels, not 0.
        levels: how many there are besides 0.
        generator: of the random choices.
        codes: the numbers of units, plus that of the levels.

    Returns:
        The variance of the rounding over the squared norm.
    """
    corrected = _corrected(gradient, residual)
    # The largest quotient may be a little over the number of levels.
    fraction = np.minimum(np.abs(corrected) / unit, levels)
    level = np.floor(fraction)
    fraction -= level
    variance = _sum(fraction * (1 - fraction)) / _sum(np.square(level + fraction))
    level += generator.random(corrected.size, np.float32) < fraction
    codes[...] = levels + np.copysign(level, corrected)
    return variance


def subtract_levels(gradient: Array, residual: Array, unit: np.float32, levels: np.float32, codes: Array) -> None:
    """Write the new residual."""
    residual += gradient
    residual -= _values_levels(codes, levels, unit)


def decode_levels(codes: Array, levels: np.float32, unit: np.float32, out: Array) -> None:
    """Write the values of numbers of units."""
    out[...] = _values_levels(codes, levels, unit)


def accumulate_levels(codes: Array, levels: np.float32, unit: np.float32, target: Array) -> None:
    """Add the values of numbers of units."""
    target += _values_levels(codes, levels, unit)


def pack(codes: Array, bits: int, packed: Array) -> None:
    """Write codes of 2 or 4 bits to bytes, which are all zeros."""
    padded = np.zeros(packed.size * 8 // bits, np.uint8)
    padded[: codes.size] = codes
    packed[...] = np.bitwise_or.reduce(padded.reshape(packed.size, -1) << _shifts(bits), axis=1)


def unpack(packed: Array, bits: int, codes: Array) -> None:
    """Write the codes of 2 or 4 bits that are in bytes."""
    parts = (packed[:, np.newaxis] >> _shifts(bits)) & np.uint8((1 << bits) - 1)
    codes[...] = parts.reshape(-1)


def _corrected(gradient: Array, residual: Array | None) -> Array:
    return gradient if residual is None else gradient + residual


def _write(payload: Array, packed: Array) -> None:
    payload[: packed.size] = packed


def _values_1bit(payload: Array, size: int) -> Array:
    return np.where(np.unpackbits(payload, count=size), ONE, -ONE)


def _values_2bit(payload: Array, threshold: np.float32, size: int) -> Array:
    bits = np.unpackbits(payload, count=2 * size).reshape(size, 2)
    return np.where(bits[:, 0], np.where(bits[:, 1], threshold, -threshold), ZERO)


def _values_fp8(scale: np.float32, codes: Array) -> Array:
    values: Array = codes.view(FLOAT8).astype(np.float32)
    values *= scale
    return values


def _values_levels(codes: Array, levels: np.float32, unit: np.float32) -> Array:
    values: Array = codes.astype(np.float32)
    values -= levels
    values *= unit
    return values


def _shifts(bits: int) -> Array:
    return np.arange(8 - bits, -1, -bits, dtype=np.uint8)


def _sum(values: Array) -> float:
    whole = values.size // LANES * LANES
    # Along the first axis rows are added one after the other.
    lanes = np.add.reduce(values[:whole].reshape(-1, LANES), axis=0, dtype=np.float64)
    lanes[: values.size - whole] += values[whole:]
    return float(np.sum(lanes))
