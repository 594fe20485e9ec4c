"""What a trainer can be made of and go on with, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.codec import make_codec
from aiokv.core.merging import Merging
from aiokv.errors import ConfigError, DataError, OptimizerError
from aiokv.optim import FloatRule, LearningRule, Optimizer, make_optimizer
from aiokv.training.update_place import Place

if TYPE_CHECKING:
    from collections.abc import Mapping


def training_rule(optimizer: str | Optimizer, params: Mapping[str, Any] | None) -> FloatRule:
    """Return the rule that is meant.

    Args:
        optimizer: a rule, or the name of one.
        params: its parameters, if it is given by name.

    Raises:
        OptimizerError: there is no such rule, a parameter can't be, or the rule can't train.
    """
    if isinstance(optimizer, Optimizer):
        if params:
            raise OptimizerError("give either a rule, or a name and parameters")
        rule = optimizer
    else:
        rule = make_optimizer(optimizer, params or {})
    if not isinstance(rule, FloatRule):
        raise OptimizerError(f"optimizer {rule.name!r} does not scale gradients, so it can't train", got=rule.name)
    return rule


def learning_rule(rule: Optimizer) -> LearningRule:
    """Return a rule as one that has a learning rate.

    Raises:
        OptimizerError: it has none.
    """
    if not isinstance(rule, LearningRule):
        raise OptimizerError(f"optimizer {rule.name!r} has no learning rate", got=rule.name)
    return rule


def check_more_than_0(name: str, value: float) -> None:
    """Refuse a number that is not more than 0, or not finite.

    Raises:
        ConfigError: names the argument.
    """
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be more than 0, got {value!r}", key=name, expected="more than 0", got=value)


def check_sums(merging: Merging) -> None:
    """Refuse what only servers do with gradients.

    Raises:
        ConfigError: something else than a sum is wanted.
    """
    for name, got in merging._asdict().items():
        expected = Merging._field_defaults[name]
        if got != expected:
            text = f"{name} {got!r} is for updates on the servers, but none update here; say update_on_kvstore=True"
            raise ConfigError(text, key=name, expected=expected, got=got)


def check_compression(params: Mapping[str, Any], place: Place) -> None:
    """Refuse a codec that can't be, or that would have nothing to do.

    Raises:
        ConfigError: there is no store that gradients are sent to.
        CodecError: unknown codec, or a wrong parameter.
    """
    if place is Place.ALONE:
        raise ConfigError("compression_params: this trainer is alone and sends no gradients", got=repr(dict(params)))
    named = dict(params)
    make_codec(named.pop("type", ""), named)


def check_not_on_servers(place: Place, method: str) -> None:
    """Refuse a method for updates on the workers.

    Raises:
        ConfigError: the servers make them.
    """
    if place is Place.SERVERS:
        raise ConfigError(
            f"{method}() is for updates on the workers, but here the servers make them: use step(), or "
            "update_on_kvstore=False",
            key="update_on_kvstore",
            expected=False,
            got=True,
        )


def check_saved(facts: Mapping[str, Any], *, url: str, rule: Optimizer, merging: Merging) -> None:
    """Refuse a file of a trainer whose servers make other updates.

    Args:
        facts: what was saved with the values.
        url: of the file.
        rule: of this trainer.
        merging: what becomes of its gradients.

    Raises:
        DataError: says what differs.
    """
    saved = dict(facts.get("trainer", {}))
    for what, expected in {"optimizer": rule.name, **merging._asdict()}.items():
        got = saved.get(what)
        if got != expected:
            text = f"{url}: expected the states of a trainer with {what} {expected!r}, got {got!r}"
            raise DataError(text, path=url, expected=expected, got=got)
