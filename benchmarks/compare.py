"""Compare aiokv with its peers on the same work, side by side: the two take turns, A B A B, and ratios are printed.

`README.md` beside this file says how, and what is fair about it. For example:
`python benchmarks/compare.py --peer mxnet --peer gloo:flat --workload large:64 --workers 2 --repeats 3`
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.cases import KNOWN, MODES, TABLE, Case
from benchmarks.setup_peers import ENVIRONMENTS, FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

GRACE_SECONDS = 15.0
"""How much longer than its own limit a program may take to end by itself."""
SAME_COUNT = 0.02
"""How far GB/s and seconds of a result may contradict each other before bytes must have been counted differently."""

Record = dict[str, Any]


# --- one turn ---


@dataclass(slots=True)
class Turns:
    """What one of the two systems did in its turns."""

    system: str
    records: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Add the record of a turn."""
        if "system" in record:
            self.system = f"{record['system']}, {record['mode']}"
        self.records.append(record)

    @property
    def gbps(self) -> list[float]:
        """GB/s a worker of each turn."""
        return [record["gbps_per_worker"] for record in self.records]

    @property
    def round_ms(self) -> list[float]:
        """Median milliseconds a round of each turn."""
        return [1e3 * record["round_s"]["median"] for record in self.records]

    @property
    def cpu_s_per_gb(self) -> float | None:
        """CPU-seconds of all nodes per GB; None where they can't be had."""
        totals = [sum(record["cpu_s_per_gb"].values()) for record in self.records if record.get("cpu_s_per_gb")]
        return statistics.median(totals) if totals else None

    def summary(self) -> Record:
        """Return the figures for `--json`."""
        return {
            "system": self.system,
            "gbps_per_worker": statistics.median(self.gbps),
            "round_ms": statistics.median(self.round_ms),
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "turns": self.records,
        }


def run_aiokv(case: Case, rounds: int, timeout: float) -> Record:
    """Take a turn of aiokv.

    Raises:
        RunError: it failed, received wrong numbers, or took too long.
    """
    return _checked(
        _run("aiokv", [*_bench(case.workload), *_sizes(case, rounds, timeout), *case.options], timeout), case
    )


def run_peer(case: Case, rounds: int, timeout: float, folder: Path) -> Record:
    """Take a turn of the peer.

    Raises:
        RunError: it failed, received wrong numbers, or took too long.
    """
    name, _, mode = case.peer.partition(":")
    mode = mode or MODES[name][0]
    if name == "limits":
        return _limits(case, mode, timeout)
    program = Path(__file__).with_name("peers") / f"{name}_worker.py"
    command = [str(ENVIRONMENTS[name].python(folder)), str(program), "--workload", case.workload, "--mode", mode]
    return _checked(_run(name, [*command, *_sizes(case, rounds, timeout)], timeout), case)


def how_to_make(case: Case, folder: Path) -> str:
    """Return what to do when the peer's environment is missing; nothing when it is there."""
    environment = ENVIRONMENTS.get(case.peer.partition(":")[0])
    if environment is None or environment.python(folder).exists():
        return ""
    where = "" if folder == FOLDER else f" --folder {folder}"
    return (
        f"{environment.name} is missing: there is no {environment.python(folder)}. Make it with "
        f"'python benchmarks/setup_peers.py {environment.name}{where}', or set {environment.variable} to its Python"
    )


def _limits(case: Case, mode: str, timeout: float) -> Record:
    """Measure the machine, and put that as if it had been a peer's round."""
    moved = 2 * common.bytes_of(common.shapes_of(case.workload)) / 1e9
    kind, _, size = case.workload.partition(":")
    if kind == "latency":
        seconds = _run("limits", _bench("limits:1"), timeout)["latency_us"] / 1e6
    elif kind == "large":
        limits = _run("limits", _bench(f"limits:{size}"), timeout)
        key = f"bare_server_gbps_{case.workers}w" if mode == "bare" else f"{mode}_gbps"
        if key not in limits:
            raise common.RunError(f"'aiokv bench limits' has no {key}, only {', '.join(limits)}")
        seconds = moved / limits[key]
    else:
        raise common.RunError(f"limits can be compared with large and latency, not with {case.workload}")
    return {"system": "limits", "mode": mode, "gbps_per_worker": moved / seconds, "round_s": {"median": seconds}}


