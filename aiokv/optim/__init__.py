"""Update rules as typed data: a name and validated parameters. The arithmetic is in `aiokv.kernels`.

No arrays here: a server's decisions compare and log rules, the store carries them out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from aiokv.errors import OptimizerError

if TYPE_CHECKING:
    from aiokv.types import Key

__all__ = ["PRECISIONS", "RULES", "SGD", "Adam", "Assign", "Optimizer", "make_optimizer"]

PRECISIONS: Mapping[str, str] = MappingProxyType({"float16": "float32", "float32": "float32", "float64": "float64"})
"""In what precision keys of a dtype are updated, by the rules that need floats."""


class _Range(NamedTuple):
    """Finite numbers with low <= number < below."""

    expected: str
    low: float = -math.inf
    below: float = math.inf

    def has(self, number: float) -> bool:
        """Tell whether the number is in the range."""
        return math.isfinite(number) and self.low <= number < self.below


_FINITE = _Range("a finite number")
_AT_LEAST_0 = _Range("a finite number >= 0", low=0.0)
_MORE_THAN_0 = _Range("a finite number > 0", low=math.ulp(0.0))
_FRACTION = _Range("a number in [0, 1)", low=0.0, below=1.0)


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of all update rules. A rule checks its parameters however it is made."""

    def check_dtype(self, key: Key, dtype: str) -> None:
        """Refuse a key whose values the rule can't update.

        Raises:
            OptimizerError: the rule is for floats and the key has another dtype, or a parameter is not in its range
                any longer when it is rounded to the precision in which the key is updated.
        """

    def check_precision(self, precision: str) -> None:
        """Refuse to compute in a precision, float32 or float64, that can't hold the parameters.

        Raises:
            OptimizerError: a parameter is not in its range any longer when it is rounded.
        """


class Assign(Optimizer, tag="assign", frozen=True):
    """The new value is the sum of the contributions."""


class _FloatRule(Optimizer, frozen=True):
    """Base of the rules that need floats. All their parameters are numbers; an int becomes a float."""

    ranges: ClassVar[Mapping[str, _Range]] = {}

    def check_dtype(self, key: Key, dtype: str) -> None:
        """Refuse a key that does not hold floats, or is updated in a precision that can't hold the parameters."""
        if dtype not in PRECISIONS:
            name = self.__struct_config__.tag
            raise OptimizerError(
                f"optimizer {name!r} updates floats, but key {key!r} has {dtype}", key=key, expected="float", got=dtype
            )
        self.check_precision(PRECISIONS[dtype])

    def check_precision(self, precision: str) -> None:
        """Refuse a precision that can't hold the parameters."""
        if precision == "float64":
            return
        for param, allowed in self.ranges.items():
            if not allowed.has(_to_float32(getattr(self, param))):
                raise self._wrong(param, f"{allowed.expected} when it is rounded to {precision}")

    def __post_init__(self) -> None:
        for param, allowed in self.ranges.items():
            number = _to_float(getattr(self, param))
            if not allowed.has(number):
                raise self._wrong(param, allowed.expected)
            msgspec.structs.force_setattr(self, param, number)

    def _wrong(self, param: str, expected: str) -> OptimizerError:
        name, got = self.__struct_config__.tag, repr(getattr(self, param))
        return OptimizerError(f"optimizer {name!r}: {param} must be {expected}, got {got}", expected=expected, got=got)


class SGD(_FloatRule, tag="sgd", frozen=True):
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

    ranges = {"learning_rate": _AT_LEAST_0, "momentum": _FRACTION, "wd": _AT_LEAST_0, "rescale_grad": _FINITE}

    learning_rate: float = 0.1
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0


class Adam(_FloatRule, tag="adam", frozen=True):
    """Adaptive moment estimation, Kingma & Ba 2015, in the form at the end of their section 2, as MXNet has it.

    g = rescale_grad * sum + wd * w;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
    w = w - learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)

    where t is the number of the update, from 1 on. Every parameter is a finite number; an int becomes a float.

    Args:
        learning_rate: at least 0.
        beta1: how much of the mean of the gradients is kept, at least 0 and less than 1.
        beta2: how much of the mean of their squares is kept, at least 0 and less than 1.
        epsilon: more than 0: without it an element that never had a gradient would become 0 / 0.
        wd: weight decay, at least 0. It is a part of the gradient, not decoupled as in AdamW.
        rescale_grad: what the sum is multiplied by, usually one over the number of samples in it.

    Raises:
        OptimizerError: a parameter has the wrong type or is out of its range.
    """

    ranges = {
        "learning_rate": _AT_LEAST_0,
        "beta1": _FRACTION,
        "beta2": _FRACTION,
        "epsilon": _MORE_THAN_0,
        "wd": _AT_LEAST_0,
        "rescale_grad": _FINITE,
    }

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    wd: float = 0.0
    rescale_grad: float = 1.0


RULES: Mapping[str, type[Optimizer]] = MappingProxyType({"adam": Adam, "assign": Assign, "sgd": SGD})
"""All rules, by the name that `make_optimizer` takes."""


def make_optimizer(name: str, params: Mapping[str, Any]) -> Optimizer:
    """Validate a rule's name and parameters.

    Raises:
        OptimizerError: unknown name, unknown parameter, wrong type or a value out of its range.
    """
    rule = RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(RULES))
        raise OptimizerError(f"unknown optimizer {name!r}; known: {known}", expected=known, got=name)
    fields = [field.name for field in msgspec.structs.fields(rule)]
    for param in params:
        if param not in fields:
            known = ", ".join(fields) or "none"
            raise OptimizerError(
                f"optimizer {name!r} has no parameter {param!r}; its parameters are: {known}", expected=known, got=param
            )
    return rule(**params)


def _to_float(value: Any) -> float:
    """Return a number as a float, and anything else as NaN, which is in no range."""
    # To Python a bool is an int, but a flag where a number belongs is a mistake.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _to_float32(number: float) -> float:
    """Return the number in the precision of float32, and what is too large for it as infinity."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        return math.inf
    return float(rounded)
