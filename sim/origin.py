"""Where a run begins in a job that was started before: later, and with steps that are done already."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from sim.pace import Pace
from sim.timeline import Disturbance, Strike, Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sim.pace import Window
    from sim.scenario import Scenario


@dataclass(slots=True, frozen=True)
class Origin:
    """A run begins at a time of its job, and each worker has taken so many steps before."""

    at: float = 0.0
    done: Mapping[str, int] = field(default_factory=dict)


def remaining(scenario: Scenario, origin: Origin) -> Scenario:
    """Return what is left to be done of a scenario."""
    if not any(origin.done.values()):
        return scenario
    left = {name: scenario.steps_of(name) - origin.done.get(name, 0) for name in scenario.workers}
    most = max(left.values())
    return structs.replace(scenario, steps=most, uneven={name: own for name, own in left.items() if own < most})


def since(timeline: Timeline, origin: Origin, seed: int) -> Timeline:
    """Return what still happens in a run, if the whole job is started again when it fails; times are those of the run.

    No node is started again by itself then. What began before the run is over, unless it is about how fast a worker
    computes, a link, or a file.
    """
    at = origin.at
    return Timeline(
        strikes=[
            Strike(strike.at - at, strike.node, strike.kind, strike.after if strike.kind == "pause" else None)
            for strike in timeline.strikes
            if strike.at >= at
        ],
        starts={node: start - at for node, start in timeline.starts.items() if start > at},
        paces={node: _pace(node, pace, at, seed) for node, pace in timeline.paces.items()},
        disturbances=[
            Disturbance(each.source, each.target, each.at - at, each.until - at, each.fault)
            for each in timeline.disturbances
        ],
        deaf={node: [(begin - at, end - at) for begin, end in some] for node, some in timeline.deaf.items()},
        poisoned={(name, step - origin.done.get(name, 0)) for name, step in timeline.poisoned},
        torn={node: [structs.replace(each, at=each.at - at) for each in some] for node, some in timeline.torn.items()},
    )


def _pace(node: str, pace: Pace, at: float, seed: int) -> Pace:
    shifted = Pace(random.Random(f"{seed}:pace:{node}:{at}" if at else f"{seed}:pace:{node}"))
    shifted.slow = [structs.replace(fault, at=fault.at - at) for fault in pace.slow]
    shifted.pauses = [(begin - at, end - at) for begin, end in pace.pauses if begin >= at]
    shifted.bursts = [_shift(windows, at) for windows in pace.bursts]
    return shifted


def _shift(windows: Iterator[Window], at: float) -> Iterator[Window]:
    for begin, end, factor in windows:
        yield begin - at, end - at, factor
