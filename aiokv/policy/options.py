"""The text of a policy -> its options, and checks of them."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from aiokv.errors import PolicyError

if TYPE_CHECKING:
    from aiokv.policy.base import Policy

P = TypeVar("P", bound="Policy")


def parse(cls: type[P], text: str, given: list[str]) -> P:
    """Make a policy of a class from the options in its text, named ones after those that are not.

    Raises:
        PolicyError: an option is unknown, missing, given twice, or no value of its type.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    types = get_type_hints(cls)
    values: dict[str, Any] = {}
    for place, part in enumerate(given):
        name, equals, value = part.partition("=")
        if not equals:
            if place >= len(names) or any("=" in other for other in given[:place]):
                raise _wrong(cls, text, "there are too many options, or one without a name follows one with a name")
            name, value = names[place], part
        if name not in names or name in values:
            raise _wrong(cls, text, f"{'unknown option' if name not in names else 'twice the option'} {name!r}")
        try:
            values[name] = types[name](value)
        except ValueError:
            wanted = "a whole number" if types[name] is int else "a number"
            raise _wrong(cls, text, f"{name} must be {wanted}, got {value!r}") from None
    needed = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    absent = [name for name in needed if name not in values]
    if absent:
        raise _wrong(cls, text, f"{absent[0]} is not given")
    return cls(**values)


def usage(cls: type[Policy]) -> str:
    """Return how a policy is written, such as `quorum:k=:deadline=:strikes=0`."""
    fields = dataclasses.fields(cls)
    options = [f"{one.name}={'' if one.default is dataclasses.MISSING else one.default}" for one in fields]
    return ":".join([cls.name, *options])


def _wrong(cls: type[Policy], text: str, what: str) -> PolicyError:
    return PolicyError(f"policy {text!r}: {what}; it is written {usage(cls)}", expected=usage(cls), got=text)


def at_least(policy: Policy, name: str, smallest: float) -> None:
    """Refuse an option that is too small, or not finite.

    Raises:
        PolicyError: it is.
    """
    value = getattr(policy, name)
    if not smallest <= value < math.inf:
        expected = f"at least {smallest:g}"
        raise PolicyError(f"policy {policy.name}: {name} must be {expected}, got {value}", expected=expected, got=value)


def fraction(policy: Policy, name: str) -> None:
    """Refuse an option that is not from 0 to 1.

    Raises:
        PolicyError: it is not.
    """
    value = getattr(policy, name)
    if not 0.0 <= value <= 1.0:
        text = f"policy {policy.name}: {name} must be from 0 to 1, got {value}"
        raise PolicyError(text, expected="from 0 to 1", got=value)
