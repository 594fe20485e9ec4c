"""Bytes of the safetensors format: the library reads what is written here, and what is read here is what it writes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as hs
from hypothesis.extra import numpy as hnp

from aiokv.checkpoint.files import Reader
from aiokv.checkpoint.tensorfile import in_order, open_tensors, pack, unpack
from aiokv.errors import DataError
from aiokv.types import ITEM_SIZES

dtypes = hs.sampled_from([name for name in ITEM_SIZES if name != "bfloat16"]).map(np.dtype)
some_arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
names = hs.text(min_size=1).filter(lambda text: text.isprintable() and text != "__metadata__")
files = hs.dictionaries(names, some_arrays, max_size=5)
texts = hs.dictionaries(names, hs.text().filter(lambda text: text.isprintable()), min_size=1, max_size=3)


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].shape, got[name].dtype, got[name].tobytes()) == (array.shape, array.dtype, array.tobytes())


@given(files, texts)
def test_the_library_reads_what_is_written(arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    assert_equal(safetensors.numpy.load(pack(arrays, metadata)), arrays)


@given(files, texts)
def test_what_the_library_has_written_is_read(arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    got, texts = unpack(safetensors.numpy.save(arrays, metadata), "file")
    assert_equal(got, arrays)
    assert texts == metadata


@given(files, texts)
def test_what_lies_in_a_file_is_the_same_as_what_is_in_memory(arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    content = pack(arrays, metadata)
    got, texts = open_tensors(Reader(io.BytesIO(content), "file"), "file")
    assert {name: (array.shape, array.dtype, array.size, array.nbytes) for name, array in got.items()} == {
        name: (array.shape, array.dtype, array.size, array.nbytes) for name, array in arrays.items()
    }
    assert_equal({name: np.asarray(array) for name, array in got.items()}, arrays)
    assert texts == metadata
    assert pack(got, metadata) == content


def test_bfloat16_is_a_dtype_of_the_format() -> None:
    array = np.arange(3).astype("bfloat16")
    (got,) = unpack(pack({"w": array}, {}), "file")[0].values()
    assert (got.dtype, got.tolist()) == (array.dtype, array.tolist())


def test_arrays_lie_in_the_content_which_is_not_written() -> None:
    content = pack({"w": np.ones(4)}, {})
    (array,) = unpack(content, "file")[0].values()
    assert np.shares_memory(array, np.frombuffer(content, np.uint8))
    assert not array.flags.writeable


def test_large_elements_come_first_so_that_all_are_aligned() -> None:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"a": ("int8", (3,)), "b": ("float16", ()), "c": ("float64", (1,))}
    assert in_order(shapes) == ["c", "b", "a"]
    content = pack({name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}, {"text": "x"})
    assert int.from_bytes(content[:8], "little") % 8 == 0


def described(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04" * 20,
        b'{"weights": [1, 2, 3]}',
        (1 << 62).to_bytes(8, "little") + b"{}",
        described("[]"),
        described('{"w": 5}'),
        described('{"w": {"dtype": "F128", "shape": [], "data_offsets": [0, 16]}}', bytes(16)),
        described('{"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}', bytes(1)),
        described('{"w": {"dtype": "U8", "shape": [-1, -1], "data_offsets": [0, 1]}}', bytes(1)),
        described('{"w": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', bytes(2)),
        described('{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', bytes(2)),
        described('{"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}', bytes(2)),
        described('{"__metadata__": {"n": 1}}'),
        described('{"__metadata__": {}, "w": \xff}'),
    ],
)
def test_what_is_no_whole_file_is_refused_and_named(content: bytes) -> None:
    with pytest.raises(DataError, match="some-file: expected a whole safetensors file"):
        unpack(content, "some-file")
    with pytest.raises(DataError, match="some-file: expected a whole safetensors file"):
        open_tensors(Reader(io.BytesIO(content), "some-file"), "some-file")
