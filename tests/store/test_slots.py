"""A server's slots: what lands there, is added up and cut, and that every buffer is used again."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.kernels import get_backend
from aiokv.store.pool import Pool
from aiokv.store.slots import Slots

VALUES = [1.0, 2.0, 3.0]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def store(pool: Pool) -> Slots:
    return Slots(get_backend("reference"), pool)


def land(store: Slots, values: list[float]) -> int:
    """Return a slot that holds these values in float32."""
    array = np.array(values, np.float32)
    slot, view = store.land(array.nbytes)
    view[:] = array.tobytes()
    return slot


def taken(store: Slots, slot: int) -> list[float]:
    """Return the values in a slot, and free it."""
    values: list[float] = np.frombuffer(store.content(slot), np.float32).tolist()
    return values


def test_fold_adds_and_frees(store: Slots) -> None:
    target, source = land(store, [1, 2]), land(store, [10, 20])
    store.fold(target, source, "float32")
    assert not store.has(source)
    assert taken(store, target) == [11, 22]
    assert store.open_slots == 0


def test_a_slot_is_cut_into_parts(store: Slots) -> None:
    store.split(land(store, VALUES), [(-1, 4), (-2, 8)])
    assert taken(store, -1) == [1]
    assert taken(store, -2) == [2, 3]
    assert store.open_slots == 0


def test_slot_that_is_freed_while_it_is_sent_is_idle_afterwards(store: Slots, pool: Pool) -> None:
    slot = land(store, VALUES)
    view, sent = store.lend(slot)
    store.free(slot)
    assert (store.open_slots, pool.idle_bytes) == (0, 0)
    assert np.frombuffer(view, np.float32).tolist() == VALUES
    sent()
    assert pool.idle_bytes == 12


def test_rows_of_several_contributions_follow_each_other(store: Slots) -> None:
    slots = [land(store, [1.0]), land(store, [2.0, 3.0])]
    assert np.frombuffer(store.joined(slots), np.float32).tolist() == VALUES
