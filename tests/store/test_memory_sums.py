"""Sums that do not simply add up: low precisions, integers, means."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiokv.core.effects import Apply, Combine, Fold, Weigh
from aiokv.core.stimuli import Applied
from aiokv.errors import SumOverflowError, UpdateRefusedError
from aiokv.kernels import get_backend
from aiokv.optim import SGD, Accumulate, Assign, OwnRule
from aiokv.store.memory import ParameterStore
from aiokv.storing import perform


@pytest.fixture
def store() -> ParameterStore:
    return ParameterStore(get_backend("reference"))


def land(store: ParameterStore, values: Any, dtype: Any) -> int:
    array = np.array(values, dtype)
    slot, view = store.land(array.nbytes)
    view[:] = array.tobytes()
    return slot


def read(store: ParameterStore, dtype: Any, version: int = 1, key: str = "w") -> Any:
    value = store.acquire(key, 0, version)
    array = value.buffer.view(dtype).copy()
    store.release(value)
    return array


def update(store: ParameterStore, contributions: list[Any], dtype: Any, rule: Any = None, divisor: int = 1) -> Applied:
    """Sum contributions in order and apply them to zeros."""
    name = np.dtype(dtype).name
    store.install("w", 0, name, len(contributions[0]), land(store, np.zeros(len(contributions[0])), dtype))
    slots = [land(store, values, dtype) for values in contributions]
    for source in slots[1:]:
        store.fold(slots[0], source, name)
    applied = perform(store, Apply("w", 0, 1, slots[0], [], [], 1, rule or Assign(), divisor))
    assert isinstance(applied, Applied)
    assert store.open_slots == 0
    return applied


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_scenario_70_mean_of_low_precisions_does_not_overflow(store: ParameterStore, dtype: Any) -> None:
    # 7 times 10,000 is more than a float16 can hold.
    update(store, [[10_000.0]] * 7, dtype, divisor=7)
    assert read(store, dtype).tolist() == [dtype(10_000.0)]


def test_low_precisions_are_added_in_float32(store: ParameterStore) -> None:
    # In float16 2048 + 1 is 2048, however often 1 is added.
    update(store, [[2048.0], [1.0], [1.0]], np.float16, SGD(learning_rate=1.0))
    assert read(store, np.float16).tolist() == [-2050.0]


def test_sum_of_low_precisions_is_cut_like_its_slot(store: ParameterStore) -> None:
    for key, size in (("a", 1), ("w", 2)):
        store.install(key, 0, "float16", size, land(store, np.zeros(size), np.float16))
    total = land(store, [2048, 1, 2], np.float16)
    store.fold(total, land(store, [1, 1, 1], np.float16), "float16")
    store.split(total, [(-1, 2), (-2, 4)])
    store.fold(-1, land(store, [1], np.float16), "float16")
    for key, slot in (("a", -1), ("w", -2)):
        perform(store, Apply(key, 0, 1, slot, [], [], 1, Assign(), 1))
    assert read(store, np.float16, key="a").tolist() == [2050.0]
    assert read(store, np.float16).tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("dtype", "parts", "total"),
    [
        ("int32", [[2**30], [2**29]], 2**30 + 2**29),
        ("int64", [[2**62], [2**62 - 1]], 2**63 - 1),
        ("int8", [[100], [27]], 127),
    ],
)
def test_scenario_28_sums_of_integers_are_exact(
    store: ParameterStore, dtype: str, parts: list[list[int]], total: int
) -> None:
    assert update(store, parts, dtype).error is None
    assert read(store, dtype).tolist() == [total]


@pytest.mark.parametrize(
    ("dtype", "parts"), [("int8", [[100], [100]]), ("uint8", [[200], [100]]), ("int64", [[2**62]] * 3)]
)
def test_scenario_28_sum_that_does_not_fit_is_an_error_and_changes_nothing(
    store: ParameterStore, dtype: str, parts: list[list[int]]
) -> None:
    error = update(store, parts, dtype).error
    assert isinstance(error, SumOverflowError)
    assert error.details == {"key": "w", "round": 1}
    assert read(store, dtype).tolist() == [0]


def test_mean_is_made_before_the_rule(store: ParameterStore) -> None:
    update(store, [[1.0], [2.0], [6.0]], np.float32, SGD(learning_rate=0.5), divisor=3)
    assert read(store, np.float32).tolist() == [-1.5]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_median_takes_the_place_of_the_sum(store: ParameterStore, dtype: Any) -> None:
    name = np.dtype(dtype).name
    store.install("w", 0, name, 2, land(store, [0, 0], dtype))
    slots = [land(store, values, dtype) for values in ([1, 9], [1000, 7], [3, -1000])]
    perform(store, Combine(slots[0], slots[1:], name, "median"))
    perform(store, Apply("w", 0, 1, slots[0], [], [], 1, Assign(), 1))
    assert read(store, dtype).tolist() == [3, 7]
    assert store.open_slots == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_contributions_are_scaled_before_they_are_added(store: ParameterStore, dtype: Any) -> None:
    name = np.dtype(dtype).name
    store.install("w", 0, name, 2, land(store, [0, 0], dtype))
    first, second, third = (land(store, values, dtype) for values in ([6, 3], [8, 0], [1, 2]))
    perform(store, Weigh(second, name, 0.5))
    perform(store, Fold(first, second, name))
    perform(store, Weigh(third, name, 0.25))
    perform(store, Fold(first, third, name))
    perform(store, Apply("w", 0, 1, first, [], [], 1, Assign(), 1))
    assert read(store, dtype).tolist() == [10.25, 3.5]
    assert store.open_slots == 0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_median_is_that_of_scaled_contributions(store: ParameterStore, dtype: Any) -> None:
    name = np.dtype(dtype).name
    store.install("w", 0, name, 1, land(store, [0], dtype))
    slots = [land(store, [value], dtype) for value in (1, 12, 4)]
    perform(store, Weigh(slots[1], name, 0.25))
    perform(store, Combine(slots[0], slots[1:], name, "median"))
    perform(store, Apply("w", 0, 1, slots[0], [], [], 1, Assign(), 1))
    assert read(store, dtype).tolist() == [3]


def test_low_precisions_are_scaled_in_float32(store: ParameterStore) -> None:
    # A third of 2**-24, the smallest float16, is 0 in float16; the rule multiplies it by 3.
    store.install("w", 0, "float16", 1, land(store, [0], np.float16))
    slot = land(store, [2.0**-24], np.float16)
    perform(store, Weigh(slot, "float16", 1 / 3))
    perform(store, Apply("w", 0, 1, slot, [], [], 1, Accumulate(rescale_grad=3.0), 1))
    assert read(store, np.float16).tolist() == [2.0**-24]


class Broken(OwnRule, tag="broken", frozen=True):
    """Raises."""

    def compute(self, weight: Any, gradient: Any, state: Any, step: Any) -> Any:
        raise ZeroDivisionError("of the user's own")


def test_rule_that_raises_changes_nothing_and_says_what(store: ParameterStore) -> None:
    error = update(store, [[1.0]], np.float32, Broken()).error
    assert isinstance(error, UpdateRefusedError)
    assert "ZeroDivisionError: of the user's own" in str(error)
    assert read(store, np.float32).tolist() == [0.0]
