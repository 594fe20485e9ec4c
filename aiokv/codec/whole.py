"""What the formats share that look at a whole tensor before any of it is cut.

A scale, or the choice of values, is made once for the tensor; so the chunks say the same whatever the cuts are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.codec.backends import Kernels
    from aiokv.codec.reference import Array

Draw = Callable[[], np.random.Generator]
"""Returns the generator of one step's random choices, new each time it is called."""

Cut = Callable[[int, int], "Array"]
"""Returns the payload of elements [start, stop) of a tensor that is compressed, at least one."""


class WholeFormat(abc.ABC):
    """Base of the formats that compress the whole tensor, then cut it.

    Args:
        kernels: who computes.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    @abc.abstractmethod
    def compress(self, gradient: Array, residual: Array | None, draw: Draw) -> Cut:
        """Compress a tensor, and write the new residual.

        Args:
            gradient: at least one element; with the residual it has only numbers that float32 can hold.
            residual: written in place; None without error feedback.
            draw: returns the generator of this step's random choices.
        """

    @abc.abstractmethod
    def read_into(self, payload: Array, out: Array) -> None:
        """Write what the payload of at least one element says. Raises ProtocolError when it is malformed."""

    @abc.abstractmethod
    def add_to(self, payload: Array, target: Array) -> None:
        """Add what the payload of at least one element says. Raises ProtocolError when it is malformed."""

    def fits(self, gradient: Array, residual: Array | None) -> bool:
        """Tell whether the gradient with the residual has only numbers that float32 can hold."""
        return self._kernels.fits(gradient, residual)

    def encode(
        self, gradient: Array, residual: Array | None, cuts: Sequence[tuple[int, int]], draw: Draw
    ) -> tuple[list[Array], Array | None]:
        """Return a payload for each cut, and the residual, written in place."""
        if not gradient.size:
            return [_empty() for _ in cuts], residual
        cut = self.compress(gradient, residual, draw)
        return [cut(start, stop) if start < stop else _empty() for start, stop in cuts], residual

    def decode_into(self, payload: Array, out: Array) -> None:
        """Write the payload's values."""
        if out.size:
            self.read_into(payload, out)

    def accumulate_into(self, payload: Array, target: Array) -> None:
        """Add the payload's values."""
        if target.size:
            self.add_to(payload, target)


def as_bytes(array: Array) -> Array:
    """Return the memory of a contiguous array as uint8."""
    return array.view(np.uint8)


def with_scale(scale: np.float32, codes: Array) -> Array:
    """Return the payload that has the scale in front of the codes."""
    return np.concatenate([as_bytes(np.array([scale], np.float32)), as_bytes(codes)])


def _empty() -> Array:
    return np.empty(0, np.uint8)
