"""Cases of large fleets: failures of a training that was published, and step times that were."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING, Final

from sim import closed_forms as known
from sim.advice import step_matrix
from sim.compute import Constant, Exponential
from sim.faults import Spot
from sim.scenario import Scenario
from sim.sections import ClusterSection
from sim.timeline import draw_timeline
from sim.validation.case import Case, estimated, exact, proportion
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Iterator

DAY: Final = 86_400.0
NODES: Final = 2048
"""Of 8 accelerators each."""
FAILURES: Final = 419 / 54
"""Unexpected interruptions a day of 16,384 accelerators (Llama team 2024, "The Llama 3 herd of models")."""
SLOW: Final = 2.0
"""Seconds after which a gradient is late (Chen and others 2016)."""


def interruptions() -> Iterator[Case]:
    """Cases 18 and 19: hours between failures, and what they leave of the time (Kokolis and others 2025)."""
    rate = FAILURES / NODES
    yield exact("19 failures of a node in 1000 days", round(1000.0 * rate, 2), 3.79)
    scenario = Scenario(
        steps=1,
        cluster=ClusterSection(workers=NODES),
        compute=Constant(mean=1.0),
        fault=(Spot(node="workers", scale=DAY / rate, restart=0.0),),
    )
    strikes = [strike.at for strike in draw_timeline(scenario, 1).strikes if strike.at < 100.0 * DAY]
    gaps = [(later - earlier) / 3600.0 for earlier, later in itertools.pairwise(strikes)]
    yield estimated("19 hours between failures of 16,384 accelerators", gaps, 24.0 / FAILURES)
    minutes = 0.1 * 24.0 * 60.0 / FAILURES
    yield exact("19 minutes that a failure may cost for 90 % effective time", round(minutes, 1), 18.6)
    for nodes, restart, interval, cost, expected in (
        (2048, 300.0, 600.0, 0.0, 0.9076),
        (256, 300.0, 3600.0, 60.0, 0.9438),
    ):
        yield estimated(f"18 effective time, {nodes} nodes", _effective(nodes, restart, interval, cost), expected)


def _effective(nodes: int, restart: float, interval: float, cost: float) -> list[float]:
    """Return the share of effective time in stretches of ten days; a failure costs a restart and what was not saved."""
    scenario = Scenario(
        steps=1,
        cluster=ClusterSection(workers=nodes),
        compute=Constant(mean=1.0),
        fault=(Spot(node="workers", scale=DAY / 6.5e-3, restart=0.0),),
    )
    stretch, count = 10.0 * DAY, 40
    lost = [0.0] * count
    for strike in draw_timeline(scenario, 2).strikes:
        if strike.at < stretch * count:
            lost[int(strike.at // stretch)] += restart + strike.at % interval
    return [(1.0 - seconds / stretch) / (1.0 + cost / interval) for seconds in lost]


def tails() -> Iterator[Case]:
    """Case 26: of 100 equal workers the last is seldom in time; published numbers need that they are slow together."""
    late = 1.0 - 0.3**0.01
    columns = step_matrix(run_ideal("bsp", 100, 300, Exponential(mean=-SLOW / math.log(late)))).values()
    rows = [sorted(row) for row in zip(*columns, strict=True)]
    for place, expected in ((100, 0.30), (98, known.at_most_late(100, 2, late))):
        hits = sum(row[place - 1] < SLOW for row in rows)
        yield proportion(f"26 P(gradient {place} of 100 within 2 s), independent", hits, len(rows), expected)
    stream = random.Random("1:tails")
    counts = []
    for _ in range(4000):
        share = stream.betavariate(3.098, 209.5)
        counts.append(sum(stream.random() < share for _ in range(100)))
    for spare, published in ((0, 0.30), (1, 0.601), (2, 0.80), (4, 0.960)):
        hits = sum(count <= spare for count in counts)
        expected = known.at_most_late_together(100, spare, 3.098, 209.5)
        yield proportion(f"26 P(gradient {100 - spare} of 100 within 2 s), correlated", hits, len(counts), expected)
        yield exact(
            f"26 P(gradient {100 - spare} of 100 within 2 s), on paper", round(expected, 2), round(published, 2)
        )
