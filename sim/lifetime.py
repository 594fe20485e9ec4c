"""A job as a whole, over days: work, checkpoints, failures and restarts, without its single steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


def segment_time(interval: float, cost: float, mtbf: float, restart: float, stream: random.Random) -> float:
    """Return the seconds until one interval of work is done and saved.

    Args:
        interval: seconds of work between checkpoints.
        cost: seconds of a checkpoint.
        mtbf: mean seconds between failures, which are exponential and may hit at any time.
        restart: seconds from a failure until work goes on from the last checkpoint.
        stream: where the failures are drawn from.
    """
    elapsed = 0.0
    while True:
        failure = stream.expovariate(1.0 / mtbf)
        if failure >= interval + cost:
            return elapsed + interval + cost
        elapsed += failure
        while (failure := stream.expovariate(1.0 / mtbf)) < restart:
            elapsed += failure
        elapsed += restart
