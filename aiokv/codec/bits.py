"""The payloads of `1bit` and `2bit`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.codec.records import WORD, TwoBit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.codec.backends import Kernels
    from aiokv.codec.records import BitCodec
    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw

LOW_BITS = np.uint8(0b01010101)
"""The lower one of each pair of bits: it is set in code 11 alone, so the upper one is set too."""


class BitFormat:
    """A few bits for each value, the first value in the top bits of the first byte, padded with 0 to whole words.

    What a value becomes depends on no other one, so each chunk is encoded alone, from its own first word on.
    """

    def __init__(self, codec: BitCodec, kernels: Kernels) -> None:
        self._codec = codec
        self._kernels = kernels
        self._two = isinstance(codec, TwoBit)
        self._threshold = np.float32(codec.threshold)

    def fits(self, gradient: Array, residual: Array | None) -> bool:
        """Tell whether the gradient with the residual has only numbers that float32 can hold."""
        return self._kernels.fits(gradient, residual)

    def encode(
        self, gradient: Array, residual: Array | None, cuts: Sequence[tuple[int, int]], draw: Draw
    ) -> tuple[list[Array], Array | None]:
        """Return a payload for each cut, and the residual, written in place."""
        encode = self._kernels.encode_2bit if self._two else self._kernels.encode_1bit
        payloads = []
        for start, stop in cuts:
            payload = np.zeros(self._codec.nbytes(stop - start), np.uint8)
            part = None if residual is None else residual[start:stop]
            encode(gradient[start:stop], part, self._threshold, payload)
            payloads.append(payload)
        return payloads, residual

    def decode_into(self, payload: Array, out: Array) -> None:
        """Write the payload's values."""
        self._check(payload, out.size)
        if self._two:
            self._kernels.decode_2bit(payload, self._threshold, out)
        else:
            self._kernels.decode_1bit(payload, out)

    def accumulate_into(self, payload: Array, target: Array) -> None:
        """Add the payload's values."""
        self._check(payload, target.size)
        if self._two:
            self._kernels.accumulate_2bit(payload, self._threshold, target)
        else:
            self._kernels.accumulate_1bit(payload, target)

    def unit(self, payload: Array, size: int) -> float:
        """Return the threshold. Raises ProtocolError when the payload is malformed."""
        self._check(payload, size)
        return float(self._threshold)

    def _check(self, payload: Array, size: int) -> None:
        if not size:
            return
        last = payload[-WORD:]
        used = size * self._codec.bits - 8 * (payload.size - WORD)
        if np.unpackbits(last)[used:].any():
            raise self._codec.malformed(f"of {size} elements", "zeros after the last one", last.tobytes().hex())
        if self._two and (wrong := payload & ~(payload >> np.uint8(1)) & LOW_BITS).any():
            got = f"01 in byte {int(np.flatnonzero(wrong)[0])}"
            raise self._codec.malformed(f"of {size} elements", "the codes 00, 10 and 11", got)
