"""The payloads of `qsgd`: the unit (float32), then for each value how many units it is, plus the number of levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.codec.floats import aligned
from aiokv.codec.records import SCALE
from aiokv.codec.whole import Cut, WholeFormat, as_bytes, with_scale

if TYPE_CHECKING:
    from aiokv.codec.backends import Kernels
    from aiokv.codec.records import QSGD
    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw

BYTE = 8


class LevelFormat(WholeFormat):
    """Codes of 2, 4, 8 or 16 bits; in a byte the first one has the top bits, and unused bits are 0."""

    def __init__(self, codec: QSGD, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._codec = codec
        self._levels = np.float32(codec.levels)
        # One less than the quotient in its last digit, so that the product with the number of levels can't overflow.
        self._max_unit = np.nextafter(np.finfo(np.float32).max / self._levels, np.float32(0))

    def compress(self, gradient: Array, residual: Array | None, draw: Draw) -> Cut:
        """Round each value at random to one of the neighbouring levels."""
        levels = self._codec.levels
        unit = min(np.float32(self._kernels.largest(gradient, residual) / levels), self._max_unit)
        # Zero for all zeros, and for numbers so small that no float32 is a fine enough unit.
        codes = np.full(gradient.size, levels, np.uint16 if self._codec.bits > BYTE else np.uint8)
        if unit:
            variance = self._kernels.encode_levels(gradient, residual, unit, self._levels, draw(), codes)
            if residual is not None:
                unit = np.float32(unit / (1 + variance))
        if residual is not None:
            self._kernels.subtract_levels(gradient, residual, unit, self._levels, codes)
        return lambda start, stop: with_scale(unit, self._pack(codes[start:stop]))

    def read_into(self, payload: Array, out: Array) -> None:
        """Write what a payload says."""
        unit, codes = self._read(payload, out.size)
        self._kernels.decode_levels(codes, self._levels, unit, out)

    def add_to(self, payload: Array, target: Array) -> None:
        """Add what a payload says."""
        unit, codes = self._read(payload, target.size)
        self._kernels.accumulate_levels(codes, self._levels, unit, target)

    def _pack(self, codes: Array) -> Array:
        """Return the codes in as few bytes as they need."""
        if self._codec.bits >= BYTE:
            return as_bytes(codes)
        packed = np.zeros(-(-codes.size * self._codec.bits // BYTE), np.uint8)
        self._kernels.pack(codes, self._codec.bits, packed)
        return packed

    def _read(self, payload: Array, size: int) -> tuple[np.float32, Array]:
        unit = payload[:SCALE].view(np.float32)[0]
        if not 0 <= unit <= self._max_unit:
            raise self._codec.malformed(f"of {size} elements", f"a unit from 0 to {self._max_unit}", f"{unit}")
        codes = self._unpack(payload[SCALE:])
        if codes[size:].any():
            raise self._codec.malformed(f"of {size} elements", "zeros after the last one", f"{codes[size:].tolist()}")
        codes = codes[:size]
        if (largest := codes.max()) > 2 * self._codec.levels:
            raise self._codec.malformed(
                f"of {size} elements", f"codes from 0 to {2 * self._codec.levels}", f"{largest}"
            )
        return unit, codes

    def _unpack(self, packed: Array) -> Array:
        """Return the codes, and what is in the unused bits of the last byte."""
        bits = self._codec.bits
        if bits >= BYTE:
            return aligned(packed.view(np.uint16 if bits > BYTE else np.uint8))
        codes = np.empty(packed.size * BYTE // bits, np.uint8)
        self._kernels.unpack(packed, bits, codes)
        return aligned(codes)
