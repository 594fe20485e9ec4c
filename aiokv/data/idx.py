"""IDX files: the format of the MNIST data set.

Two zero bytes, one for the dtype, one for the number of axes; the length of each axis as a big-endian uint32; then the
elements, big-endian, the last axis varying fastest.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from aiokv.data.damage import damaged

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_AXES = 32
"""Of any array, in the oldest NumPy that is supported."""
_GZIP_MAGIC = b"\x1f\x8b"
_DEFLATE_RATIO = 1032
"""Compressed data grows to at most so many times its size: 258 bytes from two bits (zlib, technical details)."""


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array of an IDX file, in this machine's byte order. The file may be compressed with gzip.

    Nothing is allocated for sizes that the file can't hold.

    Raises:
        DataError: the file is of another format, truncated, damaged, or longer than its header says.
    """
    size = Path(path).stat().st_size
    with Path(path).open("rb") as raw:
        compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        raw.seek(0)
        if not compressed:
            return _read(path, raw, size)
        try:
            with gzip.open(raw) as file:
                return _read(path, cast("IO[bytes]", file), size * _DEFLATE_RATIO)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise damaged(path, raw.tell(), expected="a whole gzip file", got=f"{error}") from None


def _read(path: str | os.PathLike[str], file: IO[bytes], most: int) -> NDArray[Any]:
    """Read an array from a file of at most `most` bytes."""
    dtype, shape = _read_header(path, file)
    start = file.tell()
    nbytes = dtype.itemsize * math.prod(shape)
    expected = f"{nbytes} bytes of {dtype.name} with shape {shape}"
    if nbytes > most - start:
        raise damaged(path, start, expected=expected, got=f"at most {most - start}")
    array = np.empty(shape, dtype)
    memory = array.reshape(-1).view(np.uint8).data
    filled = 0
    while filled < nbytes and (count := file.readinto(memory[filled:])):  # type: ignore[attr-defined]
        filled += count
    if filled < nbytes:
        raise damaged(path, start + filled, expected=expected, got=f"the end of the file after {filled}")
    if file.read(1):
        raise damaged(path, start + nbytes, expected=f"the end of the file after {expected}", got="more")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _read_header(path: str | os.PathLike[str], file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES or not 1 <= magic[3] <= _MOST_AXES:  # noqa: PLR2004 - the magic's four bytes
        types = ", ".join(f"{code:02x}" for code in _DTYPES)
        expected = f"00 00, a type ({types}) and 1 to {_MOST_AXES} axes"
        raise damaged(path, 0, expected=expected, got=magic.hex(" ") or "an empty file")
    lengths = file.read(4 * magic[3])
    if len(lengths) < 4 * magic[3]:
        raise damaged(path, 4, expected=f"the lengths of {magic[3]} axes", got=f"{len(lengths)} bytes")
    return np.dtype(_DTYPES[magic[2]]), tuple(int(length) for length in np.frombuffer(lengths, ">u4"))
