"""The command `aiokv bench`: how fast a cluster on this machine is."""

# ruff: noqa: PLC0415 - imports stand inside functions, so that `aiokv --help` is quick

from __future__ import annotations

from typing import Any

import click

from aiokv.cli.options import COLOCATE, COUNT, REPLICATION, SECONDS, SERVERS, WORKERS, Plain, with_options
from aiokv.cli.processes import environment, finish

BENCH_NOTE = "docs/performance.md says how to measure and what each figure means."


@click.command(epilog=BENCH_NOTE)
@with_options(
    WORKERS,
    SERVERS,
    COLOCATE,
    REPLICATION,
    click.option("--rounds", type=COUNT, metavar="N", help="Rounds that are timed.  [default: the workload's]"),
    click.option(
        "--warmup", type=Plain(click.IntRange(min=0)), metavar="N", help="Rounds before.  [default: the workload's]"
    ),
    click.option("--store", metavar="NAME", help="dist_sync or dist_async.  [default: dist_sync]"),
    click.option("--policy", metavar="TEXT", help="Another one with the same sums, such as k_sync:2 with two workers."),
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
        finish(outcome.exit_code, outcome.reason)
    chunk_kib, timeout, profile = options.pop("chunk_kib"), options.pop("timeout"), options.pop("profile")
    measured = {name: options.pop(name) for name in ("warmup", "store", "policy", "optimizer")}
    environ = environment()
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
    finish(outcome.exit_code, outcome.reason)
