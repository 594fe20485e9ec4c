"""Pictures: nothing that they show lies on their edge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.cluster import simulate
from sim.compute import Constant
from sim.picture import progress, staleness, step_times
from sim.sections import StopSection

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario


def test_equal_step_times_can_be_seen(make_scenario: Callable[..., Scenario]) -> None:
    runs = [simulate(make_scenario(2, steps, Constant(mean=4.0)), "bsp", 1) for steps in (1, 3)]
    (axes,) = step_times(runs).axes
    assert axes.get_xlim() == pytest.approx((0.0, 4.2))
    for line in axes.get_lines():
        assert np.unique(line.get_xdata()).tolist() == [4.0]
        assert np.asarray(line.get_ydata())[[0, -1]].tolist() == [0.0, 100.0]


def test_one_update_can_be_seen(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(make_scenario(2, 1, Constant(mean=4.0)), "bsp", 1)
    (axes,) = progress([run]).axes
    assert axes.get_xlim() == pytest.approx((0.0, 4.2))
    # Where nothing is stale the axis still has whole versions.
    (axes,) = staleness([run]).axes
    assert axes.get_xlim() == pytest.approx((0.0, 1.05))


def test_a_picture_of_nothing_can_be_drawn(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(2, 1, Constant(mean=4.0), stop=StopSection(time=1.0))
    for figure in (step_times, staleness, progress):
        (axes,) = figure([simulate(scenario, "bsp", 1)]).axes
        assert axes.get_xlim()[1] > 0.0
