"""The commands that every server knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from aiokv.commands.registry import NoParams, ServerInfo, register
from aiokv.errors import CommandError


@register("statistics", NoParams)
def statistics(server: ServerInfo, params: NoParams) -> dict[str, Any]:
    """Return name and number of the server, its counters, and the histogram of staleness."""
    del params
    staleness = dict(sorted(server.staleness.items()))
    return {"name": server.name, "index": server.index, "counters": dict(server.counters), "staleness": staleness}


@register("profiler.start", NoParams)
def start_profiler(server: ServerInfo, params: NoParams) -> dict[str, Any]:
    """Forget what was recorded, and record from now on."""
    del params
    server.profile.start()
    return {}


@register("profiler.stop", NoParams)
def stop_profiler(server: ServerInfo, params: NoParams) -> dict[str, Any]:
    """Record no longer, and keep what was recorded."""
    del params
    server.profile.running = False
    return {"steps": len(server.profile.steps)}


@register("profiler.resume", NoParams)
def resume_profiler(server: ServerInfo, params: NoParams) -> dict[str, Any]:
    """Go on recording."""
    del params
    server.profile.running = True
    return {"steps": len(server.profile.steps)}


class Dump(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a trace is written: `path` on the server's machine; its last part gets the server's number in front."""

    path: str = "profile.json"


@register("profiler.dump", Dump)
def dump_profile(server: ServerInfo, params: Dump) -> dict[str, Any]:
    """Write what was recorded to a file in the format of Chrome's trace viewer; the answer names it.

    Raises:
        CommandError: the name does not end in ".json", or the file can't be written.
    """
    wanted = Path(params.path)
    if wanted.suffix != ".json":
        expected = "a path that ends in .json"
        raise CommandError(
            f"profiler.dump: expected {expected}, got {params.path!r}", expected=expected, got=params.path
        )
    path = wanted.with_name(f"server{server.index}_{wanted.name}")
    try:
        path.write_bytes(msgspec.json.encode(server.profile.trace(server.name, server.index)))
    except OSError as error:
        text = f"profiler.dump: {server.name} can't write {path}: {error.strerror or error}"
        raise CommandError(text, path=str(path)) from None
    return {"path": str(path.absolute()), "steps": len(server.profile.steps), "dropped": server.profile.dropped}
