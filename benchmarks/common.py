"""What the programs of all peers share: the workloads, the timed loop, the nodes' processes and the result.

It runs under the peers' own Pythons, from 3.8 on, and so needs nothing but the standard library. Linux only: it reads
/proc. Every program here prints one JSON object with the keys that `aiokv bench --json` uses, and counts as it does:
GB/s are bytes pushed plus bytes pulled by one worker, CPU-seconds per GB are all nodes' over all workers' bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    Shape = tuple[int, ...]

ROOT = str(Path(__file__).resolve().parents[1])
"""The folder that this package is imported from."""

MIB = 1 << 20
FLOAT_BYTES = 4
ROUNDS = {"large": 20, "resnet50": 12, "small": 20, "latency": 1000}
"""Rounds of a run, by the kind of workload."""
POLL_SECONDS = 0.02
GRACE_SECONDS = 5.0
"""How long processes that were asked to end may take."""
EARLIER = "BENCHMARK_EARLIER_NODES"
"""An environment variable that tells a node who was started before it."""
MARK = "BENCHMARK_MARK"
"""An environment variable that all processes of a run inherit, so that none can stay behind unseen."""


class RunError(Exception):
    """A run did not come to its end; says why."""


# --- the workloads ---


def shapes_of(workload: str) -> list[Shape]:
    """Return the shapes of a workload's float32 tensors.

    Raises:
        ValueError: there is no such workload.
    """
    kind, _, size = workload.partition(":")
    if kind in ("large", "latency") and size.isdigit() and int(size) > 0:
        nbytes = int(size) * (MIB if kind == "large" else 1)
        if nbytes % FLOAT_BYTES == 0:
            return [(nbytes // FLOAT_BYTES,)]
    elif workload == "resnet50":
        return _resnet50()
    elif workload == "small":
        return [(1024 // FLOAT_BYTES,)] * 1000
    raise ValueError(f"expected large:MIB, resnet50, small or latency:BYTES (a multiple of 4), got {workload!r}")


def _resnet50() -> list[Shape]:
    """The 161 parameters of ResNet-50: 53 convolutions, each with a scale and a shift, and the classifier."""
    shapes: list[Shape] = []

    def convolution(inputs: int, outputs: int, kernel: int) -> None:
        shapes.extend([(outputs, inputs, kernel, kernel), (outputs,), (outputs,)])

    convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        outputs = 4 * width
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, outputs, 1)
            if block == 0:
                convolution(inputs, outputs, 1)
            inputs = outputs
    return [*shapes, (1000, inputs), (1000,)]


def size_of(shape: Shape) -> int:
    """Return the number of elements."""
    size = 1
    for length in shape:
        size *= length
    return size


def bytes_of(shapes: Sequence[Shape]) -> int:
    """Return the number of bytes of all tensors together: what a worker pushes in a round, and pulls."""
    return FLOAT_BYTES * sum(size_of(shape) for shape in shapes)


def gradient(rank: int, index: int) -> float:
    """Return the value of a worker's gradients in a round: another one in each round, so that a stale sum shows."""
    return float((rank + 1) * (1 + index % 7))


def expected_sum(workers: int, index: int) -> float:
    """Return the value that all workers receive in a round."""
    return sum(gradient(rank, index) for rank in range(workers))


# --- the command line of a peer's program ---


def arguments(description: str, modes: Sequence[str], argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments that all the programs take; `shapes` is added."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", default="large:64", help="large:MIB | resnet50 | small | latency:BYTES")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="timed rounds (default: by workload)")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those (default: %(default)s)")
    parser.add_argument("--mode", choices=modes, default=modes[0])
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the whole run (default: %(default)s)")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        options.shapes = shapes_of(options.workload)
    except ValueError as error:
        parser.error(str(error))
    options.rounds = options.rounds or ROUNDS[options.workload.partition(":")[0]]
    if min(options.servers, options.workers, options.rounds, options.warmup) < 1:
        parser.error("servers, workers, rounds and warmup are at least 1")
    return options


def node(program: str, options: argparse.Namespace, role: str, rank: int = 0, meet: str = "") -> list[str]:
    """Return the command that starts the same program as one node of the cluster; `meet` is passed on as it is."""
    command = [sys.executable, program, "--role", role, "--rank", str(rank), "--meet", meet]
    for name in ("workload", "servers", "workers", "rounds", "warmup", "mode"):
        command += [f"--{name}", str(getattr(options, name))]
    return command


# --- the timed loop ---


