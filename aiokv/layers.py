"""Layers of settings: where a value comes from, and what a mistake in it says.

A setting is a field of a record. Its type says what it may be, `Meta(description=...)` in words, and `says(...)` what
it is for.
"""

from __future__ import annotations

import difflib
import tomllib
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin

import msgspec
from msgspec import Meta

from aiokv.errors import AiokvError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Layer = dict[str, tuple[Any, str]]
"""Setting -> (value, where it came from)."""

FILE: Final = "config"
"""The name of the TOML file, in the environment and the arguments."""
TRAINING: Final = "training"
"""The table of the file, and the middle of the variables' names, that have the settings of training."""
SECRETS: Final = frozenset({"token"})


def says(meaning: str) -> Meta:
    """Return what annotates a setting with what it is for."""
    return Meta(title=meaning)


def types_of(record: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the settings of a record, with their types."""
    return {field.name: field.type for field in msgspec.structs.fields(record)}


def allowed(kind: Any) -> str:
    """Say in words what a setting of this type may be."""
    return next(str(meta.description) for meta in kind.__metadata__ if meta.description)


def meaning(kind: Any) -> str:
    """Say what a setting of this type is for."""
    return next((str(meta.title) for meta in kind.__metadata__ if meta.title), "")


def shown(name: str, value: Any) -> str:
    """Return a value as it may be seen."""
    if name in SECRETS:
        return "'***'" if value else "''"
    # A role is a text with a long way to show itself.
    return repr(str(value)) if isinstance(value, str) else repr(value)


def argument_layer(arguments: Mapping[str, Any]) -> Layer:
    """Return the arguments of a call as a layer; None counts as not given."""
    return {name: (value, f"argument {name!r}") for name, value in arguments.items() if value is not None}


def environment_layer(variables: Mapping[str, str], prefix: str, names: Iterable[str], *, ignored: str = "") -> Layer:
    """Return the variables of a prefix as a layer; an empty one counts as not set.

    Args:
        variables: the environment.
        prefix: what the names of the variables begin with.
        names: the settings.
        ignored: a longer prefix, of variables that are no business of this layer.

    Raises:
        ConfigError: a variable has the prefix and is no setting.
    """
    known = {f"{prefix}{name.upper()}": name for name in names}
    layer: Layer = {}
    for name, value in variables.items():
        if not name.startswith(prefix) or (ignored and name.startswith(ignored)):
            continue
        if name not in known:
            raise unknown("environment variable", name, "the environment", list(known))
        if value:
            layer[known[name]] = (value, name)
    return layer


def file_layers(path: Any, origin: str) -> tuple[Layer, Layer]:
    """Return the settings at the top of a TOML file, and those of its table for training.

    Args:
        path: of the file.
        origin: who named it.

    Raises:
        ConfigError: there is no such file, it is no TOML, or "training" in it is no table.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration file {str(path)!r} (from {origin}): {error.strerror or error}",
            key=FILE,
            source=origin,
            got=str(path),
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}", key=FILE, source=origin, got=str(path)) from None
    training = values.pop(TRAINING, {})
    if not isinstance(training, dict):
        got = repr(training)
        raise ConfigError(f"{path}: {TRAINING} must be a table, got {got}", key=TRAINING, source=str(path), got=got)
    top, table = ({name: (value, str(path)) for name, value in each.items()} for each in (values, training))
    return top, table


def convert(name: str, value: Any, kind: Any, origin: str, *, strict: bool) -> Any:
    """Return a value in the type of its setting; not `strict`: it may be a text, with commas in a list.

    Raises:
        ConfigError: it can't be.
    """
    given = value
    if not strict and isinstance(value, str) and get_origin(get_args(kind)[0]) is tuple:
        given = [part.strip() for part in value.split(",")]
    try:
        return msgspec.convert(given, kind, strict=strict)
    except msgspec.ValidationError:
        expected, got = allowed(kind), shown(name, value)
        raise ConfigError(
            f"{name} must be {expected}, got {got} (from {origin})", key=name, source=origin, expected=expected, got=got
        ) from None


def unknown(kind: str, name: str, origin: str, known: list[str]) -> AiokvError:
    """Return the error for a name that is none, with the closest one that is."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    where = "" if origin == "the environment" or origin.startswith("argument") else f" in {origin}"
    return ConfigError(
        f"unknown {kind} {name!r}{where}; {hint}",
        key=name,
        source=origin,
        expected=close[0] if close else None,
        got=name,
    )
