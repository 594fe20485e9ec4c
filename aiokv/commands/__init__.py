"""Commands that a worker sends to all servers: a name, typed parameters, and a function on the server's side.

One of your own::

    import msgspec
    from aiokv.commands import ServerInfo, register

    class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        '''Which counters are wanted.'''

        prefix: str = ""

    @register("counters", Wanted)
    def counters(server: ServerInfo, params: Wanted) -> dict[str, int]:
        '''Return the counters whose names begin so.'''
        return {name: number for name, number in server.counters.items() if name.startswith(params.prefix)}

    kv.send_command_to_servers("counters", {"prefix": "refused"})  # a list of dicts, by the servers' numbers

Only the name and the parameters travel, as plain data, and nothing is ever unpickled. The servers import the module
that registers the command: `aiokv server --plugin MODULE`, `aiokv run --plugin MODULE`, or `plugins` in the
configuration. What servers and workers need for themselves are messages of their own, and can't be reached from here.

These are always there::

    statistics        the server's counters, and how stale the contributions were that it applied
    profiler.start    forget what was recorded, and record from now on
    profiler.stop     record no longer
    profiler.resume   go on recording
    profiler.dump     write what was recorded as a trace for Chrome's viewer
"""

from __future__ import annotations

from aiokv.commands import builtin as _builtin  # noqa: F401 - it registers what is always there
from aiokv.commands.registry import COMMANDS, Command, NoParams, ServerInfo, make_command, plain, register, run

__all__ = ["COMMANDS", "Command", "NoParams", "ServerInfo", "make_command", "plain", "register", "run"]
