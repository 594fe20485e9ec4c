"""Batches that suit each worker's speed: the rule of the worker's side that carries LB-BSP over a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.training.averaging import check_every
from aiokv.training.batch_sizes import SpeedEstimate, check_batch, split_batch

if TYPE_CHECKING:
    from aiokv.kvstore import KVStore

SPEEDS = "aiokv.training.balancer.speeds"
"""The key by which all workers learn the speed of each."""


class BatchBalancer:
    """Gives slow workers smaller batches, so that nobody waits for them; the sum of the batches stays the same.

    LB-BSP (Chen et al. 2018), with a moving average as the predictor of speeds. Workers tell each other their speeds
    after every so many steps, and all compute the same sizes from them. At first all batches are equal, but for one
    sample. A worker that has left or finished gets none, and the others divide its samples.

    An update must be that of the mean over all samples, so the gradient of a smaller batch has to count for less:

    - gradients of the *sum* of the loss: divide their sum by `total` (`rescale_grad=1 / total`). With `aiokv.Trainer`
      pass `step` the same number on all workers, `total / kv.num_workers`, not this worker's batch size.
    - gradients of the *mean* of the loss over this worker's batch: multiply them by `weight` before they are summed.

    All workers make it with the same arguments.

    Args:
        store: a store; rounds are those of all its workers, whatever its type.
        batch_size: samples in the batches of all workers together.
        least: samples that every worker gets at least, so that its speed can be measured.
        every: after so many steps sizes are computed anew.
        weight: of the newest measurement in the average; see `aiokv.training.batch_sizes.SpeedEstimate`.
        timeout: seconds that an exchange may take; `Config.call_timeout` when not given.

    Raises:
        ConfigError: `every`, `least` or `weight` can't be, or the batch is too small for `least`.
    """

    def __init__(
        self,
        store: KVStore,
        batch_size: int,
        *,
        least: int = 1,
        every: int = 10,
        weight: float = 0.2,
        timeout: float | None = None,
    ) -> None:
        check_batch(batch_size, workers=store.num_workers, least=least)
        self._store = store
        self._total = batch_size
        self._least = least
        self._every = check_every(every)
        self._timeout = timeout
        self._estimate = SpeedEstimate(weight)
        self._steps = 0
        self._sizes = split_batch(batch_size, [1.0] * store.num_workers, least=least)
        store.init(SPEEDS, np.zeros(store.num_workers, np.int64), policy="sum", timeout=timeout)

    @property
    def batch_size(self) -> int:
        """Samples in this worker's next batch."""
        return self._sizes[self._store.rank]

    @property
    def batch_sizes(self) -> list[int]:
        """Samples in the next batch of every worker, by rank; the same list on all workers."""
        return list(self._sizes)

    @property
    def total(self) -> int:
        """Samples in the batches of all workers together."""
        return self._total

    @property
    def weight(self) -> float:
        """What part of the samples this worker has: the weight of its mean gradient in the sum over all workers."""
        return self.batch_size / self._total

    def step(self, seconds: float) -> bool:
        """Take note of how long this worker has computed its batch; after `every` steps, agree on new sizes.

        Args:
            seconds: without the time for which it has waited for others.

        Returns:
            Whether the sizes were computed anew.

        Raises:
            ConfigError: `seconds` is not more than 0.
        """
        self._estimate.measured(self.batch_size, seconds)
        self._steps += 1
        if self._steps % self._every:
            return False
        self._sizes = split_batch(self._total, self._exchange(), least=self._least)
        return True

    def _exchange(self) -> list[float]:
        """Return the speed of every worker, 0 for those that take no part."""
        speeds = np.zeros(self._store.num_workers)
        speeds[self._store.rank] = self._estimate.speed
        # The bits as integers: no codec touches those, and with the zeros of all others the sum is the bits again.
        bits = self._store.pushpull(SPEEDS, speeds.view(np.int64), timeout=self._timeout)
        exchanged: list[float] = bits.view(np.float64).tolist()
        return exchanged
