"""What an update rule is to a backend: the name of a kernel, the arrays that it keeps, and numbers for each update.

A new rule is its record in `aiokv.optim`, a case in each function here, and a kernel in each backend.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiokv.errors import OptimizerError
from aiokv.optim import SGD, Adam, Assign

if TYPE_CHECKING:
    from aiokv.kernels.reference import Scalar
    from aiokv.optim import Optimizer


class Kernel(NamedTuple):
    """The name of a kernel, and those of its state arrays, in the order in which it takes them."""

    name: str
    state: tuple[str, ...] = ()


def kernel_of(rule: Optimizer) -> Kernel | None:
    """Return the rule's kernel, None when there is nothing to compute: the sum is the new weight.

    Raises:
        OptimizerError: no backend knows the rule.
    """
    match rule:
        case Assign():
            return None
        case SGD(momentum=0.0):
            return Kernel("sgd")
        case SGD():
            return Kernel("sgd_with_momentum", ("momentum",))
        case Adam():
            return Kernel("adam", ("mean", "variance"))
        case _:
            raise _unknown(rule)


def scalars_of(rule: Optimizer, precision: np.dtype[Any], step: int) -> tuple[Scalar, ...]:
    """Return the scalars that the rule's kernel takes, in its order and in the precision of the computation.

    Args:
        rule: one that has a kernel.
        precision: float32 or float64.
        step: the number of the update, from 1 on.

    Raises:
        OptimizerError: a parameter is not in its range any longer when it is rounded.
    """
    fixed = _fixed_scalars(rule, precision)
    if isinstance(rule, Adam):
        # The corrections undo what the betas did as they are computed with, which is rounded, but are themselves
        # computed in double precision.
        beta1, _, beta2, *_ = map(float, fixed)
        rate = rule.learning_rate * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        with np.errstate(over="ignore"):
            return precision.type(rate), *fixed
    return fixed


@functools.lru_cache
def _fixed_scalars(rule: Optimizer, precision: np.dtype[Any]) -> tuple[Scalar, ...]:
    """Return the scalars that are the same in each update."""
    rule.check_precision(precision.name)
    kind = precision.type
    match rule:
        case SGD(momentum=0.0):
            return kind(rule.learning_rate), kind(rule.wd), kind(rule.rescale_grad)
        case SGD():
            return kind(rule.learning_rate), kind(rule.momentum), kind(rule.wd), kind(rule.rescale_grad)
        case Adam():
            beta1, beta2 = kind(rule.beta1), kind(rule.beta2)
            # With the rest of the rounded beta, the parts of a mean add up to 1.
            rest1, rest2 = kind(1 - float(beta1)), kind(1 - float(beta2))
            return beta1, rest1, beta2, rest2, kind(rule.epsilon), kind(rule.wd), kind(rule.rescale_grad)
        case _:
            raise _unknown(rule)


def _unknown(rule: Optimizer) -> OptimizerError:
    return OptimizerError(f"no backend can compute {rule!r}", expected="a rule with a kernel", got=repr(rule))
