"""The gradients: small whole numbers in float32, so that sums are exact, different for every rank, round and place.

Element i of rank k's gradient in round r is `i % PERIOD + term(k, r)`. As the first part repeats, whatever the servers
do to each element by itself is known from the first PERIOD elements; as PERIOD is prime, no two chunks look the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

Floats = NDArray[np.float32]

PERIOD = 8191
BLOCK = 64 * 1024
"""Elements that are made or checked at a time: few enough to stay in the cache."""

_ROUNDS = 64
"""The terms of later rounds repeat those of earlier ones, so that sums stay below 2**24 with 500 workers."""


def term(rank: int, round_: int, workers: int) -> int:
    """Return the part of a gradient that says whose it is and of which round."""
    return round_ % _ROUNDS * workers + rank


def terms(workers: int) -> int:
    """Return the number of different terms; every term is below it."""
    return _ROUNDS * workers


def ramp(size: int) -> Floats:
    """Return the part of a gradient that says which element it is: the first `size` elements, at most PERIOD."""
    return np.arange(min(size, PERIOD), dtype=np.float32)


def tiled(period: NDArray[Any], size: int) -> Floats:
    """Repeat what `ramp` began until every block of an array of `size` elements is a piece of it."""
    return np.resize(period.astype(np.float32), min(size, PERIOD + BLOCK))


def blocks(flat: Floats) -> Iterator[tuple[int, Floats, slice]]:
    """Cut a one-dimensional array into blocks: where each starts, the block, and which piece of `tiled` it has."""
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        phase = start % PERIOD
        yield start, block, slice(phase, phase + block.size)


class Gradient:
    """Makes the gradients of one worker in one array, round after round.

    Args:
        rank: the worker's rank.
        workers: number of workers.
        size: elements of all tensors together.
    """

    def __init__(self, rank: int, workers: int, size: int) -> None:
        self.flat: Floats = np.empty(size, np.float32)
        self._rank, self._workers = rank, workers
        self._ramp = tiled(ramp(size), size)

    def fill(self, round_: int) -> None:
        """Write the gradient of a round."""
        number = np.float32(term(self._rank, round_, self._workers))
        for _, block, piece in blocks(self.flat):
            np.add(self._ramp[piece], number, out=block)
