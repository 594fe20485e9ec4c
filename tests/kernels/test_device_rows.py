"""Rows of a table on the device, against NumPy. Only collected where CUDA is, or the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.errors import SpecMismatchError
from aiokv.kernels.cuda import sparse

Array = NDArray[Any]
Bits = Callable[[Array], bytes]
OnDevice = Callable[[Array], Any]
Read = Callable[[Any, Array], Array]


@pytest.mark.parametrize("width", [1, 3, 4, 8, 33])
@pytest.mark.parametrize(
    ("target", "values"),
    [
        ("float32", "float32"),
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("float16", "float16"),
        ("float64", "float64"),
    ],
)
def test_duplicates_are_added_in_the_order_of_the_message(
    bits: Bits, on_device: OnDevice, read: Read, target: str, values: str, width: int
) -> None:
    rng = np.random.default_rng(width)
    table, rows = rng.standard_normal((11, width)).astype(target), rng.standard_normal((40, width)).astype(values)
    rows[3, 0] = np.nan
    ids = rng.integers(0, 11, 40)
    device = on_device(table.reshape(-1))
    sparse.scatter_add(device, ids, on_device(rows.reshape(-1)), width)
    expected = table.copy()
    for row, values_of_row in zip(ids, rows, strict=True):
        expected[row] += values_of_row.astype(target)
    assert bits(read(device, table.reshape(-1))) == bits(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 8, 33])
def test_rows_are_gathered_and_scattered(on_device: OnDevice, read: Read, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    table = rng.standard_normal((9, width)).astype(dtype)
    ids = np.array([8, 0, 3, 3])
    device, out = on_device(table.reshape(-1)), np.empty(4 * width, dtype)
    taken = on_device(out)
    sparse.gather(device, ids, taken, width)
    assert read(taken, out).tobytes() == table[ids].tobytes()
    sparse.scatter(device, np.array([1, 8]), taken[: 2 * width], width)
    expected = table.copy()
    expected[[1, 8]] = table[[8, 0]]
    assert read(device, table.reshape(-1)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int16", "uint8"])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_memory_is_cleared_from_anywhere_on(on_device: OnDevice, read: Read, dtype: str, offset: int) -> None:
    whole = np.arange(1, 301).astype(dtype)
    device = on_device(whole)
    sparse.clear(device[offset:290])
    expected = whole.copy()
    expected[offset:290] = 0
    assert read(device, whole).tolist() == expected.tolist()


@pytest.mark.parametrize("value", [-0.0, 1.5, np.inf])
def test_one_number_everywhere(on_device: OnDevice, read: Read, value: float) -> None:
    device, out = on_device(np.ones(133, np.float32)), np.empty(133, np.float32)
    sparse.fill(device, value)
    assert read(device, out).tobytes() == np.full(133, value, np.float32).tobytes()


def test_no_rows(on_device: OnDevice, read: Read) -> None:
    table = np.ones(6, np.float32)
    device = on_device(table)
    sparse.scatter_add(device, np.empty(0, np.int64), on_device(np.empty(0, np.float32)), 3)
    assert read(device, table).tolist() == [1] * 6


def test_rows_that_are_not_there_are_refused(on_device: OnDevice) -> None:
    table, row = on_device(np.ones(6, np.float32)), on_device(np.ones(3, np.float32))
    with pytest.raises(SpecMismatchError, match="row 2 is not in a table of 2 rows"):
        sparse.scatter_add(table, np.array([2]), row, 3)
    with pytest.raises(SpecMismatchError, match="row -1 is not in a table of 2 rows"):
        sparse.gather(table, np.array([-1]), row, 3)
    with pytest.raises(SpecMismatchError, match=r"values must be 2 rows of 3.*; got 3 and 6 elements"):
        sparse.scatter_add(table, np.array([0, 1]), row, 3)
    with pytest.raises(SpecMismatchError, match="ids must be each row once"):
        sparse.scatter(table, np.array([1, 1]), on_device(np.ones(6, np.float32)), 3)
