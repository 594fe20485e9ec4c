"""A server's memory: what is being sent never changes, and every buffer is used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv.kernels import get_backend
from aiokv.optim import SGD, Assign
from aiokv.store.memory import ParameterStore
from aiokv.store.pool import Pool


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


def read(store: ParameterStore, version: int) -> Any:
    value = store.acquire("w", 0, version)
    array = value.buffer.view(np.float32).copy()
    store.release(value)
    return array


def test_a_value_that_is_being_sent_never_changes(store: ParameterStore) -> None:
    store.install("w", 0, "float32", 2, landed(store, 1, 1))
    reading = store.acquire("w", 0, 0)
    for version in range(1, 5):
        update(store, "w", 0, version, landed(store, 100 * version, 0))
    np.testing.assert_array_equal(reading.buffer.view(np.float32), [1, 1])
    store.release(reading)


def test_value_before_the_current_one_can_be_sent_while_it_is_kept(store: ParameterStore) -> None:
    store.install("w", 0, "float32", 2, landed(store, 1, 1))
    store.apply("w", 0, 1, landed(store, 2, 3), SGD(learning_rate=1.0), 1, 1, keep=True)
    np.testing.assert_array_equal(read(store, 0), [1, 1])
    np.testing.assert_array_equal(read(store, 1), [-1, -2])
    store.retire("w", 0, [0])
    with pytest.raises(KeyError):
        store.acquire("w", 0, 0)


def test_buffers_are_used_again_when_their_readers_are_done(store: ParameterStore) -> None:
    store.install("w", 0, "float32", 2, landed(store, 1, 1))
    first, second = store.acquire("w", 0, 0), store.acquire("w", 0, 0)
    old: object = first.buffer
    update(store, "w", 0, 1, landed(store, 2, 2))
    store.release(first)
    taken = [store.land(8)[1].obj for _ in range(3)]
    assert all(buffer is not old for buffer in taken)
    store.release(second)
    assert store.land(8)[1].obj is old


def test_sgd_keeps_momentum_per_chunk(store: ParameterStore) -> None:
    """w0 = 1, gradients .5, .5, lr .1, momentum .9: .95, .855 (by hand)."""
    rule = SGD(learning_rate=0.1, momentum=0.9)
    store.reset_states()
    for start in (0, 2):
        store.install("w", start, "float32", 2, landed(store, 1, 1))
    for version in (1, 2):
        update(store, "w", 0, version, landed(store, 0.5, 0.5), rule)
    update(store, "w", 2, 1, landed(store, 0.5, 0.5), rule)
    np.testing.assert_allclose(read(store, 2), [0.855, 0.855], rtol=1e-6)
    value = store.acquire("w", 2, 1)
    np.testing.assert_allclose(value.buffer.view(np.float32), [0.95, 0.95], rtol=1e-6)


def test_chunks_without_elements(store: ParameterStore) -> None:
    store.install("w", 0, "float32", 0, None)
    update(store, "w", 0, 1, None)
    assert read(store, 1).shape == (0,)


def test_a_pool_is_bounded() -> None:
    pool = Pool(max_idle_bytes=100)
    buffers = [pool.take(60) for _ in range(3)]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.idle_bytes == 60
    assert pool.take(60) is buffers[0]
    assert pool.idle_bytes == 0


def test_a_chunk_is_divided_with_its_value_and_momentum(store: ParameterStore) -> None:
    """w0 = 1, gradients .5, .5, lr .1, momentum .9: .95, .855 (by hand), although the chunk is divided between."""
    rule = SGD(learning_rate=0.1, momentum=0.9)
    store.reset_states()
    store.install("a", -1, "float32", 3, landed(store, 1, 1, 2))
    update(store, "a", -1, 1, landed(store, 0.5, 0.5, 0), rule)
    reading = store.acquire("a", -1, 1)
    store.divide("a", -1, [("a", 1), ("w", 2)])
    np.testing.assert_allclose(read(store, 1), [0.95, 2], rtol=1e-6)
    update(store, "w", 0, 2, landed(store, 0.5, 0), rule)
    np.testing.assert_allclose(read(store, 2), [0.855, 2], rtol=1e-6)
    np.testing.assert_allclose(reading.buffer.view(np.float32), [0.95, 0.95, 2], rtol=1e-6)
    store.release(reading)
