"""What has to come back: one small class for each way in which the servers can combine the gradients of `pattern`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.bench.pattern import BLOCK, PERIOD, Floats, blocks, ramp, term, terms, tiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "assign": {},
    "sgd": {"learning_rate": 0.001, "momentum": 0.9},
    "adam": {"learning_rate": 0.001},
}
"""The parameters with which the benchmark uses a rule; another rule gets its defaults."""

_TOLERANCE = 1e-4
"""Relative: thousands of float32 updates, each rounded, against the same in float64."""


class Check(ABC):
    """Looks at the values that one worker received. Call it once after each round, in order.

    Args:
        rank: the worker's rank.
        workers: number of workers.
        size: elements of all tensors together.
    """

    same_on_all = True
    """Whether all workers receive the same bits in a round."""

    def __init__(self, rank: int, workers: int, size: int) -> None:
        self._rank, self._workers, self._size = rank, workers, size
        self._ramp = ramp(size)
        self._wrong = np.empty(BLOCK, np.bool_)
        self._scratch = np.empty(BLOCK, np.float32)

    def __call__(self, values: Floats, round_: int) -> str:
        """Return what is wrong with the values of the round, in a sentence; empty when nothing is.

        Args:
            values: all tensors one after the other, float32, one-dimensional.
            round_: the round, counted from 0.
        """
        self.prepare(values, round_)
        for start, block, piece in blocks(values):
            wrong = self.wrong(block, piece, round_)
            if wrong.any():
                first = int(np.argmax(wrong))
                expected = self.expected(piece.start + first, round_)
                return f"round {round_}: element {start + first} is {block[first]:g}, expected {expected}"
        return ""

    def prepare(self, values: Floats, round_: int) -> None:  # noqa: B027 - most checks need no preparation
        """Compute what the whole round has in common."""

    def sum(self, round_: int) -> Floats:
        """Return the exact sum of all workers' gradients of a round, for the elements of `ramp`."""
        numbers = sum(term(rank, round_, self._workers) for rank in range(self._workers))
        return self._ramp * np.float32(self._workers) + np.float32(numbers)

    @abstractmethod
    def wrong(self, block: Floats, piece: slice, round_: int) -> NDArray[np.bool_]:
        """Return which elements of a block are wrong; `piece` is its part of a `tiled` array."""

    @abstractmethod
    def expected(self, place: int, round_: int) -> str:
        """Describe what belongs at a place of a `tiled` array."""


class SumCheck(Check):
    """Sync without an optimizer: exactly the sum of all workers' gradients."""

    _sum: Floats

    def prepare(self, values: Floats, round_: int) -> None:
        """Sum the gradients of all workers."""
        self._sum = tiled(self.sum(round_), self._size)

    def wrong(self, block: Floats, piece: slice, round_: int) -> NDArray[np.bool_]:
        """Compare with the sum."""
        return np.not_equal(block, self._sum[piece], out=self._wrong[: block.size])

    def expected(self, place: int, round_: int) -> str:
        """Return the sum."""
        return f"{self._sum[place]:g}, the sum of all workers"


class NearCheck(Check):
    """What checks that allow for rounding share."""

    _near: Floats

    def wrong(self, block: Floats, piece: slice, round_: int) -> NDArray[np.bool_]:
        """Compare with `_near`."""
        expected = self._near[piece]
        distance = np.subtract(block, expected, out=self._scratch[: block.size])
        np.abs(distance, out=distance)
        # A comparison with something that is not finite is False: so ask what is right, and negate.
        right = np.less_equal(distance, _TOLERANCE * (1 + np.abs(expected)), out=self._wrong[: block.size])
        return np.logical_not(right, out=right)

    def expected(self, place: int, round_: int) -> str:
        """Return the value and the tolerance."""
        return f"{self._near[place]:g} to within {_TOLERANCE:g} of it"


class SgdCheck(NearCheck):
    """Sync with SGD and momentum: the weights that the sums so far give, from zeros, computed in float64."""

    def __init__(self, rank: int, workers: int, size: int) -> None:
        super().__init__(rank, workers, size)
        self._weights, self._momentum = np.zeros(self._ramp.size), np.zeros(self._ramp.size)

    def prepare(self, values: Floats, round_: int) -> None:
        """Update the weights once more."""
        params = OPTIMIZERS["sgd"]
        self._momentum *= params["momentum"]
        self._momentum -= params["learning_rate"] * self.sum(round_)
        self._weights += self._momentum
        self._near = tiled(self._weights, self._size)


class AlikeCheck(NearCheck):
    """Sync with another rule: what got the same gradients is the same, and everything is finite."""

    def prepare(self, values: Floats, round_: int) -> None:
        """Take the first elements as the measure of all others."""
        self._near = tiled(values[:PERIOD], self._size)


class LatestCheck(Check):
    """Async without an optimizer: a gradient that somebody pushed, and not an older one of this worker's own."""

    same_on_all = False

    def __init__(self, rank: int, workers: int, size: int) -> None:
        super().__init__(rank, workers, size)
        self._places = tiled(self._ramp, size)

    def wrong(self, block: Floats, piece: slice, round_: int) -> NDArray[np.bool_]:
        """Look at the terms, of which a block has one for each chunk in it."""
        found = np.subtract(block, self._places[piece], out=self._scratch[: block.size])
        wrong = self._wrong[: block.size]
        wrong[:] = False
        for number in (found[:1] if (found == found[0]).all() else np.unique(found)).tolist():
            if not self._is_term(number, round_):
                wrong |= np.isnan(found) if math.isnan(number) else found == number
        return wrong

    def _is_term(self, number: float, round_: int) -> bool:
        if not (number.is_integer() and 0 <= number < terms(self._workers)):
            return False
        return number % self._workers != self._rank or number == term(self._rank, round_, self._workers)

    def expected(self, place: int, round_: int) -> str:
        """Return this worker's own gradient."""
        own = self._places[place] + term(self._rank, round_, self._workers)
        return f"{own:g}, as this worker pushed, or a gradient of another worker"


class FiniteCheck(Check):
    """Async with an optimizer: the values depend on the order of arrival, so they only have to be finite."""

    same_on_all = False

    def wrong(self, block: Floats, piece: slice, round_: int) -> NDArray[np.bool_]:
        """Look for what is not finite."""
        finite = np.isfinite(block, out=self._wrong[: block.size])
        return np.logical_not(finite, out=finite)

    def expected(self, place: int, round_: int) -> str:
        """Say so."""
        return "a finite number"


def make_check(rank: int, workers: int, size: int, *, policy: str, optimizer: str | None) -> Check:
    """Return the check for a policy and an update rule; None is the servers' default, which assigns."""
    kind: type[Check]
    if optimizer in (None, "assign"):
        kind = SumCheck if policy == "bsp" else LatestCheck
    elif policy == "bsp":
        kind = SgdCheck if optimizer == "sgd" else AlikeCheck
    else:
        kind = FiniteCheck
    return kind(rank, workers, size)
