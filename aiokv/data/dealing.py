"""How the indices of an epoch are dealt over workers: pure functions of the order, the workers and what was finished.

A step is one batch of every worker. Step t takes the next num_workers * batch_size indices of the order, and rank r the
r-th batch of them. So the number of batches that each rank has finished says which indices are left, and everybody who
knows these numbers deals them anew in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from aiokv.data.sharding import shard
from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Indices = NDArray[np.signedinteger[Any]]

Last = Literal["pad", "drop", "short"]


def epoch_order(n: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """Return the order in which an epoch uses range(n): the same on every worker.

    It takes 4 bytes per index, and 8 where there are more than 2^31.
    """
    order: Indices = np.arange(n, dtype="<i4" if n <= 1 << 31 else "<i8")
    if shuffle:
        np.random.Generator(np.random.PCG64([seed, epoch])).shuffle(order)
    return order


class Hand(NamedTuple):
    """The batches that one worker was dealt."""

    whole: Indices
    """The full ones, of shape (batches, batch_size)."""
    last: Indices | None
    """What was made of the remainder."""


class Deal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Over how many workers indices are dealt, and what happens to those that do not fill a step."""

    num_workers: Annotated[int, msgspec.Meta(ge=1)]
    batch_size: Annotated[int, msgspec.Meta(ge=1)]
    last: Last

    @property
    def step_size(self) -> int:
        """How many indices all workers use in a step."""
        return self.num_workers * self.batch_size

    def num_batches(self, size: int) -> int:
        """Return how many batches each worker gets of `size` indices."""
        full, rest = divmod(size, self.step_size)
        return full + (rest > 0 and self.last != "drop")

    def hand(self, order: Indices, rank: int) -> Hand:
        """Return what a rank gets of the indices in `order`."""
        full, rest = divmod(len(order), self.step_size)
        whole = order[: full * self.step_size].reshape(full, self.num_workers, self.batch_size)[:, rank].copy()
        if not rest or self.last == "drop":
            return Hand(whole, None)
        size = self._last_size(rest)
        # What fills the step up are the first indices once more; over and over, where there are too few.
        filled = np.concatenate([order[-rest:], np.resize(order, size - rest)])
        return Hand(whole, filled[shard(size, rank, self.num_workers)])

    def check_done(self, size: int, done: Sequence[int]) -> None:
        """Refuse numbers of finished batches that workers who share `size` indices can't have.

        Raises:
            ConfigError: they are for another number of workers, or one of them is out of range.
        """
        if len(done) != self.num_workers:
            raise ConfigError(
                f"finished batches of {len(done)} workers: expected those of {self.num_workers}",
                expected=self.num_workers,
                got=len(done),
            )
        most = self.num_batches(size)
        for rank, batches in enumerate(done):
            if not 0 <= batches <= most:
                raise ConfigError(
                    f"rank {rank} cannot have finished {batches} batches: expected 0 to {most}",
                    expected=f"0 to {most}",
                    got=batches,
                )

    def unfinished(self, order: Indices, done: Sequence[int]) -> Indices:
        """Return the indices that nobody has finished, in their order, when rank r has finished `done[r]` batches."""
        left = np.ones(len(order), dtype=np.bool_)
        full, rest = divmod(len(order), self.step_size)
        dealt = left[: full * self.step_size].reshape(full, self.num_workers, self.batch_size)
        remainder = left[full * self.step_size :]
        for rank, batches in enumerate(done):
            dealt[:batches, rank] = False
            if batches > full:
                remainder[shard(self._last_size(rest), rank, self.num_workers)] = False
        return order[left]

    def num_unfinished(self, size: int, done: Sequence[int]) -> int:
        """Return how many of `size` indices are left when rank r has finished `done[r]` batches."""
        full, rest = divmod(size, self.step_size)
        for rank, batches in enumerate(done):
            size -= min(batches, full) * self.batch_size
            if batches > full:
                size -= len(range(rest)[shard(self._last_size(rest), rank, self.num_workers)])
        return size

    def _last_size(self, rest: int) -> int:
        """Return how many indices the last step has, those that fill it up included: one per worker at least."""
        return self.step_size if self.last == "pad" else max(rest, self.num_workers)
