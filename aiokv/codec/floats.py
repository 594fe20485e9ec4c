"""The payloads of `fp16`, `bf16` and `fp8`: each value in a narrower float."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from aiokv.codec.records import SCALE, Float16
from aiokv.codec.whole import Compressed, WholeFormat, as_bytes, with_scale

if TYPE_CHECKING:
    from aiokv.codec.records import BFloat16, Float8
    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw

FLOAT8_MAX = np.float32(448)
"""The format has no infinities, and one NaN for each sign."""

FLOAT8_NAN = 0b0111_1111

# One less than the quotient in its last digit, so that the product with the largest code can't overflow.
MAX_SCALE = np.nextafter(np.finfo(np.float32).max / FLOAT8_MAX, np.float32(0))


class CastFormat(WholeFormat):
    """IEEE half precision or bfloat16, rounded to nearest even."""

    def __init__(self, codec: Float16 | BFloat16) -> None:
        self._codec = codec
        self._dtype: np.dtype[Any] = np.dtype(np.float16 if isinstance(codec, Float16) else ml_dtypes.bfloat16)
        self._max = float(ml_dtypes.finfo(self._dtype).max)  # type: ignore[no-untyped-call]

    def compress(self, corrected: Array, draw: Draw) -> Compressed:
        """Round each value; what is too large becomes the largest: an infinity would never leave the weights."""
        return _Cast(np.clip(corrected, -self._max, self._max).astype(self._dtype))

    def values(self, payload: Array, size: int) -> Array:
        """Return what a payload says."""
        values = payload.view(self._dtype).astype(np.float32)
        if not np.isfinite(values).all():
            raise self._codec.malformed(f"of {size} elements", "finite numbers", "NaN or infinity")
        return values


class _Cast(Compressed):
    def __init__(self, rounded: Array) -> None:
        self._rounded = rounded

    def cut(self, start: int, stop: int) -> Array:
        return as_bytes(self._rounded[start:stop])

    def subtract_from(self, corrected: Array) -> None:
        corrected -= self._rounded.astype(corrected.dtype)


class Float8Format(WholeFormat):
    """The scale, float32, then one byte for each value."""

    def __init__(self, codec: Float8) -> None:
        self._codec = codec

    def compress(self, corrected: Array, draw: Draw) -> Compressed:
        """Round each value in units of the scale."""
        largest = np.max(np.abs(corrected))
        scale = min(np.float32(largest / FLOAT8_MAX), MAX_SCALE)
        if scale == 0:
            # All zeros, or so small that no float32 is a fine enough unit.
            return _Scaled(scale, np.zeros(corrected.size, ml_dtypes.float8_e4m3fn))
        # The largest quotient may be a little over 448, and much over it where the scale is a subnormal number.
        units = np.clip(corrected / scale, -FLOAT8_MAX, FLOAT8_MAX)
        return _Scaled(scale, units.astype(ml_dtypes.float8_e4m3fn))

    def values(self, payload: Array, size: int) -> Array:
        """Return what a payload says."""
        scale = payload[:SCALE].view(np.float32)[0]
        if not 0 <= scale <= MAX_SCALE:
            raise self._codec.malformed(f"of {size} elements", f"a scale from 0 to {MAX_SCALE}", f"{scale}")
        codes = payload[SCALE:]
        if (codes & FLOAT8_NAN == FLOAT8_NAN).any():
            raise self._codec.malformed(f"of {size} elements", "finite numbers", "NaN")
        return _scaled(scale, codes.view(ml_dtypes.float8_e4m3fn))


class _Scaled(Compressed):
    def __init__(self, scale: np.float32, codes: Array) -> None:
        self._scale = scale
        self._codes = codes

    def cut(self, start: int, stop: int) -> Array:
        return with_scale(self._scale, self._codes[start:stop])

    def subtract_from(self, corrected: Array) -> None:
        corrected -= _scaled(self._scale, self._codes)


def _scaled(scale: np.float32, codes: Array) -> Array:
    values: Array = codes.astype(np.float32)
    values *= scale
    return values
