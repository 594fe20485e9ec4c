"""How the rows of a lazily made table begin, as typed data. The arithmetic is in `aiokv.store.table`.

A row's first value is a function of the initializer, the key and the row, so it is the same on every server, in every
run and in whatever order rows are used, and nothing is kept of rows that nobody has changed.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SEED = 2**63 - 1


class Initializer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of all initializers."""


class Zeros(Initializer, tag="zeros", frozen=True):
    """All elements are 0."""


class RandomInitializer(Initializer, frozen=True, kw_only=True):
    """Base of those that draw numbers.

    Args:
        scale: how large the numbers are, more than 0.
        seed: another seed gives other numbers; at least 0.

    Raises:
        ConfigError: a parameter has the wrong type or is out of its range.
    """

    scale: float
    seed: int = 0

    def __post_init__(self) -> None:
        scale: Any = self.scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
            raise self._wrong("scale", "a finite number > 0")
        seed: Any = self.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise self._wrong("seed", "a whole number, 0 <= seed < 2**63")

    def _wrong(self, param: str, expected: str) -> ConfigError:
        got = repr(getattr(self, param))
        text = f"initializer {self.__struct_config__.tag!r}: {param} must be {expected}, got {got}"
        return ConfigError(text, expected=expected, got=got)


class Normal(RandomInitializer, tag="normal", frozen=True, kw_only=True):
    """Numbers of a normal distribution around 0 with standard deviation `scale`."""

    scale: float = 0.01


class Uniform(RandomInitializer, tag="uniform", frozen=True, kw_only=True):
    """Numbers that are evenly distributed over -scale <= number < scale."""

    scale: float = 0.07


INITIALIZERS: Mapping[str, type[Initializer]] = MappingProxyType({"normal": Normal, "uniform": Uniform, "zeros": Zeros})
"""All initializers, by name."""

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def make_initializer(data: Mapping[str, Any], dtype: str) -> Initializer:
    """Validate an initializer that is given as a dict of its name and parameters; without a name it is "zeros".

    Raises:
        ConfigError: unknown name, unknown parameter, wrong type or a value out of its range, or the dtype is not one of
            floats where random numbers are drawn.
    """
    params = dict(data)
    name = params.pop("name", "zeros")
    kind = INITIALIZERS.get(name) if isinstance(name, str) else None
    if kind is None:
        known = ", ".join(INITIALIZERS)
        raise ConfigError(f"unknown initializer {name!r}; known: {known}", expected=known, got=repr(name))
    fields = [field.name for field in msgspec.structs.fields(kind)]
    for param in params:
        if param not in fields:
            known = ", ".join(fields) or "none"
            text = f"initializer {name!r} has no parameter {param!r}; its parameters are: {known}"
            raise ConfigError(text, expected=known, got=repr(param))
    if kind is not Zeros and dtype not in _FLOATS:
        text = f"initializer {name!r} makes floats, but the dtype is {dtype}; use 'zeros'"
        raise ConfigError(text, expected="a dtype of floats", got=dtype)
    return kind(**params)
