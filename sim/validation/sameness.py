"""Cases that need no number: things that must not change a run, or change it in a known way."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

from sim.compute import Constant, Exponential, Pareto, Shared
from sim.faults import Bursts, Crash, Pause
from sim.history import digest_of_history, history, history_by_clock
from sim.sections import JobSection, NetworkSection, ServerSection, TensorSection
from sim.validation.case import Case, exact
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.compute import Law
    from sim.record import Run


def unchanged() -> Iterator[Case]:
    """Case 31: faults after the end, the unit of time, and one worker under any policy."""
    law = Exponential(mean=1.0)
    plain = run_ideal("bsp", 8, 50, law)
    late = run_ideal("bsp", 8, 50, law, fault=(Crash(node="worker-1", at=1e6),))
    yield exact("31 a fault after the end: same log", plain.digest == late.digest, 1.0)
    double = run_ideal("bsp", 8, 50, Exponential(mean=2.0))
    yield exact(
        "31 twice the time unit: same events at twice the time", history(double, unit=2.0) == history(plain), 1.0
    )
    one, other = (run_ideal(policy, 1, 50, law) for policy in ("bsp", "asp"))
    steps = [[(step.start, step.end) for step in run.workers[0].steps] for run in (one, other)]
    yield exact("31 one worker: bsp is asp", steps[0] == steps[1], 1.0)
    asynchronous = run_ideal("asp", 8, 50, law)
    slower = max(w.ended for w in plain.workers) >= max(w.ended for w in asynchronous.workers)
    yield exact("31 the same step times: asp is not slower than bsp", slower, 1.0)


TENSORS: Final = (TensorSection(key="table", shape=(40_000,)), TensorSection(key="bias", shape=(6_000,)))
"""Three chunks. All are too large to be sent together, as small ones are under some policies and not under others."""

CLUSTERS: Final[dict[str, tuple[int, Law, dict[str, Any]]]] = {
    "8 equal workers": (8, Exponential(mean=1.0), {}),
    "one of 8 three times slower": (8, Exponential(mean=1.0), {"slow": {"worker-7": 3.0}}),
    "6 workers that always tie": (6, Constant(mean=1.0), {}),
    "heavy tails, three chunks": (5, Pareto(minimum=1.0, shape=2.0), {"tensor": TENSORS}),
    "two servers": (4, Exponential(mean=1.0), {"tensor": TENSORS, "servers": 2}),
    "a shared fleet, a network that takes time": (
        4,
        Shared(mean=1.0),
        {
            "network": NetworkSection(latency=0.01, bandwidth=1e6),
            "server": ServerSection(per_message=1e-3, per_byte=1e-8),
        },
    ),
    "bursts and a pause": (
        4,
        Exponential(mean=1.0),
        {
            "network": NetworkSection(latency=0.01),
            "fault": (
                Bursts(node="workers", factor=4.0, gap=8.0, duration=5.0),
                Pause(node="worker-1", at=5.0, duration=7.0),
            ),
        },
    ),
}
"""How many workers, their step times, and what else is not as in an ideal cluster.

With several servers the network takes no time here: rounds of the first k are then decided by one of them, and the
messages to it would count. Each has a seed of its own.
"""

STEPS: Final = 16
ALWAYS_IN_STEP: Final = f"sync_switch:1:{STEPS}"
NEVER_IN_STEP: Final = f"sync_switch:0:{STEPS}"


def equivalent() -> Iterator[Case]:
    """Case 31: policies that are special cases of others have the same event log, line by line."""
    for seed, (name, (workers, law, fields)) in enumerate(CLUSTERS.items(), start=1):

        def run(policy: str) -> Run:
            return run_ideal(policy, workers, STEPS, law, seed, **fields)  # noqa: B023 - called here

        in_step, free = run("bsp"), digest_of_history(history(run("asp")))
        rounds, clocks = digest_of_history(history(in_step)), digest_of_history(history_by_clock(in_step))
        for policy in (f"k_sync:{workers}", "backup:0", f"quorum:{workers}:1e9", f"k_async:{workers}", ALWAYS_IN_STEP):
            same = digest_of_history(history(run(policy))) == rounds
            yield exact(f"31 {policy} is bsp, {name}: same events", same, 1.0)
        # Under these each gradient is an update of its own.
        for policy in ("ssp:0", "dssp:0:0", f"pssp:{workers - 1}:0"):
            same = digest_of_history(history_by_clock(run(policy))) == clocks
            yield exact(f"31 {policy} is bsp, {name}: same events by clocks", same, 1.0)
        for policy in ("ssp:1000000", "k_async:1", "k_batch_async:1", "ringmaster:99999", "pbsp:0", NEVER_IN_STEP):
            same = digest_of_history(history(run(policy))) == free
            yield exact(f"31 {policy} is asp, {name}: same events", same, 1.0)


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
