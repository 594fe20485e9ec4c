"""What a server sends to its standby out of its memory: sums that are updated meanwhile, and whole chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv.checkpoint.saving import STEPS
from aiokv.checkpoint.tensorfile import pack, unpack
from aiokv.core import effects as ef
from aiokv.core.stimuli import Restored
from aiokv.errors import DataError, SumOverflowError
from aiokv.initializers import Zeros
from aiokv.kernels import get_backend
from aiokv.optim import SGD, Assign
from aiokv.store.memory import ParameterStore
from aiokv.store.pool import Pool
from aiokv.storing import copy_bytes, perform
from aiokv.types import STANDBY, TensorSpec

VALUES = [1.0, 2.0, 3.0]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def store(pool: Pool) -> ParameterStore:
    made = ParameterStore(get_backend("reference"), pool)
    made.install("w", 0, "float32", 3, None)
    return made


def land(store: ParameterStore, values: Any, dtype: Any = np.float32) -> int:
    array = np.array(values, dtype)
    slot, view = store.land(array.nbytes)
    view[:] = array.tobytes()
    return slot


def read(store: ParameterStore, version: int) -> Any:
    value = store.acquire("w", 0, version)
    array = value.buffer.view(np.float32).tolist()
    store.release(value)
    return array


@pytest.mark.parametrize(
    ("rule", "divisor", "value"),
    [
        (Assign(), 1, [1, 2, 3]),
        (Assign(), 2, [0.5, 1, 1.5]),
        (SGD(learning_rate=1.0), 1, [-1, -2, -3]),
        (SGD(learning_rate=1.0), 2, [-0.5, -1, -1.5]),
    ],
    ids=["kept", "mean", "updated", "updated with the mean"],
)
def test_a_sum_that_is_being_sent_stays_as_it_is(store: ParameterStore, rule: Any, divisor: int, value: Any) -> None:
    slot = land(store, VALUES)
    first, first_sent = store.lend(slot)
    second, second_sent = store.lend(slot)
    store.apply("w", 0, 1, slot, rule, 1, divisor)
    assert read(store, 1) == value
    # The next update must not get its memory.
    store.apply("w", 0, 2, land(store, [7.0, 7.0, 7.0]), Assign(), 2, 1)
    first_sent()
    store.apply("w", 0, 3, land(store, [8.0, 8.0, 8.0]), Assign(), 3, 1)
    assert np.frombuffer(first, np.float32).tolist() == VALUES
    assert np.frombuffer(second, np.float32).tolist() == VALUES
    second_sent()


@pytest.mark.parametrize("rule", [Assign(), SGD(learning_rate=1.0)], ids=["kept", "updated"])
def test_memory_of_sums_that_were_sent_is_used_again(store: ParameterStore, pool: Pool, rule: Any) -> None:
    taken = []
    for version in range(1, 6):
        slot = land(store, VALUES)
        view, sent = store.lend(slot)
        taken.append(view.obj)
        store.apply("w", 0, version, slot, rule, version, 1)
        sent()
    assert len({id(buffer) for buffer in taken}) < len(taken)
    assert pool.idle_bytes <= 3 * 12


def test_sums_of_low_precisions_are_sent_in_the_one_that_they_have(store: ParameterStore) -> None:
    """1 + 1/2048 is not a float16, but a float32."""
    store.install("h", 0, "float16", 1, land(store, [1.0], np.float16))
    slot = land(store, [1.0], np.float16)
    store.fold(slot, land(store, [1 / 2048], np.float16), "float16")
    view, sent = store.lend(slot)
    store.apply("h", 0, 1, slot, SGD(learning_rate=1.0), 1, 1)
    assert np.frombuffer(view, np.float32).tolist() == [1 + 1 / 2048]
    sent()
    other = ParameterStore(get_backend("reference"))
    other.install("h", 0, "float16", 1, land(other, [1.0], np.float16))
    copied = land(other, np.frombuffer(view, np.float32))
    other.widen(copied, "float16")
    other.apply("h", 0, 1, copied, SGD(learning_rate=1.0), 1, 1)
    values = [one.acquire("h", 0, 1).buffer.view(np.float16).tolist() for one in (store, other)]
    assert values == [[-1 / 2048], [-1 / 2048]]


def test_mean_of_one_low_precision_push_is_rounded_once_while_it_is_sent(store: ParameterStore) -> None:
    store.install("h", 0, "float16", 1, None)
    slot = land(store, [1.0], np.float16)
    _, sent = store.lend(slot)
    store.apply("h", 0, 1, slot, SGD(learning_rate=3.0), 1, 3)
    assert store.acquire("h", 0, 1).buffer.view(np.float16).tolist() == [-1.0]
    sent()


def test_sum_that_does_not_fit_is_refused_after_it_was_sent(store: ParameterStore) -> None:
    store.install("n", 0, "int8", 1, None)
    slot = land(store, [100], np.int8)
    store.fold(slot, land(store, [100], np.int8), "int8")
    _, sent = store.lend(slot)
    with pytest.raises(SumOverflowError):
        store.apply("n", 0, 1, slot, Assign(), 1, 1)
    sent()


# --- whole chunks with the value before ---


def make_table(store: ParameterStore) -> None:
    store.install_rows("t", 0, TensorSpec((4, 2), "float32"), Zeros(), None, lazy=True)


def restored(store: ParameterStore, key: str, arrays: dict[str, Any]) -> Any:
    """Restore a chunk with the value of version 1 in the place of a current version 2."""
    content = np.frombuffer(pack(arrays, {STEPS: "2"}), np.uint8)
    store.keep(key, 0, 2)
    done = perform(store, ef.Restore(STANDBY, 0, key, 0, 0, Assign(), land(store, content, np.uint8), 1))
    assert isinstance(done, Restored)
    return done.error


def test_the_value_before_is_kept(store: ParameterStore) -> None:
    values, before = np.array(VALUES, "f4"), np.array([7, 8, 9], "f4")
    assert restored(store, "w", {"value": values, "before/value": before}) is None
    assert (read(store, 1), read(store, 2)) == ([7, 8, 9], VALUES)
    copied = unpack(copy_bytes(store, ef.StoredCopy("w", 0, 2, 12, 1)), "w")[0]
    assert copied["before/value"].tolist() == [7, 8, 9]
    store.retire("w", 0, [1])
    assert "before/value" not in unpack(copy_bytes(store, ef.StoredCopy("w", 0, 2, 12)), "w")[0]


def test_rows_of_the_value_before_are_kept(store: ParameterStore) -> None:
    make_table(store)
    ids, some = np.array([1, 2]), np.array([1])
    rows, before = np.ones((2, 2), "f4"), np.full((1, 2), 5, "f4")
    arrays = {"ids": ids, "value": rows, "before/ids": some, "before/value": before}
    assert restored(store, "t", arrays) is None
    assert store.get_rows("t", 0, 1, ids.tobytes()).tolist() == [[5, 5], [1, 1]]
    assert store.get_rows("t", 0, 2, ids.tobytes()).tolist() == [[1, 1], [1, 1]]
    copied = unpack(copy_bytes(store, ef.StoredCopy("t", 0, 2, 0, 1)), "t")[0]
    assert {name: array.tolist() for name, array in copied.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


@pytest.mark.parametrize(
    "before", [{}, {"before/value": np.zeros(2, "f4")}, {"before/value": np.zeros(3, "f8")}], ids=str
)
def test_a_value_before_that_can_not_be_the_chunk_s_is_refused(store: ParameterStore, before: dict[str, Any]) -> None:
    assert isinstance(restored(store, "w", {"value": np.array(VALUES, "f4"), **before}), DataError)


@pytest.mark.parametrize(
    "before",
    [{}, {"before/ids": np.array([1]), "before/value": np.zeros((2, 2), "f4")}],
    ids=["none", "another number"],
)
def test_rows_before_that_can_not_be_the_table_s_are_refused(store: ParameterStore, before: dict[str, Any]) -> None:
    make_table(store)
    arrays = {"ids": np.array([1]), "value": np.ones((1, 2), "f4"), **before}
    assert isinstance(restored(store, "t", arrays), DataError)
