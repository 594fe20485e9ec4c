"""What a codec is to an encoder and a decoder, and which class it is for each codec.

Payloads are arrays of uint8. Their length is checked before a format gets them, everything else is checked by the
format, before it writes anything: bytes come from a peer.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

import numpy as np

from aiokv.codec.backends import Kernels, get_kernels
from aiokv.codec.bits import BitFormat
from aiokv.codec.floats import CastFormat, Float8Format
from aiokv.codec.levels import LevelFormat
from aiokv.codec.records import QSGD, BFloat16, BitCodec, Codec, Float8, Float16, RandomK, TopK
from aiokv.codec.sparse import RandomKFormat, TopKFormat
from aiokv.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.codec.reference import Array
    from aiokv.codec.whole import Draw, WholeFormat


class Format(Protocol):
    """How one codec's payloads are made and read."""

    def fits(self, gradient: Array, residual: Array | None) -> bool:
        """Tell whether the gradient with the residual has only numbers that float32 can hold."""
        ...

    def encode(
        self, gradient: Array, residual: Array | None, cuts: Sequence[tuple[int, int]], draw: Draw
    ) -> tuple[list[Array], Array | None]:
        """Return a payload for each cut, and the new residual: None when there was none.

        Args:
            gradient: of the whole tensor, in the precision of the residual; it stays as it is.
            residual: None without error feedback. It may be written.
            cuts: neighbouring ranges that cover the tensor.
            draw: returns the generator of this step's random choices.
        """
        ...

    def decode_into(self, payload: Array, out: Array) -> None:
        """Write the payload's values. Raises ProtocolError, and writes nothing, when it is malformed."""
        ...

    def accumulate_into(self, payload: Array, target: Array) -> None:
        """Add the payload's values. Raises ProtocolError, and adds nothing, when it is malformed."""
        ...


@functools.lru_cache
def make_format(codec: Codec, backend: str) -> Format:
    """Return the codec's format.

    Args:
        codec: which one.
        backend: who computes: "reference", "cpu", or "auto": cpu where Numba can be imported.

    Raises:
        ConfigError: there is no such backend.
        CodecError: there is no format for the codec.
        MissingExtraError: the backend's packages are not installed.
    """
    kernels = get_kernels(backend)
    if isinstance(codec, BitCodec):
        return BitFormat(codec, kernels)
    return _make_whole_format(codec, kernels)


def _make_whole_format(codec: Codec, kernels: Kernels) -> WholeFormat:
    match codec:
        case Float16() | BFloat16():
            return CastFormat(codec, kernels)
        case Float8():
            return Float8Format(codec, kernels)
        case TopK():
            return TopKFormat(codec, kernels)
        case RandomK():
            return RandomKFormat(codec, kernels)
        case QSGD():
            return LevelFormat(codec, kernels)
        case _:
            raise CodecError(f"no format for {codec!r}", expected="a codec of aiokv.codec", got=repr(codec))


def warm_up(codec: Codec, dtype: str = "float32", backend: str = "auto") -> None:
    """Compile, or load from the cache, what encoding and decoding need, so that the first gradient does not wait.

    It may take seconds: call it in a thread while an event loop runs. Called again, it returns at once.

    Args:
        codec: which one.
        dtype: in which residuals are kept and sums are made: float32 or float64.
        backend: as in `make_format`.

    Raises:
        ConfigError: there is no such backend.
        MissingExtraError: the backend's packages are not installed.
    """
    codec_format = make_format(codec, backend)
    # Of zeros not all codecs compute anything.
    gradient, residual = np.ones(1, dtype), np.zeros(1, dtype) if codec.error_feedback else None
    gradient.flags.writeable = False
    codec_format.fits(gradient, residual)
    payloads, _ = codec_format.encode(gradient, residual, [(0, 1)], np.random.default_rng)
    payload = np.frombuffer(payloads[0].tobytes(), np.uint8)
    codec_format.decode_into(payload, np.zeros(1, dtype))
    codec_format.accumulate_into(payload, np.zeros(1, dtype))
