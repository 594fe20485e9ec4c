"""What a worker refuses to push, in this process and in a cluster: all of a call is pushed, or nothing."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aiokv
from aiokv.config import load_config
from aiokv.errors import ConfigError, NormLimitError, NotFiniteError
from aiokv.sparse import RowSparse
from aiokv.training.guard import MOST_HISTORIES, Guard


def store(**limits: Any) -> aiokv.LocalStore:
    kv = aiokv.LocalStore(**limits)
    kv.set_optimizer("accumulate")
    return kv


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_norm_is_that_of_all_keys_together(dtype: Any) -> None:
    kv = store(max_norm=5.0)
    kv.init({"a": np.zeros(1, dtype), "b": np.zeros((2, 1), dtype)})
    kv.push({"a": np.array([3], dtype), "b": np.array([[0], [4]], dtype)})
    with pytest.raises(NormLimitError, match=r"'a', 'b' has a norm of 6, but the limit is max_norm = 5;") as caught:
        kv.push({"a": np.array([4], dtype), "b": np.array([[2], [4]], dtype)})
    assert caught.value.details == {"keys": ["a", "b"], "expected": 5.0, "got": 6.0}
    np.testing.assert_array_equal(kv.pull("a"), [3])
    np.testing.assert_array_equal(kv.pull("b"), [[0], [4]])


def test_what_the_dtype_can_t_hold_is_measured_all_the_same() -> None:
    kv = store(max_norm=1e6)
    kv.init({"half": np.zeros(400, np.float16), "w": np.zeros(1, np.float32)})
    # The sum of their squares is 1e12, and a float16 ends at 65504.
    kv.push("half", np.full(400, 50_000, np.float16))
    with pytest.raises(NormLimitError, match=r"norm of 1\.414e\+30"):
        kv.push({"half": np.zeros(400, np.float16), "w": np.full(1, 1.414e30, np.float32)})


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
@pytest.mark.parametrize("limits", [{"max_norm": np.finfo(float).max}, {"max_norm_ratio": 10.0}])
def test_norm_that_is_no_number_is_over_every_limit(value: float, limits: dict[str, float]) -> None:
    kv = store(**limits)
    kv.init("w", np.zeros(2))
    with pytest.raises(NormLimitError, match=r"norm of (nan|inf), but"):
        kv.push("w", np.array([1.0, value]))


def test_jump_is_refused_after_16_norms_and_does_not_count() -> None:
    kv = store(max_norm_ratio=4.0)
    kv.init("w", np.zeros(1))
    for norm in range(1, 16):
        kv.push("w", np.array([float(norm)]))
    kv.push("w", np.array([-1000.0]))
    # The median of 1 to 15 and 1000 is 8.5.
    for _ in range(20):
        with pytest.raises(NormLimitError, match=r"35, but the limit is max_norm_ratio = 4 times 8\.5") as caught:
            kv.push("w", np.array([35.0]))
        assert caught.value.details["expected"] == 34.0
    kv.pushpull("w", np.array([34.0]))
    with pytest.raises(NormLimitError, match="times 9,"):
        kv.pushpull("w", np.array([36.5]))
    np.testing.assert_array_equal(kv.pull("w"), [120 - 1000 + 34])


def test_limit_follows_the_last_64_norms() -> None:
    guard = Guard(max_norm_ratio=2.0)
    for norm in [100.0] * 64 + [1.0] * 33:
        guard.admit(["w"], norm)
    with pytest.raises(NormLimitError, match="2 times 1,"):
        guard.admit(["w"], 2.5)


def test_smaller_of_two_limits_holds() -> None:
    guard = Guard(max_norm=10.0, max_norm_ratio=4.0)
    for norm in [4.0] * 40:
        guard.admit(["w"], norm)
    with pytest.raises(NormLimitError, match="max_norm = 10"):
        guard.admit(["w"], 11.0)
    for norm in [1.0] * 40:
        guard.admit(["w"], norm)
    with pytest.raises(NormLimitError, match="max_norm_ratio = 4 times 1,"):
        guard.admit(["w"], 9.0)


def test_other_keys_have_norms_of_their_own() -> None:
    guard = Guard(max_norm_ratio=2.0)
    for _ in range(16):
        guard.admit(["small"], 1.0)
        guard.admit(["large"], 1000.0)
    guard.admit(["large"], 1500.0)
    with pytest.raises(NormLimitError, match="'small' has a norm of 3,"):
        guard.admit(["small"], 3.0)


def test_only_so_many_sets_of_keys_are_remembered() -> None:
    guard = Guard(max_norm_ratio=2.0)
    for _ in range(16):
        guard.admit(["often"], 1.0)
        guard.admit(["once"], 1.0)
    for number in range(MOST_HISTORIES - 1):
        guard.admit([number], 1.0)
        guard.admit(["often"], 1.0)
    guard.admit(["once"], 9.0)
    with pytest.raises(NormLimitError):
        guard.admit(["often"], 9.0)


def test_where_gradients_were_zero_any_other_is_accepted() -> None:
    kv = store(max_norm_ratio=2.0)
    kv.init("w", np.zeros(1))
    for _ in range(20):
        kv.push("w", np.zeros(1))
    kv.push("w", np.ones(1))
    np.testing.assert_array_equal(kv.pull("w"), [1])


def test_whole_numbers_do_not_count() -> None:
    kv = aiokv.LocalStore(max_norm=1.0, check_finite=True)
    kv.init({"n": np.zeros(1, np.int64), "w": np.zeros(1)})
    kv.push({"n": np.array([1_000]), "w": np.ones(1)})
    np.testing.assert_array_equal(kv.pull("n"), [1_000])


@pytest.mark.parametrize(
    ("limits", "error"), [({"max_norm": 10.0}, NormLimitError), ({"check_finite": True}, NotFiniteError)]
)
def test_rows_are_looked_at_too(limits: dict[str, Any], error: type[Exception]) -> None:
    kv = store(**limits)
    kv.init("t", RowSparse([0], np.zeros((1, 2), np.float32), (9, 2)))
    kv.push("t", RowSparse([7, 3], np.full((2, 2), 5, np.float32), (9, 2)))
    with pytest.raises(error, match="'t'"):
        kv.push("t", RowSparse([7], np.array([[0, np.nan]], np.float32), (9, 2)))
    rows = kv.row_sparse_pull("t", row_ids=[3, 7]).values
    np.testing.assert_array_equal(rows, np.full((2, 2), 5))


def test_sum_over_devices_is_what_counts() -> None:
    kv = store(max_norm=5.0)
    kv.init("w", np.zeros(1))
    kv.push("w", [np.array([30.0]), np.array([-26.0])])
    with pytest.raises(NormLimitError, match="norm of 6,"):
        kv.push("w", [np.array([3.0]), np.array([3.0])])


def test_gradient_counts_not_the_value_that_an_updater_makes_of_it() -> None:
    kv = aiokv.LocalStore(max_norm=5.0)
    kv.init("w", np.full(1, 1000.0))
    kv.set_updater(lambda key, received, stored: np.subtract(stored, received, out=stored))
    kv.push("w", np.array([5.0]))
    with pytest.raises(NormLimitError):
        kv.push("w", np.array([6.0]))
    np.testing.assert_array_equal(kv.pull("w"), [995])


@pytest.mark.parametrize("name", ["max_norm", "max_norm_ratio"])
@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_limit_that_cannot_be_is_refused(name: str, limit: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a number of at least 0") as caught:
        store(**{name: limit})
    assert caught.value.details["key"] == name
    with pytest.raises(ConfigError, match=f"{name} must be a number of at least 0"):
        load_config(environ={f"AIOKV_{name.upper()}": str(limit)})
