"""Scenarios for the tests of the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.compute import Exponential
from sim.scenario import Scenario
from sim.sections import ClusterSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.compute import Law


@pytest.fixture
def make_scenario() -> Callable[..., Scenario]:
    """Return a function that makes a scenario with an ideal network and servers that take no time."""

    def make(workers: int, steps: int, law: Law | None = None, **fields: Any) -> Scenario:
        cluster = fields.pop("cluster", ClusterSection(workers=workers))
        return Scenario(name="test", steps=steps, compute=law or Exponential(mean=1.0), cluster=cluster, **fields)

    return make
