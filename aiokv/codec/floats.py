"""The payloads of `fp16`, `bf16` and `fp8`: each value in a narrower float."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from aiokv.codec.records import SCALE, Float16
from aiokv.codec.reference import FLOAT8_MAX
from aiokv.codec.whole import Cut, WholeFormat, as_bytes, with_scale

if TYPE_CHECKING:
    from aiokv.codec.backends import Kernels
    from aiokv.codec.records import BFloat16, Float8
    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw

FLOAT8_NAN = np.uint8(0b0111_1111)
"""The format has no infinities, and one NaN for each sign."""

# One less than the quotient in its last digit, so that the product with the largest code can't overflow.
MAX_SCALE = np.nextafter(np.finfo(np.float32).max / FLOAT8_MAX, np.float32(0))


class CastFormat(WholeFormat):
    """IEEE half precision or bfloat16, rounded to nearest even."""

    def __init__(self, codec: Float16 | BFloat16, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._codec = codec
        half = isinstance(codec, Float16)
        self._dtype: np.dtype[Any] = np.dtype(np.float16 if half else ml_dtypes.bfloat16)
        # Infinities and NaN have all bits of the exponent.
        self._exponent = np.uint16(0x7C00 if half else 0x7F80)

    def compress(self, gradient: Array, residual: Array | None, draw: Draw) -> Cut:
        """Round each value; what is too large becomes the largest: an infinity would never leave the weights."""
        codes = np.empty(gradient.size, self._dtype)
        self._kernels.encode_half(gradient, residual, codes)
        return lambda start, stop: as_bytes(codes[start:stop])

    def read_into(self, payload: Array, out: Array) -> None:
        """Write what a payload says."""
        self._kernels.decode_half(self._codes(payload), out)

    def add_to(self, payload: Array, target: Array) -> None:
        """Add what a payload says."""
        self._kernels.accumulate_half(self._codes(payload), target)

    def unit(self, payload: Array, size: int) -> float:
        """Return 1: codes are values. Raises ProtocolError when the payload is malformed."""
        self._codes(payload)
        return 1.0

    def _codes(self, payload: Array) -> Array:
        codes = aligned(payload.view(self._dtype))
        if self._kernels.has_code(codes.view(np.uint16), self._exponent):
            raise self._codec.malformed(f"of {codes.size} elements", "finite numbers", "NaN or infinity")
        return codes


class Float8Format(WholeFormat):
    """The scale, float32, then one byte for each value."""

    def __init__(self, codec: Float8, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._codec = codec

    def compress(self, gradient: Array, residual: Array | None, draw: Draw) -> Cut:
        """Round each value in units of the scale."""
        scale = min(np.float32(self._kernels.largest(gradient, residual) / FLOAT8_MAX), MAX_SCALE)
        # Zero for all zeros, and for numbers so small that no float32 is a fine enough unit.
        codes = np.zeros(gradient.size, np.uint8)
        if scale:
            self._kernels.encode_fp8(gradient, residual, scale, codes)
        elif residual is not None:
            residual += gradient
        return lambda start, stop: with_scale(scale, codes[start:stop])

    def read_into(self, payload: Array, out: Array) -> None:
        """Write what a payload says."""
        self._kernels.decode_fp8(*self._read(payload), out)

    def add_to(self, payload: Array, target: Array) -> None:
        """Add what a payload says."""
        self._kernels.accumulate_fp8(*self._read(payload), target)

    def unit(self, payload: Array, size: int) -> float:
        """Return the scale. Raises ProtocolError when the payload is malformed."""
        scale, _ = self._read(payload)
        return float(scale)

    def _read(self, payload: Array) -> tuple[np.float32, Array]:
        scale, codes = payload[:SCALE].view(np.float32)[0], payload[SCALE:]
        if not 0 <= scale <= MAX_SCALE:
            raise self._codec.malformed(f"of {codes.size} elements", f"a scale from 0 to {MAX_SCALE}", f"{scale}")
        if self._kernels.has_code(codes, FLOAT8_NAN):
            raise self._codec.malformed(f"of {codes.size} elements", "finite numbers", "NaN")
        return scale, codes


def aligned(array: Array) -> Array:
    """Return an array at an address that its elements may have, read-only: payloads may begin anywhere."""
    array = np.require(array, requirements="A").view()
    # Compiled functions are compiled once for read-only arrays, and again for others.
    array.flags.writeable = False
    return array
