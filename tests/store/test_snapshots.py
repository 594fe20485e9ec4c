"""What a server holds for checkpoints stays as it was, while values and states change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.initializers import make_initializer
from aiokv.kernels import get_backend
from aiokv.optim import make_optimizer
from aiokv.store.memory import ParameterStore
from aiokv.store.snapshots import Snapshots
from aiokv.types import Piece, TensorSpec

if TYPE_CHECKING:
    from aiokv.errors import AiokvError

RULE = make_optimizer("sgd", {"learning_rate": 1.0, "momentum": 0.5})


@pytest.fixture
def store() -> ParameterStore:
    """A store with a chunk of the keys "a" and "b", two elements each."""
    store = ParameterStore(get_backend("reference"))
    slot = landed(store, [1.0, 2.0, 3.0, 4.0])
    store.install("a", -1, "float32", 4, slot, [Piece("a", 0, 2), Piece("b", 0, 2)])
    return store


def landed(store: ParameterStore, values: list[float]) -> int:
    """Let values land in a slot."""
    slot, view = store.land(4 * len(values))
    view[:] = np.array(values, np.float32).tobytes()
    return slot


def update(store: ParameterStore, version: int) -> None:
    """Update the chunk with gradients of 1."""
    store.apply("a", -1, version, landed(store, [1.0] * 4), RULE, version, 1)


def contents(snapshots: Snapshots[str], clock: int) -> list[tuple[str, int, dict[str, Any]]]:
    """Return what is held."""
    return [
        (one.state, one.updates, {name: array.tolist() for name, array in one.arrays().items()})
        for one in snapshots.held(clock)
    ]


def test_value_and_state_are_those_of_their_time(store: ParameterStore) -> None:
    snapshots: Snapshots[str] = Snapshots(store)
    update(store, 1)
    snapshots.hold(10, "a", -1, 1, ["of a", "of b"])
    expected = contents(snapshots, 10)
    assert [(name, updates) for name, updates, _ in expected] == [("of a", 1), ("of b", 1)]
    assert expected[0][2]["value"] == [0.0, 1.0]
    # By hand: the momentum is the last step.
    assert expected[1][2]["momentum"] == [-1.0, -1.0]
    update(store, 2)
    update(store, 3)
    assert contents(snapshots, 10) == expected


def test_nothing_is_kept_of_a_rule_before_its_first_update(store: ParameterStore) -> None:
    snapshots: Snapshots[str] = Snapshots(store)
    snapshots.hold(10, "a", -1, 0, ["of a", "of b"])
    assert contents(snapshots, 10) == [("of a", 0, {"value": [1.0, 2.0]}), ("of b", 0, {"value": [3.0, 4.0]})]


def test_what_is_held_stays_when_the_chunk_is_no_more(store: ParameterStore) -> None:
    snapshots: Snapshots[str] = Snapshots(store)
    snapshots.hold(10, "a", -1, 0, ["of a", "of b"])
    store.divide("a", -1, [("a", 2), ("b", 2)])
    store.forget("a", 0)
    # Another buffer of the same length would be the old one, if that were free.
    store.install("c", 0, "float32", 4, landed(store, [9.0] * 4))
    assert contents(snapshots, 10)[0][2] == {"value": [1.0, 2.0]}


def test_first_value_counts_when_a_key_is_made_anew(store: ParameterStore) -> None:
    snapshots: Snapshots[str] = Snapshots(store)
    snapshots.hold(10, "a", -1, 0, ["of a", "of b"])
    update(store, 1)
    snapshots.hold(10, "a", -1, 1, ["later", "later"])
    assert [state for state, _, _ in contents(snapshots, 10)] == ["of a", "of b"]


def test_buffers_are_used_again_when_they_are_released(store: ParameterStore) -> None:
    snapshots: Snapshots[str] = Snapshots(store)
    for clock in (10, 20):
        snapshots.hold(clock, "a", -1, clock // 10 - 1, ["of a", "of b"])
        update(store, clock // 10)
    first = snapshots.held(10)[0].arrays()["value"]
    snapshots.release(10)
    assert contents(snapshots, 10) == []
    assert len(contents(snapshots, 20)) == 2
    slot, view = store.land(16)
    assert np.shares_memory(np.frombuffer(view, np.float32), first)
    store.free(slot)
    snapshots.release(30)


class Rows:
    """A store with a table of ten rows with one number each."""

    def __init__(self) -> None:
        self.store = ParameterStore(get_backend("reference"))
        self.store.install_rows(
            "t", 0, TensorSpec((10, 1), "float32"), make_initializer({}, "float32"), None, lazy=True
        )

    def push(self, row: int, version: int) -> None:
        """Push a gradient of 1 for a row."""
        payload = np.array([row], np.int64).tobytes() + np.array([1.0], np.float32).tobytes()
        slot, view = self.store.land(len(payload))
        view[:] = payload
        self.store.apply_rows("t", 0, version, [slot], RULE, version, 1)
        self.store.free(slot)


def test_rows_of_a_table_are_copied_in_the_order_of_their_numbers() -> None:
    rows = Rows()
    rows.push(7, 1)
    rows.push(2, 2)
    snapshots: Snapshots[str] = Snapshots(rows.store)
    snapshots.hold(10, "t", 0, 2, ["of t"])
    rows.push(7, 3)
    ready: list[AiokvError | None] = []
    snapshots.when_ready(10, ready.append)
    assert (snapshots.is_copying, ready) == (True, [])
    # A row is a value and a momentum of four bytes each.
    snapshots.copy_some(8)
    rows.push(2, 4)
    assert (snapshots.is_copying, ready) == (True, [])
    snapshots.copy_some(8)
    assert (snapshots.is_copying, ready) == (False, [None])
    for _ in range(2):
        ((_, updates, arrays),) = contents(snapshots, 10)
        assert (updates, arrays["ids"], arrays["value"]) == (2, [2, 7], [[-1.0], [-1.0]])
        assert arrays["momentum"] == [[-1.0], [-1.0]]


def test_copies_of_tables_are_made_one_after_the_other() -> None:
    rows = Rows()
    rows.push(7, 1)
    snapshots: Snapshots[str] = Snapshots(rows.store)
    for clock in (10, 20):
        snapshots.hold(clock, "t", 0, clock // 10, ["of t"])
        rows.push(7, clock // 10 + 1)
    snapshots.copy_some(100)
    assert snapshots.is_copying
    snapshots.copy_some(100)
    assert not snapshots.is_copying
    # By hand: the first step is 1, the second one 1.5.
    found = [arrays["value"] for clock in (10, 20) for _, _, arrays in contents(snapshots, clock)]
    assert found == [[[-1.0]], [[-2.5]]]


def test_a_table_is_copied_no_further_for_what_is_released() -> None:
    rows = Rows()
    rows.push(7, 1)
    snapshots: Snapshots[str] = Snapshots(rows.store)
    snapshots.hold(10, "t", 0, 1, ["of t"])
    snapshots.hold(20, "t", 0, 1, ["of t"])
    snapshots.release(10)
    rows.push(7, 2)
    snapshots.copy_some(100)
    assert not snapshots.is_copying
    assert [arrays["value"] for _, _, arrays in contents(snapshots, 20)] == [[[-1.0]]]
    # Nothing is kept for either of them any longer.
    assert rows.store.table("t", 0)._copies == []


def test_an_empty_table_is_held_too() -> None:
    rows = Rows()
    snapshots: Snapshots[str] = Snapshots(rows.store)
    snapshots.hold(10, "t", 0, 0, ["of t"])
    snapshots.copy_some(100)
    assert [arrays for _, _, arrays in contents(snapshots, 10)] == [{"ids": [], "value": []}]
