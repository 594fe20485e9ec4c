"""Rules that follow the gradient: plain, with momentum, with noise, or by its sign.

In their formulas g is the gradient: rescale_grad times the sum of the contributions, clipped, plus wd times the weight;
w is the weight and sign(0) is 0.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import msgspec

from aiokv.optim.base import LearningRule, Norms, Step
from aiokv.optim.checks import AT_LEAST_0, COUNT, FRACTION

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.types import Key


class Momentum(LearningRule, frozen=True, kw_only=True):
    """Base of the rules that keep nothing when their momentum is 0."""

    ranges = LearningRule.ranges | {"momentum": FRACTION}
    decays_gradient = True

    momentum: float = 0.0

    @property
    def kernel(self) -> str:
        """The name of the arithmetic, by whether there is momentum."""
        return f"{self.name}_with_momentum" if self.momentum else self.name

    @property
    def keeps(self) -> tuple[str, ...]:
        """The momentum, if there is any."""
        return ("momentum",) if self.momentum else ()

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del rounded, norms
        return {"learning_rate": step.learning_rate, "decay": self.momentum}


class SGD(Momentum, tag="sgd", frozen=True, kw_only=True):
    """Stochastic gradient descent with momentum, as MXNet and Sutskever et al. 2013 write it.

    ::

        m = momentum * m - learning_rate * g;  w = w + m

    Args:
        momentum: at least 0 and less than 1; at 0 the rule keeps no state.
    """

    learning_rate: float = 0.1


class NAG(Momentum, tag="nag", frozen=True, kw_only=True):
    """Nesterov's accelerated gradient, as Sutskever et al. 2013 and Bengio et al. 2013 write it.

    ::

        m = momentum * m - learning_rate * g;  w = w + momentum * m - learning_rate * g

    Args:
        momentum: at least 0 and less than 1; at 0 the rule is SGD and keeps no state.
    """

    learning_rate: float = 0.1
    momentum: float = 0.9

    @property
    def kernel(self) -> str:
        """The name of the arithmetic, by whether there is momentum."""
        return "nag_with_momentum" if self.momentum else "sgd"


class SGLD(LearningRule, tag="sgld", frozen=True, kw_only=True):
    """Stochastic gradient Langevin dynamics, Welling & Teh 2011: SGD with as much noise as makes it a sampler.

    ::

        w = w - learning_rate / 2 * g + N(0, learning_rate)

    The noise is a function of seed, key, count and the place of the element in its tensor: a job that is run again, or
    whose tensors are cut otherwise, draws the same.

    Args:
        seed: a whole number that is at least 0.
    """

    ranges = LearningRule.ranges | {"seed": COUNT}
    decays_gradient = True
    draws_noise = True

    learning_rate: float = 0.1
    seed: int = 0

    def step_for(self, key: Key, *, count: int, num_update: int) -> Step:
        """Return the numbers of one update, with the seed of its noise. See `Optimizer.step_for`."""
        step = super().step_for(key, count=count, num_update=num_update)
        name = f"{self.seed}:{count}:{type(key).__name__}:{key}"
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
        return msgspec.structs.replace(step, seed=int.from_bytes(digest, "little"))

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del rounded, norms
        return {"half_rate": step.learning_rate / 2, "deviation": math.sqrt(step.learning_rate)}


class Signum(Momentum, tag="signum", frozen=True, kw_only=True):
    """Descent by the sign of the gradient or, with momentum, of its mean, Bernstein et al. 2018.

    ::

        m = momentum * m - (1 - momentum) * g;  w = (1 - learning_rate * wd_lh) * w + learning_rate * sign(m)

    Args:
        momentum: at least 0 and less than 1; at 0 the sign is the gradient's, and the rule keeps no state.
        wd_lh: weight decay that does not go through the sign, Loshchilov & Hutter 2019, at least 0.
    """

    ranges = Momentum.ranges | {"wd_lh": AT_LEAST_0}

    learning_rate: float = 0.01
    momentum: float = 0.9
    wd_lh: float = 0.0

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del norms
        decay = rounded(self.momentum)
        return {
            "learning_rate": step.learning_rate,
            "left": 1.0 - step.learning_rate * self.wd_lh,
            "decay": decay,
            "rest": 1.0 - decay,
            "zero": 0.0,
            "one": 1.0,
        }


class DCASGD(Momentum, tag="dcasgd", frozen=True, kw_only=True):
    """Asynchronous SGD with compensation of the delay, Zheng et al. 2017.

    ::

        m = momentum * m - learning_rate * (g + lamda * g^2 * (w - w_read));  w = w + m

    where w_read is the weight that the worker had read when it computed the gradient. So a weight is kept for each
    worker; MXNet keeps one for all of them, which measures the delay of none. Where several contributions make an
    update, each of them is compensated by itself before they are added, with `rescale_grad` times what it is as its g;
    decay and clipping come afterwards.

    Args:
        momentum: at least 0 and less than 1.
        lamda: how much of the difference is compensated, at least 0; 0 gives SGD.
    """

    ranges = Momentum.ranges | {"lamda": AT_LEAST_0}
    reads_weight = True

    learning_rate: float = 0.1
    lamda: float = 0.04

    @property
    def compensation(self) -> float:
        """See `Optimizer.compensation`."""
        # The sum is rescaled later, and the square would be twice.
        return self.lamda * self.rescale_grad

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        return {**super().numbers(step, rounded, norms), "lamda": self.lamda}


class Lion(LearningRule, tag="lion", frozen=True, kw_only=True):
    """Evolved sign momentum, Chen et al. 2023. Weight decay is decoupled.

    ::

        w = w - learning_rate * (sign(beta1 * m + (1 - beta1) * g) + wd * w);  m = beta2 * m + (1 - beta2) * g

    where g is without decay.

    Args:
        beta1: how much of the mean goes into a step, at least 0 and less than 1.
        beta2: how much of the mean is kept, at least 0 and less than 1.
    """

    arrays = ("mean",)
    ranges = LearningRule.ranges | {"beta1": FRACTION, "beta2": FRACTION}

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del norms
        beta1, beta2 = rounded(self.beta1), rounded(self.beta2)
        return {
            "learning_rate": step.learning_rate,
            "wd": step.wd,
            "beta1": beta1,
            "rest1": 1.0 - beta1,
            "beta2": beta2,
            "rest2": 1.0 - beta2,
            "zero": 0.0,
            "one": 1.0,
        }
