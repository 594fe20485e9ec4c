"""Arrays that lie in a file, and are read when they are used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from aiokv.checkpoint.files import Reader


@dataclass(slots=True, eq=False)
class FileArray:
    """What is known of an array without its elements; parts of it are of the same kind. NumPy's functions read it.

    Args:
        reader: of the file.
        dtype: of the elements.
        shape: of the array.
        start: its first byte in the file.
    """

    reader: Reader
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.dtype.itemsize

    def reshape(self, shape: int) -> FileArray:
        """Return its elements in one line; the shape has to be -1."""
        assert shape == -1, "nobody needs another one"
        return FileArray(self.reader, self.dtype, (self.size,), self.start)

    def __getitem__(self, part: slice) -> FileArray:
        """Return rows that follow each other, or elements of a line."""
        first, end, step = part.indices(self.shape[0])
        assert step == 1, "nobody needs another one"
        row_nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(0, end - first), *self.shape[1:])
        return FileArray(self.reader, self.dtype, shape, self.start + first * row_nbytes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Read it.

        Raises:
            DataError: the file can't be read.
        """
        data = self.reader.read(self.start, self.start + self.nbytes)
        array = np.frombuffer(data, self.dtype).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)


AnyArray = NDArray[Any] | FileArray
"""An array in memory, or in a file."""
