"""Normal noise that depends on a seed and on where an element lies in its tensor, and on nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from aiokv.kernels.reference import Array

BLOCK = 4096
"""Elements that are drawn together."""


def draw(seed: int, start: int, size: int, precision: np.dtype[Any]) -> Array:
    """Return the noise of elements `start` to `start + size` of a tensor."""
    first, last = start // BLOCK, -(-(start + size) // BLOCK)
    blocks = [_block(seed, number) for number in range(first, last)]
    offset = start - first * BLOCK
    return np.concatenate(blocks)[offset : offset + size].astype(precision)


def _block(seed: int, number: int) -> Array:
    # A generator that counts: each block begins far from where another one ends.
    return np.random.Generator(np.random.Philox(key=seed, counter=number << 64)).standard_normal(BLOCK)
