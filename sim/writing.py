"""Writing a scenario as a TOML file, without what is left at its default."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from sim.scenario import Scenario


def to_toml(scenario: Scenario) -> str:
    """Return a scenario as the text of a TOML file; reading it gives an equal one."""
    table = _fields(scenario)
    plain = {name: value for name, value in table.items() if not _is_table(value)}
    lines = [f"{name} = {_value(value)}" for name, value in plain.items()]
    for name, value in table.items():
        if name in plain:
            continue
        header = f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
        for part in value if isinstance(value, list) else [value]:
            lines += ["", header, *(f"{_key(key)} = {_value(inner)}" for key, inner in part.items())]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a record that are not at their defaults, and its tag."""
    config = struct.__struct_config__
    found: dict[str, Any] = {} if config.tag is None else {str(config.tag_field): config.tag}
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value != default:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _fields(value)
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        # The escapes of JSON are those of TOML, but for the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    return str(value)
