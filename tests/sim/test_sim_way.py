"""Bad links: what a message meets on its way, and when it arrives."""

from __future__ import annotations

import math
import statistics

import pytest

from sim.faults import Link
from sim.laws import Exponential
from sim.sections import NetworkSection
from sim.timeline import Disturbance
from sim.way import Way


def way(net: NetworkSection | None = None, **fault: object) -> Way:
    disturbances = []
    if fault:
        link = Link(node="a", to="b", **fault)  # type: ignore[arg-type]
        disturbances = [Disturbance("a", "b", link.at, link.at + link.duration, link)]
    return Way(net or NetworkSection(latency=0.01), "a", "b", disturbances=disturbances, seed=1)


def test_nothing_disturbs_a_plain_way() -> None:
    assert way().delay(3.0, 100) == 0.01
    assert way().is_plain


def test_a_slow_link_is_slow_while_it_is() -> None:
    slow = way(latency=0.5, at=10.0, duration=5.0, bandwidth=0.25)
    assert [slow.delay(now, 100) for now in (9.9, 10.0, 14.9, 15.0)] == [0.01, 0.51, 0.51, 0.01]
    assert [slow.share(now) for now in (9.9, 10.0)] == [1.0, 0.25]


def test_what_a_clogged_link_holds_arrives_when_it_is_over() -> None:
    clogged = way(clog=True, at=10.0, duration=5.0)
    assert clogged.delay(12.0, 100) == pytest.approx(3.01)
    assert not clogged.refuses(12.0)


def test_a_cut_link_refuses_connections_and_may_never_heal() -> None:
    cut = way(cut=True, at=10.0)
    assert [cut.refuses(now) for now in (9.0, 11.0)] == [False, True]
    assert math.isinf(cut.delay(11.0, 100))


def test_lost_messages_are_sent_again_later_and_later() -> None:
    lossy = way(loss=0.5)
    delays = [round(lossy.delay(0.0, 100), 6) for _ in range(4000)]
    assert set(delays) >= {0.01, 0.21, 0.61, 1.41}
    # Half get through at once, and each byte is sent once more on average.
    assert delays.count(0.01) / 4000 == pytest.approx(0.5, abs=0.03)
    assert lossy.lost / 400_000 == pytest.approx(1.0, abs=0.08)


def test_duplicates_cost_bytes_and_no_time() -> None:
    doubled = way(duplicate=0.25)
    assert {doubled.delay(0.0, 100) for _ in range(1000)} == {0.01}
    assert doubled.duplicate / 100_000 == pytest.approx(0.25, abs=0.05)


def test_some_messages_are_overtaken() -> None:
    shuffled = way(reorder=0.5)
    delays = [shuffled.delay(0.0, 100) for _ in range(1000)]
    assert min(delays) == 0.01
    assert 0.015 < max(delays) <= 0.02


def test_latency_may_follow_a_law_with_jitter_on_top() -> None:
    noisy = way(NetworkSection(latency=Exponential(mean=0.02), jitter=0.01))
    assert statistics.fmean(noisy.delay(0.0, 1) for _ in range(20_000)) == pytest.approx(0.03, rel=0.03)
