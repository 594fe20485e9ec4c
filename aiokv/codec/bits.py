"""The payloads of `1bit` and `2bit`, and the choice of who computes them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aiokv.codec import reference
from aiokv.codec.records import WORD, TwoBit
from aiokv.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.codec.records import BitCodec
    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw

BACKENDS = ("auto", "cpu", "reference")

LOW_BITS = np.uint8(0b01010101)
"""The lower one of each pair of bits: it is set in code 11 alone, so the upper one is set too."""

_logger = logging.getLogger(__name__)


class _Kernels(Protocol):
    """What `reference` and `compiled` have."""

    def fits(self, gradient: Array, residual: Array | None, /) -> bool: ...

    def encode_1bit(
        self, gradient: Array, residual: Array | None, threshold: np.float32, payload: Array, /
    ) -> None: ...

    def encode_2bit(
        self, gradient: Array, residual: Array | None, threshold: np.float32, payload: Array, /
    ) -> None: ...

    def decode_1bit(self, payload: Array, out: Array, /) -> None: ...

    def decode_2bit(self, payload: Array, threshold: np.float32, out: Array, /) -> None: ...

    def accumulate_1bit(self, payload: Array, target: Array, /) -> None: ...

    def accumulate_2bit(self, payload: Array, threshold: np.float32, target: Array, /) -> None: ...


class BitFormat:
    """A few bits for each value, the first value in the top bits of the first byte, padded with 0 to whole words.

    What a value becomes depends on no other one, so each chunk is encoded alone, from its own first word on.
    """

    def __init__(self, codec: BitCodec, kernels: _Kernels) -> None:
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


def get_kernels(backend: str) -> _Kernels:
    """Return the kernels of a backend.

    Raises:
        ConfigError: there is no such backend.
        MissingExtraError: its packages are not installed.
    """
    match backend:
        case "auto":
            try:
                return get_kernels("cpu")
            except MissingExtraError as error:
                _logger.info("backend 'auto' is 'reference' here: %s", error)
                return reference
        case "reference":
            return reference
        case "cpu":
            try:
                from aiokv.codec import compiled  # noqa: PLC0415 - Numba is optional and slow to import
            except ImportError as error:
                raise MissingExtraError(
                    f"backend 'cpu' needs a package that can't be imported ({error}); "
                    'install it: pip install "aiokv[cpu]"'
                ) from error
            return compiled
        case _:
            known = ", ".join(BACKENDS)
            raise ConfigError(f"unknown backend {backend!r}; known: {known}", expected=known, got=backend)
