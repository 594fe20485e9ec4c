"""Train the digits example on a local cluster, waiting for each other and not, and check that nothing stays behind.

    make demo

Each run is a command that a user would type: `aiokv run` starts scheduler, servers and workers as processes and waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

SERVERS = 2
WORKERS = 2
LIMIT = 120.0
"""Seconds after which a run has failed."""
DIGITS = Path(__file__).with_name("digits.py")
MARK = "DEMO_OF_PROCESS"
"""A run's processes inherit this variable, so that one which outlives its parent is found too."""


@dataclass(frozen=True, slots=True)
class Run:
    """How one run ended."""

    store: str
    exit_code: int
    accuracy: float | None
    """On the images held out; None if the training did not come to its end."""
    seconds: float

    def __str__(self) -> str:
        accuracy = "not trained to the end" if self.accuracy is None else f"held-out accuracy {self.accuracy:.4f}"
        ending = f", exit code {self.exit_code}" if self.exit_code else ""
        return f"{self.store:<10}  {accuracy}, {self.seconds:.1f} s{ending}"


def train(store: str) -> Run:
    """Train with the given store; the output goes where this program's output goes."""
    print(f"$ aiokv run -s {SERVERS} -w {WORKERS} -- python examples/{DIGITS.name} --store {store}", flush=True)
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        cluster = [sys.executable, "-m", "aiokv", "run", "-s", str(SERVERS), "-w", str(WORKERS)]
        script = [sys.executable, str(DIGITS), "--store", store, "--json", str(result)]
        with subprocess.Popen([*cluster, "--", *script], env={**os.environ, MARK: str(os.getpid())}) as process:
            try:
                exit_code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                print(f"the run did not end within {LIMIT:.0f} s, stopping it", flush=True)
                process.terminate()
                exit_code = process.wait()
        accuracy = json.loads(result.read_text(encoding="utf-8"))["accuracy"] if result.exists() else None
    print(flush=True)
    return Run(store, exit_code, accuracy, time.monotonic() - start)


def left_running() -> list[str]:
    """Describe the processes of this demo's runs that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(os.getpid()):
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except psutil.Error:
            # It has just ended, or it is somebody else's.
            continue
    return found


def main() -> int:
    """Run both modes, sum up, and return the exit code."""
    runs = [train("dist_sync"), train("dist_async")]
    left = left_running()
    print(*runs, sep="\n")
    print(f"{WORKERS} workers and {SERVERS} servers, {sum(run.seconds for run in runs):.1f} s in all")
    print(*(["still running:", *left] if left else ["nothing is left running"]), sep="\n  ")
    return 1 if left or any(run.exit_code for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
