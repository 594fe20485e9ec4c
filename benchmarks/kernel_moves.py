"""Count the bytes that kernels move, in Numba's simulator: of those whose loops the PTX does not show plainly.

    NUMBA_ENABLE_CUDASIM=1 python benchmarks/kernel_moves.py

It prints the bytes for each unit of each kernel as JSON. What the threads of a block share does not count, nor do the
ids of rows, which neighbouring threads read together.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from aiokv.kernels.cuda import launch, listing, memory, select
from aiokv.kernels.cuda.tensors import Copy
from aiokv.kernels.reference import LANES

WIDTH = 16
"""Values of a row."""


class Counter:
    """How many bytes were read and written."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count an access."""
        with self._lock:
            self.nbytes += nbytes


class Watched:
    """An argument of a kernel whose numbers are counted when they are read or written.

    Args:
        array: the numbers.
        counter: what counts.
    """

    def __init__(self, array: Any, counter: Counter) -> None:
        self.shape, self.size = array.shape, array.size
        self._array, self._counter = array, counter

    def __getitem__(self, place: Any) -> Any:
        self._counter.add(self._array.itemsize)
        return self._array[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._counter.add(self._array.itemsize)
        self._array[place] = value


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Count what kernels read and write by address."""
    counter, at = Counter(), memory._at

    def counted(address: int, start: int, count: int, dtype: Any) -> Any:
        counter.add(count * dtype.itemsize)
        return at(address, start, count, dtype)

    with mock.patch.object(memory, "_at", counted):
        yield counter


Run = Callable[..., None]
Watch = Callable[[Any], Watched]


def _totals(run: Run, watch: Watch, n: int) -> None:
    """Of n parts."""
    run(watch(np.ones(n)), watch(np.zeros(1)))


def _factor(run: Run, watch: Watch, n: int) -> None:
    run(watch(np.ones(1)), watch(np.ones(1)), watch(np.zeros((n, 1), np.float32)))


def _lanes(run: Run, watch: Watch, n: int) -> None:
    sums = Copy(np.zeros(n))
    run(watch(np.ones((n, LANES))), watch(sums.tensor.address + 8 * np.arange(n)))


def _digits(run: Run, watch: Watch, n: int) -> None:
    """Of n digits, all of whose values are looked at."""
    for _ in range(n):
        run(watch(np.ones(select.DIGITS, np.int64)), watch(np.array([0, select.DIGITS])), 0)


def _scan(run: Run, watch: Watch, n: int) -> None:
    run(watch(np.ones((n, 2), np.int64)))


def _clear(run: Run, watch: Watch, n: int) -> None:
    array = Copy(np.ones(n, np.float32))
    run(array.tensor.address, watch(np.arange(n, dtype=np.uint32)))


def _add_rows(values: str) -> Callable[[Run, Watch, int], None]:
    def add(run: Run, _: Watch, n: int) -> None:
        """Each row occurs once."""
        table, rows = Copy(np.zeros(n, np.float32)), Copy(np.zeros(n, values))
        ids = np.arange(n // WIDTH)
        run(table.tensor.address, rows.tensor.address, ids, np.arange(ids.size + 1), ids, WIDTH, True)

    return add


def _copy_rows(run: Run, _: Watch, n: int) -> None:
    table, rows = Copy(np.zeros(n, np.float32)), Copy(np.zeros(n, np.float32))
    run(table.tensor.address, rows.tensor.address, np.arange(n // WIDTH), WIDTH, True)


WORK: dict[str, Callable[[Run, Watch, int], None]] = {
    "total of squares": _totals,
    "factor of a norm": _factor,
    "sum of lanes": _lanes,
    "largest of parts": _totals,
    "top-k, pick": _digits,
    "top-k, scan": _scan,
    "top-k, clear": _clear,
    "add rows, float32": _add_rows("float32"),
    "add rows, float16 to float32": _add_rows("float16"),
    "gather rows": _copy_rows,
    "scatter rows": _copy_rows,
}

FEW, MANY = WIDTH, 2 * WIDTH
"""Units: what a launch moves besides is the same for both."""


def count(listed: listing.Listed) -> float:
    """Return the bytes that a kernel moves for each of its units."""
    kernel, found = listed.make()[2, launch.THREADS, 0], []
    for units in (FEW, MANY):
        with counting() as counter:
            WORK[listed.name](kernel, lambda array: Watched(array, counter), units)
        found.append(counter.nbytes)
    return (found[1] - found[0]) / (MANY - FEW)


def count_all() -> dict[str, float]:
    """Return them for every kernel whose unit is not an element."""
    return {listed.name: count(listed) for listed in listing.every_kernel() if listed.unit != "element"}


if __name__ == "__main__":
    print(json.dumps(count_all()))
