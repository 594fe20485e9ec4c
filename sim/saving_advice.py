"""How often to save: from what saving costs in a run, and how often its nodes fail."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

from sim.closed_forms import daly, efficiency
from sim.faults import Crash, Spot

if TYPE_CHECKING:
    from sim.record import Run
    from sim.scenario import Scenario

WORTHWHILE = 0.01
"""A gain below this share of the time is not worth an advice."""


class SavingAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """The best time between saves (Daly 2006), if each failure sets the whole job back to the last one."""

    cost_s: float
    """What a save takes."""
    mtbf_s: float
    """Mean seconds between failures of any node."""
    restart_s: float
    """Seconds until a node that has failed is there again."""
    interval_s: float
    """Seconds of work between two saves, as it is."""
    useful: float
    """Share of the time that goes into work which is not lost, as it is."""
    best_interval_s: float
    best_useful: float


def failures_per_s(scenario: Scenario) -> tuple[float, float]:
    """Return how many nodes fail a second, and the mean seconds until each is there again; 0 for single failures."""
    rates: list[tuple[float, float]] = []
    for fault in scenario.fault:
        count = len(scenario.select(fault.node))
        match fault:
            case Spot(scale=scale, shape=shape, restart=restart):
                rates.append((count / (scale * math.gamma(1.0 + 1.0 / shape)), restart or 0.0))
            case Crash(times=times, every=every, restart=restart) if times > 1:
                rates.append((count / every, restart or 0.0))
            case _:
                pass
    total = math.fsum(rate for rate, _ in rates)
    return total, math.fsum(rate * restart for rate, restart in rates) / total if total else 0.0


def saving_advice(run: Run, step: float) -> SavingAdvice | None:
    """Return how often to save; None where workers do not save, saving takes no time, or nothing fails again and again.

    Args:
        run: says what a save takes.
        step: mean seconds of a step.
    """
    job = run.scenario.job
    if run.saves:
        cost, interval = statistics.fmean(save.end - save.begin for save in run.saves), job.save_every * step
    else:
        cost, interval = job.checkpoint_cost, job.checkpoint_interval
    rate, restart = failures_per_s(run.scenario)
    if not (cost > 0 and interval > 0 and rate > 0):
        return None
    mtbf = 1.0 / rate
    best = daly(cost, mtbf)
    return SavingAdvice(
        cost_s=cost,
        mtbf_s=mtbf,
        restart_s=restart,
        interval_s=interval,
        useful=efficiency(interval, cost, mtbf, restart),
        best_interval_s=best,
        best_useful=efficiency(best, cost, mtbf, restart),
    )


def sentences_on_saving(found: SavingAdvice | None) -> list[str]:
    """Return the advice in words."""
    if found is None:
        return []
    state = f"a save takes {found.cost_s:.3g} s and a node fails every {found.mtbf_s:.4g} s"
    if found.best_useful - found.useful < WORTHWHILE:
        return [f"{state}: {found.interval_s:.4g} s between saves is about right ({found.useful:.1%} useful)"]
    return [
        f"{state}: {found.best_interval_s:.4g} s of work between saves would be better than {found.interval_s:.4g} s, "
        f"{found.best_useful:.1%} of the time useful instead of {found.useful:.1%}"
    ]
