"""Update rules as typed data: a name and validated parameters. The arithmetic is in `aiokv.kernels`.

No arrays here: a server's decisions compare and log rules, the store carries them out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.errors import OptimizerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.types import Key

__all__ = ["SGD", "Assign", "Optimizer", "make_optimizer"]


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of all update rules. A rule checks its parameters however it is made."""

    def check_dtype(self, key: Key, dtype: str) -> None:
        """Refuse a key whose values the rule can't update.

        Raises:
            OptimizerError: the rule is for floats, and the key has another dtype.
        """


class Assign(Optimizer, tag="assign", frozen=True):
    """The new value is the sum of the contributions."""


class SGD(Optimizer, tag="sgd", frozen=True):
    """Stochastic gradient descent with momentum and weight decay, as MXNet and Sutskever et al. 2013 write it.

    g = rescale_grad * sum + wd * w;  m = momentum * m - learning_rate * g;  w = w + m

    Every parameter is a finite number; an int becomes a float.

    Args:
        learning_rate: at least 0.
        momentum: at least 0 and less than 1; at 0 the rule keeps no state.
        wd: weight decay, at least 0.
        rescale_grad: what the sum is multiplied by, usually one over the number of samples in it.

    Raises:
        OptimizerError: a parameter has the wrong type or is out of its range.
    """

    learning_rate: float = 0.1
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0

    def check_dtype(self, key: Key, dtype: str) -> None:
        """Refuse a key that does not hold floats."""
        if not dtype.startswith("float"):
            raise OptimizerError(
                f"optimizer 'sgd' updates floats, but key {key!r} has {dtype}", key=key, expected="float", got=dtype
            )

    def __post_init__(self) -> None:
        _check_number(self, "learning_rate", "a finite number >= 0", low=0.0)
        _check_number(self, "momentum", "a number in [0, 1)", low=0.0, below=1.0)
        _check_number(self, "wd", "a finite number >= 0", low=0.0)
        _check_number(self, "rescale_grad", "a finite number")


_RULES: dict[str, type[Optimizer]] = {"assign": Assign, "sgd": SGD}


def make_optimizer(name: str, params: Mapping[str, Any]) -> Optimizer:
    """Validate a rule's name and parameters.

    Raises:
        OptimizerError: unknown name, unknown parameter, wrong type or a value out of its range.
    """
    rule = _RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(_RULES))
        raise OptimizerError(f"unknown optimizer {name!r}; known: {known}", expected=known, got=name)
    fields = [field.name for field in msgspec.structs.fields(rule)]
    for param in params:
        if param not in fields:
            known = ", ".join(fields) or "none"
            raise OptimizerError(
                f"optimizer {name!r} has no parameter {param!r}; its parameters are: {known}", expected=known, got=param
            )
    return rule(**params)


def _check_number(
    rule: Optimizer, param: str, expected: str, *, low: float = -math.inf, below: float = math.inf
) -> None:
    """Make the parameter a float, or raise OptimizerError: it is not a finite number with low <= number < below."""
    given = getattr(rule, param)
    number = math.nan
    # To Python a bool is an int, but a flag where a number belongs is a mistake.
    if isinstance(given, int | float) and not isinstance(given, bool):
        try:
            number = float(given)
        except OverflowError:
            number = math.inf
    if not (math.isfinite(number) and low <= number < below):
        name = rule.__struct_config__.tag
        raise OptimizerError(
            f"optimizer {name!r}: {param} must be {expected}, got {given!r}", expected=expected, got=repr(given)
        )
    msgspec.structs.force_setattr(rule, param, number)
