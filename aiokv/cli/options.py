"""Options that several commands have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable


class Plain(click.ParamType[Any]):
    """A range whose limits are in no need of being shown in the help; the error for a wrong value names them."""

    def __init__(self, limits: click.ParamType[Any]) -> None:
        self.name = limits.name
        self._limits = limits

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value as what has the limits converts it."""
        return self._limits.convert(value, param, ctx)


PORT = Plain(click.IntRange(0, 65535))
COUNT = Plain(click.IntRange(min=1))
SECONDS = Plain(click.FloatRange(min=0, min_open=True))


def with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Apply several options, in the order in which the help shows them."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


CONFIG = click.option("--config", metavar="FILE", help="TOML file with settings.  [default: AIOKV_CONFIG]")
CLUSTER = click.option("--cluster", metavar="ID", help="Nodes of another cluster are refused.")
WORKERS = click.option(
    "-w", "--workers", "num_workers", type=COUNT, metavar="N", help="Number of workers.  [default: 1]"
)
SERVERS = click.option(
    "-s", "--servers", "num_servers", type=COUNT, metavar="N", help="Number of servers.  [default: 1]"
)
PLACES = click.option(
    "--places",
    "num_places",
    type=Plain(click.IntRange(min=0)),
    metavar="N",
    help="Cut keys for so many places, of which servers that join get some; 0: one for each server.  [default: 0]",
)
COLOCATE = click.option(
    "--colocate", is_flag=True, default=None, help="Each worker also hosts a server; no other servers are started."
)
ADVERTISE = click.option(
    "--advertise", "advertise_host", metavar="HOST", help="Address under which the others reach this node."
)
ON_WORKER_LOSS = click.option(
    "--on-worker-loss",
    metavar="MODE",
    help="When a worker is lost: fail, shrink (go on without it) or respawn (wait for another process).  "
    "[default: fail]",
)
WORKER_LIMITS = (
    click.option(
        "--min-workers",
        type=COUNT,
        metavar="N",
        help="Fewer workers do not go on, with --on-worker-loss shrink or --max-workers.  [default: 1]",
    ),
    click.option(
        "--max-workers",
        type=Plain(click.IntRange(min=0)),
        metavar="N",
        help="Workers may join the running job until there are so many; 0: none may.  [default: 0]",
    ),
)
REPLICATION = click.option(
    "--replication",
    type=Plain(click.IntRange(1, 2)),
    metavar="N",
    help="Keep every parameter on so many servers, 1 or 2.  [default: 1]",
)
NAME = click.option("--name", metavar="NAME", help="Name of this node.")
PLUGINS = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="MODULE",
    help="Module that the servers import for the rules and commands it registers; may be given several times.",
)
CHECKPOINTS = (
    click.option("--checkpoint-folder", metavar="URL", help="Where checkpoints of the whole cluster are."),
    click.option(
        "--checkpoint-every",
        type=Plain(click.IntRange(min=0)),
        metavar="N",
        help="Make one after every N rounds; 0: none.  [default: 0]",
    ),
    click.option(
        "--checkpoint-seconds",
        type=Plain(click.FloatRange(min=0)),
        metavar="SECONDS",
        help="Make one every so many seconds; 0: none.  [default: 0]",
    ),
    click.option("--checkpoint-keep", type=COUNT, metavar="N", help="Keep the last N of them.  [default: 3]"),
    click.option("--resume", "resumes", is_flag=True, help="Go on from the newest complete one, if there is one."),
    click.option("--resume-from", "resume", metavar="URL", help="Go on from this one, or the newest in this folder."),
)
TLS = (
    click.option("--tls-cert", metavar="FILE", help="This node's certificate, as PEM; turns TLS on."),
    click.option("--tls-key", metavar="FILE", help="The private key of the certificate, as PEM."),
    click.option("--tls-ca", metavar="FILE", help="The certificate of the cluster's own authority, as PEM."),
)
JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print lines of JSON: the real address when ready, then what goes wrong."
)
