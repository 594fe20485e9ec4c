"""TOML -> typed records, with messages that name the file, the line, the key and what was expected there."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import inspect

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T", bound=msgspec.Struct)

_WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}
_SECTION: Final = re.compile(r"\s*\[(\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_STEP: Final = re.compile(r"[^.\[\]]+|\[\d+\]")
_ELSEWHERE: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)


def closest(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" for the name that is most alike; empty when none is."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def mistake(file: str, text: str, path: str, what: str, changes: Sequence[tuple[str, Any]] = ()) -> ConfigError:
    """Return the error for something wrong in a file.

    Args:
        file: the file's path.
        text: its content, to find the line.
        path: the key, as in "cluster.workers" or "tensor[0].shape"; empty for the whole file.
        what: what is wrong, expected and got.
        changes: keys, and values that stand in for those of the file: what is wrong may be one of them, or be so
            only with them.
    """
    steps = _STEP.findall(path)
    is_changed = any(steps[: len(key.split("."))] == key.split(".") for key, _ in changes)
    line = None if is_changed else line_of(text, path)
    place = file if line is None else f"{file}, line {line}"
    shown = [
        f"{key}={', '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in changes
        if value != ()
    ]
    if shown:
        place += f", with {', '.join(shown)}"
    return ConfigError(f"{place}: {path}: {what}" if path else f"{place}: {what}", key=path)


def decode(content: bytes, file: str, record: type[T], changes: Sequence[tuple[str, Any]] = ()) -> tuple[str, T]:
    """Return a TOML file's text, and the record that it describes.

    Args:
        content: the file's bytes, UTF-8.
        file: its path, for messages.
        record: what it has to describe.
        changes: keys, as in "cluster.workers", and values that stand in for those of the file.

    Raises:
        ConfigError: not TOML, an unknown or missing key, or a value of the wrong type or out of range.
    """
    try:
        text = content.decode()
        raw = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} is not a TOML file: {error}") from None
    for path, value in changes:
        _put(raw, path, value)
    try:
        return text, msgspec.convert(raw, record)
    except msgspec.ValidationError as error:
        raise mistake(file, text, *_explain(str(error), raw, record), changes) from None


def _put(raw: dict[str, Any], path: str, value: Any) -> None:
    *tables, name = path.split(".")
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"can't set {path}: {table} is not a table", key=path)
    raw[name] = value


def _explain(message: str, raw: dict[str, Any], record: type[msgspec.Struct]) -> tuple[str, str]:
    """Return the path of the key that a message of msgspec is about, and what is wrong in words."""
    match = _ELSEWHERE.match(message)
    assert match is not None, "the pattern matches every text"
    what, path = match["what"], (match["path"] or "").lstrip(".")
    named = re.search(r"(unknown|required) field `(.*)`", what)
    if named is not None:
        state, name = named.groups()
        whole = f"{path}.{name}".lstrip(".")
        known = _fields(_type_at(path, raw, inspect.type_info(record)), _value_at(path, raw))
        if state == "unknown":
            return whole, f"unknown key{closest(name, known) or '; known: ' + ', '.join(known)}"
        return whole, "is missing"
    if path.endswith("[...]"):
        path = _culprit(path.removesuffix("[...]"), message, raw, record)
    value = _value_at(path, raw)
    if what.startswith("Invalid"):
        expected = _choices(_type_at(path.rpartition(".")[0], raw, inspect.type_info(record)), path.rpartition(".")[2])
        return path, f"expected {expected}, got {value!r}{closest(str(value), expected.split(', '))}"
    return path, f"{_in_words(what).split(', got')[0]}, got {value!r}"


def _culprit(table: str, message: str, raw: dict[str, Any], record: type[msgspec.Struct]) -> str:
    """Return the path of the key of a table that a message is about; msgspec names only the table."""
    for name, value in _value_at(table, raw).items():
        alone = copy.deepcopy(raw)
        _put(alone, table, {name: value})
        try:
            msgspec.convert(alone, record)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return f"{table}.{name}"
    raise AssertionError("one of the values is the reason for the message")


def _in_words(what: str) -> str:
    """Return what msgspec says, with the names of types in words: `float | object` is a number or a table."""

    def plain(match: re.Match[str]) -> str:
        return " or ".join(_WORDS.get(name, name) for name in match[1].split(" | "))

    return re.sub("`([^`]*)`", plain, what).replace("Expected", "expected")


def _value_at(path: str, raw: Any) -> Any:
    for step in _STEP.findall(path):
        raw = raw[int(step[1:-1])] if step.startswith("[") else raw.get(step, {})
    return raw


def _type_at(path: str, raw: Any, kind: inspect.Type) -> inspect.Type:
    """Return the type that belongs at a path, the variant that `raw` selects where there are several."""
    for step in _STEP.findall(path):
        kind = _inner(kind)
        if isinstance(kind, inspect.VarTupleType | inspect.ListType):
            kind = kind.item_type
        elif isinstance(kind, inspect.StructType):
            kind = next(field.type for field in kind.fields if field.encode_name == step)
    return _inner(kind)


def _inner(kind: inspect.Type) -> inspect.Type:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return kind


def _variants(kind: inspect.Type) -> list[inspect.StructType]:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [variant for variant in map(_inner, kinds) if isinstance(variant, inspect.StructType)]


def _fields(kind: inspect.Type, value: Any) -> list[str]:
    """Return the keys that a table may have."""
    variants = _variants(kind)
    chosen = [v for v in variants if v.tag_field and isinstance(value, dict) and value.get(v.tag_field) == v.tag]
    return list(dict.fromkeys(field.encode_name for v in chosen or variants for field in v.fields))


def _choices(kind: inspect.Type, name: str) -> str:
    """Return the texts that may stand under a key, in words."""
    variants = _variants(kind)
    tags = [str(variant.tag) for variant in variants if variant.tag_field == name]
    if tags:
        return ", ".join(tags)
    for field in (field for variant in variants for field in variant.fields if field.encode_name == name):
        literal = _inner(field.type)
        if isinstance(literal, inspect.LiteralType):
            return ", ".join(str(value) for value in literal.values if value != "")
    return "another value"


def line_of(text: str, path: str) -> int | None:
    """Return the number of the line (from 1) where a key or its table stands; None when it can't be found."""
    wanted = _STEP.findall(path)
    table: list[str] = []
    seen: dict[str, int] = {}
    best: tuple[int, int | None] = (0, None)
    for number, line in enumerate(text.splitlines(), start=1):
        header = _SECTION.match(line)
        here = table
        if header is not None:
            table = [part.strip("\"' ") for part in header[2].split(".")]
            if header[1]:
                name = header[2]
                seen[name] = seen.get(name, -1) + 1
                table.append(f"[{seen[name]}]")
            here = table
        elif "=" in line and not line.lstrip().startswith("#"):
            here = [*table, *(part.strip("\"' ") for part in line.split("=")[0].split("."))]
        else:
            continue
        if here == wanted[: len(here)] and len(here) > best[0]:
            best = (len(here), number)
    return best[1]
