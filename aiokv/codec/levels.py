"""The payloads of `qsgd`: the unit (float32), then for each value how many units it is, plus the number of levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.codec.records import SCALE
from aiokv.codec.whole import Compressed, WholeFormat, as_bytes, with_scale

if TYPE_CHECKING:
    from aiokv.codec.records import QSGD
    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw

BYTE = 8


class LevelFormat(WholeFormat):
    """Codes of 2, 4, 8 or 16 bits; in a byte the first one has the top bits, and unused bits are 0."""

    def __init__(self, codec: QSGD) -> None:
        self._codec = codec
        # One less than the quotient in its last digit, so that the product with the number of levels can't overflow.
        self._max_unit = np.nextafter(np.finfo(np.float32).max / np.float32(codec.levels), np.float32(0))

    def compress(self, corrected: Array, draw: Draw) -> Compressed:
        """Round each value at random to one of the neighbouring levels."""
        codec = self._codec
        magnitudes = np.abs(corrected)
        unit = min(np.float32(np.max(magnitudes) / codec.levels), self._max_unit)
        if unit == 0:
            # All zeros, or so small that no float32 is a fine enough unit.
            return _Levels(codec, unit, np.full(corrected.size, codec.levels, self._dtype))
        # The largest quotient may be a little over the number of levels.
        fraction = np.minimum(magnitudes / unit, codec.levels)
        level = np.floor(fraction)
        fraction -= level
        if codec.error_feedback:
            unit = np.float32(unit / (1 + _relative_variance(level, fraction)))
        level += draw().random(corrected.size, np.float32) < fraction
        codes = (codec.levels + np.copysign(level, corrected)).astype(self._dtype)
        return _Levels(codec, unit, codes)

    def values(self, payload: Array, size: int) -> Array:
        """Return what a payload says."""
        levels = self._codec.levels
        unit = payload[:SCALE].view(np.float32)[0]
        if not 0 <= unit <= self._max_unit:
            raise self._codec.malformed(f"of {size} elements", f"a unit from 0 to {self._max_unit}", f"{unit}")
        codes = unpack(payload[SCALE:], self._codec.bits)
        if codes[size:].any():
            raise self._codec.malformed(f"of {size} elements", "zeros after the last one", f"{codes[size:].tolist()}")
        codes = codes[:size]
        if (largest := codes.max()) > 2 * levels:
            raise self._codec.malformed(f"of {size} elements", f"codes from 0 to {2 * levels}", f"{largest}")
        return _values(codes, levels, unit)

    @property
    def _dtype(self) -> type[np.unsignedinteger]:
        return np.uint16 if self._codec.bits > BYTE else np.uint8


class _Levels(Compressed):
    def __init__(self, codec: QSGD, unit: np.float32, codes: Array) -> None:
        self._codec = codec
        self._unit = unit
        self._codes = codes

    def cut(self, start: int, stop: int) -> Array:
        return with_scale(self._unit, pack(self._codes[start:stop], self._codec.bits))

    def subtract_from(self, corrected: Array) -> None:
        corrected -= _values(self._codes, self._codec.levels, self._unit)


def pack(codes: Array, bits: int) -> Array:
    """Return the codes in as few bytes as they need."""
    if bits >= BYTE:
        return as_bytes(codes)
    each = BYTE // bits
    padded = np.zeros(-(-codes.size // each) * each, np.uint8)
    padded[: codes.size] = codes
    packed: Array = np.bitwise_or.reduce(padded.reshape(-1, each) << _shifts(bits), axis=1)
    return packed


def unpack(payload: Array, bits: int) -> Array:
    """Return the codes, and what is in the unused bits of the last byte."""
    if bits > BYTE:
        return payload.view(np.uint16)
    if bits == BYTE:
        return payload
    codes: Array = (payload[:, np.newaxis] >> _shifts(bits)) & np.uint8((1 << bits) - 1)
    return codes.reshape(-1)


def _shifts(bits: int) -> Array:
    return np.arange(BYTE - bits, -1, -bits, dtype=np.uint8)


def _values(codes: Array, levels: int, unit: np.float32) -> Array:
    values: Array = codes.astype(np.float32)
    values -= np.float32(levels)
    values *= unit
    return values


def _relative_variance(level: Array, fraction: Array) -> float:
    """Return the variance of rounding at random over the squared norm, both in units."""
    variance = np.sum(fraction * (1 - fraction), dtype=np.float64)
    squares = np.sum(np.square(level + fraction), dtype=np.float64)
    return float(variance / squares)
