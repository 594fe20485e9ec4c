"""A copy of a table is what the table was, however its parts are copied between updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.initializers import Zeros
from aiokv.kernels import get_backend
from aiokv.optim import SGD
from aiokv.store.table import Table
from aiokv.types import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

BACKEND = get_backend("reference")
RULE = SGD(learning_rate=0.5, momentum=0.5)
ROWS = 40
WIDTH = 3

Action = set[int] | int | str
"""Rows that are pushed, bytes that are copied, or another name for what is done."""

ACTIONS = hs.lists(
    hs.one_of(
        hs.sets(hs.integers(0, ROWS - 1), max_size=12),
        hs.integers(0, 200),
        hs.sampled_from(["begin", "forget the state", "begin anew"]),
    ),
    max_size=30,
)


def push(table: Table, rows: set[int]) -> None:
    ids = np.array(sorted(rows), np.int64)
    values = np.arange(ids.size * WIDTH, dtype=np.float32).reshape(ids.size, WIDTH) + 1
    table.apply([(ids, values)], RULE, 1, 1, BACKEND)


def now(table: Table) -> dict[str, NDArray[Any]]:
    """Return copies of what a table has, by the ids of the rows."""
    ids, arrays = table.saved()
    order = np.argsort(ids)
    return {name: array[order].copy() for name, array in ({"ids": ids} | arrays).items()}


@given(actions=ACTIONS)
def test_every_copy_is_what_the_table_was_when_it_began(actions: list[Action]) -> None:
    table = Table("t", 0, TensorSpec((ROWS, WIDTH), "float32"), Zeros(), lazy=True)
    push(table, {3, 1, 20})
    copies = [(table.begin_copy(), now(table))]
    for action in actions:
        if isinstance(action, set):
            push(table, action)
        elif isinstance(action, int):
            for copy, _ in copies:
                copy.advance(action)
        elif action == "begin":
            copies.append((table.begin_copy(), now(table)))
        elif action == "forget the state":
            table.forget_state()
        else:
            saved: dict[str, NDArray[Any]] = {"ids": np.arange(5), "value": np.ones((5, WIDTH), np.float32)}
            table.restore(saved, 0, RULE, BACKEND, anew=True)
    for copy, expected in copies:
        while not copy.is_whole:
            copy.advance(50)
        table.end_copy(copy)
        arrays = copy.arrays()
        assert arrays.keys() == expected.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_no_more_is_copied_than_is_asked_for_and_one_row_at_least() -> None:
    table = Table("t", 0, TensorSpec((ROWS, WIDTH), "float32"), Zeros(), lazy=True)
    push(table, set(range(10)))
    # A row is three numbers of four bytes, and as many of momentum.
    for most, times in ((1, 10), (24, 10), (71, 5), (72, 4), (240, 1), (10_000, 1)):
        copy = table.begin_copy()
        for _ in range(times):
            assert not copy.is_whole
            copy.advance(most)
        assert copy.is_whole, most
        table.end_copy(copy)