def timed_rounds(
    options: argparse.Namespace,
    *,
    fill: Callable[[int], None],
    work: Callable[[], None],
    check: Callable[[int], bool],
    barrier: Callable[[], None],
    cpu: Callable[[], float] = time.process_time,
    others: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Do all rounds of a worker and time them, each by itself.

    What is not timed stands between barriers, as in `aiokv bench`, so that no worker waits for another one's checks.

    Args:
        options: the arguments, with the worker's rank.
        fill: called with the index of the round: writes the gradients, as a backward pass would.
        work: pushes and pulls; timed.
        check: called with the index of the round: says whether every value that came is right.
        barrier: waits for all workers.
        cpu: returns the CPU-seconds used so far by whatever does the work of this worker.
        others: names and process ids of nodes that only work when workers do.

    Returns:
        The record of this worker, for `result`.
    """
    times, used, ok = [], 0.0, True
    for index in range(options.warmup + options.rounds):
        fill(index)
        barrier()
        if index == options.warmup:
            before = {name: cpu_seconds(pid) for name, pid in others.items()}
        cpu_start, start = cpu(), time.perf_counter()
        work()
        stop, cpu_stop = time.perf_counter(), cpu()
        barrier()
        ok = check(index) and ok
        if index >= options.warmup:
            times.append(stop - start)
            used += cpu_stop - cpu_start
    own = f"worker{options.rank}"
    return {
        "round_s": times,
        "cpu_s": {own: used, **{name: cpu_seconds(pid) - before[name] for name, pid in others.items()}},
        "peak_rss_mib": {name: peak_rss_mib(pid) for name, pid in {own: os.getpid(), **others}.items()},
        "ok": ok,
    }


def result(options: argparse.Namespace, system: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the workers' records together into the object that a program prints; `system` is a name with a version."""
    moved = 2 * bytes_of(options.shapes) / 1e9
    rounds = sorted(seconds for record in records for seconds in record["round_s"])
    median = statistics.median(rounds)
    return {
        "system": system,
        "workload": options.workload,
        "servers": options.servers,
        "workers": options.workers,
        "rounds": options.rounds,
        "mode": options.mode,
        "gbps_per_worker": moved / median,
        "round_s": {"min": rounds[0], "median": median, "p99": rounds[int(0.99 * (len(rounds) - 1))]},
        "cpu_s_per_gb": {
            name: seconds / (moved * options.rounds * options.workers)
            for record in records
            for name, seconds in record["cpu_s"].items()
        },
        "peak_rss_mib": {name: mib for record in records for name, mib in record["peak_rss_mib"].items()},
        "ok": all(record["ok"] for record in records),
    }


def emit(record: Mapping[str, Any]) -> None:
    """Print a record as one line of JSON."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


# --- processes ---


def run_nodes(
    commands: Sequence[tuple[str, Sequence[str], Mapping[str, str]]], *, timeout: float
) -> dict[str, list[dict[str, Any]]]:
    """Start a process for each node and wait until all have ended. None of their processes outlives this call.

    Args:
        commands: name, command and additional environment of each node, in the order of their start. Each finds the
            names and process ids of those before it with `earlier_nodes`.
        timeout: seconds.

    Returns:
        By name the JSON objects that the node printed, each on a line of its own.

    Raises:
        RunError: a node failed, or the time is up.
    """
    deadline = time.monotonic() + timeout
    processes: dict[str, subprocess.Popen[bytes]] = {}
    mark = os.environ.get(MARK) or f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        try:
            for name, command, environ in commands:
                earlier = json.dumps({other: process.pid for other, process in processes.items()})
                full = {**os.environ, **environ, EARLIER: earlier, MARK: mark}
                # Files, not pipes: nobody has to read while the nodes run.
                with open(folder / f"{name}.out", "wb") as out, open(folder / f"{name}.err", "wb") as err:
                    processes[name] = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=full
                    )
            _wait_for_all(processes, deadline, timeout)
        except RunError as error:
            raise RunError(f"{error}\n{_last_words(folder, list(processes))}") from None
        finally:
            _end(list(processes.values()), mark)
        return {name: _records((folder / f"{name}.out").read_text(errors="replace")) for name in processes}


def earlier_nodes() -> dict[str, int]:
    """Return the process ids of the nodes that `run_nodes` started before this one, by name."""
    return dict(json.loads(os.environ[EARLIER]))


def drive_or_say_why(drive: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Call the function with the arguments; if a run fails, end this program with the reason instead of a traceback."""
    end_on_sigterm()
    try:
        drive(options)
    except RunError as error:
        raise SystemExit(str(error)) from None


def end_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C would, with everything that it started."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


def _wait_for_all(processes: Mapping[str, subprocess.Popen[bytes]], deadline: float, timeout: float) -> None:
    while True:
        codes = {name: process.poll() for name, process in processes.items()}
        failed = [f"{name} ended with exit status {code}" for name, code in codes.items() if code]
        if failed:
            raise RunError(", ".join(failed))
        if None not in codes.values():
            return
        if time.monotonic() > deadline:
            waiting = [name for name, code in codes.items() if code is None]
            raise RunError(f"not done within {timeout:.0f} s: {', '.join(waiting)}")
        time.sleep(POLL_SECONDS)


def _last_words(folder: Path, names: Sequence[str]) -> str:
    """Return the ends of what the nodes wrote to stderr."""
    texts = [(name, (folder / f"{name}.err").read_text(errors="replace").strip()) for name in names]
    return "\n".join(f"[{name}] {text[-1500:]}" for name, text in texts if text)


def _records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _end(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """End the processes that still run: ask, then kill, them and every other one that carries the mark."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    deadline = time.monotonic() + GRACE_SECONDS
    while _kill_marked(f"{MARK}={mark}".encode()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for process in running:
        process.wait()


def _kill_marked(wanted: bytes) -> bool:
    """Kill the processes whose environment holds the text, but for this one, and say whether there were any."""
    found = False
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # That of a dead process is empty, even if its parent has not collected it yet.
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                found = True
    return found


# --- what processes use ---


_TICKS = os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def cpu_seconds(pid: int) -> float:
    """Return the seconds that a process has computed so far, in all its threads."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS


def tree_cpu_seconds(root: int) -> float:
    """Return the seconds that a process and all that descend from it and still live have computed so far."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int(_stat(int(folder.name))[1])
    tree = [root]
    for pid in tree:
        tree.extend(child for child, parent in parents.items() if parent == pid)
    total = 0.0
    for pid in tree:
        with contextlib.suppress(OSError):
            total += cpu_seconds(pid)
    return total


def peak_rss_mib(pid: int) -> float:
    """Return the largest amount of memory that a process has had resident, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0
