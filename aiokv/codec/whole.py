"""What the formats share that look at a whole tensor before any of it is cut.

A scale, or the choice of values, is made once for the tensor; so the chunks say the same whatever the cuts are.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from aiokv.codec import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.codec.reference import Array

Draw = Callable[[], np.random.Generator]
"""Returns the generator of one step's random choices, new each time it is called."""


class Compressed(abc.ABC):
    """A whole tensor, compressed but not yet cut."""

    @abc.abstractmethod
    def cut(self, start: int, stop: int) -> Array:
        """Return the payload of elements [start, stop), at least one."""

    @abc.abstractmethod
    def subtract_from(self, corrected: Array) -> None:
        """Leave what the payloads do not say: the new residual."""


class WholeFormat(abc.ABC):
    """Base of the formats that compress the whole tensor, then cut it."""

    @abc.abstractmethod
    def compress(self, corrected: Array, draw: Draw) -> Compressed:
        """Compress a tensor that has at least one element and only numbers that float32 can hold; it is not written."""

    @abc.abstractmethod
    def values(self, payload: Array, size: int) -> Array:
        """Return what a payload says, float32[size]. Raises ProtocolError when it is malformed."""

    def fits(self, gradient: Array, residual: Array | None) -> bool:
        """Tell whether the gradient with the residual has only numbers that float32 can hold."""
        return reference.fits(gradient, residual)

    def encode(
        self, gradient: Array, residual: Array | None, cuts: Sequence[tuple[int, int]], draw: Draw
    ) -> tuple[list[Array], Array | None]:
        """Return a payload for each cut, and the new residual."""
        if not gradient.size:
            return [_empty() for _ in cuts], residual
        corrected = gradient if residual is None else gradient + residual
        compressed = self.compress(corrected, draw)
        payloads = [compressed.cut(start, stop) if start < stop else _empty() for start, stop in cuts]
        if residual is None:
            return payloads, None
        compressed.subtract_from(corrected)
        return payloads, corrected

    def decode_into(self, payload: Array, out: Array) -> None:
        """Write the payload's values."""
        if out.size:
            out[...] = self.values(payload, out.size)

    def accumulate_into(self, payload: Array, target: Array) -> None:
        """Add the payload's values."""
        if target.size:
            target += self.values(payload, target.size)


def as_bytes(array: Array) -> Array:
    """Return the memory of a contiguous array as uint8."""
    return array.view(np.uint8)


def with_scale(scale: np.float32, codes: Array) -> Array:
    """Return the payload that has the scale in front of the codes."""
    return np.concatenate([as_bytes(np.array([scale], np.float32)), as_bytes(codes)])


def _empty() -> Array:
    return np.empty(0, np.uint8)
