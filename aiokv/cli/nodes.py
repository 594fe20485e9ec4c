"""The commands `aiokv scheduler` and `aiokv server`: one node of a cluster."""

# ruff: noqa: PLC0415 - imports stand inside functions, so that `aiokv --help` is quick

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from aiokv.cli.options import (
    ADVERTISE,
    CHECKPOINTS,
    CLUSTER,
    CONFIG,
    JSON,
    NAME,
    ON_WORKER_LOSS,
    PLACES,
    PLUGINS,
    PORT,
    REPLICATION,
    SERVERS,
    TLS,
    WORKER_LIMITS,
    WORKERS,
    with_options,
)
from aiokv.cli.processes import finish

if TYPE_CHECKING:
    from aiokv.config import Config
    from aiokv.launch.serve import Node

TOKEN_NOTE = (
    "The cluster's token is not an option, because every user of the machine can see those: set AIOKV_TOKEN, or token "
    "in the file."
)


@click.command(epilog=TOKEN_NOTE)
@with_options(
    click.option("--host", "bind_host", metavar="HOST", help="Address to listen at.  [default: 127.0.0.1]"),
    click.option(
        "--port", "bind_port", type=PORT, metavar="PORT", help="Port to listen at; 0: any free one.  [default: 9091]"
    ),
    ADVERTISE,
    WORKERS,
    SERVERS,
    PLACES,
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


@click.command(epilog=TOKEN_NOTE)
@with_options(
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
    from aiokv.addresses import format_address
    from aiokv.config import load_config
    from aiokv.net.server import Server
    from aiokv.types import Role

    config = load_config(role=Role.SERVER, plugins=plugins or None, **settings)
    if config.plugins and "" not in sys.path:
        # Modules in the current folder are found, as `python -m` finds them.
        sys.path.insert(0, "")
    waiting = f"scheduler at {format_address(config.scheduler_host, config.scheduler_port)}"
    _run_node(Server(config), config, waiting, as_json=as_json)


def _run_node(node: Node, config: Config, task: str, *, as_json: bool) -> None:
    """Run a scheduler or server to its end, and leave with its exit code."""
    import atexit
    import contextlib
    import gc
    import logging

    from aiokv.launch import descriptors
    from aiokv.launch.events import writing_events
    from aiokv.launch.serve import serve
    from aiokv.net import runner

    # Python looks for garbage once more at its end, which nobody needs: after Numba it takes longer than all else.
    atexit.register(gc.freeze)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with writing_events(sys.stdout) if as_json else contextlib.nullcontext():
        missing = descriptors.make_room(config.max_connections)
        if missing:
            text = f"{missing} file descriptors are missing for max_connections = {config.max_connections}"
            hint = "raise the hard limit (ulimit -Hn), or set fewer connections"
            node.note("warning", "few_descriptors", f"{text}: {hint}", {"missing": missing})
        outcome = runner.run(serve(node, lambda: _announce(node, config, task, as_json=as_json)), loop=config.loop)
    if outcome.exit_code == 0:
        click.echo(f"{config.role} is done: {outcome.reason}", err=True)
    finish(outcome.exit_code, outcome.reason)


def _announce(node: Node, config: Config, task: str, *, as_json: bool) -> None:
    import json

    from aiokv.addresses import format_address

    if as_json:
        facts = {"role": config.role, "name": config.name, "cluster": config.cluster}
        click.echo(
            json.dumps(facts | {"host": config.advertise_host or node.host, "port": node.port, "pid": os.getpid()})
        )
    else:
        click.echo(f"{config.role} listening on {format_address(node.host, node.port)}, {task}")
