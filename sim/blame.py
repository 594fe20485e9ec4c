"""Who is to blame: the same run again, each time with one thing as it should be."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sim.cluster import simulate
from sim.faults import Join, Leave, Link
from sim.report import summarise
from sim.sections import SCHEDULER, NetworkSection, ServerSection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.faults import AnyFault
    from sim.record import Run
    from sim.scenario import Scenario

MAX_WORKERS: Final = 8
"""So many of the slowest workers are looked at."""

MAX_LINKS: Final = 8
"""Of a fault of more links than these, single ones are not looked at."""

SLOW: Final = 1.02
"""A worker counts as slow whose mean is so many times that of the median worker."""

NOTHING: Final = Link(node=SCHEDULER, to=SCHEDULER)
"""Stands where a fault was, so that the others keep their random numbers: no link leads from a node to itself."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """What a step would take if one thing were as it should be."""

    cause: str
    step_s: float
    saved: float
    """Share of the step time; below 0 when it would take longer."""
    saved_s: float
    gradients_per_s: float
    failed_workers: int
    """How many workers would not come to the end."""


def alternatives(run: Run) -> Iterator[tuple[str, Scenario]]:
    """Yield each thing that may be to blame, and the scenario without it."""
    scenario = run.scenario

    def change(**fields: Any) -> Scenario:
        return msgspec.structs.replace(scenario, **fields)

    means = {w.name: statistics.fmean(step.work for step in w.steps) for w in run.workers if w.steps}
    if means:
        usual = statistics.median(means.values())
        slow = sorted((name for name in means if means[name] > SLOW * usual), key=lambda name: -means[name])
        for name in slow[:MAX_WORKERS]:
            # The same draws, at the pace of the worker in the middle.
            factor = scenario.slow.get(name, 1.0) * usual / means[name]
            yield (
                f"{name} computes {means[name] / usual:.2f} times as long",
                change(slow=scenario.slow | {name: factor}),
            )
    for number, fault in enumerate(scenario.fault):
        if isinstance(fault, Join | Leave):
            # That somebody comes or goes is no mishap.
            continue
        before, after = scenario.fault[:number], scenario.fault[number + 1 :]
        yield describe(fault), change(fault=(*before, NOTHING, *after))
        for link, inside, behind in _links_of(scenario, fault):
            yield link, change(fault=(*before, inside, *after, behind))
    net = scenario.network
    if net != NetworkSection():
        unhurried = {"latency": 0.0, "jitter": 0.0, "rack_latency": 0.0, "loss": 0.0}
        if any(getattr(net, name) for name in unhurried):
            yield "latency and loss of the network", change(network=msgspec.structs.replace(net, **unhurried))
        if net.bandwidth < math.inf:
            yield "bandwidth of the network cards", change(network=msgspec.structs.replace(net, bandwidth=math.inf))
    if scenario.server != ServerSection():
        yield "arithmetic of the servers", change(server=ServerSection())


def _links_of(scenario: Scenario, fault: AnyFault) -> Iterator[tuple[str, Link, Link]]:
    """Yield each link of a fault that hits several at known times, and two faults that hit the others."""
    if not isinstance(fault, Link) or fault.drawn:
        return
    nodes, others = scenario.select(fault.node), scenario.select(fault.to)
    links = [(node, other) for node in nodes for other in others if node != other]
    for node, other in links if 1 < len(links) <= MAX_LINKS else ():
        without = tuple(name for name in nodes if name != node)
        rest = tuple(name for name in others if name != other)
        hit = msgspec.structs.replace(fault, node=node, to=other)
        yield (
            describe(hit),
            msgspec.structs.replace(fault, node=without),
            msgspec.structs.replace(hit, to=rest),
        )


def describe(fault: AnyFault) -> str:
    """Return a fault in a few words."""
    kind = fault.__struct_config__.tag
    nodes = fault.node if isinstance(fault.node, str) else ", ".join(fault.node)
    if not isinstance(fault, Link):
        return f"{kind} of {nodes}"
    to = fault.to if isinstance(fault.to, str) else ", ".join(fault.to)
    return f"{kind} between {nodes} and {to}"


def blame(run: Run, on_run: Callable[[], None] = lambda: None) -> list[WhatIf]:
    """Run a scenario again without each thing that may be to blame; what ends workers first, then the largest savings.

    Args:
        run: what there was.
        on_run: is called after each further run.
    """
    before = summarise(run).step_time_s.mean
    found = []
    for cause, scenario in alternatives(run):
        summary = summarise(simulate(scenario, run.policy, run.seed, check=False))
        step = summary.step_time_s.mean
        found.append(
            WhatIf(
                cause=cause,
                step_s=step,
                saved=1.0 - step / before,
                saved_s=before - step,
                gradients_per_s=summary.gradients_per_s,
                failed_workers=round(summary.failed_workers),
            )
        )
        on_run()
    return sorted(found, key=lambda each: (each.failed_workers, math.inf if math.isnan(each.saved) else -each.saved))
