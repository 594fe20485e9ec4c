"""All cases, in one table; a new policy adds its module here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.validation import (
    barriers,
    bounded,
    compression,
    descents,
    failures,
    fleets,
    queues,
    rounds,
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
    "staleness.conservation_of_rounds": staleness.conservation_of_rounds,
    "staleness.geometric": staleness.geometric,
    "rounds.first_of_all": rounds.first_of_all,
    "rounds.batches": rounds.batches,
    "rounds.ratio": rounds.ratio,
    "rounds.best": rounds.best,
    "rounds.coded": rounds.coded,
    "rounds.coded_in_proportion": rounds.coded_in_proportion,
    "bounded.pair": bounded.pair,
    "bounded.ten": bounded.ten,
    "bounded.persistent": bounded.persistent,
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
    "compression.golden": compression.golden,
    "compression.nothing_lost": compression.nothing_lost,
    "fleets.interruptions": fleets.interruptions,
    "fleets.tails": fleets.tails,
    "traces.bundled": traces.bundled,
    "sameness.unchanged": sameness.unchanged,
    "sameness.equivalent": sameness.equivalent,
    "sameness.monotone": sameness.monotone,
}
"""Each group of cases by name; groups do not depend on each other, so they may run in several processes."""


def run_group(name: str) -> list[Case]:
    """Return the results of one group."""
    return list(GROUPS[name]())
