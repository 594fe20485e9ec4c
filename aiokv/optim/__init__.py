"""Update rules as typed data: a name and validated parameters. The arithmetic is in `aiokv.kernels`.

No arrays here: a server's decisions compare and log rules, the store carries them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.errors import OptimizerError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SGD", "Assign", "Optimizer", "make_optimizer"]


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of all update rules."""


class Assign(Optimizer, tag="assign", frozen=True):
    """The new value is the sum of the contributions."""


class SGD(Optimizer, tag="sgd", frozen=True):
    """Stochastic gradient descent with momentum and weight decay, as MXNet and Sutskever et al. 2013 write it.

    g = rescale_grad * sum + wd * w;  m = momentum * m - learning_rate * g;  w = w + m
    """

    learning_rate: float = 0.1
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0


_RULES: dict[str, type[Optimizer]] = {"assign": Assign, "sgd": SGD}


def make_optimizer(name: str, params: Mapping[str, Any]) -> Optimizer:
    """Validate a rule's name and parameters.

    Raises:
        OptimizerError: unknown name, unknown parameter, wrong type or a value that is not finite.
    """
    rule = _RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(_RULES))
        raise OptimizerError(f"unknown optimizer {name!r}; known: {known}", expected=known, got=name)
    try:
        return msgspec.convert(dict(params), rule)
    except msgspec.ValidationError as error:
        fields = ", ".join(field.name for field in msgspec.structs.fields(rule))
        raise OptimizerError(
            f"optimizer {name!r}: {error}; its parameters are: {fields or 'none'}", expected=fields, got=repr(params)
        ) from None
