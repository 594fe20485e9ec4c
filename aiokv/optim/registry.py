"""Rules by name, and rules as plain data."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aiokv.errors import OptimizerError
from aiokv.optim.adam import AdaBelief, Adam, Adamax, AdamW, Nadam
from aiokv.optim.adaptive import FTML, AdaDelta, AdaGrad, Ftrl, GroupAdaGrad, RMSProp
from aiokv.optim.checks import check_names
from aiokv.optim.layerwise import LAMB, LANS, LARS
from aiokv.optim.momentum import DCASGD, NAG, SGD, SGLD, Lion, Signum
from aiokv.optim.own import OwnRule
from aiokv.optim.plain import Accumulate, Assign

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.optim.base import Optimizer

Own = TypeVar("Own", bound=type[OwnRule])

_BUILT_IN: tuple[type[Optimizer], ...] = (
    *(Accumulate, Assign),
    *(SGD, NAG, SGLD, Signum, DCASGD, Lion),
    *(Adam, AdamW, Adamax, Nadam, AdaBelief),
    *(AdaGrad, GroupAdaGrad, AdaDelta, RMSProp, Ftrl, FTML),
    *(LARS, LAMB, LANS),
)

_rules: dict[str, type[Optimizer]] = {str(rule.__struct_config__.tag): rule for rule in _BUILT_IN}

RULES: Mapping[str, type[Optimizer]] = MappingProxyType(_rules)
"""All rules, by the name that `make_optimizer` takes. It grows with `register`."""


def register(rule: Own) -> Own:
    """Make a rule of one's own known by its name; a decorator of its class. See `aiokv.optim.own`.

    Raises:
        OptimizerError: it is no `OwnRule` with a name, or another rule has the name.
    """
    given: Any = rule
    if not isinstance(given, type) or not issubclass(given, OwnRule):
        raise OptimizerError(
            f"only a class made of OwnRule can be registered, got {rule!r}",
            expected="a class of OwnRule",
            got=repr(rule),
        )
    name = rule.__struct_config__.tag
    if not isinstance(name, str) or not name or not rule.__struct_config__.frozen:
        raise OptimizerError(
            f'{rule.__name__} needs a name and must not change: class {rule.__name__}(OwnRule, tag="...", frozen=True)',
            expected="a tag, and frozen=True",
            got=repr(name),
        )
    if _rules.setdefault(name, rule) is not rule:
        raise OptimizerError(
            f"optimizer {name!r} is already {_rules[name].__qualname__}", expected="a name of its own", got=name
        )
    return rule


def make_optimizer(name: str, params: Mapping[str, Any]) -> Optimizer:
    """Validate a rule's name and parameters, given as plain data.

    Raises:
        OptimizerError: unknown name, unknown parameter, wrong type or a value out of its range.
    """
    rule = RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(RULES))
        raise OptimizerError(f"unknown optimizer {name!r}; known: {known}", expected=known, got=name)
    check_names(f"optimizer {name!r}", rule, params)
    return rule(**params)


def rule_to_params(rule: Optimizer) -> dict[str, Any]:
    """Return a rule's parameters as plain data: with its name, `make_optimizer` makes an equal rule of them.

    It is the same after a way through JSON or MessagePack: numbers by key are a list of pairs, in which int keys stay
    ints.
    """
    params: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(rule))
    del params["name"]
    return params
