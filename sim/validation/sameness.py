"""Cases that need no number: things that must not change a run, or change it in a known way."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sim.compute import Constant, Exponential
from sim.faults import Crash
from sim.sections import JobSection
from sim.validation.case import Case, exact
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.record import Run, Step


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


def steps_of(run: Run) -> list[list[Step]]:
    """Return the steps of each worker, with all their times."""
    return [worker.steps for worker in run.workers]


def equivalent() -> Iterator[Case]:
    """Case 31: policies that are special cases of others make the same steps and updates."""
    law = Exponential(mean=1.0)
    for slow in ({}, {"worker-7": 3.0}):
        of = "one of 8 three times slower" if slow else "8 equal workers"
        in_step = run_ideal("bsp", 8, 100, law, slow=slow)
        # Under ssp:0 each gradient is an update of its own, so only the steps are the same.
        other = run_ideal("ssp:0", 8, 100, law, slow=slow)
        yield exact(f"31 ssp:0 is bsp, {of}: same steps", steps_of(other) == steps_of(in_step), 1.0)
        for policy in ("k_sync:8", "backup:0", "quorum:8:1e9", "k_async:8", "pssp:7:0", "sync_switch:1:100"):
            other = run_ideal(policy, 8, 100, law, slow=slow)
            same = steps_of(other) == steps_of(in_step)
            if policy != "pssp:7:0":
                same = same and other.updates == in_step.updates
            yield exact(f"31 {policy} is bsp, {of}", same, 1.0)
        free = run_ideal("asp", 8, 100, law, slow=slow)
        for policy in (
            "ssp:1000000",
            "k_async:1",
            "k_batch_async:1",
            "ringmaster:99999",
            "pbsp:0",
            "sync_switch:0:100",
        ):
            other = run_ideal(policy, 8, 100, law, slow=slow)
            same = steps_of(other) == steps_of(free) and other.updates == free.updates
            yield exact(f"31 {policy} is asp, {of}: same steps and updates", same, 1.0)


def monotone() -> Iterator[Case]:
    """Case 31: more backups are never slower, and it does not matter which worker is slow."""
    job = JobSection(cancel=True)
    times = [
        [update.time for update in run_ideal(f"backup:{spare}", 8, 100, Exponential(mean=1.0), job=job).updates]
        for spare in range(5)
    ]
    never = all(
        fewer >= more for one, other in itertools.pairwise(times) for fewer, more in zip(one, other, strict=True)
    )
    yield exact("31 the same step times: no update is later with one backup more", never, 1.0)
    for policy in ("bsp", "asp", "ssp:2", "k_sync:6", "k_async:4", "k_batch_async:3", "ringmaster:8"):
        first, last = (
            run_ideal(policy, 8, 60, Constant(mean=1.0), slow={name: 2.5}) for name in ("worker-0", "worker-7")
        )
        same = [update.time for update in first.updates] == [update.time for update in last.updates]
        yield exact(f"31 {policy}: another worker is the slow one, same times of updates", same, 1.0)
