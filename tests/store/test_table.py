"""A server's rows: look-ups in memory that grows, first values, sums and updates."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from aiokv.core.effects import JoinRows
from aiokv.errors import OptimizerError, SumOverflowError
from aiokv.initializers import Initializer, Normal, Uniform, Zeros
from aiokv.kernels import get_backend
from aiokv.optim import SGD, Accumulate, Adam, Assign, GroupAdaGrad, OwnRule
from aiokv.store import table as table_module
from aiokv.store.first_rows import FirstRows
from aiokv.store.memory import ParameterStore
from aiokv.store.table import RowIndex, Table, span_of
from aiokv.storing import perform
from aiokv.types import TensorSpec

BACKEND = get_backend("reference")
NOTHING: tuple[Any, Any] = (np.empty(0, np.int64), np.empty((0, 1), np.float32))


def make(
    rows: int = 10, width: int = 1, dtype: str = "float32", initializer: Initializer | None = None, **options: Any
) -> Table:
    options = {"lazy": True} | options
    return Table("t", 0, TensorSpec((rows, width), dtype), initializer or Zeros(), **options)


def rows(table: Table, numbers: dict[int, float]) -> tuple[Any, Any]:
    """Return a push of rows with one number in all elements of each."""
    ids = np.array(sorted(numbers), np.int64)
    values = np.array([[numbers[row]] * table.row_size for row in ids.tolist()], table.dtype)
    return ids, values.reshape(ids.size, table.row_size)


def update(table: Table, *numbers: dict[int, float], rule: Any = None, clock: int = 1, divisor: int = 1) -> None:
    pushes = [rows(table, each) for each in numbers]
    table.apply(pushes, rule or Accumulate(), clock, divisor, BACKEND)


def read(table: Table, *ids: int) -> list[float]:
    """Return the first element of rows."""
    return [float(value) for value in table.get(np.array(ids, np.int64))[:, 0]]


@pytest.mark.parametrize(
    ("ids", "span"), [([], None), ([5], (5, 5)), ([1, 5, 9], (1, 9)), ([1, 1], None), ([1, 9, 5], None)]
)
def test_span(ids: list[int], span: Any) -> None:
    assert span_of(np.array(ids, np.int64)) == span


@given(batches=hs.lists(hs.sets(hs.integers(0, 60)), max_size=12))
def test_every_row_is_found_where_it_was_put(batches: list[set[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "MIN_RECENT", 3)
        index = RowIndex()
        expected: dict[int, int] = {}
        for batch in batches:
            new = sorted(batch - set(expected))
            expected |= {row: len(expected) + i for i, row in enumerate(new)}
            index.add(np.array(new, np.int64))
            places = index.find(np.arange(61))
            assert places.tolist() == [expected.get(row, -1) for row in range(61)]
            assert len(index) == len(expected)


def test_rows_that_are_not_there_read_as_zero_and_take_no_memory() -> None:
    table = make(10**12)
    assert read(table, 0, 10**12 - 1) == [0, 0]
    assert table.num_rows == 0


def test_pushes_are_added_in_their_order_and_to_what_is_there() -> None:
    """1 + 1e8 - 1e8 in float32 is 0; backwards it is 1."""
    table = make()
    table.set(*rows(table, {2: 5, 7: 7}))
    update(table, {2: 1, 3: 1}, {3: 1e8}, {0: 4, 3: -1e8})
    assert read(table, 0, 2, 3, 7, 9) == [4, 6, 0, 7, 0]
    assert table.num_rows == 4


def test_assign_replaces_the_rows_that_were_pushed_and_no_others() -> None:
    table = make()
    table.set(*rows(table, {2: 5, 7: 7}))
    update(table, {2: 1}, {2: 2}, rule=Assign())
    assert read(table, 2, 7) == [3, 7]


def test_scenario_45_lazy_and_dense_momentum() -> None:
    """sgd, momentum .9, lr .1; row 0 gets 1 in round 1 only (by hand): lazy -.1, -.1; dense -.1, -.19."""
    rule = SGD(learning_rate=0.1, momentum=0.9)
    for lazy, second in ((True, -0.1), (False, -0.19)):
        table = make(lazy=lazy)
        update(table, {0: 1}, rule=rule)
        assert read(table, 0) == pytest.approx([-0.1])
        update(table, {}, rule=rule)
        assert read(table, 0) == pytest.approx([second])


def test_the_dense_rule_is_that_of_a_dense_key_on_all_rows_that_are_there() -> None:
    """Adam with weight decay over six rounds, on a row that gets a gradient in some of them only."""
    rule = Adam(learning_rate=0.1, wd=0.01)
    table = make(lazy=False)
    table.set(*rows(table, {4: 2.0}))
    weight = np.array([2.0], np.float32)
    state = BACKEND.new_state(rule, weight)
    for count, gradient in enumerate((1, 0, 0, -2, 0, 0), 1):
        update(table, {4: gradient} if gradient else {1: 1}, rule=rule, clock=count)
        total = np.array([gradient], np.float32)
        BACKEND.update(rule, weight, total, state, rule.step_for("t", count=count, num_update=count))
        weight = total
        assert read(table, 4) == weight.tolist()


def test_a_row_that_begins_late_has_state_of_its_own() -> None:
    """Momentum .5, lr 1: the row that is new in round 2 moves by its gradient alone (by hand)."""
    rule = SGD(learning_rate=1.0, momentum=0.5)
    table = make()
    update(table, {1: 1}, rule=rule)
    update(table, {1: 1, 2: 1}, rule=rule)
    update(table, {2: 1}, rule=rule)
    assert read(table, 1, 2) == [-2.5, -2.5]


def test_a_rule_that_keeps_one_number_for_each_row() -> None:
    """GroupAdaGrad: h = mean of g^2 = 9, w = -lr * g / (sqrt(h) + eps) = -lr (by hand)."""
    table = make(width=4)
    rule = GroupAdaGrad(learning_rate=0.5)
    update(table, {3: 3.0}, rule=rule)
    update(table, {5: 2.0}, rule=rule)
    np.testing.assert_allclose(table.get(np.array([3, 5])), -0.5, rtol=1e-5)


def test_low_precision_has_a_master_copy_and_is_summed_in_float32() -> None:
    """2048 + 1 is 2048 in float16: neither the sum of three pushes nor a thousand small steps may get stuck there."""
    table = make(dtype="float16")
    update(table, {0: 2048}, {0: 1}, {0: 1}, rule=Assign())
    assert read(table, 0) == [2050]
    table = make(dtype="float16")
    table.set(*rows(table, {0: 2048}))
    for _ in range(10):
        update(table, {0: -1}, rule=SGD(learning_rate=1.0, multi_precision=True))
    assert read(table, 0) == [2058]


def test_whole_numbers_are_exact_and_a_sum_that_does_not_fit_changes_nothing() -> None:
    table = make(dtype="int8")
    update(table, {1: 100, 2: 1}, rule=Assign())
    with pytest.raises(SumOverflowError):
        update(table, {1: 100}, {1: 100}, rule=Assign())
    assert read(table, 1, 2) == [100, 1]


def test_a_mean_divides_the_sum() -> None:
    table = make()
    update(table, {1: 1}, {1: 2}, {2: 3}, divisor=3)
    assert read(table, 1, 2) == [1, 1]


def test_factors_multiply_each_push_by_its_own_one() -> None:
    table = make()
    pushes = [rows(table, {1: 1, 2: 4}), rows(table, {1: 2})]
    table.apply(pushes, Accumulate(), 1, 1, BACKEND, [0.5, 1.0])
    assert read(table, 1, 2) == [2.5, 2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factors_of_low_precisions_round_nothing_before_the_sum(dtype: str) -> None:
    """Three times a third and -1 is 0 in float32; a third is off by 8e-5 in float16, and by 6e-4 in bfloat16."""
    table = make(dtype=dtype)
    pushes = [rows(table, {1: number}) for number in (1, 1, 1, -1)]
    table.apply(pushes, Accumulate(), 1, 1, BACKEND, [1 / 3, 1 / 3, 1 / 3, 1.0])
    assert read(table, 1) == [0]


class Broken(OwnRule, tag="broken_on_rows", frozen=True):
    """A rule that fails."""

    arrays = ("momentum",)

    def compute(self, *_: Any) -> Any:
        raise ValueError("no")


def test_after_an_update_that_fails_all_is_as_it_was() -> None:
    table = make()
    rule = SGD(learning_rate=1.0, momentum=0.5)
    update(table, {1: 1}, rule=rule)
    with pytest.raises(ValueError, match="no"):
        update(table, {1: 1, 2: 2}, rule=Broken())
    assert table.num_rows == 1
    update(table, {1: 1}, rule=rule)
    assert read(table, 1) == [-2.5]


def test_another_rules_state_is_forgotten() -> None:
    table = make()
    update(table, {1: 1}, rule=SGD(learning_rate=1.0, momentum=0.5))
    with pytest.raises((OptimizerError, KeyError)):
        update(table, {1: 1}, rule=Adam())
    table.forget_state()
    update(table, {1: 1}, rule=SGD(learning_rate=1.0, momentum=0.5))
    assert read(table, 1) == [-2]


@pytest.mark.parametrize("shape", [(4,), (4, 0), (0, 3), (4, 2, 3)])
@pytest.mark.parametrize("rule", [Adam(), GroupAdaGrad(), Assign()], ids=lambda rule: rule.name)
def test_rows_of_any_shape(shape: tuple[int, ...], rule: Any) -> None:
    table = Table("t", 0, TensorSpec(shape, "float32"), Zeros(), lazy=False)
    ids = np.arange(min(2, shape[0]))
    values = np.ones((ids.size, table.row_size), np.float32)
    for count in (1, 2):
        table.apply([(ids, values), (ids[:0], values[:0])], rule, count, 1, BACKEND)
    assert table.get(ids).shape == values.shape
    assert table.num_rows == ids.size


# --- first values ---


@pytest.mark.parametrize(
    "initializer", [Normal(scale=2.0, seed=7), Uniform(scale=2.0, seed=7)], ids=["normal", "uniform"]
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_rows_first_value_does_not_depend_on_what_else_is_read(initializer: Initializer, dtype: str) -> None:
    ids = np.array([0, 5, 16_777_217, 10**9 - 1, 2**62])
    together = FirstRows(initializer, "t", 3, np.dtype(dtype)).make(ids)
    assert together.dtype == dtype
    for row, values in zip(ids, together, strict=True):
        alone = FirstRows(initializer, "t", 3, np.dtype(dtype)).make(np.array([row]))
        np.testing.assert_array_equal(alone[0], values)
    assert len({tuple(values) for values in together.tolist()}) == ids.size


@pytest.mark.parametrize("other", [("u", 7), ("t", 8), (1, 7), ("1", 7)], ids=str)
def test_another_key_or_seed_gives_other_numbers(other: tuple[Any, int]) -> None:
    ids = np.arange(3)
    mine = FirstRows(Normal(seed=7), "t", 4, np.dtype(np.float32)).make(ids)
    assert not np.any(mine == FirstRows(Normal(seed=other[1]), other[0], 4, np.dtype(np.float32)).make(ids))


def test_first_values_are_numpys_philox_numbers() -> None:
    """A promise to those who load such a table elsewhere: key [seed, hash of the name], counter [0, row, 0, 0]."""
    name = int.from_bytes(bytes.fromhex("0fcb9ff830f39fc3"), "little")  # blake2b of "'t'", 8 bytes
    bits = np.random.Philox(key=[7, name], counter=[0, 123, 0, 0])
    expected = np.float32(0.5) * np.random.Generator(bits).standard_normal(4, np.float32)
    made = FirstRows(Normal(scale=0.5, seed=7), "t", 4, np.dtype(np.float32)).make(np.array([123]))
    np.testing.assert_array_equal(made[0], expected)


def test_numbers_are_distributed_as_the_name_says() -> None:
    """Mean and standard deviation of 40,000 numbers: 0 and the scale, or the scale / sqrt(3), to within 2 %."""
    ids = np.arange(400)
    normal = FirstRows(Normal(scale=2.0), "t", 100, np.dtype(np.float64)).make(ids)
    uniform = FirstRows(Uniform(scale=2.0), "t", 100, np.dtype(np.float64)).make(ids)
    assert np.abs(uniform).max() <= 2
    for numbers, deviation in ((normal, 2.0), (uniform, 2 / 3**0.5)):
        assert abs(numbers.mean()) < 0.02 * deviation
        assert numbers.std() == pytest.approx(deviation, rel=0.02)


def test_an_update_begins_from_the_first_value() -> None:
    table = make(initializer=Normal(scale=1.0))
    before = read(table, 1, 2)
    update(table, {1: 4})
    assert read(table, 1, 2) == [np.float32(before[0]) + np.float32(4), before[1]]


def test_scenario_76_memory_is_that_of_the_rows_that_were_touched() -> None:
    """A table of 10^9 rows of 64 floats, which would be 256 GB; 10,000 rows with momentum are 5 MB."""
    table = make(10**9, 64, initializer=Normal(seed=1))
    rule = SGD(momentum=0.9)
    ids = np.arange(10_000) * 99_991
    tracemalloc.start()
    try:
        table.get(ids)
        assert table.nbytes == 0, "reading keeps nothing"
        table.apply([(ids, np.ones((ids.size, 64), np.float32))], rule, 1, 1, BACKEND)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    touched = ids.size * 2 * 64 * 4
    assert touched <= table.nbytes <= 1.2 * touched
    assert taken <= 1.5 * touched


@settings(max_examples=30)
@given(seed=hs.integers(0, 99), rounds=hs.integers(1, 6))
def test_growing_keeps_every_value(seed: int, rounds: int) -> None:
    table, random = make(5000, 2), np.random.default_rng(seed)
    dense = np.zeros((5000, 2), np.float32)
    for _ in range(rounds):
        ids = np.unique(random.integers(0, 5000, 800))
        values = random.integers(-9, 9, (ids.size, 2)).astype(np.float32)
        table.apply([(ids, values)], Accumulate(), 1, 1, BACKEND)
        dense[ids] += values
    np.testing.assert_array_equal(table.get(np.arange(5000)), dense)


# --- in the store ---


@pytest.fixture
def store() -> ParameterStore:
    return ParameterStore(BACKEND)


def landed(store: ParameterStore, ids: list[int], *values: float) -> int:
    payload = np.array(ids, np.int64).tobytes() + np.array(values, np.float32).tobytes()
    slot, view = store.land(len(payload))
    view[:] = payload
    return slot


def ids_of(*ids: int) -> bytes:
    return np.array(ids, np.int64).tobytes()


def test_an_update_sums_the_rows_in_its_slots(store: ParameterStore) -> None:
    spec = TensorSpec((9, 1), "float32")
    store.install_rows("t", 0, spec, Zeros(), landed(store, [4], 1), lazy=True)
    slots = [landed(store, [4, 5], 2, 3), landed(store, [5], 4)]
    np.testing.assert_array_equal(store.row_ids(slots[0], 2), [4, 5])
    assert not store.row_ids(slots[0], 4).size
    assert not store.row_ids(slots[0], -1).size
    store.apply_rows("t", 0, 1, slots, Accumulate(), 1, 1)
    np.testing.assert_array_equal(store.get_rows("t", 0, 1, ids_of(4, 5, 6)), [[3], [7], [0]])
    assert store.dtypes() == ["float32"]
    store.forget("t", 0)
    assert store.dtypes() == []


def test_a_refused_update_names_the_key_and_keeps_the_value(store: ParameterStore) -> None:
    store.install_rows("t", 0, TensorSpec((9, 1), "int32"), Zeros(), None, lazy=True)
    slots = [landed(store, [4], 0), landed(store, [4], 0)]
    for slot in slots:
        store._slots[slot].buffer[8:].view(np.int32)[:] = 2**30 + 2**29
    with pytest.raises(SumOverflowError, match="key 't'"):
        store.apply_rows("t", 0, 1, slots, Assign(), 1, 1)
    store.keep("t", 0, 1)
    np.testing.assert_array_equal(store.get_rows("t", 0, 1, ids_of(4)), [[0]])


@pytest.mark.parametrize("lazy", [True, False])
def test_rows_can_be_read_as_they_were_before_the_last_update(store: ParameterStore, lazy: bool) -> None:
    """One that the update changed, one that it did not, one that it was the first to use, and one that nobody used."""
    spec = TensorSpec((9, 1), "float32")
    store.install_rows("t", 0, spec, Uniform(seed=3), landed(store, [1, 2], 10, 20), lazy=lazy)
    rule, ids = SGD(learning_rate=1.0, wd=0.5), ids_of(1, 2, 4, 7)
    before = store.get_rows("t", 0, 0, ids)
    np.testing.assert_array_equal(before[:2], [[10], [20]])
    for version in (1, 2):
        store.apply_rows("t", 0, version, [landed(store, [2, 4], 1, 1)], rule, version, 1, keep=True)
        np.testing.assert_array_equal(store.get_rows("t", 0, version - 1, ids), before)
        before = store.get_rows("t", 0, version, ids)
        assert before[0, 0] == (10 if lazy else 10 * 0.5**version)
    nbytes = store.table("t", 0).nbytes
    store.apply_rows("t", 0, 3, [landed(store, [2], 1)], rule, 3, 1)
    assert store.table("t", 0).nbytes < nbytes, "nothing is kept that nobody has asked for"


def test_before_an_update_that_changed_no_row_all_was_as_it_is(store: ParameterStore) -> None:
    store.install_rows("t", 0, TensorSpec((9, 1), "float32"), Zeros(), None, lazy=True)
    store.apply_rows("t", 0, 1, [landed(store, [])], Accumulate(), 1, 1, keep=True)
    np.testing.assert_array_equal(store.get_rows("t", 0, 0, ids_of(1)), [[0]])


def test_rows_that_came_in_several_messages_are_joined(store: ParameterStore) -> None:
    parts = [landed(store, [1, 2], 1, 2), landed(store, [5], 5)]
    perform(store, JoinRows(-1, parts, 4))
    assert store.open_slots == 1
    store.install_rows("t", 0, TensorSpec((9, 1), "float32"), Zeros(), -1, lazy=True)
    np.testing.assert_array_equal(store.get_rows("t", 0, 0, ids_of(1, 2, 5)), [[1], [2], [5]])
    assert store.open_slots == 0


def test_a_first_rule_begins_with_new_state(store: ParameterStore) -> None:
    store.install_rows("t", 0, TensorSpec((9, 1), "float32"), Zeros(), None, lazy=True)
    rule = SGD(learning_rate=1.0, momentum=0.5)
    store.apply_rows("t", 0, 1, [landed(store, [1], 1)], rule, 1, 1)
    store.reset_states()
    store.apply_rows("t", 0, 2, [landed(store, [1], 1)], rule, 2, 1)
    np.testing.assert_array_equal(store.table("t", 0).get(np.array([1])), [[-2]])
