"""Adam and what was made of it.

In their formulas g is the gradient: rescale_grad times the sum of the contributions, clipped, plus wd times the weight
unless the decay is decoupled; w is the weight, t the number of the update of this key, from 1 on.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from aiokv.optim.base import LearningRule, Norms, Step
from aiokv.optim.checks import AT_LEAST_0, FRACTION, MORE_THAN_0

if TYPE_CHECKING:
    from collections.abc import Callable


class TwoMeans(LearningRule, frozen=True, kw_only=True):
    """Base of the rules that keep a mean of the gradients and one of their squares.

    Args:
        beta1: how much of the mean of the gradients is kept, at least 0 and less than 1.
        beta2: how much of the mean of their squares is kept, at least 0 and less than 1.
        epsilon: more than 0: without it an element that never had a gradient would become 0 / 0.
    """

    arrays = ("mean", "variance")
    ranges = LearningRule.ranges | {"beta1": FRACTION, "beta2": FRACTION, "epsilon": MORE_THAN_0}

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del step, norms
        # With the rest of the rounded beta, the parts of a mean add up to 1.
        beta1, beta2 = rounded(self.beta1), rounded(self.beta2)
        return {"beta1": beta1, "rest1": 1.0 - beta1, "beta2": beta2, "rest2": 1.0 - beta2, "epsilon": self.epsilon}


def corrections(beta1: float, beta2: float, count: int) -> tuple[float, float]:
    """Return what the means are divided by, for having begun at 0.

    They undo what the betas did as they are computed with, which is rounded, but are themselves in double precision.
    """
    return 1.0 - beta1**count, 1.0 - beta2**count


class Adam(TwoMeans, tag="adam", frozen=True, kw_only=True):
    """Adaptive moment estimation, Kingma & Ba 2015, in the form at the end of their section 2, as MXNet has it.

    ::

        m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
        w = w - learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)
    """

    decays_gradient = True

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        first, second = corrections(fixed["beta1"], fixed["beta2"], step.count)
        return {"rate": step.learning_rate * math.sqrt(second) / first, **fixed}


class AdamW(TwoMeans, tag="adamw", frozen=True, kw_only=True):
    """Adam with decoupled weight decay, Loshchilov & Hutter 2019, which follows the learning rate as in PyTorch.

    ::

        w = w - learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + wd * w)
    """

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        first, second = corrections(fixed["beta1"], fixed["beta2"], step.count)
        rates = {"rate": step.learning_rate / first, "root": math.sqrt(second)}
        return {**rates, "shrink": step.learning_rate * step.wd, **fixed}


class Adamax(TwoMeans, tag="adamax", frozen=True, kw_only=True):
    """Adam with the infinity norm, Kingma & Ba 2015, section 7.1.

    ::

        m = beta1 * m + (1 - beta1) * g;  u = max(beta2 * u, |g|)
        w = w - learning_rate / (1 - beta1^t) * m / (u + epsilon)
    """

    arrays = ("mean", "largest")
    decays_gradient = True

    learning_rate: float = 0.002

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        first, _ = corrections(fixed["beta1"], 0.0, step.count)
        return {"rate": step.learning_rate / first, **fixed}


class Nadam(TwoMeans, tag="nadam", frozen=True, kw_only=True):
    """Adam with Nesterov's momentum, Dozat 2016.

    ::

        mu(t) = beta1 * (1 - 0.5 * 0.96^(t * schedule_decay));  M(t) = mu(1) * ... * mu(t)
        w = w - learning_rate * ((1 - mu(t)) * g / (1 - M(t)) + mu(t + 1) * m / (1 - M(t + 1)))
                              / (sqrt(v / (1 - beta2^t)) + epsilon)

    M is a function of the key's own count. In MXNet it is multiplied in each update of any key, so that it depends on
    how many keys a server holds.

    Args:
        schedule_decay: how fast mu goes from beta1 / 2 to beta1, at least 0.
    """

    ranges = TwoMeans.ranges | {"schedule_decay": AT_LEAST_0}
    decays_gradient = True

    schedule_decay: float = 0.004

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        t, beta1 = step.count, fixed["beta1"]
        product = momentum_product(beta1, self.schedule_decay, t)
        now, following = (momentum_at(beta1, self.schedule_decay, n) for n in (t, t + 1))
        return {
            "rate_now": step.learning_rate * (1.0 - now) / (1.0 - product),
            "rate_mean": step.learning_rate * following / (1.0 - product * following),
            "root": math.sqrt(1.0 - fixed["beta2"] ** t),
            **fixed,
        }


def momentum_at(beta1: float, decay: float, count: int) -> float:
    """Return the mu of Nadam at an update."""
    return beta1 * (1.0 - 0.5 * math.pow(0.96, count * decay))


@functools.lru_cache(maxsize=1024)
def momentum_product(beta1: float, decay: float, count: int) -> float:
    """Return the product of Nadam's mu up to an update."""
    product = 1.0
    for n in range(1, count + 1):
        product *= momentum_at(beta1, decay, n)
        # It is only ever subtracted from 1, where less than this changes nothing.
        if product < 2.0**-60:
            break
    return product


class AdaBelief(TwoMeans, tag="adabelief", frozen=True, kw_only=True):
    """Adam with steps by how far gradients are from what was expected, Zhuang et al. 2020.

    ::

        m = beta1 * m + (1 - beta1) * g;  s = beta2 * s + (1 - beta2) * (g - m)^2 + epsilon
        w = w - learning_rate * m / (1 - beta1^t) / (sqrt(s / (1 - beta2^t)) + epsilon)
    """

    decays_gradient = True

    epsilon: float = 1e-6

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        first, second = corrections(fixed["beta1"], fixed["beta2"], step.count)
        return {"rate": step.learning_rate / first, "root": math.sqrt(second), **fixed}
