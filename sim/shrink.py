"""Making a failing scenario smaller, while it fails in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from sim.faults import Link
from sim.mistakes import first_mistake
from sim.sections import JobSection, NetworkSection, ServerSection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.faults import Nodes
    from sim.scenario import Scenario

MAX_TRIES: Final = 300
"""So many smaller scenarios are tried."""


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], tries: int = MAX_TRIES) -> Scenario:
    """Return a scenario that still fails, from which no single part can be taken.

    Args:
        scenario: one that fails.
        fails: says whether one fails in the same way.
        tries: how often it may be asked.
    """
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for smaller in _smaller(scenario):
            if first_mistake(smaller) is not None:
                # It could not be read from a file.
                continue
            left -= 1
            if left < 0:
                break
            if fails(smaller):
                scenario, progress = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with one thing less, the largest things first."""

    def change(**fields: Any) -> Scenario:
        return msgspec.structs.replace(scenario, **fields)

    for fields in _fewer_nodes(scenario):
        yield change(**fields)
    for number in range(len(scenario.fault)):
        yield change(fault=scenario.fault[:number] + scenario.fault[number + 1 :])
    for number in range(len(scenario.change)):
        yield change(change=scenario.change[:number] + scenario.change[number + 1 :])
    for steps in sorted({1, scenario.steps // 2, scenario.steps - 1}):
        if 0 < steps < scenario.steps:
            yield change(
                steps=steps,
                uneven={name: min(own, steps) for name, own in scenario.uneven.items()},
                change=tuple(each for each in scenario.change if each.after < steps),
            )
    if len(scenario.tensor) > 1:
        for number in range(len(scenario.tensor)):
            yield change(tensor=scenario.tensor[:number] + scenario.tensor[number + 1 :])
    yield from _plainer(scenario)


def _fewer_nodes(scenario: Scenario) -> Iterator[dict[str, Any]]:
    cluster = scenario.cluster
    more = scenario.more_servers
    if cluster.replication > 1 and (cluster.places > cluster.servers or not more):
        yield {"cluster": msgspec.structs.replace(cluster, replication=1)}
    if cluster.places and not more:
        yield {"cluster": msgspec.structs.replace(cluster, places=0)}
    if cluster.servers > cluster.replication and not more and not _is_named(scenario, scenario.servers[-1]):
        yield {"cluster": msgspec.structs.replace(cluster, servers=cluster.servers - 1)}
    last = scenario.workers[-1]
    in_group = any(cluster.workers - 1 in tensor.group for tensor in scenario.tensor)
    if cluster.workers > 1 and not _is_named(scenario, last) and not in_group:
        yield {
            "cluster": msgspec.structs.replace(cluster, workers=cluster.workers - 1),
            "uneven": {name: steps for name, steps in scenario.uneven.items() if name != last},
        }
    if cluster.racks > 1:
        yield {"cluster": msgspec.structs.replace(cluster, racks=1)}


def _is_named(scenario: Scenario, node: str) -> bool:
    def names(nodes: Nodes) -> tuple[str, ...]:
        return (nodes,) if isinstance(nodes, str) else nodes

    named = [name for fault in scenario.fault for name in names(fault.node)]
    named += [name for fault in scenario.fault if isinstance(fault, Link) for name in names(fault.to)]
    return node in named


def _plainer(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with one thing at its default."""
    for name in ("uneven", "slow"):
        if getattr(scenario, name):
            yield msgspec.structs.replace(scenario, **{name: {}})
    for name, plain in (("network", NetworkSection()), ("server", ServerSection()), ("job", JobSection())):
        section = getattr(scenario, name)
        if section == plain:
            continue
        yield msgspec.structs.replace(scenario, **{name: plain})
        for field in section.__struct_fields__:
            if getattr(section, field) != getattr(plain, field):
                reset = msgspec.structs.replace(section, **{field: getattr(plain, field)})
                yield msgspec.structs.replace(scenario, **{name: reset})
    for number, tensor in enumerate(scenario.tensor):
        if tensor.group:
            ungrouped = msgspec.structs.replace(tensor, group=())
            yield msgspec.structs.replace(
                scenario, tensor=(*scenario.tensor[:number], ungrouped, *scenario.tensor[number + 1 :])
            )
