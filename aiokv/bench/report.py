"""The figures of a measurement: computed, as JSON, and as a table for people."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from aiokv.bench.workloads import MIB, parse_workload
from aiokv.kvstore import DIST_POLICIES
from aiokv.launch.base import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from aiokv.bench.cluster import Usage
    from aiokv.bench.plan import Done, Plan

_GB = 1e9


class Rounds(msgspec.Struct, frozen=True):
    """Seconds that a round took."""

    min: float
    median: float
    p99: float


class WorkerFigures(msgspec.Struct, frozen=True):
    """One worker: GB/s pushed and pulled in its median round, and its rounds."""

    gbps: float
    round_s: Rounds


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a measurement. `docs/performance.md` says what each means."""

    workload: str
    servers: int
    workers: int
    rounds: int
    warmup: int
    store: str
    policy: str
    optimizer: str | None
    payload_mib: float
    """What a worker pushes in a round; it receives as much."""
    gbps_per_worker: float
    round_s: Rounds
    by_worker: dict[str, WorkerFigures]
    cpu_s_per_gb: dict[str, float]
    cpu_s_per_gb_total: float
    peak_rss_mib: dict[str, float]
    ok: bool
    problems: list[str]

    def to_json(self) -> str:
        """Write one line of JSON."""
        return msgspec.json.encode(self).decode()


def make_report(plan: Plan, results: Mapping[str, Done], usage: Mapping[str, Usage]) -> Report:
    """Compute the figures.

    Args:
        plan: what was measured.
        results: what each worker found, by name; at least one.
        usage: what each node used, by name.
    """
    nbytes = parse_workload(plan.workload).nbytes
    moved = 2 * nbytes / _GB
    total = moved * plan.rounds * plan.workers
    by_worker = {name: _worker_figures(moved, result.round_s) for name, result in results.items()}
    cpu = {name: node.cpu_s / total for name, node in usage.items()}
    problems = [f"{name}: {problem}" for name, result in results.items() for problem in result.problems]
    if len({result.digest for result in results.values()}) > 1:
        problems.append("the workers did not receive the same values in the last round")
    everything = _worker_figures(moved, [seconds for result in results.values() for seconds in result.round_s])
    return Report(
        workload=plan.workload,
        servers=plan.servers,
        workers=plan.workers,
        rounds=plan.rounds,
        warmup=plan.warmup,
        store=plan.store,
        policy=plan.policy,
        optimizer=plan.optimizer,
        payload_mib=nbytes / MIB,
        gbps_per_worker=everything.gbps,
        round_s=everything.round_s,
        by_worker=by_worker,
        cpu_s_per_gb=cpu,
        cpu_s_per_gb_total=sum(cpu.values()),
        peak_rss_mib={name: node.peak_rss_mib for name, node in usage.items()},
        ok=not problems,
        problems=problems,
    )


def _worker_figures(moved: float, seconds: Sequence[float]) -> WorkerFigures:
    median = statistics.median(seconds)
    rounds = Rounds(min(seconds), median, float(np.percentile(seconds, 99)))
    return WorkerFigures(moved / median, rounds)


def make_table(report: Report) -> Table:
    """Return the report as a table, one line for each node."""
    from rich.table import Table  # noqa: PLC0415 - JSON needs no table

    unit, scale = _unit(report)
    nodes = f"{count(report.workers, 'worker')}, {count(report.servers, 'server')}"
    rule = f", {report.optimizer}" if report.optimizer else ""
    policy = "" if report.policy == DIST_POLICIES[report.store] else f", {report.policy}"
    title = f"{report.workload}: {nodes}, {report.store}{policy}{rule}, {count(report.rounds, 'round')}"
    table = Table(title=title, title_justify="left")
    table.add_column("node")
    for heading in ("GB/s", f"min {unit}", f"median {unit}", f"p99 {unit}", "CPU s/GB", "peak RSS MiB"):
        table.add_column(heading, justify="right")
    for name, memory in report.peak_rss_mib.items():
        cells = [""] * 4
        if name in report.by_worker:
            figures = report.by_worker[name]
            rounds = figures.round_s
            times = [f"{seconds * scale:.3g}" for seconds in (rounds.min, rounds.median, rounds.p99)]
            cells = [f"{figures.gbps:.3g}", *times]
        table.add_row(name, *cells, f"{report.cpu_s_per_gb[name]:.3g}", f"{memory:.0f}")
    return table


def make_summary(report: Report) -> str:
    """Return the figures of the whole cluster, in a line."""
    unit, scale = _unit(report)
    verdict = "every number is right" if report.ok else "NUMBERS ARE WRONG"
    return (
        f"{report.gbps_per_worker:.3g} GB/s a worker, median round {report.round_s.median * scale:.3g} {unit}, "
        f"{report.cpu_s_per_gb_total:.3g} CPU s/GB on all nodes; {verdict}"
    )


def _unit(report: Report) -> tuple[str, float]:
    return ("us", 1e6) if report.round_s.median < 1e-3 else ("ms", 1e3)  # noqa: PLR2004 - a thousandth
