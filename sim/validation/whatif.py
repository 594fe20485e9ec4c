"""What if nothing had been slow: recorded training steps are replayed with the times that all would have taken.

Model and question are those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al.,
OSDI 2025). A step is a graph of operations. A computation starts when the one before it on its worker has ended and
its input is there; a transfer starts when all its partners have reached it. How long it waited for the last of them
is in its recorded duration, and not in the replay's. The slowdown is the time of the steps with their recorded
durations, over the time in which every operation takes what its kind usually takes: a computation the mean, a
transfer the median over all steps and workers. A worker has one stage of the pipeline: interleaved ones are not
modelled.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Final

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sim.validation.operations import Operation, Steps

Key = tuple[str, int, int, int]
"""What happens once for all who take part in it: its kind, replica, stage and number; -1 for what they don't share."""

COMPUTATIONS: Final = ("forward-compute", "backward-compute")
AFTERWARDS: Final = (
    "gc",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "optimizer-clip-main-grad",
    "optimizer",
)
"""What a worker does, in this order, when it has computed all gradients of a step."""

ALONE: Final = (*COMPUTATIONS, "gc", "optimizer")
"""What takes its worker's own time; everything else moves data."""


def key_of(operation: Operation) -> Key:
    """Return what an operation is a part of: itself, or a transfer with its partners."""
    replica, stage, number = operation.replica, operation.stage, operation.number
    match operation.kind:
        # Both ends of a transfer from stage to stage, by the stage that sends.
        case "forward-send" | "backward-send" as kind:
            return (kind, replica, stage, number)
        case "forward-recv":
            return ("forward-send", replica, stage - 1, number)
        case "backward-recv":
            return ("backward-send", replica, stage + 1, number)
        case "params-all-gather" | "grads-reduce-scatter" as kind:
            return (kind, -1, stage, number)
        # The first and the last stage share the embedding.
        case "embedding-grads-all-reduce" as kind:
            return (kind, replica, -1, number)
        # The norm of all gradients.
        case "optimizer-clip-main-grad" as kind:
            return (kind, -1, -1, number)
        case kind:
            return (kind, replica, stage, number)


def durations(operations: Iterable[Operation]) -> dict[Key, float]:
    """Return how long all that happened in a step took; a transfer from when all its partners had reached it."""
    starts: dict[Key, float] = {}
    ends: dict[Key, float] = {}
    for each in operations:
        key = key_of(each)
        starts[key] = max(each.start, starts.get(key, each.start))
        ends[key] = max(each.start + each.duration, ends.get(key, 0.0))
    # Clocks of different machines: a transfer may seem to end before its last partner was there.
    return {key: max(0.0, ends[key] - start) for key, start in starts.items()}


def dependencies(operations: Iterable[Operation]) -> dict[Key, set[Key]]:
    """Return what each thing that happened in a step had to wait for.

    Raises:
        ConfigError: a worker computes nothing.
    """
    graph: dict[Key, set[Key]] = {}
    workers: dict[tuple[int, int], list[Operation]] = defaultdict(list)
    for operation in operations:
        graph.setdefault(key_of(operation), set())
        workers[operation.replica, operation.stage].append(operation)
    for (replica, stage), own in workers.items():
        if all(each.kind not in COMPUTATIONS for each in own):
            raise ConfigError(f"the worker of replica {replica} and stage {stage} computes nothing in a recorded step")
        _add_worker(graph, sorted(own, key=lambda each: each.start))
    return graph


def _add_worker(graph: dict[Key, set[Key]], own: Sequence[Operation]) -> None:
    """Add what the operations of one worker, in the order in which they started, wait for."""
    named = {(each.kind, each.number): key_of(each) for each in own}
    computed = [each for each in own if each.kind in COMPUTATIONS]
    _in_a_row(graph, [key_of(each) for each in computed])
    for kind in ("forward-send", "forward-recv", "backward-send", "backward-recv"):
        # Each kind of transfer has a stream of its own, which does not hold up computations.
        _in_a_row(graph, [key_of(each) for each in own if each.kind == kind])
    for each in computed:
        direction = each.kind.removesuffix("-compute")
        received = named.get((f"{direction}-recv", each.number))
        sent = named.get((f"{direction}-send", each.number))
        if received is not None:
            graph[key_of(each)].add(received)
        if sent is not None:
            graph[sent].add(key_of(each))
    first, last = ([key_of(each)] for each in (computed[0], computed[-1]))
    _in_a_row(graph, [*(key_of(each) for each in own if each.kind == "params-all-gather"), *first])
    _in_a_row(graph, [*last, *(named[kind, 0] for kind in AFTERWARDS if (kind, 0) in named)])


def _in_a_row(graph: dict[Key, set[Key]], keys: Sequence[Key]) -> None:
    for before, after in itertools.pairwise(keys):
        graph[after].add(before)


def replay(order: Sequence[Key], graph: Mapping[Key, set[Key]], times: Mapping[Key, float]) -> float:
    """Return the seconds that a step takes when each thing starts as soon as it has not to wait any more.

    Args:
        order: the keys of the graph, each after those that it waits for.
        graph: what each has to wait for.
        times: seconds that each takes.
    """
    ends: dict[Key, float] = {}
    for key in order:
        ends[key] = max((ends[before] for before in graph[key]), default=0.0) + times[key]
    return max(ends.values())


class WhatIf:
    """Recorded steps of one job, and how long they would have taken."""

    def __init__(self, steps: Steps) -> None:
        """Measure the steps.

        Raises:
            ConfigError: a worker computes nothing in a step, or its operations wait for each other.
        """
        self._measured = {step: durations(operations) for step, operations in steps.items()}
        self._graphs = {step: dependencies(operations) for step, operations in steps.items()}
        try:
            self._orders = {step: list(TopologicalSorter(graph).static_order()) for step, graph in self._graphs.items()}
        except CycleError as error:
            raise ConfigError(f"recorded operations wait for each other: {error.args[1]}") from None
        pooled: dict[str, list[float]] = defaultdict(list)
        for measured in self._measured.values():
            for key, seconds in measured.items():
                pooled[key[0]].append(seconds)
        self._usual = {
            kind: statistics.fmean(times) if kind in ALONE else statistics.median(times)
            for kind, times in pooled.items()
        }

    def slowdown(self, kinds: Iterable[str] | None = None) -> float:
        """Return how much longer the steps took than if no operation had been slow.

        Args:
            kinds: only operations of these kinds take what they took, the others what is usual; by default all do.
        """
        slow = self._usual if kinds is None else frozenset(kinds)
        took = usual = 0.0
        for step, measured in self._measured.items():
            graph, order = self._graphs[step], self._orders[step]
            ideal = {key: self._usual[key[0]] for key in measured}
            mixed = {key: seconds if key[0] in slow else ideal[key] for key, seconds in measured.items()}
            took += replay(order, graph, mixed)
            usual += replay(order, graph, ideal)
        return took / usual