def _sizes(case: Case, rounds: int, timeout: float) -> list[str]:
    """Return the options that aiokv and all peers have in common."""
    sizes = {"servers": case.servers, "workers": case.workers, "rounds": rounds, "timeout": timeout}
    return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


def _bench(workload: str) -> list[str]:
    return [sys.executable, "-m", "aiokv", "bench", workload, "--json"]


def _run(name: str, command: Sequence[str], timeout: float) -> Record:
    """Run a program, and return the last JSON object that it printed."""
    [records] = common.run_nodes([(name, command, {})], timeout=timeout + GRACE_SECONDS).values()
    if not records:
        raise common.RunError(f"it printed no result: {' '.join(command)}")
    return records[-1]


def _checked(record: Record, case: Case) -> Record:
    """Return the record if its numbers can be compared."""
    if not record["ok"]:
        raise common.RunError(f"it received wrong numbers: {record.get('problems', '')}")
    moved = 2 * common.bytes_of(common.shapes_of(case.workload)) / 1e9
    counted = record["gbps_per_worker"] * record["round_s"]["median"]
    if abs(counted / moved - 1) > SAME_COUNT:
        raise common.RunError(f"it counts other bytes than the rest: {counted:.4f} GB a round, expected {moved:.4f}")
    return record


# --- one comparison ---


@dataclass(slots=True)
class Comparison:
    """The turns of aiokv and of a peer; `trouble` says why there are none."""

    case: Case
    aiokv: Turns
    peer: Turns
    trouble: str = ""
    missing: bool = False

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer aiokv is: the ratio of the medians of GB/s."""
        return statistics.median(self.aiokv.gbps) / statistics.median(self.peer.gbps)

    @property
    def ratios(self) -> list[float]:
        """The ratio of each pair of turns."""
        return [own / other for own, other in zip(self.aiokv.gbps, self.peer.gbps, strict=True)]

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is none, or nothing to judge."""
        if self.trouble:
            return None
        if self.case.at_least is not None:
            return self.ratio >= self.case.at_least
        if self.case.at_most_ms is not None:
            return statistics.median(self.aiokv.round_ms) <= self.case.at_most_ms
        return None

    def to_json(self) -> Record:
        """Return everything as one JSON object."""
        case = self.case
        record: Record = {
            "workload": case.workload,
            "workers": case.workers,
            "servers": case.servers,
            "options": case.options,
            "peer": case.peer,
        }
        if self.trouble:
            return {**record, "missing" if self.missing else "error": self.trouble}
        return {
            **record,
            "ratio": {"of_medians": self.ratio, "min": min(self.ratios), "max": max(self.ratios)},
            "at_least": case.at_least,
            "at_most_ms": case.at_most_ms,
            "met": self.met,
            "results": {"aiokv": self.aiokv.summary(), "peer": self.peer.summary()},
        }


def compare(case: Case, options: argparse.Namespace) -> Comparison:
    """Let aiokv and the peer take turns."""
    missing = how_to_make(case, options.folder)
    result = Comparison(case, Turns("aiokv"), Turns(case.peer), trouble=missing, missing=bool(missing))
    rounds = options.rounds or common.ROUNDS[case.workload.partition(":")[0]]
    _say(str(case))
    try:
        for turn in range(0 if missing else 2 * options.repeats):
            left = min(options.timeout, options.deadline - time.monotonic())
            if left <= 0:
                raise common.RunError(f"not measured: the {options.limit:.0f} s of --limit are used up")
            if turn % 2 == 0:
                turns, record = result.aiokv, run_aiokv(case, rounds, left)
            else:
                turns, record = result.peer, run_peer(case, rounds, left, options.folder)
            turns.add(record)
            _say(f"  {turns.system:<32} {turns.gbps[-1]:8.4g} GB/s  {turns.round_ms[-1]:8.4g} ms")
    except common.RunError as error:
        result.trouble = str(error)
    if result.trouble:
        _say(f"  {result.trouble}")
    return result


