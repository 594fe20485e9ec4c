"""Runs without anything that disturbs: no network, no service times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.cluster import simulate
from sim.scenario import Scenario
from sim.sections import ClusterSection, StopSection

if TYPE_CHECKING:
    from sim.compute import Law
    from sim.record import Run


def run_ideal(policy: str, workers: int, steps: int, law: Law, seed: int = 1, servers: int = 1, **fields: Any) -> Run:
    """Run a cluster whose network and servers take no time, unless other sections are given.

    Args:
        policy: name of the synchronisation policy.
        workers: how many.
        steps: of each worker.
        law: of the step times.
        seed: of the run.
        servers: how many.
        fields: further sections of the scenario.
    """
    # With hours between heartbeats, they do not take part.
    cluster = ClusterSection(
        workers=workers, servers=servers, heartbeat=1e5, death_timeout=5e5, call_timeout=1e6, join_timeout=1e6
    )
    fields.setdefault("stop", StopSection(departures=False))
    scenario = Scenario(steps=steps, compute=law, cluster=cluster, **fields)
    return simulate(scenario, policy, seed, check=False)
