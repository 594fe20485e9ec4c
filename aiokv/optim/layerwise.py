"""Rules that scale each tensor's step by its norms. They must see whole tensors, which may lie on several servers.

So an update has `norm_phases` phases before it: each server computes the sums of squares of its chunks, the sums over
all chunks are gathered, and every chunk is updated with the same totals.

In the formulas g is rescale_grad times the sum of the contributions, clipped; w is the weight, |x| the norm of a whole
tensor, t the number of the update of this key, from 1 on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aiokv.errors import OptimizerError
from aiokv.optim.adam import TwoMeans, corrections
from aiokv.optim.checks import MORE_THAN_0, NONE_OR_MORE_THAN_0
from aiokv.optim.momentum import Momentum

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.optim.base import Norms, Step


class LARS(Momentum, tag="lars", frozen=True, kw_only=True):
    """Layer-wise adaptive rate scaling, You et al. 2017: SGD whose rate is multiplied by a trust ratio.

    ::

        ratio = eta * |w| / (|g| + wd * |w| + epsilon), or 1 when one of the norms is 0
        m = momentum * m - learning_rate * ratio * (g + wd * w);  w = w + m

    Args:
        momentum: at least 0 and less than 1; at 0 the rule keeps no state.
        eta: the trust coefficient, more than 0.
        epsilon: more than 0.
    """

    ranges = Momentum.ranges | {"eta": MORE_THAN_0, "epsilon": MORE_THAN_0}
    norm_counts = (2,)

    learning_rate: float = 0.1
    eta: float = 0.001
    epsilon: float = 1e-8

    @property
    def kernel(self) -> str:
        """That of SGD: only the rate differs."""
        return "sgd_with_momentum" if self.momentum else "sgd"

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        if not norms:
            return fixed
        weight, gradient = map(math.sqrt, norms[0])
        ratio = 1.0
        if weight and gradient:
            ratio = self.eta * weight / (gradient + step.wd * weight + self.epsilon)
        return {**fixed, "learning_rate": step.learning_rate * ratio}


class _LayerwiseAdam(TwoMeans, frozen=True, kw_only=True):
    """Base of the rules that scale a step of Adam.

    Args:
        epsilon: more than 0.
        lower_bound: the least norm of a weight that counts, more than 0; None for no bound.
        upper_bound: the largest norm of a weight that counts, more than `lower_bound`; None for no bound.
        bias_correction: undo that the means began at 0.
    """

    ranges = TwoMeans.ranges | {"lower_bound": NONE_OR_MORE_THAN_0, "upper_bound": NONE_OR_MORE_THAN_0}
    flags = (*TwoMeans.flags, "bias_correction")

    epsilon: float = 1e-6
    lower_bound: float | None = None
    upper_bound: float | None = None
    bias_correction: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lower_bound is not None and self.upper_bound is not None and self.lower_bound >= self.upper_bound:
            raise OptimizerError(
                f"optimizer {self.name!r}: lower_bound must be less than upper_bound, got {self.lower_bound} "
                f"and {self.upper_bound}",
                expected="lower_bound < upper_bound",
                got=[self.lower_bound, self.upper_bound],
            )

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        first, second = 1.0, 1.0
        if self.bias_correction:
            first, second = corrections(fixed["beta1"], fixed["beta2"], step.count)
        return {"first": 1.0 / first, "root": math.sqrt(second), "wd": step.wd, **fixed}

    def ratio(self, weight: float, direction: float) -> float:
        """Return the bounded norm of the weight over that of the direction, given as sums of squares."""
        size = math.sqrt(weight)
        if self.lower_bound is not None:
            size = max(size, self.lower_bound)
        if self.upper_bound is not None:
            size = min(size, self.upper_bound)
        return size / math.sqrt(direction) if size and direction else 1.0


class LAMB(_LayerwiseAdam, tag="lamb", frozen=True, kw_only=True):
    """Layer-wise adaptive moments for large batches, You et al. 2020.

    ::

        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + wd * w
        w = w - learning_rate * |w| / |r| * r, without the ratio when one of the norms is 0

    where the norm of the weight is kept between the bounds.
    """

    norm_counts = (2,)

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        if not norms:
            return fixed
        return {**fixed, "rate": step.learning_rate * self.ratio(*norms[0])}


class LANS(_LayerwiseAdam, tag="lans", frozen=True, kw_only=True):
    """LAMB with Nesterov's momentum and normalised gradients, Zheng et al. 2020.

    ::

        h = g / |g|;  m, v are the means of h and its squares
        a = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + wd * w
        b = h / (sqrt(v / (1 - beta2^t)) + epsilon) + wd * w
        w = w - learning_rate * (beta1 * |w| / |a| * a + (1 - beta1) * |w| / |b| * b)

    where the norm of the weight is kept between the bounds, and a ratio is 1 when one of its norms is 0.
    """

    norm_counts = (1, 3)

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        fixed = super().numbers(step, rounded, norms)
        if not norms:
            return fixed
        (gradient,) = norms[0]
        fixed["scale"] = 1.0 / math.sqrt(gradient) if gradient else 1.0
        if len(norms) == 1:
            return fixed
        weight, mean, own = norms[1]
        rate = step.learning_rate
        fixed["rate_mean"] = rate * fixed["beta1"] * self.ratio(weight, mean)
        fixed["rate_own"] = rate * fixed["rest1"] * self.ratio(weight, own)
        return fixed
