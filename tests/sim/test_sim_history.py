"""The events of workers and the model, and that they tell policies apart."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from sim.cluster import simulate
from sim.compute import Constant, Exponential
from sim.history import digest_of_history, history, history_by_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario


def test_each_step_and_each_update_is_a_line_with_what_the_gradient_was_computed_from(
    make_scenario: Callable[..., Scenario],
) -> None:
    run = simulate(make_scenario(2, 2, Constant(mean=1.0), slow={"worker-1": 1.5}), "asp", 1)
    assert history(run) == [
        '[0.0,"worker-0","begins",1,[["weights",0,0]]]',
        '[0.0,"worker-1","begins",1,[["weights",0,0]]]',
        '[1.0,"model","makes","weights",0,1,[["worker-0",1]]]',
        '[1.0,"worker-0","begins",2,[["weights",0,1]]]',
        '[1.0,"worker-0","goes on",1,""]',
        '[1.0,"worker-0","pushes",1]',
        '[1.5,"model","makes","weights",0,2,[["worker-1",1]]]',
        '[1.5,"worker-1","begins",2,[["weights",0,2]]]',
        '[1.5,"worker-1","goes on",1,""]',
        '[1.5,"worker-1","pushes",1]',
        '[2.0,"model","makes","weights",0,3,[["worker-0",2]]]',
        '[2.0,"worker-0","goes on",2,""]',
        '[2.0,"worker-0","pushes",2]',
        '[3.0,"model","makes","weights",0,4,[["worker-1",2]]]',
        '[3.0,"worker-1","goes on",2,""]',
        '[3.0,"worker-1","pushes",2]',
    ]


def test_by_clocks_the_model_completes_what_all_have_pushed(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(make_scenario(2, 2, Constant(mean=1.0), slow={"worker-1": 1.5}), "asp", 1)
    lines = history_by_clock(run)
    assert [line for line in lines if "model" in line] == [
        '[1.5,"model","completes","weights",0,1,[["worker-0",1],["worker-1",1]]]',
        '[3.0,"model","completes","weights",0,2,[["worker-0",2],["worker-1",2]]]',
    ]
    # Its second gradient was computed from one of each.
    assert '[1.5,"worker-1","begins",2,[["weights",0,[1,1]]]]' in lines


def test_a_clock_is_complete_without_those_who_push_no_more(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(make_scenario(2, 2, Constant(mean=1.0), uneven={"worker-1": 1}), "ssp:0", 1)
    assert [line for line in history_by_clock(run) if "completes" in line] == [
        '[1.0,"model","completes","weights",0,1,[["worker-0",1],["worker-1",1]]]',
        '[2.0,"model","completes","weights",0,2,[["worker-0",2]]]',
    ]


def test_what_was_dropped_says_so_where_its_worker_goes_on(make_scenario: Callable[..., Scenario]) -> None:
    run = simulate(make_scenario(2, 2, Constant(mean=1.0), slow={"worker-1": 1.5}), "backup:1", 1)
    assert [line for line in history(run) if "late" in line] == [
        '[1.5,"worker-1","goes on",1,"late"]',
        '[3.0,"worker-1","goes on",2,"late"]',
    ]


@pytest.mark.parametrize(
    ("one", "other"), [("bsp", "backup:1"), ("asp", "ssp:1"), ("asp", "k_async:2"), ("k_async:2", "k_batch_async:2")]
)
def test_policies_that_differ_have_other_events(make_scenario: Callable[..., Scenario], one: str, other: str) -> None:
    scenario = make_scenario(4, 10, Exponential(mean=1.0))
    assert history(simulate(scenario, one, 1)) != history(simulate(scenario, other, 1))


def test_one_round_later_is_another_history_by_clocks(make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(4, 10, Exponential(mean=1.0))
    assert history_by_clock(simulate(scenario, "bsp", 1)) != history_by_clock(simulate(scenario, "ssp:1", 1))


def test_the_digest_is_that_of_the_lines() -> None:
    assert digest_of_history(["a", "b"]) == hashlib.sha256(b"a\nb").hexdigest()
