"""8-bit floats (e4m3fn: four bits of exponent, three of mantissa, no infinities) by integer arithmetic.

Instructions that convert them come with compute capability 8.9; these few run everywhere, with the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiokv.kernels.cuda.memory import bits_of, float_of, where
from aiokv.kernels.cuda.rounding import SINGLE, device_function

_add, _multiply = SINGLE.add, SINGLE.multiply

LEAST_NORMAL = 0x3C800000
"""The bits of 2**-6."""

# The last digit of 2**14 is 2**-9, and so is the unit of what is less than 2**-6.
BASE, UNIT = np.float32(2**14), np.float32(2**-9)
BASE_BITS = 0x46800000


@device_function
def to_float8(x: Any) -> Any:
    """Return the code of a number from -448 to 448, rounded to nearest even."""
    bits = bits_of(x)
    size = bits & 0x7FFFFFFF
    # A float32 has 20 more bits of mantissa, and its exponents are larger by 120.
    normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3)
    small = bits_of(_add(float_of(np.int32(size)), BASE)) - BASE_BITS
    return np.uint8(bits >> 24 & 0x80 | where(size >= LEAST_NORMAL, normal, small))


@device_function
def from_float8(code: Any) -> Any:
    """Return the number of a code."""
    wide = np.int32(code)
    exponent, mantissa = wide >> 3 & 15, wide & 7
    normal = float_of(np.int32((exponent + 120) << 23 | mantissa << 20))
    size = where(exponent != 0, normal, _multiply(np.float32(mantissa), UNIT))
    return where(wide & 0x80 != 0, -size, size)
