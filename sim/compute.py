"""How long a worker computes: laws of step times, and one stream of random numbers a worker.

All times are seconds.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator

Positive = Annotated[float, Meta(gt=0, le=1e9)]


class Constant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag="constant"):
    """Every step takes `mean` seconds."""

    mean: Positive

    def sample(self, stream: random.Random) -> float:
        """Return the time of one step, in seconds."""
        return self.mean


class Exponential(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag="exponential"
):
    """Exponentially distributed around `mean` seconds."""

    mean: Positive

    def sample(self, stream: random.Random) -> float:
        """Return the time of one step, in seconds."""
        return stream.expovariate(1.0 / self.mean)


class ShiftedExponential(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag="shifted-exponential"
):
    """At least `shift` seconds, plus an exponentially distributed rest of `scale` seconds on average."""

    shift: Positive
    scale: Positive

    def sample(self, stream: random.Random) -> float:
        """Return the time of one step, in seconds."""
        return self.shift + stream.expovariate(1.0 / self.scale)


Law = Constant | Exponential | ShiftedExponential


def step_times(law: Law, *, factor: float, seed: int, worker: str) -> Iterator[float]:
    """Yield the seconds that a worker's steps take, one after the other, without end.

    The numbers depend on the arguments only: under every policy, step i of a worker takes the same time.

    Args:
        law: distribution of a step's time.
        factor: how many times slower than the law this worker is.
        seed: the run's seed.
        worker: the worker's name, which selects its stream.
    """
    stream = random.Random(f"{seed}:compute:{worker}")
    while True:
        yield factor * law.sample(stream)
