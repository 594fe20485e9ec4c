"""Cases that need no number: things that must not change a run, or change it in a known way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.compute import Exponential, Law, Pareto
from sim.faults import Crash
from sim.validation.case import Case, exact
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator


def unchanged() -> Iterator[Case]:
    """Case 31: faults after the end, the unit of time, and one worker under any policy."""
    law = Exponential(mean=1.0)
    plain = run_ideal("bsp", 8, 50, law)
    late = run_ideal("bsp", 8, 50, law, fault=(Crash(node="worker-1", at=1e6),))
    yield exact("31 a fault after the end: same log", plain.digest == late.digest, 1.0)
    double = run_ideal("bsp", 8, 50, Exponential(mean=2.0))
    yield exact("31 twice the time unit: twice the time", double.workers[0].ended / plain.workers[0].ended, 2.0)
    one, other = (run_ideal(policy, 1, 50, law) for policy in ("bsp", "asp"))
    steps = [[(step.start, step.end) for step in run.workers[0].steps] for run in (one, other)]
    yield exact("31 one worker: bsp is asp", steps[0] == steps[1], 1.0)
    asynchronous = run_ideal("asp", 8, 50, law)
    slower = max(w.ended for w in plain.workers) >= max(w.ended for w in asynchronous.workers)
    yield exact("31 the same step times: asp is not slower than bsp", slower, 1.0)


SAME: Final = {
    "bsp": ("ssp:0", "k_sync:{n}", "backup:0", "k_async:{n}", "quorum:{n}:1000", "sync_switch:1:{steps}"),
    "asp": ("ssp:1000", "k_async:1", "k_batch_async:1", "ringmaster:1000", "pssp:0:0", "sync_switch:0:{steps}"),
}
"""Policies that are the same under other names, for n workers."""


def policies() -> Iterator[Case]:
    """Case 31: under policies that are the same, all steps begin and end at the same times."""
    for law in (Exponential(mean=1.0), Pareto(minimum=1.0, shape=2.0)):
        for policy, others in SAME.items():
            steps = _steps(policy, law)
            for other in others:
                name = other.format(n=6, steps=40)
                yield exact(f"31 {name} is {policy}, {type(law).__name__}: same steps", _steps(name, law) == steps, 1.0)


def _steps(policy: str, law: Law) -> list[tuple[float, float, float]]:
    run = run_ideal(policy, 6, 40, law)
    return [(step.start, step.computed, step.end) for worker in run.workers for step in worker.steps]
