"""A scenario whose cluster grows: two tensors, one of which lies on all servers, and steps of a second."""

from __future__ import annotations

from typing import Any

from sim.compute import Constant
from sim.scenario import Scenario
from sim.sections import ClusterSection, NetworkSection, TensorSection


def growing(steps: int, faults: tuple[Any, ...], **cluster: Any) -> Scenario:
    """Return it, with so many steps and those who come, and whatever else happens."""
    return Scenario(
        policies=("bsp",),
        steps=steps,
        cluster=ClusterSection(chunk_bytes=64, split_bytes=32, **cluster),
        compute=Constant(mean=1.0),
        network=NetworkSection(latency=0.01),
        tensor=(TensorSection(key="big", shape=(80,)), TensorSection(key="small", shape=(3,))),
        fault=faults,
    )
