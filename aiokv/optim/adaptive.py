"""Rules that scale each step by the history of the gradients, and those that follow a regularised leader.

In their formulas g is the gradient: rescale_grad times the sum of the contributions, clipped, plus wd times the weight
unless said otherwise; w is the weight, t the number of the update of this key, from 1 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.optim.adam import corrections
from aiokv.optim.base import LearningRule, Norms, Step
from aiokv.optim.checks import AT_LEAST_0, FRACTION, MORE_THAN_0

if TYPE_CHECKING:
    from collections.abc import Callable


class AdaGrad(LearningRule, tag="adagrad", frozen=True, kw_only=True):
    """Adaptive subgradients, Duchi et al. 2011.

    ::

        h = h + g^2;  w = w - learning_rate * g / (sqrt(h) + epsilon)

    Args:
        epsilon: more than 0.
    """

    arrays = ("history",)
    ranges = LearningRule.ranges | {"epsilon": MORE_THAN_0}
    decays_gradient = True

    epsilon: float = 1e-6

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del rounded, norms
        return {"learning_rate": step.learning_rate, "epsilon": self.epsilon}


class GroupAdaGrad(AdaGrad, tag="groupadagrad", frozen=True, kw_only=True):
    """AdaGrad with one history for each row, such as the vector of one word, as MXNet has it.

    ::

        h = h + mean of g^2 over the row;  w = w - learning_rate * g / (sqrt(h) + epsilon)

    A row is one index of the first axis. Servers refuse a dense key that is cut inside a row: one whose rows are larger
    than `chunk_bytes`, or too few to be spread evenly over the servers.

    Args:
        epsilon: more than 0.
    """

    by_row = True


class AdaDelta(LearningRule, tag="adadelta", frozen=True, kw_only=True):
    """Steps of the size that earlier steps had, Zeiler 2012.

    ::

        a = rho * a + (1 - rho) * g^2;  d = sqrt(b + epsilon) / sqrt(a + epsilon) * g
        b = rho * b + (1 - rho) * d^2;  w = w - learning_rate * d

    Args:
        rho: how much of both means is kept, at least 0 and less than 1.
        epsilon: more than 0; the size of the first steps comes from it.
    """

    arrays = ("squares", "steps")
    ranges = LearningRule.ranges | {"rho": FRACTION, "epsilon": MORE_THAN_0}
    decays_gradient = True

    learning_rate: float = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del norms
        rho = rounded(self.rho)
        rate = step.learning_rate
        return {"learning_rate": rate, "rho": rho, "rest": 1.0 - rho, "epsilon": self.epsilon}


class RMSProp(LearningRule, tag="rmsprop", frozen=True, kw_only=True):
    """Divide by the root of the mean of the squares, Hinton 2012; centred, and with momentum, Graves 2013.

    ::

        n = rho * n + (1 - rho) * g^2;  d = g / (sqrt(n) + epsilon)
        centred:  a = rho * a + (1 - rho) * g;  d = g / (sqrt(n - a^2) + epsilon)
        w = w - learning_rate * d, or with momentum  m = momentum * m - learning_rate * d;  w = w + m

    MXNet uses momentum, .9 unless it is told otherwise, in the centred form only.

    Args:
        rho: how much of both means is kept, at least 0 and less than 1.
        momentum: at least 0 and less than 1.
        epsilon: more than 0.
        centered: subtract the square of the mean from the mean of the squares.
    """

    ranges = LearningRule.ranges | {"rho": FRACTION, "momentum": FRACTION, "epsilon": MORE_THAN_0}
    flags = (*LearningRule.flags, "centered")
    decays_gradient = True

    learning_rate: float = 0.001
    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-8
    centered: bool = False

    @property
    def kernel(self) -> str:
        """The name of the arithmetic, which depends on the form."""
        return f"rmsprop{'_centered' * self.centered}{'_with_momentum' * (self.momentum > 0)}"

    @property
    def keeps(self) -> tuple[str, ...]:
        """What the form needs."""
        return ("squares",) + ("mean",) * self.centered + ("momentum",) * (self.momentum > 0)

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del norms
        rho = rounded(self.rho)
        return {
            "learning_rate": step.learning_rate,
            "rho": rho,
            "rest": 1.0 - rho,
            "decay": self.momentum,
            "epsilon": self.epsilon,
            "zero": 0.0,
        }


class Ftrl(LearningRule, tag="ftrl", frozen=True, kw_only=True):
    """Follow the regularised leader, McMahan et al. 2013, for sparse linear models.

    ::

        z = z + g - (sqrt(n + g^2) - sqrt(n)) / learning_rate * w;  n = n + g^2
        w = -sign(z) * max(|z| - lamda1, 0) / ((beta + sqrt(n)) / learning_rate + wd)

    where g is without decay: wd is the weight of the squared norm in what is minimised.

    Args:
        learning_rate: at least 0; at 0 weights stay as they are.
        lamda1: weight of the absolute values, at least 0: how many weights are 0.
        beta: more than 0.
    """

    arrays = ("leader", "squares")
    ranges = LearningRule.ranges | {"lamda1": AT_LEAST_0, "beta": MORE_THAN_0}
    divides_by_rate = True

    learning_rate: float = 0.1
    lamda1: float = 0.01
    beta: float = 1.0

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del rounded, norms
        rate = step.learning_rate
        return {"learning_rate": rate, "wd": step.wd, "lamda1": self.lamda1, "beta": self.beta, "zero": 0.0}


class FTML(LearningRule, tag="ftml", frozen=True, kw_only=True):
    """Follow the moving leader, Zheng & Kwok 2017.

    ::

        v = beta2 * v + (1 - beta2) * g^2;  d' = (1 - beta1^t) / learning_rate * (sqrt(v / (1 - beta2^t)) + epsilon)
        z = beta1 * z + (1 - beta1) * g - (d' - beta1 * d) * w;  d = d';  w = -z / d

    Args:
        learning_rate: at least 0; at 0 weights stay as they are.
        beta1: how much of the leader is kept, at least 0 and less than 1.
        beta2: how much of the mean of the squares is kept, at least 0 and less than 1.
        epsilon: more than 0.
    """

    arrays = ("variance", "scale", "leader")
    ranges = LearningRule.ranges | {"beta1": FRACTION, "beta2": FRACTION, "epsilon": MORE_THAN_0}
    divides_by_rate = True
    decays_gradient = True

    learning_rate: float = 0.0025
    beta1: float = 0.6
    beta2: float = 0.999
    epsilon: float = 1e-8

    def numbers(self, step: Step, rounded: Callable[[float], float], norms: Norms) -> dict[str, float]:
        """See `Optimizer.numbers`."""
        del norms
        beta1, beta2 = rounded(self.beta1), rounded(self.beta2)
        first, second = corrections(beta1, beta2, step.count)
        return {
            "learning_rate": step.learning_rate,
            "first": first,
            "root": second**0.5,
            "beta1": beta1,
            "rest1": 1.0 - beta1,
            "beta2": beta2,
            "rest2": 1.0 - beta2,
            "epsilon": self.epsilon,
        }
