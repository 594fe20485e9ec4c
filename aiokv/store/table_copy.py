"""The rows of a table as they were at one time, copied a part at a time while the table is updated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.store.states import IDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.store.table import GrowingRows, RowIndex

Places = NDArray[np.int64]


class TableCopy:
    """A copy of all rows that a table has now: updates write in their place, and rows that come later lie behind them.

    Whoever writes to rows says so first (`keep`), and what is not copied yet is copied then.

    Args:
        index: where each row lies.
        sources: values, and optimizer state, by name.
    """

    def __init__(self, index: RowIndex, sources: Mapping[str, GrowingRows]) -> None:
        self._order = index.order()
        self._sources = dict(sources)
        self._size = len(index)
        self._arrays = {
            name: np.empty((self._size, rows.width), rows.rows.dtype) for name, rows in self._sources.items()
        }
        self._row_nbytes = max(1, sum(rows.width * rows.rows.itemsize for rows in self._sources.values()))
        self._next = 0
        """All rows before this place are copied."""
        self._kept = np.zeros(self._size, np.bool_)
        """Those that were copied because they were about to change."""
        self._ids: NDArray[np.int64] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all rows are copied."""
        return self._next >= self._size

    def advance(self, most: int) -> None:
        """Copy the next rows, up to `most` bytes, but one at least."""
        begin, self._next = self._next, min(self._size, self._next + max(1, most // self._row_nbytes))
        part = slice(begin, self._next)
        self._copy(begin + np.flatnonzero(~self._kept[part]) if self._kept[part].any() else part)

    def keep(self, places: Places) -> None:
        """Copy rows that are about to change; some may have come later."""
        late = places[(places >= self._next) & (places < self._size)]
        late = late[~self._kept[late]]
        self._copy(late)
        self._kept[late] = True

    def _copy(self, places: Places | slice) -> None:
        for name, source in self._sources.items():
            self._arrays[name][places] = source.rows[places]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the rows in the order of their ids, once all are copied. The first time it takes a while.

        It may run in a thread.
        """
        if self._ids is None:
            self._ids, places = self._order()
            for name in self._arrays:
                # One after the other, so that only one of them is in memory twice.
                self._arrays[name] = self._arrays[name][places]
        return {IDS: self._ids} | self._arrays
