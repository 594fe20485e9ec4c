"""Cases of compressed gradients: the bytes of the 2-bit codec, and that error feedback loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.codec import TwoBit
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder
from sim.validation.case import Case, exact, within

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN: Final = ("2cc00000", "ecc00000", "2ec00000")
"""Payloads of three equal gradients in a row (MXNet's 2-bit compression)."""


def two_bits() -> Iterator[Case]:
    """Case 27: golden bytes, the length of a payload, and what was sent plus what is left is what was computed."""
    codec = TwoBit(threshold=0.5)
    gradient = np.array([0.3, -0.7, 0.5, -0.2, 1.2, 0.0], np.float32)
    encoder, decoder = Encoder(codec, "key", 6, backend="reference"), Decoder(codec, backend="reference")
    total = np.zeros(6, np.float32)
    for number, expected in enumerate(GOLDEN, start=1):
        [payload] = encoder.encode(gradient)
        yield exact(f"27 bytes of gradient {number}", int(bytes(payload).hex(), 16), int(expected, 16))
        decoder.accumulate_into(payload, total)
    left = encoder.flush()
    yield within(
        "27 decoded and left over is what was computed", float(np.abs(total + left - 3 * gradient).max()), 0.0, 1e-6
    )
    yield exact("27 bytes of 1000 elements", codec.nbytes(1000), 252.0)
