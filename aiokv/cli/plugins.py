"""Commands that are found by name: those of other packages, and some of aiokv's own; imported when they are used."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

import click

from aiokv.cli.processes import EXIT_INTERRUPTED, finish, one_line
from aiokv.errors import AiokvError, MissingExtraError

PLUGIN_GROUP = "aiokv.commands"
"""Entry points of this group are commands: click commands under the entry point's name."""

OWN = [
    EntryPoint("chaos", "aiokv.chaos.command:chaos", PLUGIN_GROUP),
    EntryPoint("metrics", "aiokv.why:metrics", PLUGIN_GROUP),
    EntryPoint("why", "aiokv.why:why", PLUGIN_GROUP),
]
"""Commands that have a room of their own; nothing of it is imported until it is used."""


class Commands(click.Group):
    """A group that finds further commands by name, and imports them only when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted({*super().list_commands(ctx), *_found().names})

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; at Ctrl-C end as a shell expects it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            finish(EXIT_INTERRUPTED, "interrupted")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or what stands for it until it is used."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        found = list(_found().select(name=cmd_name))
        return _Plugin(found[0]) if found else None


class _Plugin(click.Command):
    """Stands for a command of another package until it is used."""

    def __init__(self, entry: EntryPoint) -> None:
        super().__init__(entry.name)
        self._entry = entry

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return _load(self._entry).make_context(info_name, args, parent, **extra)

    def get_short_help_str(self, limit: int = 45) -> str:
        try:
            return _load(self._entry).get_short_help_str(limit)
        except Exception as error:  # noqa: BLE001 - a broken plug-in must not hide the help of all other commands
            return f"(not available: {one_line(error)})"


def _found() -> EntryPoints:
    return EntryPoints([*OWN, *entry_points(group=PLUGIN_GROUP)])


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", entry.module.partition(".")[0]):
            raise AiokvError(f"the command {entry.name!r} can't be loaded from {entry.value}: {error}") from error
        raise MissingExtraError(
            f"the command {entry.name!r} needs the package {missing!r}, which is not installed: "
            f"{_install_hint(entry, missing)}"
        ) from None
    if not isinstance(command, click.Command):
        kind = type(command).__name__
        raise AiokvError(
            f"the command {entry.name!r} can't be used: {entry.value} is of type {kind}, not a click command"
        )
    return command


def _install_hint(entry: EntryPoint, missing: str) -> str:
    """Name the extra of the plug-in's distribution that has the plug-in's name, or else the missing package."""
    extras = entry.dist.metadata.get_all("Provides-Extra") if entry.dist else None
    if entry.dist and entry.name in (extras or []):
        return f"pip install '{entry.dist.name}[{entry.name}]'"
    return f"pip install {missing}"
