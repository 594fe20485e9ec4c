"""What a run says under a policy that does not let all wait for all: who waits, whose gradients are old or dropped."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from aiokv.policy import get_policy
from sim.fates import fates

if TYPE_CHECKING:
    from sim.advice import Skew
    from sim.record import Run
    from sim.report import Summary

SMALL: Final = 0.05
"""A share below this one is not worth a sentence."""


def on_waits(run: Run, summary: Summary, skew: Skew | None) -> list[str]:
    """Return what was seen, in sentences; nothing where too little happened.

    Args:
        run: what there was.
        summary: its numbers.
        skew: how unequal its steps were.
    """
    if skew is None:
        return []
    policy, waits = get_policy(run.policy), summary.split.wait >= SMALL
    if not (policy.decides or policy.gate() or waits):
        return [f"nobody waits; {_predicted(run, skew.slowest)}"]
    found = [f"workers wait {summary.split.wait:.0%} of their time" if waits else "nobody waits"]
    if policy.gate() is not None and summary.held >= SMALL and skew.is_persistent:
        found.append(
            f"bounded staleness does not help for long: all end up at the pace of {skew.slowest}, which takes "
            f"{skew.slowest_mean:.3g} s where the mean is {skew.mean:.3g} s"
        )
    return [*found, *_on_fates(run)]


def _predicted(run: Run, worker: str) -> str:
    """Return how stale a worker's gradients are where each is an update at once."""
    times = {
        each.name: statistics.fmean(step.end - step.start for step in each.steps) for each in run.workers if each.steps
    }
    own = 1.0 / times[worker]
    stale = (sum(1.0 / time for time in times.values()) - own) / own
    return f"gradients of {worker} are about {stale:.1f} versions stale, (R - r) / r"


def _on_fates(run: Run) -> list[str]:
    """Return whose gradients are the oldest, and whose are dropped most often."""
    found = []
    every = fates(run)
    ages = {
        name: sum(age * count for age, count in fate.staleness.items()) / fate.staleness.total()
        for name, fate in every.items()
        if fate.staleness.total()
    }
    oldest = max(ages, key=ages.__getitem__, default="")
    if ages and ages[oldest] > 0.0:
        found.append(f"gradients of {oldest} are {ages[oldest]:.1f} versions stale in the mean, more than all others")
    dropped = {name: fate.dropped.total() / fate.steps for name, fate in every.items() if fate.steps}
    unlucky = max(dropped, key=dropped.__getitem__, default="")
    if dropped and dropped[unlucky] >= SMALL:
        share = statistics.fmean(dropped.values())
        found.append(f"{share:.0%} of the gradients are dropped, and of {unlucky} {dropped[unlucky]:.0%}")
    return found
