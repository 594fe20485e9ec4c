"""Laws of random times: how long a step takes, or a message is under way. All times are seconds."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator

Positive = Annotated[float, Meta(gt=0, le=1e9)]
Deviation = Annotated[float, Meta(ge=0, le=100)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class Distribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law"):
    """Base of the laws whose draws are independent of each other."""

    def sample(self, stream: random.Random) -> float:
        """Return one draw, in seconds."""
        raise NotImplementedError

    def times(self, seed: int, worker: str, rank: int) -> Iterator[float]:
        """Yield the seconds that a worker's steps take, without end.

        Args:
            seed: the run's seed.
            worker: the worker's name, which selects its stream.
            rank: its number.
        """
        stream = random.Random(f"{seed}:compute:{worker}")
        while True:
            yield self.sample(stream)


class Constant(Distribution, frozen=True, kw_only=True, tag="constant"):
    """Always `mean` seconds."""

    mean: Positive

    def sample(self, stream: random.Random) -> float:
        """Return the mean."""
        return self.mean


class Exponential(Distribution, frozen=True, kw_only=True, tag="exponential"):
    """Exponentially distributed around `mean` seconds."""

    mean: Positive

    def sample(self, stream: random.Random) -> float:
        """Return one draw, in seconds."""
        return stream.expovariate(1.0 / self.mean)


class ShiftedExponential(Distribution, frozen=True, kw_only=True, tag="shifted-exponential"):
    """At least `shift` seconds, plus an exponentially distributed rest of `scale` seconds on average."""

    shift: Positive
    scale: Positive

    def sample(self, stream: random.Random) -> float:
        """Return one draw, in seconds."""
        return self.shift + stream.expovariate(1.0 / self.scale)


class Normal(Distribution, frozen=True, kw_only=True, tag="normal"):
    """Normally distributed; what would be below zero is zero."""

    mean: Positive
    sd: Positive

    def sample(self, stream: random.Random) -> float:
        """Return one draw, in seconds."""
        return max(0.0, stream.gauss(self.mean, self.sd))


class Lognormal(Distribution, frozen=True, kw_only=True, tag="lognormal"):
    """`mean` seconds on average; `sd` is the standard deviation of the logarithm."""

    mean: Positive
    sd: Positive

    def sample(self, stream: random.Random) -> float:
        """Return one draw, in seconds."""
        return self.mean * math.exp(stream.gauss(0.0, self.sd) - self.sd**2 / 2.0)


class Pareto(Distribution, frozen=True, kw_only=True, tag="pareto"):
    """At least `minimum` seconds, with a tail of the power `shape`: the smaller, the heavier."""

    minimum: Positive
    shape: Positive

    def sample(self, stream: random.Random) -> float:
        """Return one draw, in seconds."""
        return self.minimum * stream.paretovariate(self.shape)


class Erlang(Distribution, frozen=True, kw_only=True, tag="erlang"):
    """The sum of `phases` exponential times of `mean` seconds each, as of so many local steps."""

    phases: Annotated[int, Meta(ge=1, le=10_000)]
    mean: Positive

    def sample(self, stream: random.Random) -> float:
        """Return one draw, in seconds."""
        return stream.gammavariate(self.phases, self.mean)


class Hyperexponential(Distribution, frozen=True, kw_only=True, tag="hyperexponential"):
    """A mix of a short and a long exponential time, with the squared coefficient of variation `scv` above 1.

    Each of the two makes half of the total time ("balanced means"; Tijms 2003, "A First Course in Stochastic Models").
    """

    mean: Positive
    scv: Annotated[float, Meta(gt=1, le=1e6)]

    def sample(self, stream: random.Random) -> float:
        """Return one draw, in seconds."""
        share = 0.5 * (1.0 + math.sqrt((self.scv - 1.0) / (self.scv + 1.0)))
        chosen = share if stream.random() < share else 1.0 - share
        return stream.expovariate(2.0 * chosen / self.mean)


Latency = Constant | Exponential | ShiftedExponential | Normal | Lognormal | Pareto | Erlang | Hyperexponential
"""Laws whose draws are independent of each other."""
