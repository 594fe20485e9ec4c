"""Batch sizes in proportion to speed: the decisions of LB-BSP, without a store, a clock or arrays."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def split_batch(total: int, speeds: Sequence[float], *, least: int = 1) -> list[int]:
    """Divide a batch over workers in proportion to their speeds, so that all are done at about the same time.

    Shares are rounded by the method of the largest remainder; of equal remainders the lower rank's comes first.
    Workers whose share would be less than `least` get that, and the others divide what is left. It is computed with
    fractions, so equal speeds give equal sizes everywhere, and the sum is `total`.

    Args:
        total: samples in the whole batch.
        speeds: by rank, in any unit; 0 for one that takes no part, which gets no samples.
        least: samples that every other worker gets at least.

    Raises:
        ConfigError: there are too few samples, nobody takes part, or a speed is no finite number of at least 0.
    """
    for rank, speed in enumerate(speeds):
        if not 0 <= speed < float("inf"):
            expected = "a finite number of at least 0"
            raise ConfigError(f"the speed of rank {rank} must be {expected}, got {speed!r}", expected=expected)
    sharing = {rank: Fraction(speed) for rank, speed in enumerate(speeds) if speed > 0}
    check_batch(total, workers=len(sharing), least=least)
    sizes = [0] * len(speeds)
    # Who gets more than his share leaves less to the others, so that others may fall below `least` in their turn.
    while slow := _below(least, total, sharing):
        for rank in slow:
            sizes[rank] = least
            total -= least
            del sharing[rank]
    for rank, size in _largest_remainder(total, sharing).items():
        sizes[rank] = size
    return sizes


def check_batch(total: int, *, workers: int, least: int) -> None:
    """Refuse a batch that can't be divided.

    Raises:
        ConfigError: no workers, `least` is not at least 1, or the batch has too few samples.
    """
    if workers < 1:
        raise ConfigError("no worker takes part, so there is nobody to divide a batch over")
    if least < 1:
        raise ConfigError(f"least must be at least 1, got {least}", key="least", expected="at least 1", got=least)
    if total < workers * least:
        raise ConfigError(
            f"a batch of {total} is too small for {workers} workers with at least {least} samples each",
            key="batch_size",
            expected=f"at least {workers * least}",
            got=total,
        )


def _below(least: int, total: int, speeds: dict[int, Fraction]) -> list[int]:
    together = sum(speeds.values())
    return [rank for rank, speed in speeds.items() if total * speed < least * together]


def _largest_remainder(total: int, speeds: dict[int, Fraction]) -> dict[int, int]:
    together = sum(speeds.values())
    shares = {rank: total * speed / together for rank, speed in speeds.items()}
    sizes = {rank: int(share) for rank, share in shares.items()}
    left = total - sum(sizes.values())
    for rank in sorted(shares, key=lambda rank: (sizes[rank] - shares[rank], rank))[:left]:
        sizes[rank] += 1
    return sizes


class SpeedEstimate:
    """Predicts a worker's speed: the exponentially weighted moving average of what was measured.

    Args:
        weight: of the newest measurement, more than 0 and at most 1. Small ones smooth jitter, large ones follow
            changes.
    """

    def __init__(self, weight: float) -> None:
        if not 0 < weight <= 1:
            expected = "more than 0 and at most 1"
            raise ConfigError(f"weight must be {expected}, got {weight!r}", key="weight", expected=expected, got=weight)
        self._weight = weight
        self.speed = 0.0
        """Samples per second; 0 before the first measurement."""

    def measured(self, samples: int, seconds: float) -> None:
        """Take note of how long a number of samples has taken.

        Raises:
            ConfigError: the time is not more than 0.
        """
        if not 0 < seconds < float("inf"):
            raise ConfigError(
                f"seconds must be more than 0, got {seconds!r}", key="seconds", expected="more than 0", got=seconds
            )
        speed = samples / seconds
        # The first measurement counts whole: there is nothing to average it with.
        self.speed = self._weight * speed + (1 - self._weight) * self.speed if self.speed else speed
