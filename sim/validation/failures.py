"""Cases of failures: checkpoints, and how many nodes are up."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from sim import closed_forms as known
from sim.compute import Constant
from sim.faults import Spot
from sim.lifetime import segment_time
from sim.scenario import Scenario
from sim.sections import ClusterSection
from sim.timeline import draw_timeline
from sim.validation.case import Case, estimated, proportion

if TYPE_CHECKING:
    from collections.abc import Iterator

DAY = 86_400.0


def checkpoints() -> Iterator[Case]:
    """Case 17: time that a saved interval of work takes, at Daly's interval."""
    for cost, mtbf, restart in ((300.0, DAY, 600.0), (60.0, 3.09 * 3600.0, 300.0), (10.0, 3600.0, 60.0)):
        interval = known.daly(cost, mtbf)
        stream = random.Random("1:segments")
        times = [segment_time(interval, cost, mtbf, restart, stream) / interval for _ in range(40_000)]
        expected = 1.0 / known.efficiency(interval, cost, mtbf, restart)
        yield estimated(f"17 time per useful second, checkpoint {cost:g} s, MTBF {mtbf:g} s", times, expected)


def _fleet(nodes: int, life: float, repair: float | None) -> Scenario:
    return Scenario(
        steps=1,
        cluster=ClusterSection(workers=nodes),
        compute=Constant(mean=1.0),
        fault=(Spot(node="workers", scale=life, restart=repair),),
    )


def first_failure() -> Iterator[Case]:
    """Case 18: the first of n nodes fails after 1/(n r) (Kokolis and others 2025)."""
    rate = 6.5e-3
    for nodes, seeds in ((256, 120), (2048, 30)):
        scenario = _fleet(nodes, DAY / rate, None)
        times = [draw_timeline(scenario, seed).strikes[0].at / 3600.0 for seed in range(seeds)]
        yield estimated(f"18 hours to the first failure of {nodes} nodes", times, 24.0 / (nodes * rate))


def availability() -> Iterator[Case]:
    """Case 20: how many of independent nodes are up."""
    for nodes, life, repair, wanted in ((100, 1000.0, 1.0, (100, 99, 98)), (32, 20.0, 1.0, (32, 30, 28))):
        timeline = draw_timeline(_fleet(nodes, life, repair), 1)
        # Far from the beginning, and so far apart that the counts have nothing to do with each other.
        times = np.arange(20.0 * life, 500.0 * life, 20.0)
        down = np.zeros(len(times), dtype=int)
        for strike in timeline.strikes:
            first, last = np.searchsorted(times, (strike.at, strike.at + repair))
            down[first:last] += 1
        for up in wanted:
            hits = int((nodes - down >= up).sum())
            expected = known.at_least_up(nodes, up, life / (life + repair))
            yield proportion(
                f"20 P(at least {up} of {nodes} up), up {life:g} s, down {repair:g} s", hits, len(times), expected
            )
