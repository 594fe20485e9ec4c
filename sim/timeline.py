"""The faults of one run: what a scenario says, and what its seeded processes draw, as times of single events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from sim.faults import (
    Bursts,
    Crash,
    Hang,
    HeartbeatLoss,
    Join,
    Late,
    Leave,
    Link,
    Pause,
    Poison,
    Reset,
    Slow,
    Spot,
    Torn,
)
from sim.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.faults import AnyFault
    from sim.pace import Window
    from sim.scenario import Scenario
    from sim.tokens import Token

MAX_DRAWN: Final = 1000
"""So many events of a seeded process are drawn for a node."""


@dataclass(slots=True, frozen=True)
class Strike:
    """Something happens to a node. `after` are the seconds until it is over, None: it is for good."""

    at: float
    node: str
    kind: Literal["crash", "hang", "pause"]
    after: float | None = None


@dataclass(slots=True, frozen=True)
class Disturbance:
    """What a link fault does to one direction, from `at` to `until`."""

    source: str
    target: str
    at: float
    until: float
    fault: Link


@dataclass(slots=True)
class Timeline:
    """All that happens to the nodes and links of one run."""

    strikes: list[Strike] = field(default_factory=list)
    starts: dict[str, float] = field(default_factory=dict)
    """When a node is started, if it is not at the beginning."""
    leaves: dict[str, Leave] = field(default_factory=dict)
    """The workers that leave."""
    paces: dict[str, Pace] = field(default_factory=dict)
    """How fast those workers compute whose speed changes."""
    disturbances: list[Disturbance] = field(default_factory=list)
    resets: list[tuple[float, str, str]] = field(default_factory=list)
    """When the connections between two nodes end."""
    deaf: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Windows in which a node's heartbeats get lost."""
    poisoned: set[Token] = field(default_factory=set)
    torn: dict[str, list[Torn]] = field(default_factory=dict)
    """What tears the files that a server writes."""

    def pace(self, node: str, seed: int) -> Pace:
        """Return a node's pace, to add to it."""
        return self.paces.setdefault(node, Pace(random.Random(f"{seed}:pace:{node}")))


def draw_timeline(scenario: Scenario, seed: int) -> Timeline:
    """Return the events of a run; equal seeds give equal events under every policy."""
    timeline = Timeline()
    for number, fault in enumerate(scenario.fault):
        for node in scenario.select(fault.node):
            _add(timeline, scenario, fault, node, seed, random.Random(f"{seed}:fault-{number}:{node}"))
    timeline.strikes.sort(key=lambda strike: strike.at)
    return timeline


def _add(  # noqa: C901, PLR0912 - one case for each kind
    timeline: Timeline, scenario: Scenario, fault: AnyFault, node: str, seed: int, stream: random.Random
) -> None:
    match fault:
        case Crash(restart=restart):
            count = fault.times if restart is not None else 1
            for at in _times(fault, restart or 0.0, stream)[:count]:
                timeline.strikes.append(Strike(at, node, "crash", restart))
        case Hang(at=at):
            timeline.strikes.append(Strike(at, node, "hang"))
        case Pause(duration=duration):
            for at in _times(fault, duration, stream):
                timeline.strikes.append(Strike(at, node, "pause", duration))
                timeline.pace(node, seed).pauses.append((at, at + duration))
        case Late(at=at) | Join(at=at):
            timeline.starts[node] = at
        case Leave():
            timeline.leaves[node] = fault
        case Spot():
            timeline.strikes += _spot(fault, node, stream)
        case Slow():
            timeline.pace(node, seed).slow.append(fault)
        case Bursts():
            timeline.pace(node, seed).bursts.append(_bursts(fault, stream))
        case Link(to=to):
            for other in scenario.select(to):
                for at in _times(fault, fault.duration, stream):
                    timeline.disturbances += _disturb(fault, at, node, other)
        case Reset(to=to):
            others = [other for other in scenario.select(to) if other != node]
            timeline.resets += [(at, node, other) for at in _times(fault, 0.0, stream) for other in others]
        case HeartbeatLoss(at=at, duration=duration):
            timeline.deaf.setdefault(node, []).append((at, at + duration))
        case Poison(step=step):
            timeline.poisoned.add((node, step))
        case Torn():
            timeline.torn.setdefault(node, []).append(fault)


def _times(fault: Crash | Pause | Link | Reset, lasts: float, stream: random.Random) -> list[float]:
    """Return when a fault comes that lasts so long each time."""
    if not fault.drawn:
        return [fault.at + fault.every * number for number in range(fault.times)]
    times, free = [], fault.at
    for _ in range(fault.times):
        times.append(free + stream.expovariate(1.0 / fault.every))
        free = times[-1] + lasts
    return times


def _spot(fault: Spot, node: str, stream: random.Random) -> list[Strike]:
    strikes = []
    at = 0.0
    for _ in range(MAX_DRAWN if fault.restart is not None else 1):
        at += stream.weibullvariate(fault.scale, fault.shape)
        strikes.append(Strike(at, node, "crash", fault.restart))
        at += fault.restart or 0.0
    return strikes


def _bursts(fault: Bursts, stream: random.Random) -> Iterator[Window]:
    at = 0.0
    while True:
        at += stream.expovariate(1.0 / fault.gap)
        end = at + stream.expovariate(1.0 / fault.duration)
        yield at, end, fault.factor
        at = end


def _disturb(fault: Link, at: float, node: str, other: str) -> list[Disturbance]:
    if node == other:
        return []
    ways = [(node, other), (other, node)] if fault.both else [(node, other)]
    return [Disturbance(source, target, at, at + fault.duration, fault) for source, target in ways]
