"""Named arrays and text as the bytes of a safetensors file, and back without a copy.

The library `safetensors` needs all arrays at once to write them, and copies each when it reads. Here the head is made
from names, dtypes and shapes alone, so that the arrays can follow one after the other, as they come.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import msgspec
import numpy as np
from numpy.typing import NDArray

from aiokv.checkpoint.file_arrays import AnyArray, FileArray
from aiokv.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiokv.checkpoint.files import Reader

Array = NDArray[Any]
Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of arrays by name."""

METADATA = "__metadata__"
LENGTH_BYTES = 8

DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}
"""NumPy's name of each of the format's dtypes that can be a parameter's."""

FORMAT_NAMES = {name: given for given, name in DTYPES.items()}


class _Tensor(msgspec.Struct):
    """What the head says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def in_order(shapes: Shapes) -> list[str]:
    """Return the names in the order of their arrays in a file: large elements first, so that all lie aligned."""
    return sorted(shapes, key=lambda name: -np.dtype(shapes[name][0]).itemsize)


def head(shapes: Shapes, metadata: Mapping[str, str]) -> bytes:
    """Return what comes before the arrays, which follow `in_order`.

    Args:
        shapes: of the arrays.
        metadata: texts by name.
    """
    described: dict[str, Any] = {METADATA: dict(metadata)}
    end = 0
    for name in in_order(shapes):
        dtype, shape = shapes[name]
        begin, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        described[name] = _Tensor(FORMAT_NAMES[dtype], shape, (begin, end))
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def pack(arrays: Mapping[str, AnyArray], metadata: Mapping[str, str]) -> bytes:
    """Return arrays and texts by name as the content of a file."""
    shapes: Shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    return b"".join([head(shapes, metadata), *(bytes_of(arrays[name]) for name in in_order(shapes))])


def bytes_of(array: AnyArray) -> memoryview:
    """Return the bytes of an array, in the order of its elements."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def unpack(content: bytes | memoryview, path: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Return arrays and texts; the arrays lie in the content and can't be written to.

    Args:
        content: all of a file.
        path: where it comes from, for errors.

    Raises:
        DataError: it is no safetensors file, or has tensors of a dtype that no parameter has.
    """
    view = memoryview(content).toreadonly()
    with _understanding(path, len(view)):
        begin, described, metadata = read_head(view)
        _check_places(described, len(view) - begin)
        arrays: dict[str, Array] = {}
        for name, tensor in described.items():
            start, stop = (begin + offset for offset in tensor.data_offsets)
            arrays[name] = np.frombuffer(view[start:stop], DTYPES[tensor.dtype]).reshape(tensor.shape)
    return arrays, metadata


def open_tensors(reader: Reader, path: str) -> tuple[dict[str, FileArray], dict[str, str]]:
    """Return arrays and texts of a file, of which nothing but the head is read; see `unpack`.

    Args:
        reader: of the file.
        path: where it is, for errors.

    Raises:
        DataError: as for `unpack`, or it can't be read.
    """
    with _understanding(path, reader.nbytes):
        begin = head_nbytes(reader.read(0, LENGTH_BYTES))
        if begin > reader.nbytes:
            raise ValueError(f"its head ends at byte {begin}")
        _, described, metadata = read_head(memoryview(reader.read(0, begin)))
        _check_places(described, reader.nbytes - begin)
        arrays = {
            name: FileArray(reader, np.dtype(DTYPES[tensor.dtype]), tensor.shape, begin + tensor.data_offsets[0])
            for name, tensor in described.items()
        }
    return arrays, metadata


@contextlib.contextmanager
def _understanding(path: str, nbytes: int) -> Iterator[None]:
    try:
        yield
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError) as error:
        text = f"{path}: expected a whole safetensors file, got {nbytes} bytes that are none: {error}"
        raise DataError(text, path=path, expected="safetensors", got=f"{nbytes} bytes") from None


def _check_places(described: dict[str, _Tensor], nbytes: int) -> None:
    """Refuse arrays that do not lie one behind the other in so many bytes.

    Raises:
        ValueError: they do not.
        KeyError: one has another dtype than parameters.
    """
    end = 0
    for name, tensor in sorted(described.items(), key=lambda item: item[1].data_offsets):
        start, stop = tensor.data_offsets
        size = math.prod(tensor.shape) * np.dtype(DTYPES[tensor.dtype]).itemsize
        if start != end or min(tensor.shape, default=0) < 0 or stop - start != size:
            raise ValueError(f"tensor {name!r} of {tensor.dtype}{list(tensor.shape)} can't be at {start} to {stop}")
        end = stop
    if end != nbytes:
        raise ValueError(f"{end} bytes of tensors where {nbytes} are")


def head_nbytes(view: memoryview | bytes) -> int:
    """Return where the arrays begin, from the first bytes of a file."""
    return LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")


def read_head(view: memoryview) -> tuple[int, dict[str, _Tensor], dict[str, str]]:
    """Return where the arrays begin, what there is, and the texts."""
    begin = head_nbytes(view)
    if begin > len(view):
        raise ValueError(f"its head ends at byte {begin}")
    described = msgspec.json.decode(view[LENGTH_BYTES:begin], type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(described.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
    return begin, {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in described.items()}, metadata
