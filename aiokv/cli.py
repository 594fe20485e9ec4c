"""The `aiokv` command. Each command imports what it needs when it runs, so that `aiokv --help` is quick."""

# ruff: noqa: PLC0415 - that is why imports stand inside functions here

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TYPE_CHECKING, Any, NoReturn

import click

from aiokv.errors import AiokvError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.config import Config
    from aiokv.launch.base import Job
    from aiokv.launch.output import Output
    from aiokv.launch.serve import Node

PLUGIN_GROUP = "aiokv.commands"
"""Entry points of this group are commands: click commands under the entry point's name."""

OWN = [
    EntryPoint("chaos", "aiokv.chaos.command:chaos", PLUGIN_GROUP),
    EntryPoint("metrics", "aiokv.why:metrics", PLUGIN_GROUP),
    EntryPoint("why", "aiokv.why:why", PLUGIN_GROUP),
]
"""Commands that have a room of their own; nothing of it is imported until it is used."""

EXIT_OUTPUT_LOST = 141
"""128 + SIGPIPE."""


# --- plug-in commands ---


class _Commands(click.Group):
    """A group that finds further commands by name, and imports them only when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_found().names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
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
            return f"(not available: {_one_line(error)})"


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


# --- the command itself ---


def _version() -> str:
    import aiokv

    return str(getattr(aiokv, "__version__", "unknown"))


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"aiokv {_version()}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """A parameter server for training with asyncio.

    Settings come, in rising order, from a TOML file (--config or AIOKV_CONFIG), the environment (AIOKV_*, or DMLC_*
    as for MXNet) and the options.
    """


class _Plain(click.ParamType[Any]):
    """A range whose limits are in no need of being shown in the help; the error for a wrong value names them."""

    def __init__(self, limits: click.ParamType[Any]) -> None:
        self.name = limits.name
        self._limits = limits

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._limits.convert(value, param, ctx)


PORT = _Plain(click.IntRange(0, 65535))
COUNT = _Plain(click.IntRange(min=1))
SECONDS = _Plain(click.FloatRange(min=0, min_open=True))


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
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
        type=_Plain(click.IntRange(min=0)),
        metavar="N",
        help="Workers may join the running job until there are so many; 0: none may.  [default: 0]",
    ),
)
REPLICATION = click.option(
    "--replication",
    type=_Plain(click.IntRange(1, 2)),
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
        type=_Plain(click.IntRange(min=0)),
        metavar="N",
        help="Make one after every N rounds; 0: none.  [default: 0]",
    ),
    click.option(
        "--checkpoint-seconds",
        type=_Plain(click.FloatRange(min=0)),
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

CHECKPOINT_SETTINGS = (
    *("checkpoint_folder", "checkpoint_every", "checkpoint_seconds", "checkpoint_keep"),
    "resume",
)

MEMBER_SETTINGS = ("on_worker_loss", "min_workers", "max_workers")

TLS_FILES = ("tls_cert", "tls_key", "tls_ca")

TOKEN_NOTE = (
    "The cluster's token is not an option, because every user of the machine can see those: set AIOKV_TOKEN, or token "
    "in the file."
)


@cli.command(epilog=TOKEN_NOTE)
@_options(
    click.option("--host", "bind_host", metavar="HOST", help="Address to listen at.  [default: 127.0.0.1]"),
    click.option(
        "--port", "bind_port", type=PORT, metavar="PORT", help="Port to listen at; 0: any free one.  [default: 9091]"
    ),
    ADVERTISE,
    WORKERS,
    SERVERS,
    REPLICATION,
    ON_WORKER_LOSS,
    *WORKER_LIMITS,
    *CHECKPOINTS,
    NAME,
    CLUSTER,
    *TLS,
    CONFIG,
    JSON,
)
def scheduler(*, as_json: bool, resumes: bool, resume: str | None, **settings: Any) -> None:
    """Run the scheduler of a cluster.

    It waits for the workers and the servers, tells each of them about the others, and ends when all workers have left.
    """
    from aiokv.config import load_config
    from aiokv.launch.base import count
    from aiokv.net.scheduler import Scheduler
    from aiokv.types import Role

    config = load_config(role=Role.SCHEDULER, resume=resume or ("latest" if resumes else None), **settings)
    waiting = f"waiting for {count(config.num_workers, 'worker')} and {count(config.num_servers, 'server')}"
    _run_node(Scheduler(config), config, waiting, as_json=as_json)


@cli.command(epilog=TOKEN_NOTE)
@_options(
    click.option("--scheduler", metavar="HOST:PORT", help="Where the scheduler listens.  [default: 127.0.0.1:9091]"),
    click.option("--host", "bind_host", metavar="HOST", help="Address to listen at.  [default: 127.0.0.1]"),
    click.option(
        "--port", "bind_port", type=PORT, metavar="PORT", help="Port to listen at; 0: any free one.  [default: 0]"
    ),
    ADVERTISE,
    click.option(
        "--backend", metavar="NAME", help="What computes the updates: auto, reference, cpu or cuda.  [default: auto]"
    ),
    click.option(
        "--device", metavar="NAME", help="Where parameters are: cpu, cuda, or some devices: cuda:0,1.  [default: cpu]"
    ),
    PLUGINS,
    NAME,
    CLUSTER,
    *TLS,
    CONFIG,
    JSON,
)
def server(*, as_json: bool, plugins: tuple[str, ...], **settings: Any) -> None:
    """Run one server of a cluster.

    It holds a part of the parameters, and ends when the scheduler says that the job is over.
    """
    from aiokv.config import format_address, load_config
    from aiokv.net.server import Server
    from aiokv.types import Role

    config = load_config(role=Role.SERVER, plugins=plugins or None, **settings)
    if config.plugins and "" not in sys.path:
        # Modules in the current folder are found, as `python -m` finds them.
        sys.path.insert(0, "")
    waiting = f"scheduler at {format_address(config.scheduler_host, config.scheduler_port)}"
    _run_node(Server(config), config, waiting, as_json=as_json)


@cli.command(context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] [--]")
@_options(
    WORKERS,
    SERVERS,
    COLOCATE,
    REPLICATION,
    ON_WORKER_LOSS,
    *WORKER_LIMITS,
    click.option(
        "--restarts",
        type=_Plain(click.IntRange(min=0)),
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

    from aiokv.config import load_config, parse_address
    from aiokv.launch import Job, LocalLauncher
    from aiokv.launch.base import resolve_command, unique_cluster
    from aiokv.launch.supervisor import Recovery

    port, prefix, cluster = settings.pop("port"), settings.pop("name_prefix"), settings.pop("cluster")
    environ = _environment()
    if join is not None and cluster is None:
        raise click.UsageError("--join needs the --cluster of the running job, and its AIOKV_TOKEN in the environment")
    resume = resume or ("latest" if resumes else None)
    config = load_config(environ=environ, plugins=plugins or None, resume=resume, **settings)
    config.check_replication(config.num_workers if config.colocate else None)
    environ["AIOKV_PLUGINS"] = ",".join(config.plugins)
    environ |= {f"AIOKV_{name.upper()}": str(getattr(config, name)) for name in CHECKPOINT_SETTINGS}
    environ |= {f"AIOKV_{name.upper()}": str(getattr(config, name)) for name in MEMBER_SETTINGS}
    environ["AIOKV_REPLICATION"] = str(config.replication)
    # All nodes show the same certificate.
    environ |= {f"AIOKV_{name.upper()}": path for name in TLS_FILES if (path := getattr(config, name))}
    if settings["config"] is not None:
        environ["AIOKV_CONFIG"] = os.path.abspath(settings["config"])
    job = Job(
        command=resolve_command(command),
        workers=config.num_workers,
        servers=config.num_servers,
        colocate=config.colocate,
        cluster=cluster or unique_cluster(),
        token=config.token or secrets.token_hex(16),
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
    _finish(outcome.exit_code, outcome.reason)


def _drain(config: Config, *, joins: bool) -> float:
    """Return how long workers may take to leave unless that was said: where they come and go, they may end a step."""
    return 30.0 if joins or config.max_workers else 0.0


def _restarts(config: Config, *, reseeds: bool) -> int:
    """Return how often nodes are started again unless that was said."""
    return 10 if config.on_worker_loss == "respawn" or config.replication > 1 or reseeds else 0


def _placed(config: Config, hosts: str | None, remote: str | None) -> dict[str, Any]:
    """Return where the nodes of a job run and listen."""
    from aiokv.config import is_loopback
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


@cli.command("config")
@_options(
    CONFIG,
    click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each setting, one a line."),
)
def show_config(*, config: str | None, as_json: bool) -> None:
    """Print all settings: their values, and where they come from.

    They are those that a node and a training program would have that are started here with the same file and
    environment. The token is not shown.
    """
    from aiokv.config_table import print_json, print_table, read_settings

    settings = read_settings(config=config)
    if as_json:
        print_json(settings)
    else:
        print_table(settings)


@cli.group()
def checkpoint() -> None:
    """Look at the checkpoints of a cluster."""


@checkpoint.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each checkpoint, one a line.")
@click.argument("folder", metavar="URL")
def list_checkpoints(*, folder: str, as_json: bool) -> None:
    """Print the checkpoints in a folder, the oldest first: round, time, size, and whether they are complete.

    What is incomplete was being written when its job ended. That files are whole is not looked at: see verify.
    """
    from aiokv.checkpoint_folder import find_checkpoints
    from aiokv.checkpoint_table import print_checkpoints

    print_checkpoints(find_checkpoints(folder), as_json=as_json)


@checkpoint.command("verify")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each checkpoint, one a line.")
@click.argument("folder", metavar="URL")
def verify_checkpoints(*, folder: str, as_json: bool) -> None:
    """Read all files of the checkpoints in a folder, or of one, and compare them with their checksums.

    The exit code is 1 if one is damaged.
    """
    from aiokv.checkpoint_folder import find_checkpoints, verified
    from aiokv.checkpoint_table import print_checkpoints

    found = [verified(each) for each in find_checkpoints(folder)]
    print_checkpoints(found, as_json=as_json)
    damaged = [each.name for each in found if each.problem]
    if damaged:
        _finish(1, f"damaged: {', '.join(damaged)}")


BENCH_NOTE = "docs/performance.md says how to measure and what each figure means."


@cli.command(epilog=BENCH_NOTE)
@_options(
    WORKERS,
    SERVERS,
    COLOCATE,
    REPLICATION,
    click.option("--rounds", type=COUNT, metavar="N", help="Rounds that are timed.  [default: the workload's]"),
    click.option(
        "--warmup", type=_Plain(click.IntRange(min=0)), metavar="N", help="Rounds before.  [default: the workload's]"
    ),
    click.option("--store", metavar="NAME", help="dist_sync or dist_async.  [default: dist_sync]"),
    click.option("--optimizer", metavar="NAME", help="What the servers do with the sums.  [default: keep them]"),
    click.option("--backend", metavar="NAME", help="What computes the updates: auto, reference, cpu or cuda."),
    click.option("--device", metavar="NAME", help="Where the servers' parameters are: cpu, cuda, cuda:0,1."),
    click.option("--loop", metavar="NAME", help="auto, uvloop or asyncio.  [default: auto]"),
    click.option("--chunk-kib", type=COUNT, metavar="N", help="Most KiB of a parameter that move as one."),
    click.option("--timeout", type=SECONDS, metavar="SECONDS", help="End if it takes longer.  [default: 600]"),
    click.option("--profile", metavar="FOLDER", help="Write a cProfile of each node; the figures suffer."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)
@click.argument("workload")
def bench(*, workload: str, as_json: bool, rounds: int | None, **options: Any) -> None:
    """Measure how fast a cluster on this machine is.

    Starts a scheduler, servers and workers as processes. Each worker pushes and pulls the WORKLOAD once a round, and
    checks every number that it receives; a wrong one makes the exit code 1.

    \b
    Workloads:
      large:MIB      one array of that size; 64 is a good one
      resnet50       the 161 parameter tensors of ResNet-50, 102 MB
      small          1,000 arrays of 1 KiB
      latency:BYTES  one array of that size; 4 is a good one
      limits[:MIB]   no cluster: what the machine's memory and sockets can do
      kernels[:MIB]  no cluster: what the CUDA kernels do on a device

    \b
    Example:
      aiokv bench resnet50 --servers 1 --workers 2
    """
    from aiokv.bench import show
    from aiokv.bench.kernels import parse_kernels
    from aiokv.bench.limits import parse_limits
    from aiokv.bench.plan import make_plan
    from aiokv.config import load_config

    for mib, run in ((parse_limits(workload), show.run_limits), (parse_kernels(workload), show.run_kernel_bench)):
        if mib is None:
            continue
        given = [
            f"--{name.removeprefix('num_').replace('_', '-')}" for name, value in options.items() if value is not None
        ]
        if given:
            name = workload.partition(":")[0]
            raise click.UsageError(f"{name} starts no cluster, so these options mean nothing to it: {', '.join(given)}")
        outcome = run(mib=mib, rounds=rounds, as_json=as_json)
        _finish(outcome.exit_code, outcome.reason)
    chunk_kib, timeout, profile = options.pop("chunk_kib"), options.pop("timeout"), options.pop("profile")
    measured = {name: options.pop(name) for name in ("warmup", "store", "optimizer")}
    environ = _environment()
    config = load_config(environ=environ, chunk_bytes=chunk_kib and chunk_kib * 1024, **options)
    environ |= {
        "AIOKV_BACKEND": config.backend,
        "AIOKV_DEVICE": config.device,
        "AIOKV_LOOP": config.loop,
        "AIOKV_CHUNK_BYTES": str(config.chunk_bytes),
        "AIOKV_REPLICATION": str(config.replication),
    }
    measured |= {"colocate": config.colocate, "replication": config.replication}
    plan = make_plan(workload, servers=config.num_servers, workers=config.num_workers, rounds=rounds, **measured)
    outcome = show.run_workload(plan, environ=environ, timeout=timeout or 600, as_json=as_json, profile=profile)
    _finish(outcome.exit_code, outcome.reason)


def _environment() -> dict[str, str]:
    """Return what the nodes inherit. The role is their own; a launcher that a node started may have inherited one."""
    return {name: value for name, value in os.environ.items() if name not in ("AIOKV_ROLE", "DMLC_ROLE")}


def _run_node(node: Node, config: Config, task: str, *, as_json: bool) -> None:
    """Run a scheduler or server to its end, and leave with its exit code."""
    import contextlib
    import logging

    from aiokv.launch.events import writing_events
    from aiokv.launch.serve import serve
    from aiokv.net import runner

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with writing_events(sys.stdout) if as_json else contextlib.nullcontext():
        outcome = runner.run(serve(node, lambda: _announce(node, config, task, as_json=as_json)), loop=config.loop)
    if outcome.exit_code == 0:
        click.echo(f"{config.role} is done: {outcome.reason}", err=True)
    _finish(outcome.exit_code, outcome.reason)


def _announce(node: Node, config: Config, task: str, *, as_json: bool) -> None:
    import json

    from aiokv.config import format_address

    if as_json:
        facts = {"role": config.role, "name": config.name, "cluster": config.cluster}
        click.echo(
            json.dumps(facts | {"host": config.advertise_host or node.host, "port": node.port, "pid": os.getpid()})
        )
    else:
        click.echo(f"{config.role} listening on {format_address(node.host, node.port)}, {task}")


def _finish(exit_code: int, reason: str) -> NoReturn:
    if exit_code == EXIT_OUTPUT_LOST:
        # Python flushes stdout when it ends, and would complain once more that nobody reads it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif exit_code != 0 and reason:
        click.echo(f"error: {_one_line(reason)}", err=True)
    sys.exit(exit_code)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def main(args: Sequence[str] | None = None) -> None:
    """Run the command, and leave with its exit code: 1 and a line on stderr for an error, 2 for wrong usage."""
    try:
        cli.main(args=args, prog_name="aiokv")
    except AiokvError as error:
        _finish(1, str(error))
