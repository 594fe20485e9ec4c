"""Arrays in a file are those that were written, part by part, and nothing is read before it is used."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hs
from hypothesis.extra import numpy as hnp

from aiokv.checkpoint.file_arrays import FileArray
from aiokv.checkpoint.files import BLOCK_BYTES, Reader, checksum, open_reader
from aiokv.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

BEFORE = b"something else"
ARRAYS = hnp.arrays(np.dtype("int32"), hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5))
ENDS = hs.one_of(hs.none(), hs.integers(0, 6))


class Counting(io.BytesIO):
    """A file that counts what is read of it."""

    nread = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.nread += len(data)
        return data


def filed(array: Any) -> tuple[FileArray, Counting]:
    """Return an array in a file, and the file."""
    file = Counting(BEFORE + array.tobytes() + b"behind")
    return FileArray(Reader(file, "some-file"), array.dtype, array.shape, len(BEFORE)), file


@given(array=ARRAYS, ends=hs.tuples(ENDS, ENDS), flat=hs.booleans())
def test_parts_are_those_of_the_array_and_only_they_are_read(
    array: Any, ends: tuple[int | None, int | None], flat: bool
) -> None:
    found, file = filed(array)
    if flat:
        array, found = array.reshape(-1), found.reshape(-1)
    expected, part = array[slice(*ends)], found[slice(*ends)]
    assert file.nread == 0
    assert (part.shape, part.dtype, part.size, part.nbytes) == (
        *(expected.shape, expected.dtype),
        *(expected.size, expected.nbytes),
    )
    np.testing.assert_array_equal(np.asarray(part), expected)
    assert file.nread == expected.nbytes
    np.testing.assert_array_equal(np.asarray(part[1:], np.float64), expected[1:])


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 5])
def test_the_checksum_of_a_part_is_that_of_its_bytes(nbytes: int) -> None:
    data = bytes(range(251)) * (nbytes // 251 + 1)
    assert Reader(io.BytesIO(data), "some-file").checksum(nbytes) == checksum(data[:nbytes])


def test_a_file_that_gets_another_name_is_still_the_one_that_was_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    reader = open_reader(str(tmp_path / "a"))
    (tmp_path / "b").write_bytes(b"newer")
    (tmp_path / "b").rename(tmp_path / "a")
    assert (reader.nbytes, reader.read(0, 3)) == (3, b"old")
    reader.close()
    with pytest.raises(DataError, match="a: can't be read"):
        reader.read(0, 3)


@pytest.mark.parametrize("url", ["nosuch://bucket/state", "no such folder/a", "."])
def test_what_is_no_file_can_not_be_opened(url: str) -> None:
    with pytest.raises(DataError, match="can't be read"):
        open_reader(url)
