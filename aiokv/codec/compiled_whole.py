"""The compiled kernels of the formats that compress whole tensors. See `compiled`, which has them all.

They encode float32. Gradients of float64, and float16 on processors without instructions for it, are left to NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numba import njit

from aiokv.codec import reference
from aiokv.codec.reference import FLOAT8_MAX, LANES, ONE
from aiokv.kernels import halves
from aiokv.kernels.cpu import CACHE

if TYPE_CHECKING:
    from aiokv.codec.reference import Array

BLOCK = 64 * LANES
"""So many random numbers are drawn at once: they stay in the cache."""

_FLOAT32 = np.dtype(np.float32)
_HALF_PRECISION = halves.has_float16()

_MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 but its sign; as integers, magnitudes have the same order."""

_TOP_SHIFT, _MIDDLE_SHIFT, _BINS = 20, 10, 1024
_TOP_BINS = 1 << (31 - _TOP_SHIFT)

_SMALLEST_NORMAL = np.float32(2.0**-6)
_SUBNORMAL_UNIT = np.float32(2.0**-9)
_SHIFTER = np.float32(2.0**14)
"""Its last digit is the unit of the subnormal 8-bit floats: adding it rounds to whole units, ties to even."""
_SHIFTER_BITS = int(_SHIFTER.view(np.int32))
_FIRST_NORMAL = 1 << 3
_REBIAS = (127 - 7) << 3
"""Between the exponents of E4M3 and those of float32."""


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _bits(number: np.float32) -> Any:
    return np.float32(number).view(np.int32)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _number(bits: np.int32) -> Any:
    return np.int32(bits).view(np.float32)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _largest(gradient: Array, residual: Array | None) -> Any:
    most = np.int32(0)
    for i in range(gradient.size):
        corrected = gradient[i] if residual is None else gradient[i] + residual[i]
        # The largest of floats has to mind NaN, and would not use the processor's vectors.
        most = max(most, _bits(corrected) & _MAGNITUDE)
    return most


def largest(gradient: Array, residual: Array | None) -> np.floating[Any]:
    """Return the largest magnitude. See `reference.largest`."""
    if gradient.dtype != _FLOAT32:
        return reference.largest(gradient, residual)
    magnitude: np.float32 = np.int32(_largest(gradient, residual)).view(np.float32)
    return magnitude


@njit(nogil=True, cache=CACHE, error_model="numpy")
def has_code(codes: Array, mask: Any) -> bool:
    """Tell whether one of the codes has all bits of the mask."""
    found = 0
    for i in range(codes.size):
        found |= (codes[i] & mask) == mask
    return found != 0


# --- fp16, bf16 ---


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _encode_half(gradient: Array, residual: Array | None, most: np.float32, codes: Array) -> None:
    for i in range(gradient.size):
        corrected = gradient[i] if residual is None else gradient[i] + residual[i]
        above = -most if corrected < -most else corrected
        code = halves.element(most if above > most else above, codes[i])
        codes[i] = code
        if residual is not None:
            residual[i] = corrected - halves.number(code)


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _decode_half(codes: Array, out: Array) -> None:
    for i in range(codes.size):
        out[i] = halves.number(codes[i])


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _accumulate_half(codes: Array, target: Array) -> None:
    for i in range(codes.size):
        target[i] += halves.number(codes[i])


def encode_half(gradient: Array, residual: Array | None, codes: Array) -> None:
    """Round to float16 or bfloat16. See `reference.encode_half`."""
    if gradient.dtype != _FLOAT32 or not _takes(codes):
        reference.encode_half(gradient, residual, codes)
        return
    most = np.float32(ml_dtypes.finfo(codes.dtype).max)  # type: ignore[no-untyped-call]
    _encode_half(gradient, residual, most, halves.as_integers(codes))


def decode_half(codes: Array, out: Array) -> None:
    """Write the values of float16 or bfloat16."""
    if _takes(codes):
        _decode_half(halves.as_integers(codes), out)
    else:
        reference.decode_half(codes, out)


def accumulate_half(codes: Array, target: Array) -> None:
    """Add the values of float16 or bfloat16."""
    if _takes(codes):
        _accumulate_half(halves.as_integers(codes), target)
    else:
        reference.accumulate_half(codes, target)


def _takes(codes: Array) -> bool:
    """Tell whether compiled code can read and write the codes."""
    return _HALF_PRECISION or codes.dtype != halves.FLOAT16


