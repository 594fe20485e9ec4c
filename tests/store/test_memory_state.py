"""A server's memory: what the update rule keeps stays with its chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv.kernels import get_backend
from aiokv.optim import SGD, Adam, Assign, Optimizer
from aiokv.store.memory import ParameterStore

RULES = [SGD(learning_rate=0.1, momentum=0.9), Adam(learning_rate=0.1)]


@pytest.fixture
def store() -> ParameterStore:
    return ParameterStore(get_backend("reference"))


def landed(store: ParameterStore, *values: float) -> int:
    """Return a slot that holds these float32 values."""
    array = np.array(values, np.float32)
    slot, view = store.land(array.nbytes)
    view[:] = array.tobytes()
    return slot


def update(store: ParameterStore, key: str, start: int, version: int, slot: int | None, rule: Any = None) -> None:
    store.apply(key, start, version, slot, rule or Assign(), version, 1)


def read(store: ParameterStore, key: str, version: int) -> Any:
    value = store.acquire(key, 0, version)
    array = value.buffer.view(np.float32).copy()
    store.release(value)
    return array


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_divided_chunks_go_on_where_they_were(store: ParameterStore, rule: Optimizer) -> None:
    store.reset_states()
    for key in ("whole", "other"):
        store.install(key, 0, "float32", 3, landed(store, 1, 2, 3))
        for version in (1, 2):
            update(store, key, 0, version, landed(store, 0.5, -0.25, 1), rule)
    store.divide("other", 0, [("a", 1), ("b", 2)])
    update(store, "whole", 0, 3, landed(store, 1, 0, 2), rule)
    update(store, "a", 0, 3, landed(store, 1), rule)
    update(store, "b", 0, 3, landed(store, 0, 2), rule)
    parts = np.concatenate([read(store, "a", 3), read(store, "b", 3)])
    np.testing.assert_array_equal(parts, read(store, "whole", 3))


def test_a_new_rule_starts_without_state(store: ParameterStore) -> None:
    """The first step of Adam is the learning rate."""
    store.install("w", 0, "float32", 1, landed(store, 0))
    rule: Optimizer = SGD(learning_rate=0.0, momentum=0.9)
    store.reset_states()
    for version in (1, 2):
        update(store, "w", 0, version, landed(store, 1), rule)
    rule = Adam(learning_rate=0.25)
    store.reset_states()
    update(store, "w", 0, 3, landed(store, 1), rule)
    np.testing.assert_allclose(read(store, "w", 3), [-0.25], rtol=1e-6)


def test_an_update_leaves_no_slot_behind(store: ParameterStore) -> None:
    store.install("w", 0, "float32", 1, landed(store, 0))
    rule = Adam()
    store.reset_states()
    update(store, "w", 0, 1, landed(store, 1), rule)
    assert store.open_slots == 0
