"""What the parameters of rules and schedules may be, and the errors that say so."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from aiokv.errors import OptimizerError
from aiokv.types import MAX_INT_KEY, Key


class Range(NamedTuple):
    """Numbers with low <= number < below. None is in the range when it is `optional`."""

    expected: str
    low: float = -math.inf
    below: float = math.inf
    whole: bool = False
    optional: bool = False

    def has(self, number: float) -> bool:
        """Tell whether the number is in the range."""
        return math.isfinite(number) and self.low <= number < self.below


FINITE = Range("a finite number")
AT_LEAST_0 = Range("a finite number >= 0", low=0.0)
MORE_THAN_0 = Range("a finite number > 0", low=math.ulp(0.0))
FRACTION = Range("a number in [0, 1)", low=0.0, below=1.0)
POSITIVE_FRACTION = Range("a number in (0, 1)", low=math.ulp(0.0), below=1.0)
NONE_OR_MORE_THAN_0 = Range("None or a finite number > 0", low=math.ulp(0.0), optional=True)
COUNT = Range("a whole number >= 0", low=0, below=2**63, whole=True)
POSITIVE_COUNT = Range("a whole number >= 1", low=1, below=2**63, whole=True)


def wrong(owner: str, param: str, expected: str, got: Any) -> OptimizerError:
    """Return the error that says what a parameter must be, and what it was."""
    return OptimizerError(f"{owner}: {param} must be {expected}, got {got!r}", expected=expected, got=repr(got))


def check_numbers(owner: str, record: msgspec.Struct, ranges: Mapping[str, Range]) -> None:
    """Put every number of a record into its own type: an int becomes a float where a float belongs.

    Raises:
        OptimizerError: one is no number, or out of its range.
    """
    for param, allowed in ranges.items():
        value = getattr(record, param)
        if value is None and allowed.optional:
            continue
        number = to_int(value) if allowed.whole else to_float(value)
        if not allowed.has(number):
            raise wrong(owner, param, allowed.expected, value)
        msgspec.structs.force_setattr(record, param, number)


def check_flag(owner: str, record: msgspec.Struct, param: str) -> None:
    """Raise OptimizerError unless the parameter is True or False."""
    value = getattr(record, param)
    if not isinstance(value, bool):
        raise wrong(owner, param, "True or False", value)


def check_choice(owner: str, record: msgspec.Struct, param: str, choices: tuple[str, ...]) -> None:
    """Raise OptimizerError unless the parameter is one of the words."""
    value = getattr(record, param)
    if value not in choices:
        raise wrong(owner, param, " or ".join(map(repr, choices)), value)


def check_multipliers(owner: str, record: msgspec.Struct, param: str) -> None:
    """Make pairs of key and number, in the order of the keys, out of a dict or a sequence of pairs.

    Pairs can be hashed and are equal whatever the order in which they were given, and an int key stays an int in every
    encoding, where the names of a JSON object are text.

    Raises:
        OptimizerError: something is no key, no number that is at least 0, or there twice.
    """
    given = getattr(record, param)
    try:
        pairs = [(key, number) for key, number in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        raise wrong(owner, param, "a dict, or a list of pairs, of keys and numbers", given) from None
    found: dict[Key, float] = {}
    for key, number in pairs:
        if not _is_key(key) or key in found:
            raise wrong(owner, param, "by keys, each a name or an int >= 0, and there once", key)
        found[key] = to_float(number)
        if not AT_LEAST_0.has(found[key]):
            raise wrong(owner, f"{param} of {key!r}", AT_LEAST_0.expected, number)
    ordered = sorted(found.items(), key=lambda pair: (isinstance(pair[0], str), pair[0]))
    msgspec.structs.force_setattr(record, param, tuple(ordered))


def check_names(owner: str, record_type: type[msgspec.Struct], params: Mapping[str, Any]) -> None:
    """Raise OptimizerError when the record has no field of one of the names."""
    fields = [field.name for field in msgspec.structs.fields(record_type)]
    for param in params:
        if param not in fields:
            known = ", ".join(fields) or "none"
            raise OptimizerError(
                f"{owner} has no parameter {param!r}; its parameters are: {known}", expected=known, got=param
            )


def to_float(value: Any) -> float:
    """Return a number as a float, and anything else as NaN, which is in no range."""
    # To Python a bool is an int, but a flag where a number belongs is a mistake.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def to_int(value: Any) -> int | float:
    """Return a whole number as an int, and anything else as NaN, which is in no range."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63:
        return math.nan
    return value


def to_float32(number: float) -> float:
    """Return the number in the precision of float32, and what is too large for it as infinity."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        return math.inf
    return float(rounded)


def _is_key(key: Any) -> bool:
    if isinstance(key, str):
        return key != ""
    return isinstance(key, int) and not isinstance(key, bool) and 0 <= key <= MAX_INT_KEY