# --- fp8 ---


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _encode_fp8(gradient: Array, residual: Array | None, scale: np.float32, codes: Array) -> None:
    for i in range(gradient.size):
        corrected = gradient[i] if residual is None else gradient[i] + residual[i]
        quotient = corrected / scale
        magnitude = abs(quotient)
        magnitude = FLOAT8_MAX if magnitude > FLOAT8_MAX else magnitude
        bits = _bits(magnitude)
        # Half of the last digit, or a little less where that one is even, carries into it when it must.
        normal = np.int32((bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - _REBIAS)
        subnormal = np.int32(_bits(magnitude + _SHIFTER) - _SHIFTER_BITS)
        code = subnormal if magnitude < _SMALLEST_NORMAL else normal
        code = np.int32(code | (_bits(quotient) >> 24 & 0x80))
        codes[i] = code
        if residual is not None:
            residual[i] = corrected - _value_fp8(code) * scale


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _value_fp8(code: np.int32) -> Any:
    magnitude = np.int32(code & 0x7F)
    subnormal = np.float32(magnitude) * _SUBNORMAL_UNIT
    normal = _number((magnitude + _REBIAS) << 20)
    value = subnormal if magnitude < _FIRST_NORMAL else normal
    return -value if code & 0x80 else value


@njit(nogil=True, cache=CACHE, error_model="numpy")
def decode_fp8(scale: np.float32, codes: Array, out: Array) -> None:
    """Write the values of 8-bit floats in units of the scale."""
    for i in range(codes.size):
        out[i] = _value_fp8(np.int32(codes[i])) * scale


@njit(nogil=True, cache=CACHE, error_model="numpy")
def accumulate_fp8(scale: np.float32, codes: Array, target: Array) -> None:
    """Add the values of 8-bit floats in units of the scale."""
    for i in range(codes.size):
        target[i] += _value_fp8(np.int32(codes[i])) * scale


def encode_fp8(gradient: Array, residual: Array | None, scale: np.float32, codes: Array) -> None:
    """Round to 8-bit floats. See `reference.encode_fp8`."""
    encode = _encode_fp8 if gradient.dtype == _FLOAT32 else reference.encode_fp8
    encode(gradient, residual, scale, codes)


# --- topk ---


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _bin_of(counts: Array, wanted: int) -> tuple[int, int]:
    """Return the bin in which the last of so many lies, counted from the highest bin down, and the number above it."""
    above = 0
    for place in range(counts.size - 1, -1, -1):
        if above + counts[place] >= wanted:
            return place, above
        above += counts[place]
    return 0, above


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _largest_places(bits: Array, wanted: int) -> Array:
    """Select by the digits of the magnitudes, the highest ones first."""
    # Neighbours are counted apart: adding to one counter again and again would wait for memory each time.
    counts = np.zeros((4, _TOP_BINS), np.int64)
    for i in range(bits.size):
        counts[i & 3, (bits[i] & _MAGNITUDE) >> _TOP_SHIFT] += 1
    top, above = _bin_of(counts.sum(axis=0), wanted)
    candidates = np.empty(counts[:, top:].sum() + 1, np.int64)
    found = 0
    for i in range(bits.size):
        # What is no candidate is written over by the next one.
        candidates[found] = i
        found += (bits[i] & _MAGNITUDE) >> _TOP_SHIFT >= top
    least = np.int64(top)
    for shift in (_MIDDLE_SHIFT, 0):
        digits = np.zeros(_BINS, np.int64)
        for place in candidates[:found]:
            magnitude = np.int64(bits[place] & _MAGNITUDE)
            if magnitude >> (shift + _MIDDLE_SHIFT) == least:
                digits[magnitude >> shift & (_BINS - 1)] += 1
        digit, larger = _bin_of(digits, wanted - above)
        least, above = least << _MIDDLE_SHIFT | digit, above + larger
    places = np.empty(wanted, np.int64)
    equal, chosen = wanted - above, 0
    for place in candidates[:found]:
        magnitude = np.int64(bits[place] & _MAGNITUDE)
        if magnitude > least or (magnitude == least and equal > 0):
            equal -= magnitude == least
            places[chosen] = place
            chosen += 1
    return places


def largest_places(corrected: Array, count: int) -> Array:
    """Return the places of the largest magnitudes. See `reference.largest_places`."""
    if corrected.dtype != _FLOAT32:
        return reference.largest_places(corrected, count)
    bits = corrected.view(np.int32)
    # Compiled functions are compiled once for read-only arrays, and again for others.
    bits.flags.writeable = False
    places: Array = _largest_places(bits, count)
    return places


# --- qsgd ---


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _encode_levels(
    gradient: Array,
    residual: Array | None,
    unit: np.float32,
    levels: np.float32,
    chances: Array,
    codes: Array,
    variances: Array,
    squares: Array,
) -> None:
    for start in range(0, gradient.size, LANES):
        for j in range(min(LANES, gradient.size - start)):
            i = start + j
            corrected = gradient[i] if residual is None else gradient[i] + residual[i]
            quotient = abs(corrected) / unit
            quotient = levels if quotient > levels else quotient
            level = np.float32(np.int32(quotient))
            fraction = quotient - level
            variances[j] += np.float64(fraction * (ONE - fraction))
            square = level + fraction
            squares[j] += np.float64(square * square)
            level = level + ONE if chances[i] < fraction else level
            codes[i] = np.int32(levels - level if corrected < 0 else levels + level)


def encode_levels(
    gradient: Array,
    residual: Array | None,
    unit: np.float32,
    levels: np.float32,
    generator: np.random.Generator,
    codes: Array,
) -> float:
    """Round each value at random. See `reference.encode_levels`."""
    if gradient.dtype != _FLOAT32:
        return reference.encode_levels(gradient, residual, unit, levels, generator, codes)
    variances, squares = np.zeros(LANES), np.zeros(LANES)
    drawn = np.empty(min(BLOCK, gradient.size), np.float32)
    for start in range(0, gradient.size, BLOCK):
        part = slice(start, min(start + BLOCK, gradient.size))
        chances = drawn[: part.stop - start]
        # Drawn in parts or at once, the numbers are the same.
        generator.random(dtype=np.float32, out=chances)
        left = None if residual is None else residual[part]
        _encode_levels(gradient[part], left, unit, levels, chances, codes[part], variances, squares)
    return float(np.sum(variances)) / float(np.sum(squares))


@njit(nogil=True, cache=CACHE, error_model="numpy")
def subtract_levels(gradient: Array, residual: Array, unit: np.float32, levels: np.float32, codes: Array) -> None:
    """Write the new residual."""
    for i in range(gradient.size):
        residual[i] = gradient[i] + residual[i] - (np.float32(codes[i]) - levels) * unit


@njit(nogil=True, cache=CACHE, error_model="numpy")
def decode_levels(codes: Array, levels: np.float32, unit: np.float32, out: Array) -> None:
    """Write the values of numbers of units."""
    for i in range(codes.size):
        out[i] = (np.float32(codes[i]) - levels) * unit


@njit(nogil=True, cache=CACHE, error_model="numpy")
def accumulate_levels(codes: Array, levels: np.float32, unit: np.float32, target: Array) -> None:
    """Add the values of numbers of units."""
    for i in range(codes.size):
        target[i] += (np.float32(codes[i]) - levels) * unit


@njit(nogil=True, cache=CACHE, error_model="numpy")
def pack(codes: Array, bits: int, packed: Array) -> None:
    """Write codes of 2 or 4 bits to bytes, which are all zeros."""
    each = 8 // bits
    whole = codes.size // each
    if each == 2:  # noqa: PLR2004 - the loops of each are compiled apart
        for byte in range(whole):
            packed[byte] = codes[2 * byte] << 4 | codes[2 * byte + 1]
    else:
        for byte in range(whole):
            i = 4 * byte
            packed[byte] = codes[i] << 6 | codes[i + 1] << 4 | codes[i + 2] << 2 | codes[i + 3]
    for i in range(whole * each, codes.size):
        packed[whole] |= codes[i] << (8 - bits - bits * (i % each))


@njit(nogil=True, cache=CACHE, error_model="numpy")
def unpack(packed: Array, bits: int, codes: Array) -> None:
    """Write the codes of 2 or 4 bits that are in bytes."""
    if bits == 4:  # noqa: PLR2004 - the loops of each are compiled apart
        for byte in range(packed.size):
            codes[2 * byte] = packed[byte] >> 4
            codes[2 * byte + 1] = packed[byte] & 15
    else:
        for byte in range(packed.size):
            for j in range(4):
                codes[4 * byte + j] = packed[byte] >> (6 - 2 * j) & 3
