"""Commands by name, their parameters as plain data, and how one is run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from aiokv.errors import AiokvError, CommandError

if TYPE_CHECKING:
    from aiokv.telemetry import Profile

Params = TypeVar("Params", bound=msgspec.Struct)

MAX_RESULT_BYTES: Final = 512 * 1024
"""An answer is one message, whose size is limited."""

logger = logging.getLogger("aiokv")


@dataclass(slots=True)
class ServerInfo:
    """What a command is told of the server that runs it.

    Attributes:
        name: the server's name.
        index: its number, from 0 on.
        counters: name of an event -> how often it happened.
        staleness: how many versions old a contribution was -> how many of those were applied, one for each chunk.
        profile: what the server records of its own work.
    """

    name: str
    index: int
    counters: Mapping[str, int]
    staleness: Mapping[int, int]
    profile: Profile


class NoParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a command that has none."""


Function = Callable[[ServerInfo, Any], Mapping[str, Any]]


@dataclass(slots=True, frozen=True)
class Command:
    """A command with its parameters, ready to be run."""

    name: str
    params: msgspec.Struct


_commands: dict[str, tuple[type[msgspec.Struct], Function]] = {}

COMMANDS: Mapping[str, tuple[type[msgspec.Struct], Function]] = MappingProxyType(_commands)
"""All commands of this process: name -> record of its parameters, function. It grows with `register`."""


def register(
    name: str, params: type[Params]
) -> Callable[[Callable[[ServerInfo, Params], Mapping[str, Any]]], Callable[[ServerInfo, Params], Mapping[str, Any]]]:
    """Make a function known as a command; a decorator.

    The function gets a `ServerInfo` and the parameters, and returns a dict of plain data: None, bool, int, float, str,
    bytes, lists and dicts. It runs in a thread of its own beside the server, so it may take its time.

    Args:
        name: what workers call it by.
        params: a frozen `msgspec.Struct` with `forbid_unknown_fields=True`; `NoParams` for a command without.

    Raises:
        CommandError: the name is no text or belongs to another function, or the record can change or ignores mistakes.
    """
    check_name(name)
    given: Any = params
    config = getattr(given, "__struct_config__", None) if isinstance(given, type) else None
    if config is None or not config.frozen or not config.forbid_unknown_fields:
        expected = "a class made of msgspec.Struct with frozen=True and forbid_unknown_fields=True"
        raise CommandError(f"command {name!r}: its parameters must be {expected}", expected=expected, got=repr(params))

    def decorate(
        function: Callable[[ServerInfo, Params], Mapping[str, Any]],
    ) -> Callable[[ServerInfo, Params], Mapping[str, Any]]:
        if _commands.setdefault(name, (params, function)) != (params, function):
            other = _commands[name][1]
            text = f"command {name!r} is already {other.__module__}.{other.__qualname__}"
            raise CommandError(text, expected="a name of its own", got=name)
        return function

    return decorate


def check_name(name: object) -> None:
    """Refuse what is no name, such as a number.

    Raises:
        CommandError: not a text, or an empty one.
    """
    if not isinstance(name, str) or not name:
        raise CommandError(f"a command has a name, got {name!r}", expected="a text", got=repr(name))


def make_command(name: str, params: Mapping[str, Any]) -> Command:
    """Validate a command's name and parameters, given as plain data.

    Raises:
        CommandError: unknown name, unknown parameter or wrong type.
    """
    if name not in _commands:
        known = ", ".join(sorted(_commands))
        raise CommandError(f"unknown command {name!r}; known: {known}", expected=known, got=name)
    record, _ = _commands[name]
    try:
        return Command(name, msgspec.convert(params, record))
    except msgspec.ValidationError as error:
        expected = ", ".join(field.name for field in msgspec.structs.fields(record)) or "none"
        text = f"command {name!r}: {error}; its parameters: {expected}"
        raise CommandError(text, expected=expected, got=repr(dict(params))) from None


def plain(name: str, data: Any, *, limit: int = MAX_RESULT_BYTES) -> dict[str, Any]:
    """Return parameters or a result as they arrive at the other side.

    Args:
        name: of the command, for errors.
        data: a dict, or a record.
        limit: most bytes.

    Raises:
        CommandError: there is something in it that can't travel, or too much of it.
    """
    try:
        encoded = msgspec.msgpack.encode(data)
        decoded = msgspec.msgpack.decode(encoded)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CommandError(f"command {name!r}: only plain data can travel: {error}") from None
    if not isinstance(decoded, dict) or not all(isinstance(key, str) for key in decoded):
        got = type(data).__name__
        raise CommandError(f"command {name!r}: expected a dict with names, got {got}", expected="dict", got=got)
    if len(encoded) > limit:
        text = f"command {name!r}: {len(encoded)} bytes are too many for one message, which has at most {limit}"
        raise CommandError(text, expected=limit, got=len(encoded))
    return decoded


def run(command: Command, server: ServerInfo) -> dict[str, Any] | AiokvError:
    """Run a command and return its answer; whatever goes wrong is an answer too."""
    _, function = _commands[command.name]
    try:
        return plain(command.name, function(server, command.params))
    except AiokvError as error:
        return error
    except Exception as error:  # a command of a user's own may raise anything
        text = f"command {command.name!r} on {server.name}: {type(error).__name__}: {error}"
        logger.exception(text)
        return CommandError(text, server=server.index)
