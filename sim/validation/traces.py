"""Cases of recorded jobs: how long they take under each policy, and what slow operations cost them."""

from __future__ import annotations

import csv
import lzma
import math
import tempfile
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiokv.errors import ConfigError
from sim.compute import Recorded, read_trace
from sim.sections import JobSection
from sim.split import split
from sim.validation.case import Case, exact, within
from sim.validation.operations import read_operations
from sim.validation.runs import run_ideal
from sim.validation.whatif import WhatIf

if TYPE_CHECKING:
    from collections.abc import Iterator

MAKESPANS: Final = {
    "1": {"bsp": 147867, "backup:1": 141370, "asp": 142581, "ssp:1": 144237, "ssp:3": 142581},
    "2": {"bsp": 216150, "backup:1": 206045, "asp": 216129, "ssp:1": 216129},
    "4": {"bsp": 803975, "backup:2": 526019, "asp": 714863, "ssp:10": 787749},
}
"""Time until the last worker has taken all its steps, by job and policy: sums of recorded times."""

UTILISATIONS: Final = {"1": 0.9001, "4": 0.4538}
"""Share of the time in which workers compute under bsp, to four places."""

SLOWDOWNS: Final = {
    "ST": {"all": 1.1787022, "forward-compute": 1.0874990, "backward-compute": 1.0741565},
    "SE": {"all": 1.5373614, "forward-compute": 1.1459635, "backward-compute": 1.4127706},
    "AR": {"all": 1.9730451, "forward-compute": 1.3688857, "backward-compute": 1.5805062},
}
"""What the artefact of the paper publishes, by job and by the kind of operation that may be slow."""

PUBLISHED: Final = 0.02
"""What a slowdown may be off from the published one, as a share: its graph of operations is not ours in all details."""


def bundled() -> Iterator[Case]:
    """Cases 28 and 29: jobs whose times come along."""
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
    packed = resources.files("sim.validation") / "traces" / "bytedance-st.csv.xz"
    with resources.as_file(packed) as path:
        yield from slowdowns("ST", path)


def recorded(folder: Path) -> Iterator[Case]:
    """Cases 28 and 29: the jobs whose files are in a folder or below it.

    Files are named as they were published: job_4_norm.csv and so on (cluster-trace-gpu-v2020), trace-SE.parquet and so
    on (StragglerAnalysis; the prefix may be another one).

    Raises:
        ConfigError: there is no such file, or one can't be read.
        MissingExtraError: a file needs an extra.
    """
    jobs = {job: path for job in MAKESPANS for path in sorted(folder.rglob(f"job_{job}_norm.csv"))}
    steps = {job: path for job in SLOWDOWNS for path in sorted(folder.rglob(f"*-{job}.parquet"))}
    if not jobs and not steps:
        raise ConfigError(
            f"there are no recorded jobs in {str(folder)!r}: expected files such as job_4_norm.csv or trace-SE.parquet",
            path=str(folder),
        )
    for job, path in jobs.items():
        yield from replays(job, Recorded(file=str(path), step="time", time="batch_time_norm"))
    for job, path in steps.items():
        yield from slowdowns(job, path)


def replays(job: str, law: Recorded) -> Iterator[Case]:
    """Yield how long a job takes under each policy for which that is known."""
    rows = read_trace(law)
    for policy, expected in MAKESPANS[job].items():
        # The work of those who are not waited for is given up at once.
        section = JobSection(cancel=policy.startswith("backup"))
        run = run_ideal(policy, len(rows), len(rows[0]), law, job=section)
        value = max(worker.ended for worker in run.workers) - run.workers[0].begun
        yield exact(f"28 PAI job {job}, {policy}, normalised ms", value, expected)
        if policy == "bsp" and job in UTILISATIONS:
            worked = [split(run, worker).busy for worker in run.workers]
            share = math.fsum(worked) / (value * len(worked))
            yield within(f"28 PAI job {job}, utilisation", share, UTILISATIONS[job], 5e-5)


def slowdowns(job: str, path: Path) -> Iterator[Case]:
    """Yield how much longer a job's steps took than if no operation, or all but those of a kind, had been slow."""
    recording = WhatIf(read_operations(path))
    for kind, expected in SLOWDOWNS[job].items():
        value = recording.slowdown(None if kind == "all" else [kind])
        yield within(f"29 ByteDance job {job}, slowdown by {kind}", value, expected, PUBLISHED * expected)
