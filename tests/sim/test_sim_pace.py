"""Speeds that change in the middle of a step, by hand."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sim.faults import Slow
from sim.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Iterator


def pace(*slow: Slow, pauses: list[tuple[float, float]] | None = None) -> Pace:
    made = Pace(random.Random("pace"))
    made.slow += slow
    made.pauses += pauses or []
    return made


def test_work_is_slower_in_a_window_only() -> None:
    # From 1 to 5 at half speed: 1 before, 2 within, 2 after.
    assert pace(Slow(node="w", factor=2.0, at=1.0, duration=4.0)).finish(0.0, 5.0) == (7.0, 0.0)


def test_windows_multiply() -> None:
    slow = Slow(node="w", factor=2.0), Slow(node="w", factor=3.0)
    assert pace(*slow).finish(10.0, 1.0) == (16.0, 0.0)


def test_a_pause_stops_the_work() -> None:
    assert pace(pauses=[(2.0, 7.0)]).finish(0.0, 3.0) == (8.0, 5.0)
    assert pace(pauses=[(2.0, 7.0)]).finish(3.0, 1.0) == (8.0, 4.0)


def test_a_ramp_grows_and_stays() -> None:
    ramp = pace(Slow(node="w", factor=3.0, shape="ramp", at=10.0, duration=10.0))
    ends = [ramp.finish(start, 1.0)[0] - start for start in (0.0, 10.0, 15.0, 20.0, 100.0)]
    assert ends == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_a_wandering_speed_has_its_spread_and_its_memory() -> None:
    wander = pace(Slow(node="w", factor=1.0, shape="ar1", sd=0.3, persistence=0.8))
    times = [wander.finish(float(start), 1.0)[0] - start for start in range(20_000)]
    logs = np.log(times)
    assert logs.std() == pytest.approx(0.3, rel=0.05)
    assert np.corrcoef(logs[1:], logs[:-1])[0, 1] == pytest.approx(0.8, abs=0.02)


def test_windows_that_are_drawn_as_time_goes_on_count_like_those_of_a_timeline() -> None:
    def windows(gap: float) -> Iterator[tuple[float, float, float]]:
        at = 0.0
        while True:
            at += gap
            yield at, at + 1.0, 2.0
            at += 1.0

    drawn = pace()
    drawn.bursts += [windows(3.0), windows(7.5)]
    known = pace(
        *(
            Slow(node="w", factor=factor, at=begin, duration=end - begin)
            for gap in (3.0, 7.5)
            for begin, end, factor in itertools.islice(windows(gap), 1000)
        )
    )
    ends = [
        (made.finish(start, 2.5), made.finish(start, 90.0)) for made in (drawn, known) for start in range(0, 900, 7)
    ]
    assert ends[: len(ends) // 2] == ends[len(ends) // 2 :]
