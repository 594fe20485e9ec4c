"""Which part of the training data belongs to which worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from aiokv.core.placement import split_range
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from aiokv.types import Rank


def check_member(rank: int, of: int, *, members: str = "workers", name: str = "rank") -> None:
    """Refuse a rank that is not one of `of` members.

    Raises:
        ConfigError: there are no members, or no such rank among them.
    """
    if of < 1:
        raise ConfigError(
            f"cannot split data over {of} {members}: expected 1 or more", expected=f"1 or more {members}", got=of
        )
    if not 0 <= rank < of:
        expected = f"0 <= {name} < {of}"
        raise ConfigError(
            f"{name} {rank} is not one of {of} {members}: expected {expected}", expected=expected, got=rank
        )


def shard(n: int, rank: Rank, num_workers: int, *, even: bool = False, last: Literal["drop", "pad"] = "drop") -> slice:
    """Return the part of `n` examples that a worker trains on, to be used as an index: `images[shard(...)]`.

    The shards of all ranks are neighbours and cover every example once; their lengths differ by at most one. In
    synchronous training every worker must make the same number of steps: with `even=True` all lengths are equal.

    Args:
        n: the number of examples, not negative.
        rank: the worker's number.
        num_workers: how many workers share the data.
        even: give every worker the same number of examples.
        last: how `even` gets there. "drop" leaves out the last example of the longer shards, so each has
            n // num_workers; "pad" lengthens the shorter ones by an example of a neighbour's, which is then seen twice.

    Raises:
        ConfigError: there are no such workers, no such rank among them, the size is negative, or `last` is unknown.
    """
    if n < 0:
        raise ConfigError(f"cannot split {n} examples: expected 0 or more", expected="n >= 0", got=n)
    check_member(rank, num_workers)
    if last not in {"drop", "pad"}:
        raise ConfigError(f"unknown last={last!r}: expected 'drop' or 'pad'", expected="drop or pad", got=str(last))
    start, stop = split_range(n, num_workers)[rank]
    if even:
        length = n // num_workers if last == "drop" else -(-n // num_workers)
        # The last shard has nothing behind it, so it grows at its front.
        start = min(start, n - length)
        stop = start + length
    return slice(start, stop)
