"""Which part of the training data belongs to which worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.placement import split_range
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from aiokv.types import Rank

__all__ = ["part"]


def part(size: int, rank: Rank, num_workers: int) -> slice:
    """Return the part of `size` examples that a worker trains on, to be used as an index: `images[part(...)]`.

    The parts of all ranks are neighbours, cover every example once, and their lengths differ by at most one. In
    synchronous training every worker must make the same number of steps, so count them with the shortest part,
    `size // num_workers`.

    Args:
        size: the number of examples, not negative.
        rank: the worker's number.
        num_workers: how many workers share the data.

    Raises:
        ConfigError: there are no such workers, no such rank among them, or the size is negative.
    """
    if size < 0:
        raise ConfigError(f"cannot split {size} examples: expected 0 or more", expected="size >= 0", got=size)
    if num_workers < 1:
        raise ConfigError(
            f"cannot split data over {num_workers} workers: expected 1 or more",
            expected="num_workers >= 1",
            got=num_workers,
        )
    if not 0 <= rank < num_workers:
        expected = f"0 <= rank < {num_workers}"
        raise ConfigError(
            f"rank {rank} is not one of {num_workers} workers: expected {expected}", expected=expected, got=rank
        )
    return slice(*split_range(size, num_workers)[rank])
