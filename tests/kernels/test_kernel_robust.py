"""Reductions that one contribution can't spoil."""

from __future__ import annotations

import statistics
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.kernels.robust import combine

NUMBERS = hs.floats(-1e3, 1e3, width=32)


def arrays(values: list[float], dtype: Any = np.float32) -> list[Any]:
    return [np.array([value], dtype) for value in values]


def test_scenario_57_median_of_one_that_is_far_off() -> None:
    assert combine(arrays([1, 1, 1, 1000]), "median").tolist() == [1]


@given(hs.lists(NUMBERS, min_size=1, max_size=9))
def test_median_is_that_of_each_element(values: list[float]) -> None:
    # Of an even number it is the mean of the middle two.
    expected = statistics.median(values)
    np.testing.assert_allclose(combine(arrays(values), "median"), [expected], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([5.0], 5.0),
        ([1.0, 4.0], 2.5),
        ([1e6, 2.0, 1.0], 2.0),
        ([1e6, 3.0, 2.0, -1e6], 2.5),
        ([1e9, -1e9, 1.0, 2.0, 3.0, 6.0, 1e9, -1e9], 3.0),
    ],
)
def test_trimmed_mean_leaves_a_quarter_out_at_each_end(values: list[float], mean: float) -> None:
    assert combine(arrays(values), "trimmed_mean").tolist() == [mean]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_low_precisions_are_computed_in_float32(dtype: Any) -> None:
    combined = combine(arrays([60000, 60000, 50000, 1], dtype), "trimmed_mean")
    assert combined.dtype == np.float32
    assert combined[0] == (np.float32(dtype(60000)) + np.float32(dtype(50000))) / 2


def test_order_of_contributions_changes_no_bit() -> None:
    values = [0.1, 0.7, 0.3, 1e-8, 123.0]
    for reduction in ("median", "trimmed_mean"):
        there, back = combine(arrays(values), reduction), combine(arrays(values[::-1]), reduction)
        assert there.tobytes() == back.tobytes()
