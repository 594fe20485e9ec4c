"""What is saved of a chunk, and how a saved one takes the place of what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import DataError
from aiokv.store.pieces import cut, cut_state, new_state

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from aiokv.kernels import Backend
    from aiokv.optim import Optimizer
    from aiokv.store.memory import Stored
    from aiokv.store.table import Table
    from aiokv.types import Key

Array = NDArray[Any]
State = dict[str, Array]

MOST_BYTES = 16 * 1024 * 1024
"""Rows are given in parts of about this size."""

VALUE = "value"
IDS = "ids"
BEFORE = "before/value"
BEFORE_IDS = "before/ids"
"""Names of the value before the current one, and of the rows of a table that have another one there."""


def piece_of(stored: Stored, key: Key) -> State:
    """Return value and state of a key in a chunk, not copies."""
    number = next(number for number, piece in enumerate(stored.pieces) if piece.key == key)
    value = cut(stored.value.buffer.view(stored.dtype), stored.pieces)[number]
    return {VALUE: value} | ({} if stored.state is None else cut_state(stored.state, stored.pieces)[number])


def parts_of(stored: Stored) -> list[State]:
    """Return value and state of each key in a chunk, not copies."""
    return [piece_of(stored, piece.key) for piece in stored.pieces]


def only(arrays: State, wanted: Collection[str]) -> State:
    """Return the arrays that are wanted; all when no name is given."""
    return {name: array for name, array in arrays.items() if not wanted or name in wanted}


def rows_of(table: Table, first: int, names: Collection[str] = ()) -> tuple[State, int]:
    """Return used rows from one on, increasing, as many as go in one part, with state; and the first left, or -1.

    Without `names` with all arrays.
    """
    ids, arrays = table.saved()
    wanted = np.flatnonzero(ids >= first)
    width = sum(array.nbytes // max(1, len(array)) for array in arrays.values())
    most = max(1, MOST_BYTES // max(1, width))
    left = -1
    if wanted.size > most:
        left = int(np.partition(ids[wanted], most)[most])
        wanted = wanted[ids[wanted] < left]
    part = wanted[np.argsort(ids[wanted])]
    return {name: array[part] for name, array in only({IDS: ids} | arrays, names).items()}, left


def checked_state(
    key: Key, saved: Mapping[str, Array], stored: Stored, rule: Optimizer, backend: Backend
) -> tuple[Array, State | None]:
    """Return the value and the state of a chunk of one key; None for no state yet.

    Raises:
        DataError: these arrays can't be the key's, with that rule.
    """
    own = stored.value.buffer.view(stored.dtype)
    value = saved.get(VALUE, own)
    check_like(key, {VALUE: value}, {VALUE: own})
    state = {name: array.copy() for name, array in saved.items() if name != VALUE}
    if not state:
        return value, None
    check_like(key, state, new_state(backend, rule, value, stored.pieces))
    return value, state


def check_like(key: Key, given: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Refuse arrays of other names, dtypes or shapes.

    Raises:
        DataError: names the key.
    """
    expected, got = (
        {name: f"{array.dtype}{list(array.shape)}" for name, array in sorted(arrays.items())}
        for arrays in (wanted, given)
    )
    if expected != got:
        text = f"key {key!r}: expected {expected}, got {got}"
        raise DataError(text, key=key, expected=str(expected), got=str(got))
