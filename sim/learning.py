"""What an optimisation does under a run's updates: real arithmetic, after the fact, in the order that was simulated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run, Token

    Gradient = Callable[[float, Token], float]


def descend(run: Run, gradient: Gradient, *, start: float, rate: float) -> list[float]:
    """Return the parameter at each version of a run's only chunk, from 0 on.

    Each gradient is computed at the version that its worker had read, and each update follows the mean of its
    gradients. When steps end does not depend on the values, so this may come after the run.

    Args:
        run: says which gradients are in which update, and how stale they are.
        gradient: of a parameter and the gradient's token.
        start: the parameter at version 0.
        rate: the learning rate.
    """
    values = [start]
    for update in run.updates:
        parts = [
            gradient(values[update.version - 1 - staleness], token)
            for staleness, token in zip(update.staleness, update.tokens, strict=True)
        ]
        values.append(values[-1] - rate * math.fsum(parts) / len(parts))
    return values
