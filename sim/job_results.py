"""What became of a job that is started again when it fails, in numbers and in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from sim.record import Run


class JobSummary(msgspec.Struct, frozen=True):
    """What became of a job; NaN where it is not started again."""

    seconds: float
    """Until all steps were done; infinite if they never were."""
    useful: float
    """Share of the workers' time that went into steps which count and were not lost (effective training time ratio)."""
    lives: float
    """How often it was started."""
    lost_steps: float
    """Steps of all workers that had to be taken again."""


def summarise_job(run: Run) -> JobSummary:
    """Return what became of the job that began with a run."""
    job = run.job
    if job is None:
        return JobSummary(*[math.nan] * 4)
    return JobSummary(job.seconds, job.useful, float(len(job.lives)), float(sum(life.lost for life in job.lives)))


def describe(run: Run) -> str:
    """Return in words what became of the job; nothing if it is not started again."""
    if run.job is None:
        return ""
    found = summarise_job(run)
    starts = "started once" if len(run.job.lives) == 1 else f"started {len(run.job.lives)} times"
    took = f"done after {found.seconds:.4g} s" if math.isfinite(found.seconds) else "never done"
    lost = f"{found.lost_steps:.0f} steps of all workers were lost, {found.useful:.1%} of their time was of use"
    return f"the job was {starts} and {took}; {lost}"
