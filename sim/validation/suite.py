"""All cases, in one table; a new policy adds its module here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.validation import (
    barriers,
    descents,
    failures,
    fleets,
    policies,
    queues,
    sameness,
    staleness,
    traces,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.validation.case import Case

GROUPS: Final[dict[str, Callable[[], Iterator[Case]]]] = {
    "barriers.exponential": barriers.exponential,
    "barriers.shifted": barriers.shifted,
    "barriers.normal": barriers.normal,
    "barriers.local_steps": barriers.local_steps,
    "staleness.throughput": staleness.throughput,
    "staleness.conservation": staleness.conservation,
    "staleness.geometric": staleness.geometric,
    "queues.saturation": queues.saturation,
    "queues.open": queues.open_queues,
    "queues.incast": queues.incast,
    "queues.overlap": queues.overlap,
    "failures.checkpoints": failures.checkpoints,
    "failures.first": failures.first_failure,
    "failures.availability": failures.availability,
    "descents.delayed": descents.delayed,
    "descents.momentum": descents.momentum,
    "descents.floor": descents.floor,
    "fleets.interruptions": fleets.interruptions,
    "fleets.tails": fleets.tails,
    "policies.first_k": policies.first_k,
    "policies.staleness": policies.staleness,
    "policies.order_statistics": policies.order_statistics,
    "policies.bounded": policies.bounded,
    "policies.persistent": policies.persistent,
    "traces.bundled": traces.bundled,
    "sameness": sameness.unchanged,
    "sameness.policies": sameness.policies,
}
"""Each group of cases by name; groups do not depend on each other, so they may run in several processes."""


def run_group(name: str) -> list[Case]:
    """Return the results of one group."""
    return list(GROUPS[name]())
