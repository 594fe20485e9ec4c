"""Batch sizes in proportion to speed: sizes by hand, and what holds for all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import ConfigError
from aiokv.training.batch_sizes import SpeedEstimate, split_batch


@pytest.mark.parametrize(
    ("total", "speeds", "least", "sizes"),
    [
        (100, [50.0, 12.5], 1, [80, 20]),
        (100, [3.0, 3.0, 3.0], 1, [34, 33, 33]),
        (10, [7.0], 1, [10]),
        # Hamilton's method: shares 5.4, 3.3 and 1.3; the place that is left goes to .4.
        (10, [54.0, 33.0, 13.0], 1, [6, 3, 1]),
        # Shares 2.5 and 2.5 of 5: the lower rank's comes first.
        (5, [1.0, 1.0], 1, [3, 2]),
        # 99 to 1 would give the second one sample; it gets 8, and the first the rest.
        (100, [99.0, 1.0], 8, [92, 8]),
        # Shares 88, 6.6 and 5.4. With 6 for the last, the second has 94 * 66 / 946 = 6.56, which is enough.
        (100, [880.0, 66.0, 54.0], 6, [87, 7, 6]),
        # The last gets 101 instead of 98.8; that leaves the second 899 * 101.2 / 901.2 = 100.95, so it gets 101 too.
        (1000, [800.0, 101.2, 98.8], 101, [798, 101, 101]),
        (6, [1e9, 1.0, 1.0], 2, [2, 2, 2]),
        # Who takes no part gets nothing, not the least either.
        (10, [0.0, 1.0, 4.0], 1, [0, 2, 8]),
    ],
)
def test_sizes_by_hand(total: int, speeds: list[float], least: int, sizes: list[int]) -> None:
    assert split_batch(total, speeds, least=least) == sizes


def test_speeds_that_floats_can_not_add_up() -> None:
    assert split_batch(4, [1e300, 1e300, 1e-300], least=1) == [2, 1, 1]


SPEEDS = st.lists(st.floats(min_value=1e-3, max_value=1e6), min_size=1, max_size=12)


@given(speeds=SPEEDS, least=st.integers(1, 5), extra=st.integers(0, 500))
def test_every_sample_is_given_out_once_and_nobody_gets_less_than_the_least(
    speeds: list[float], least: int, extra: int
) -> None:
    total = least * len(speeds) + extra
    sizes = split_batch(total, speeds, least=least)
    assert sum(sizes) == total
    assert min(sizes) >= least


@given(speeds=SPEEDS, total=st.integers(12, 500))
def test_a_faster_worker_never_gets_less(speeds: list[float], total: int) -> None:
    sizes = split_batch(total, speeds)
    by_speed = [size for _, size in sorted(zip(speeds, sizes, strict=True))]
    assert by_speed == sorted(by_speed)


@given(speeds=SPEEDS, total=st.integers(12, 500), doublings=st.integers(-20, 20))
def test_the_unit_of_speed_does_not_matter(speeds: list[float], total: int, doublings: int) -> None:
    assert split_batch(total, [speed * 2.0**doublings for speed in speeds]) == split_batch(total, speeds)


@pytest.mark.parametrize(
    ("total", "speeds", "least", "complaint"),
    [
        (5, [1.0, 1.0, 1.0], 2, "a batch of 5 is too small for 3 workers with at least 2 samples each"),
        (5, [0.0, 0.0], 1, "no worker takes part"),
        (5, [1.0, -2.0], 1, "the speed of rank 1 must be a finite number of at least 0, got -2.0"),
        (5, [float("nan")], 1, "the speed of rank 0"),
        (5, [float("inf")], 1, "the speed of rank 0"),
        (5, [1.0], 0, "least must be at least 1, got 0"),
    ],
)
def test_what_can_not_be_divided(total: int, speeds: list[float], least: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        split_batch(total, speeds, least=least)


def test_the_estimate_follows_by_its_weight() -> None:
    """100, then .25 * 60 + .75 * 100 = 90, then .25 * 30 + .75 * 90 = 75 samples per second."""
    estimate = SpeedEstimate(0.25)
    seen = []
    for samples, seconds in [(50, 0.5), (120, 2.0), (15, 0.5)]:
        estimate.measured(samples, seconds)
        seen.append(estimate.speed)
    assert seen == [100.0, 90.0, 75.0]


@pytest.mark.parametrize("weight", [0.0, 1.5, float("nan")])
def test_weights_that_can_not_be(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight must be more than 0 and at most 1"):
        SpeedEstimate(weight)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_can_not_be(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="seconds must be more than 0"):
        SpeedEstimate(1.0).measured(1, seconds)
