"""The shared words: specs, dtypes and roles."""

from __future__ import annotations

import dataclasses

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import numpy as np
import pytest

from aiokv.types import ITEM_SIZES, MAX_INT_KEY, SCHEDULER, Role, TensorSpec


@pytest.mark.parametrize(
    ("shape", "dtype", "size", "nbytes", "text"),
    [
        ((), "float64", 1, 8, "float64[]"),
        ((1,), "int8", 1, 1, "int8[1]"),
        ((0, 5), "float32", 0, 0, "float32[0, 5]"),
        ((2, 3), "float16", 6, 12, "float16[2, 3]"),
        ((2**20, 2**20), "uint64", 2**40, 2**43, "uint64[1048576, 1048576]"),
    ],
)
def test_spec_knows_its_size(shape: tuple[int, ...], dtype: str, size: int, nbytes: int, text: str) -> None:
    spec = TensorSpec(shape, dtype)
    assert (spec.size, spec.nbytes, spec.size * spec.itemsize, str(spec)) == (size, nbytes, nbytes, text)


def test_specs_are_values() -> None:
    assert TensorSpec((2, 3), "int8") == TensorSpec((2, 3), "int8")
    assert len({TensorSpec((6,), "int8"), TensorSpec((2, 3), "int8"), TensorSpec((6,), "int8")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorSpec((1,), "int8").dtype = "int16"  # type: ignore[misc]


@pytest.mark.parametrize("dtype", list(ITEM_SIZES))
def test_dtypes_are_named_and_sized_as_in_numpy(dtype: str) -> None:
    assert (np.dtype(dtype).name, np.dtype(dtype).itemsize) == (dtype, ITEM_SIZES[dtype])


def test_roles_are_written_as_people_write_them() -> None:
    assert [str(role) for role in Role] == ["scheduler", "server", "worker"]


def test_bounds() -> None:
    assert MAX_INT_KEY == 9_223_372_036_854_775_807
    assert SCHEDULER < 0, "connections are numbered from 0"
