"""The first values of rows that nobody has changed: a function of the initializer, the key and the row."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.initializers import Initializer, Normal, Uniform

if TYPE_CHECKING:
    from aiokv.types import Key

Array = NDArray[Any]


class FirstRows:
    """Makes the first values of a table's rows.

    Random numbers are NumPy's, from a Philox generator (Salmon et al. 2011) whose key is made of the seed and the name
    of the table, and whose counter begins at a place of the row's own. So no row depends on another one.

    Args:
        initializer: what the numbers are.
        key: the table's name.
        row_size: elements per row.
        dtype: of the elements; float16 and bfloat16 are drawn in float32 and rounded.
    """

    def __init__(self, initializer: Initializer, key: Key, row_size: int, dtype: np.dtype[Any]) -> None:
        self._initializer = initializer
        self._row_size = row_size
        self._dtype = dtype
        self._drawn: Any = np.float64 if dtype == np.float64 else np.float32
        seed = getattr(initializer, "seed", 0)
        name = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        self._bits = np.random.Philox(key=[seed, int.from_bytes(name, "little")])
        self._generator = np.random.Generator(self._bits)
        # Setting the counter of one generator is five times as fast as making another one.
        self._state: Any = self._bits.state

    def make(self, rows: NDArray[np.int64]) -> Array:
        """Return the first values of these rows, in their order."""
        initializer = self._initializer
        if not isinstance(initializer, Normal | Uniform) or not self._row_size:
            return np.zeros((rows.size, self._row_size), self._dtype)
        drawn = np.empty((rows.size, self._row_size), self._drawn)
        fill = self._fill_normal if isinstance(initializer, Normal) else self._fill_uniform
        counter = self._state["state"]["counter"]
        for row, values in zip(rows.tolist(), drawn, strict=True):
            counter[:] = (0, row, 0, 0)
            self._bits.state = self._state
            fill(values)
        drawn *= drawn.dtype.type(initializer.scale)
        return drawn.astype(self._dtype, copy=False)

    def _fill_normal(self, values: Array) -> None:
        self._generator.standard_normal(out=values, dtype=self._drawn)

    def _fill_uniform(self, values: Array) -> None:
        self._generator.random(out=values, dtype=self._drawn)
        # From [0, 1) to [-1, 1), exactly.
        values += values
        values -= values.dtype.type(1)
