"""What is put in the place of a chunk's value and state: all of it, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv.errors import DataError
from aiokv.initializers import Zeros
from aiokv.kernels import get_backend
from aiokv.optim import make_optimizer
from aiokv.store.memory import ParameterStore
from aiokv.types import TensorSpec

MOMENTUM = make_optimizer("sgd", {"momentum": 0.5, "learning_rate": 1.0})
OLD = np.arange(3, dtype="float32")


def landed(store: ParameterStore, array: Any) -> int:
    slot, view = store.land(array.nbytes)
    view[:] = array.tobytes()
    return slot


@pytest.fixture
def store() -> ParameterStore:
    """Return a store with key "w" of three elements and table "t" of ten rows of two, updated once."""
    store = ParameterStore(get_backend("reference"))
    store.install("w", 0, "float32", 3, landed(store, OLD))
    store.apply("w", 0, 1, landed(store, np.ones(3, "float32")), MOMENTUM, 1, 1)
    store.install_rows("t", 0, TensorSpec((10, 2), "float32"), Zeros(), None, lazy=True)
    rows = np.concatenate([np.array([4]).view(np.uint8), np.ones(2, "float32").view(np.uint8)])
    store.apply_rows("t", 0, 1, [landed(store, rows)], MOMENTUM, 1, 1)
    return store


def value(store: ParameterStore) -> Any:
    held = store.acquire("w", 0, 1)
    store.release(held)
    return held.buffer.view("float32").tolist()


def test_a_value_that_is_being_sent_stays_as_it_is(store: ParameterStore) -> None:
    sent = store.acquire("w", 0, 1)
    store.restore("w", 0, 0, {"value": np.zeros(3, "float32")}, 5, MOMENTUM)
    assert sent.buffer.view("float32").tolist() == [-1, 0, 1]
    assert value(store) == [0, 0, 0]
    assert store.steps("w", 0) == 5


def test_a_restored_state_can_be_updated(store: ParameterStore) -> None:
    """A velocity of -4 becomes -0.5 * 4 - 1."""
    arrays, _ = store.saved("w", 0, 1, "w", 0)
    (name,) = set(arrays) - {"value"}
    store.restore("w", 0, 0, {name: np.full(3, -4, "float32")}, 1, MOMENTUM)
    store.apply("w", 0, 2, landed(store, np.ones(3, "float32")), MOMENTUM, 2, 1)
    assert store.acquire("w", 0, 2).buffer.view("float32").tolist() == [-4, -3, -2]


@pytest.mark.parametrize(
    "saved",
    [
        {"value": np.zeros(4, "float32")},
        {"value": np.zeros(3, "float64")},
        {"value": np.zeros(3, "float32"), "variance": np.zeros(3, "float32")},
    ],
    ids=["another length", "another dtype", "the state of another rule"],
)
def test_arrays_that_can_not_be_the_chunks_change_nothing(store: ParameterStore, saved: dict[str, Any]) -> None:
    before = store.saved("w", 0, 1, "w", 0)[0]
    with pytest.raises(DataError, match="'w'"):
        store.restore("w", 0, 0, saved, 7, MOMENTUM)
    after = store.saved("w", 0, 1, "w", 0)[0]
    assert {name: array.tolist() for name, array in after.items()} == {k: v.tolist() for k, v in before.items()}
    assert store.steps("w", 0) == 1


@pytest.mark.parametrize(
    "saved",
    [
        {"value": np.zeros((1, 2), "float32")},
        {"ids": np.array([1, 2]), "value": np.zeros((1, 2), "float32")},
        {"ids": np.array([2, 1]), "value": np.zeros((2, 2), "float32")},
        {"ids": np.array([1], "int32"), "value": np.zeros((1, 2), "float32")},
        {"ids": np.array([1]), "value": np.zeros((1, 2), "float32"), "variance": np.zeros((1, 2), "float32")},
    ],
    ids=["no ids", "too few rows", "decreasing ids", "ids of another dtype", "the state of another rule"],
)
def test_rows_that_can_not_be_the_tables_change_nothing(store: ParameterStore, saved: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="'t'"):
        store.restore("t", 0, 0, saved, 7, MOMENTUM)
    assert store.table("t", 0).num_rows == 1
    assert store.table("t", 0).get(np.array([4])).tolist() == [[-1, -1]]
    assert store.steps("t", 0) == 1


def test_what_is_there_is_described_and_single_arrays_are_read(store: ParameterStore) -> None:
    """A table's row has an id, two elements, and a velocity for each."""
    (name,) = set(store.described("w", 0, "w")) - {"value"}
    assert store.described("w", 0, "w") == {"value": ("float32", 3), name: ("float32", 3)}
    assert store.described("t", 0, "t") == {"ids": ("int64", 1), "value": ("float32", 2), name: ("float32", 2)}
    assert store.saved("w", 0, 1, "w", 0, [name])[0].keys() == {name}
    assert store.saved("t", 0, 1, "t", 0, ["ids"])[0]["ids"].tolist() == [4]
    assert store.saved("t", 0, 1, "t", 0, ["value"])[0].keys() == {"value"}


def test_a_chunk_that_begins_with_a_state_is_zero_until_then(store: ParameterStore) -> None:
    store.install("new", 0, "float32", 2, None)
    assert store.acquire("new", 0, 0).buffer.view("float32").tolist() == [0, 0]
