"""Cases of recorded step times: how long two real jobs take under each policy."""

from __future__ import annotations

import csv
import lzma
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sim.advice import barrier
from sim.compute import Recorded, read_trace
from sim.validation.case import Case, exact
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

MAKESPANS: Final = {
    "1": {"bsp": 147867, "drop 1": 141370, "asp": 142581, "ssp:1": 144237, "ssp:3": 142581},
    "2": {"bsp": 216150, "drop 1": 206045, "asp": 216129},
    "4": {"bsp": 803975, "drop 2": 526019, "asp": 714863, "ssp:10": 787749},
}
"""Time until the last worker has taken all its steps, by job and policy: sums over the recorded times."""


def bundled() -> Iterator[Case]:
    """Case 28: two jobs whose times come along."""
    for job in ("1", "2"):
        packed = resources.files("sim.validation") / "traces" / f"pai-job-{job}.txt.xz"
        lines = lzma.decompress(packed.read_bytes()).decode().splitlines()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.csv"
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(("worker", "step", "seconds"))
                for worker, line in enumerate(lines):
                    writer.writerows((worker, step, time) for step, time in enumerate(line.split()))
            yield from replays(job, Recorded(file=str(path)))


def recorded(folder: Path) -> Iterator[Case]:
    """Case 28: the jobs whose files are in a folder, named as in cluster-trace-gpu-v2020: job_4_norm.csv and so on."""
    for job in MAKESPANS:
        path = folder / f"job_{job}_norm.csv"
        if path.exists():
            yield from replays(job, Recorded(file=str(path), step="time", time="batch_time_norm"))


def replays(job: str, law: Recorded) -> Iterator[Case]:
    """Yield how long a job takes under each policy for which that is known."""
    rows = read_trace(law)
    for policy, expected in MAKESPANS[job].items():
        if policy.startswith("drop"):
            # Without the slowest of each step, whose work is given up at once.
            value = barrier(rows, int(policy.split()[1])) * len(rows[0])
        else:
            run = run_ideal(policy, len(rows), len(rows[0]), law)
            value = max(worker.ended for worker in run.workers) - run.workers[0].begun
        yield exact(f"28 PAI job {job}, {policy}, normalised ms", value, expected)