# --- what is printed ---


def _say(text: str) -> None:
    """Tell how it goes, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def machine() -> Record:
    """Say on what it was measured."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


HEADINGS = ("workload", "W", "S", "system", "GB/s", "ms", "CPU s/GB", "aiokv / peer", "target")


def table_of(comparisons: Iterable[Comparison]) -> list[tuple[str, ...]]:
    """Return the rows of the table: aiokv's, and below it the peer's with the ratio."""
    rows: list[tuple[str, ...]] = []
    for result in comparisons:
        case = result.case
        nodes = (" ".join([case.workload, *case.options]), str(case.workers), str(case.servers))
        if result.trouble:
            rows.append((*nodes, case.peer, "missing" if result.missing else "failed", "", "", "", _target(result)))
            continue
        spread = f"{result.ratio:.2f} ({min(result.ratios):.2f}-{max(result.ratios):.2f})"
        rows.append((*nodes, *_figures(result.aiokv, case.workload), "", ""))
        rows.append(("", "", "", *_figures(result.peer, case.workload), spread, _target(result)))
    return rows


def _figures(turns: Turns, workload: str) -> tuple[str, ...]:
    milliseconds = _number(statistics.median(turns.round_ms))
    if workload.startswith("latency"):
        return (turns.system, "", milliseconds, "")
    return (turns.system, _number(statistics.median(turns.gbps)), milliseconds, _number(turns.cpu_s_per_gb))


def _number(value: float | None) -> str:
    """Write three digits, but no exponent."""
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _target(result: Comparison) -> str:
    case = result.case
    if case.at_least is not None:
        target = f">= {case.at_least:g}"
    elif case.at_most_ms is not None:
        target = f"<= {case.at_most_ms:g} ms"
    else:
        return ""
    return target if result.met is None else f"{target}: {'met' if result.met else 'missed'}"


def show(comparisons: Sequence[Comparison], facts: Mapping[str, Any]) -> None:
    """Print the table, and below it what went wrong."""
    rows = [HEADINGS, *table_of(comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for result in comparisons:
        if result.trouble:
            print(f"{result.case}: {result.trouble}")


# --- the command ---


def _options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Case]]:
    parser = argparse.ArgumentParser(
        description="Compare aiokv with its peers. What stands behind -- goes to 'aiokv bench'.",
        epilog="The exit status is 0 when everything was measured, and 1 when something failed or is missing.",
    )
    parser.add_argument("--peer", action="append", default=[], help=f"may be repeated: {KNOWN}")
    parser.add_argument("--workload", default="large:64", help="large:MIB | resnet50 | small | latency:BYTES")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="timed rounds of a turn (default: by workload)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="the whole table of targets instead of one workload")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a turn (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=2400.0, help="seconds of everything (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the peers' environments (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("bench", nargs="*", metavar="-- OPTION", help="options of 'aiokv bench'")
    options = parser.parse_args(argv)
    for peer in options.peer:
        name, _, mode = peer.partition(":")
        if name not in MODES or (mode and mode not in MODES[name]):
            parser.error(f"expected a peer out of {KNOWN}; got {peer!r}")
    try:
        common.shapes_of(options.workload)
    except ValueError as error:
        parser.error(str(error))
    if min(options.workers, options.servers, options.repeats, options.rounds or 1) < 1:
        parser.error("workers, servers, rounds and repeats are at least 1")
    options.deadline = time.monotonic() + options.limit
    if options.all:
        wanted = options.peer or MODES
        return options, [case for case in TABLE if {case.peer, case.peer.partition(":")[0]} & set(wanted)]
    nodes, bench = (options.workload, options.workers, options.servers), tuple(options.bench)
    return options, [Case(*nodes, peer, options=bench) for peer in options.peer or ["mxnet", "gloo", "ray"]]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit status."""
    options, cases = _options(argv)
    common.end_on_sigterm()
    facts = machine()
    comparisons = [compare(case, options) for case in cases]
    ok = not any(result.trouble for result in comparisons)
    if options.json:
        print(json.dumps({"machine": facts, "ok": ok, "comparisons": [result.to_json() for result in comparisons]}))
    else:
        show(comparisons, facts)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
