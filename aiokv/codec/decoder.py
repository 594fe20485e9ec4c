"""Payloads to values. They come from a peer: everything is checked before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.codec.bits import BitFormat
from aiokv.codec.floats import CastFormat, Float8Format
from aiokv.codec.formats import make_format
from aiokv.errors import CodecError, SpecMismatchError

if TYPE_CHECKING:
    from aiokv.codec.records import Codec
    from aiokv.codec.reference import Array

    Payload = bytes | bytearray | memoryview

_WRITTEN = (np.dtype(np.float32), np.dtype(np.float64))


class Decoder:
    """What reads the payloads of a codec. It keeps no state: any thread may call it.

    Args:
        codec: with the parameters that the encoder has.
        backend: "auto", "cpu" or "reference"; see `aiokv.codec.formats.make_format`.

    Raises:
        ConfigError: there is no such backend.
        MissingExtraError: the backend's packages are not installed.
    """

    def __init__(self, codec: Codec, *, backend: str = "auto") -> None:
        self._codec = codec
        self._format = make_format(codec, backend)

    def __repr__(self) -> str:
        return f"Decoder({self._codec!r})"

    @property
    def codec(self) -> Codec:
        """How payloads were compressed."""
        return self._codec

    def decode(self, payload: Payload, size: int) -> Array:
        """Return what the payload of a chunk says, float32[size].

        Raises:
            ProtocolError: the payload is malformed.
        """
        self._codec.check_nbytes(size, memoryview(payload).nbytes)
        out = np.empty(size, np.float32)
        self.decode_into(payload, out)
        return out

    def decode_into(self, payload: Payload, out: Array) -> None:
        """Write what the payload of a chunk says.

        Args:
            payload: contiguous bytes, at any address.
            out: float32 or float64, one-dimensional and contiguous, as long as the chunk.

        Raises:
            ProtocolError: the payload is malformed; nothing was written.
            SpecMismatchError: `out` is not as described.
        """
        _check_written("out", out)
        read = self._read(payload, out.size)
        with np.errstate(all="ignore"):
            self._format.decode_into(read, out)

    def accumulate_into(self, payload: Payload, target: Array) -> None:
        """Add what the payload of a chunk says, elementwise.

        Args:
            payload: contiguous bytes, at any address.
            target: float32 or float64, one-dimensional and contiguous, as long as the chunk.

        Raises:
            ProtocolError: the payload is malformed; nothing was added.
            SpecMismatchError: `target` is not as described.
        """
        _check_written("target", target)
        read = self._read(payload, target.size)
        with np.errstate(all="ignore"):
            self._format.accumulate_into(read, target)

    def unit(self, payload: Payload, size: int) -> float:
        """Check the payload of a chunk whose codes somebody else will decode; return the unit of its values.

        That is the threshold of `1bit` and `2bit`, the scale of `fp8`, and 1 for `fp16` and `bf16`.

        Raises:
            ProtocolError: the payload is malformed.
            CodecError: with this codec a value does not follow from its code alone.
        """
        if not isinstance(self._format, BitFormat | CastFormat | Float8Format):
            raise CodecError(f"payloads of {self._codec.name!r} have no codes to decode", got=self._codec.name)
        read = self._read(payload, size)
        return self._format.unit(read, size) if size else 1.0

    def _read(self, payload: Payload, size: int) -> Array:
        """Return a payload of the right length as a read-only array."""
        view = memoryview(payload)
        self._codec.check_nbytes(size, view.nbytes)
        if not view.nbytes:
            return np.empty(0, np.uint8)
        array = np.frombuffer(view, np.uint8)
        # Compiled functions are compiled once for read-only arrays, and again for others.
        array.flags.writeable = False
        return array


def _check_written(name: str, array: Any) -> None:
    expected = "float32 or float64, one-dimensional, contiguous and writable"
    if not isinstance(array, np.ndarray):
        raise SpecMismatchError(f"{name} must be {expected}; got {type(array).__name__}", expected=expected)
    if array.dtype not in _WRITTEN or array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
        got = f"{array.dtype.str}{list(array.shape)}, strides {array.strides}, writable {array.flags.writeable}"
        raise SpecMismatchError(f"{name} must be {expected}; got {got}", expected=expected, got=got)
