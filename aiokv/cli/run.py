"""The command `aiokv run`: a training job, on this machine or on several hosts."""

# ruff: noqa: PLC0415 - imports stand inside functions, so that `aiokv --help` is quick

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from aiokv.cli.options import (
    ADVERTISE,
    CHECKPOINTS,
    COLOCATE,
    CONFIG,
    ON_WORKER_LOSS,
    PLACES,
    PLUGINS,
    PORT,
    REPLICATION,
    SECONDS,
    SERVERS,
    TLS,
    WORKER_LIMITS,
    WORKERS,
    Plain,
    with_options,
)
from aiokv.cli.processes import environment, finish

if TYPE_CHECKING:
    from aiokv.config import Config
    from aiokv.launch.base import Job
    from aiokv.launch.output import Output

CHECKPOINT_SETTINGS = (
    *("checkpoint_folder", "checkpoint_every", "checkpoint_seconds", "checkpoint_keep"),
    "resume",
)

MEMBER_SETTINGS = ("on_worker_loss", "min_workers", "max_workers")

TLS_FILES = ("tls_cert", "tls_key", "tls_ca")


@click.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] [--]")
@with_options(
    WORKERS,
    SERVERS,
    PLACES,
    COLOCATE,
    REPLICATION,
    ON_WORKER_LOSS,
    *WORKER_LIMITS,
    click.option(
        "--restarts",
        type=Plain(click.IntRange(min=0)),
        metavar="N",
        help="How often nodes that fail are started again, all together.  "
        "[default: 10 with respawn, replication 2 or --reseed, or else 0]",
    ),
    click.option(
        "--reseed",
        "reseeds",
        is_flag=True,
        help="When servers are lost, start all of them and the scheduler again, for workers that bring their weights "
        "(kv.rejoin, kv.reseed).",
    ),
    click.option("--timeout", type=SECONDS, metavar="SECONDS", help="End a job that takes longer."),
    click.option(
        "--drain",
        type=SECONDS,
        metavar="SECONDS",
        help="How long workers may take to leave when the job is asked to end, before the others are.  "
        "[default: 30 with --max-workers or --join, or else 0]",
    ),
    click.option(
        "--port", type=PORT, default=0, metavar="PORT", help="Port of the scheduler; 0: any free one.  [default: 0]"
    ),
    click.option("--name-prefix", default="", metavar="TEXT", help="Put this in front of the names of all nodes."),
    *CHECKPOINTS,
    PLUGINS,
    click.option("--cluster", metavar="ID", help="Name of the cluster.  [default: a new one]"),
    click.option("--hosts", metavar="A,B", help="Start the servers and the workers on these hosts, in turn."),
    click.option(
        "--join",
        metavar="HOST:PORT",
        help="Start workers only, which join the running job whose scheduler listens there (--max-workers).",
    ),
    click.option(
        "--remote",
        metavar="COMMAND",
        help="What runs a command on {host}, with the stdin that it has here.  [default: ssh -o BatchMode=yes {host}]",
    ),
    ADVERTISE,
    *TLS,
    CONFIG,
    click.option("--json", "as_json", is_flag=True, help="Print everything as lines of JSON, one event each."),
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *,
    command: tuple[str, ...],
    timeout: float | None,
    drain: float | None,
    restarts: int | None,
    reseeds: bool,
    plugins: tuple[str, ...],
    hosts: str | None,
    join: str | None,
    remote: str | None,
    resumes: bool,
    resume: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Run a training job, on this machine or on several hosts.

    Starts a scheduler, the servers, and COMMAND once for each worker, with a fresh token if none is set. Every node
    finds its place in its environment: AIOKV_ROLE, AIOKV_SCHEDULER, AIOKV_NAME and so on, and the same under the names
    of MXNet. What they print is shown with their names in front.

    The job is done when every worker has exited with code 0. When a node fails, or at Ctrl-C, all others are ended too;
    unless it can be started again (--restarts): the scheduler always can, a worker with --on-worker-loss respawn, a
    server with --replication 2, all servers with --reseed.
    A bare "python" in COMMAND is the Python that runs aiokv.

    \b
    Exit code:
      0    all workers are done
      124  --timeout has passed
      130  Ctrl-C
      else the code of the node that failed, or 128 + its signal

    \b
    Example:
      aiokv run --servers 2 --workers 4 -- python train.py --epochs 10
      aiokv run -s 2 -w 4 --hosts node1,node2 -- python train.py
      aiokv run -w 2 --join HOST:PORT --cluster ID -- python train.py
    """
    import asyncio
    import secrets

    from aiokv.addresses import parse_address
    from aiokv.config import trace_config
    from aiokv.launch import Job, LocalLauncher
    from aiokv.launch.base import resolve_command, unique_cluster
    from aiokv.launch.supervisor import Recovery

    port, prefix = settings.pop("port"), settings.pop("name_prefix")
    environ = environment()
    resume = resume or ("latest" if resumes else None)
    config, origins = trace_config(environ=environ, plugins=plugins or None, resume=resume, **settings)
    if join is not None and "cluster" not in origins:
        raise click.UsageError("--join needs the --cluster of the running job, and its AIOKV_TOKEN in the environment")
    servers = config.num_workers if config.colocate else config.num_servers
    if join is None:
        config.check_workers()
    config.check_replication(servers)
    config.check_places(servers)
    environ |= _shared_settings(config, settings["config"])
    job = Job(
        command=resolve_command(command),
        workers=config.num_workers,
        servers=config.num_servers,
        colocate=config.colocate,
        cluster=config.cluster if "cluster" in origins else unique_cluster(),
        token=config.token or ("" if join is not None else secrets.token_hex(16)),
        name_prefix=prefix,
        port=port,
        joins=None if join is None else parse_address(join),
        **_placed(config, hosts, remote),
        timeout=timeout,
        drain=_drain(config, joins=join is not None) if drain is None else drain,
        recovery=Recovery(
            restarts=_restarts(config, reseeds=reseeds) if restarts is None else restarts,
            on_worker_loss=config.on_worker_loss,
            replicated=config.replication > 1,
            colocated=config.colocate,
            resumable=bool(config.checkpoint_every or config.checkpoint_seconds),
            reseeds=reseeds,
        ),
    )
    outcome = asyncio.run(LocalLauncher(job, _launch_output(job, as_json=as_json), environ=environ).run())
    finish(outcome.exit_code, outcome.reason)


def _shared_settings(config: Config, file: str | None) -> dict[str, str]:
    """Return the environment in which all nodes find what was said here."""
    names = (*CHECKPOINT_SETTINGS, *MEMBER_SETTINGS, "replication", "num_places")
    shared = {f"AIOKV_{name.upper()}": str(getattr(config, name)) for name in names}
    shared["AIOKV_PLUGINS"] = ",".join(config.plugins)
    # All nodes show the same certificate.
    shared |= {f"AIOKV_{name.upper()}": path for name in TLS_FILES if (path := getattr(config, name))}
    if file is not None:
        shared["AIOKV_CONFIG"] = os.path.abspath(file)
    return shared


def _drain(config: Config, *, joins: bool) -> float:
    """Return how long workers may take to leave unless that was said: where they come and go, they may end a step."""
    return 30.0 if joins or config.max_workers else 0.0


def _restarts(config: Config, *, reseeds: bool) -> int:
    """Return how often nodes are started again unless that was said."""
    return 10 if config.on_worker_loss == "respawn" or config.replication > 1 or reseeds else 0


def _placed(config: Config, hosts: str | None, remote: str | None) -> dict[str, Any]:
    """Return where the nodes of a job run and listen."""
    from aiokv.addresses import is_loopback
    from aiokv.launch.base import SSH

    if hosts is None:
        if remote is not None:
            raise click.UsageError("--remote says how commands are run on the hosts that --hosts names: give both")
        return {"bind_host": config.bind_host}
    names = [name for name in (name.strip() for name in hosts.split(",")) if name]
    if not names:
        raise click.UsageError("--hosts names no host")
    return {
        "bind_host": "0.0.0.0" if is_loopback(config.bind_host) else config.bind_host,
        "hosts": names,
        "remote": remote or SSH,
        "advertise_host": config.advertise_host or _address_towards(names[0]),
    }


def _address_towards(host: str) -> str:
    """Return the address of this machine that another one can reach.

    Raises:
        ConfigError: the host's name is known to ssh alone.
    """
    import asyncio

    from aiokv.errors import ConfigError
    from aiokv.net.node import local_host_towards

    try:
        return asyncio.run(local_host_towards(host, 0))
    except OSError as error:
        text = f"can't find out under which address {host!r} reaches this machine ({error.strerror}): give --advertise"
        raise ConfigError(text, key="--advertise") from None


def _launch_output(job: Job, *, as_json: bool) -> Output:
    from aiokv.launch.output import JsonOutput, TextOutput, wants_colour

    if as_json:
        return JsonOutput(sys.stdout.buffer)
    colours = wants_colour(sys.stdout), wants_colour(sys.stderr)
    return TextOutput(list(job.names()), sys.stdout.buffer, sys.stderr.buffer, colours=colours)
