"""Some rows of a row-sparse key: memory for those that were used, first values for all others."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import DataError
from aiokv.optim import PRECISIONS
from aiokv.store.first_rows import FirstRows
from aiokv.store.states import BEFORE, BEFORE_IDS, VALUE, check_like
from aiokv.store.table_copy import TableCopy
from aiokv.types import ROW_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.initializers import Initializer
    from aiokv.kernels import Backend
    from aiokv.optim import Optimizer
    from aiokv.types import Key, TensorSpec, Version

Array = NDArray[Any]
Ids = NDArray[np.int64]

MIN_RECENT = 1024
"""So many new rows are kept apart at least."""


def span_of(ids: Ids) -> tuple[int, int] | None:
    """Return the lowest and the highest row id; None when there are none, or they are not increasing."""
    if not ids.size or np.any(ids[1:] <= ids[:-1]):
        return None
    return int(ids[0]), int(ids[-1])


class RowIndex:
    """Where in a table's memory each row lies, that of the i-th new row at place i.

    New ids go to a small sorted array, which is put into the large one when it has an eighth of its length. So a row
    costs 16 bytes, and neither look-ups nor additions look at all rows one by one.
    """

    def __init__(self) -> None:
        self._size = 0
        self._main = self._recent = (np.empty(0, np.int64), np.empty(0, np.int64))

    def __len__(self) -> int:
        return self._size

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """Return the place of each row, -1 for those that are not there."""
        places = _look_up(self._main, ids)
        return np.maximum(places, _look_up(self._recent, ids)) if self._recent[0].size else places

    def order(self) -> Callable[[], tuple[Ids, NDArray[np.int64]]]:
        """Return what tells all ids of now, increasing, and the place of each. It may be called later, in a thread."""
        # Nobody writes into these.
        return functools.partial(_merge, self._main, self._recent)

    def add(self, ids: Ids) -> None:
        """Enter increasing ids that are not there."""
        places = np.arange(self._size, self._size + ids.size)
        self._size += ids.size
        self._recent = _merge(self._recent, (ids, places))
        if self._recent[0].size > max(MIN_RECENT, self._main[0].size // 8):
            self._main, self._recent = _merge(self._main, self._recent), (ids[:0], places[:0])


def _look_up(table: tuple[Ids, NDArray[np.int64]], ids: Ids) -> NDArray[np.int64]:
    known, places = table
    if not known.size:
        return np.full(ids.size, -1)
    at = np.minimum(np.searchsorted(known, ids), known.size - 1)
    return np.where(known[at] == ids, places[at], -1)


def _merge(
    first: tuple[Ids, NDArray[np.int64]], second: tuple[Ids, NDArray[np.int64]]
) -> tuple[Ids, NDArray[np.int64]]:
    ids, places = (np.concatenate(pair) for pair in zip(first, second, strict=True))
    order = np.argsort(ids, kind="stable")
    return ids[order], places[order]


class GrowingRows:
    """Rows in one array, which is made half as long again when it is full.

    Args:
        width: elements per row.
        dtype: of the elements.
    """

    def __init__(self, width: int, dtype: np.dtype[Any]) -> None:
        self.width = width
        self._memory = np.empty((0, width), dtype)
        self._used = 0

    @property
    def rows(self) -> Array:
        """All rows, not a copy."""
        return self._memory[: self._used]

    @property
    def nbytes(self) -> int:
        """How much memory there is."""
        return self._memory.nbytes

    def append(self, rows: Array) -> None:
        """Add rows at the end."""
        needed = self._used + len(rows)
        if needed > len(self._memory):
            larger = np.empty((max(needed, len(self._memory) * 3 // 2), self.width), self._memory.dtype)
            larger[: self._used] = self.rows
            self._memory = larger
        self._memory[self._used : needed] = rows
        self._used = needed


class Table:
    """A range of the rows of a row-sparse key: values and optimizer state of those that were used.

    Args:
        key: the key's name.
        start: the first row of the range.
        spec: shape and dtype of the whole key.
        initializer: how rows begin.
        lazy: an update changes only the rows that got a gradient. Otherwise all that are here; those got a gradient of
            0. (A row that was never used is not here. With "zeros" and a rule that leaves zeros as they are, that makes
            no difference.)
    """

    def __init__(self, key: Key, start: int, spec: TensorSpec, initializer: Initializer, *, lazy: bool) -> None:
        self.version: Version = 0
        self.dtype = np.dtype(spec.dtype)
        self.row_size = spec.size // spec.shape[0] if spec.shape[0] else 0
        self._key = key
        self._start = start
        self._lazy = lazy
        self._first = FirstRows(initializer, key, self.row_size, self.dtype)
        self._index = RowIndex()
        self._ids = GrowingRows(1, np.dtype(np.int64))
        self._values = GrowingRows(self.row_size, self.dtype)
        self._state: dict[str, GrowingRows] | None = None
        self._steps = 0
        self._before: tuple[Version, Ids, Array] | None = None
        """What the last update has changed: the version before it, and the rows with the values that they had."""
        self._copies: list[TableCopy] = []
        """Those that are being made."""

    @property
    def num_rows(self) -> int:
        """How many rows take memory."""
        return len(self._index)

    def count_updated(self, pushed: int) -> int:
        """Return how many rows at most an update reads, of which so many are pushed."""
        return pushed if self._lazy else pushed + self.num_rows

    @property
    def row_nbytes(self) -> int:
        """How many bytes the values of a row are."""
        return self.row_size * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """How much memory values, state and row ids take."""
        kept = [self._values, *(self._state or {}).values()]
        before = sum(array.nbytes for array in self._before[1:]) if self._before is not None else 0
        return sum(rows.nbytes for rows in kept) + 3 * ROW_ID_BYTES * self.num_rows + before

    def parse(self, payload: NDArray[np.uint8]) -> tuple[Ids, Array]:
        """Return row ids and values of a payload, not copies."""
        count = payload.size // (ROW_ID_BYTES + self.row_nbytes)
        middle = count * ROW_ID_BYTES
        return payload[:middle].view(np.int64), payload[middle:].view(self.dtype).reshape(count, self.row_size)

    def set(self, ids: Ids, values: Array) -> None:
        """Give new rows values."""
        self._index.add(ids)
        self._ids.append(ids.reshape(-1, 1))
        self._values.append(values)

    def get(self, ids: Ids) -> Array:
        """Return a copy of the values of rows, in the order of the ids."""
        places = self._index.find(ids)
        absent = places < 0
        if not absent.any():
            return np.asarray(self._values.rows[places])
        values = np.empty((ids.size, self.row_size), self.dtype)
        values[~absent] = self._values.rows[places[~absent]]
        values[absent] = self._first.make(ids[absent])
        return values

    def get_before(self, version: Version, ids: Ids) -> Array:
        """Return a copy of the values that rows had before the last update, in the order of the ids."""
        assert self._before is not None, "it was asked to keep them"
        before, changed, earlier = self._before
        assert before == version, "no other one is kept"
        values = self.get(ids)
        at = np.minimum(np.searchsorted(changed, ids), max(0, changed.size - 1))
        if changed.size:
            found = changed[at] == ids
            values[found] = earlier[at[found]]
        return values

    def before(self, version: Version) -> dict[str, Array]:
        """Return the rows that the last update has changed, with the values that they had; not copies."""
        assert self._before is not None, "it was asked to keep them"
        before, changed, earlier = self._before
        assert before == version, "no other one is kept"
        return {BEFORE_IDS: changed, BEFORE: earlier}

    def restore_before(self, version: Version, saved: dict[str, Array]) -> None:
        """Keep what rows had before the last update, as of `before`.

        Raises:
            DataError: these can't be rows of this table; nothing has changed.
        """
        ids = saved.get(BEFORE_IDS, np.empty(0, np.int32))
        values = np.empty((ids.size, self.row_size), self.dtype)
        check_like(self._key, saved, {BEFORE_IDS: np.empty(ids.size, np.int64), BEFORE: values})
        self._before = (version, ids.copy(), saved[BEFORE].copy())

    def saved(self) -> tuple[Ids, dict[str, Array]]:
        """Return the rows that are used, in any order, with their values and state by name; not copies."""
        state = {name: kept.rows for name, kept in (self._state or {}).items()}
        return self._ids.rows[:, 0], {"value": self._values.rows} | state

    def begin_copy(self) -> TableCopy:
        """Begin a copy of the rows that are used, with their values and state."""
        copy = TableCopy(self._index, {VALUE: self._values} | (self._state or {}))
        self._copies.append(copy)
        return copy

    def end_copy(self, copy: TableCopy) -> None:
        """Keep nothing for a copy any longer, whether it is whole or not."""
        self._copies.remove(copy)

    @property
    def steps(self) -> int:
        """The number of updates with the state that is here."""
        return self._steps

    def restore(self, saved: dict[str, Array], steps: int, rule: Optimizer, backend: Backend, *, anew: bool) -> None:
        """Use rows that were saved, beside those that are here or in their place.

        Args:
            saved: "ids", increasing; "value" if values are to be used too; and the state if there is one.
            steps: the number of updates with that state.
            rule: whose state it is.
            backend: who knows what it keeps.
            anew: forget the state that is here, and the values if there are others.

        Raises:
            DataError: these can't be rows of this table.
        """
        ids = saved.get("ids", np.empty(0, np.int32))
        check_like(self._key, {"ids": ids}, {"ids": np.empty(ids.size, np.int64)})
        if ids.size and span_of(ids) is None:
            raise DataError(f"key {self._key!r}: expected increasing row ids, got others", key=self._key)
        state = {name: rows for name, rows in saved.items() if name not in {"ids", "value"}}
        values = saved["value"] if "value" in saved else self.get(ids)
        check_like(self._key, {"value": values}, {"value": np.empty((ids.size, self.row_size), self.dtype)})
        if state:
            widths = self._new_state(np.zeros(self.row_size, self.dtype), rule, backend)
            wanted = {name: np.empty((ids.size, array.size), array.dtype) for name, array in widths.items()}
            check_like(self._key, state, wanted)
        if anew and "value" in saved:
            self._index, self._ids = RowIndex(), GrowingRows(1, np.dtype(np.int64))
            self._values = GrowingRows(self.row_size, self.dtype)
        self._before = None
        if anew:
            self._state, self._steps = None, steps
        if state:
            self._begin_state(rule, backend)
        self._write(ids, self._index.find(ids), values, state)

    def forget_state(self) -> None:
        """Begin with new optimizer state."""
        self._state, self._steps = None, 0

    def apply(
        self,
        pushes: Sequence[tuple[Ids, Array]],
        rule: Optimizer,
        clock: int,
        divisor: int,
        backend: Backend,
        factors: Sequence[float] = (),
        *,
        keep: bool = False,
    ) -> None:
        """Make the next value out of the sum of the pushes, added in their order. After an error all is as it was.

        Args:
            pushes: row ids, increasing, and values of each.
            rule: makes the new value.
            clock: what the rule's schedule looks at.
            divisor: the sum is divided by it first.
            backend: who does the arithmetic.
            factors: what the values of each push, floats, are multiplied by before they are added; empty for nothing.
            keep: the values before can still be read until the next update.
        """
        ids, total = self._sum(pushes, factors or [1.0] * len(pushes), backend)
        if divisor > 1:
            # A gradient that overflows shows it in its values.
            with np.errstate(all="ignore"):
                np.divide(total, divisor, out=total)
        step = rule.step_for(self._key, count=self._steps + 1, num_update=clock)
        places, weights, new = self._index.find(ids), self.get(ids), np.empty(total.shape, self.dtype)
        width = max(1, self.row_size)
        state = backend.new_state(rule, weights.reshape(-1), row_size=width)
        self._read_state(places, state, rule, backend)
        arrays = (weights.reshape(-1), total.reshape(-1), state)
        offset = self._start * self.row_size
        backend.update(rule, *arrays, step, out=new.reshape(-1), offset=offset, row_size=width)
        self._steps += 1
        # All of these are copies of what is in the table.
        self._before = (self.version, ids, weights) if keep else None
        self._write(ids, places, new, state)

    def _sum(
        self, pushes: Sequence[tuple[Ids, Array]], factors: Sequence[float], backend: Backend
    ) -> tuple[Ids, Array]:
        """Return the rows to be updated and the sums of what was pushed."""
        sets = [ids for ids, _ in pushes]
        if not self._lazy:
            sets.append(self._ids.rows[:, 0])
        ids = np.unique(np.concatenate(sets)) if sets else np.empty(0, np.int64)
        total = np.zeros((ids.size, self.row_size), PRECISIONS.get(self.dtype.name, self.dtype.name))
        for (some, values), factor in zip(pushes, factors, strict=True):
            places = np.searchsorted(ids, some)
            sums = total[places]
            # A gradient that overflows shows it in its values.
            with np.errstate(all="ignore"):
                added = values if factor == 1.0 else values.astype(total.dtype) * total.dtype.type(factor)
            backend.accumulate(sums.reshape(-1), added.reshape(-1))
            total[places] = sums
        return ids, total

    def _read_state(
        self, places: NDArray[np.int64], fresh: dict[str, Array], rule: Optimizer, backend: Backend
    ) -> None:
        """Put the optimizer state of rows that have one in the place of their fresh one."""
        present = places >= 0
        for name, kept in self._begin_state(rule, backend).items():
            fresh[name].reshape(places.size, kept.width)[present] = kept.rows[places[present]]

    def _begin_state(self, rule: Optimizer, backend: Backend) -> dict[str, GrowingRows]:
        """Return the state of all rows; a fresh one if there is none yet."""
        if self._state is None:
            rows = self._values.rows
            begun = self._new_state(rows, rule, backend)
            single = self._new_state(np.zeros(self.row_size, self.dtype), rule, backend)
            self._state = {name: GrowingRows(array.size, array.dtype) for name, array in single.items()}
            for name, kept in self._state.items():
                kept.append(begun[name].reshape(len(rows), kept.width))
        return self._state

    def _new_state(self, rows: Array, rule: Optimizer, backend: Backend) -> dict[str, Array]:
        return backend.new_state(rule, rows.reshape(-1), row_size=max(1, self.row_size))

    def _write(self, ids: Ids, places: NDArray[np.int64], values: Array, state: dict[str, Array]) -> None:
        present, absent = places >= 0, places < 0
        for copy in self._copies:
            copy.keep(places[present])
        self._values.rows[places[present]] = values[present]
        for name, kept in (self._state or {}).items():
            rows = state[name].reshape(ids.size, kept.width)
            kept.rows[places[present]] = rows[present]
            kept.append(rows[absent])
        self.set(ids[absent], values[absent])
