"""The checks notice what is wrong: each test spoils a good run in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sim.checks import find_violations
from sim.cluster import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run
    from sim.scenario import Scenario


@pytest.fixture
def bsp(make_scenario: Callable[..., Scenario]) -> Run:
    return simulate(make_scenario(2, 3), "bsp", 1)


@pytest.fixture
def asp(make_scenario: Callable[..., Scenario]) -> Run:
    return simulate(make_scenario(2, 3), "asp", 1)


def test_a_lost_gradient(bsp: Run) -> None:
    bsp.updates[1].tokens.pop()
    bsp.updates[1].ranks.pop()
    found = find_violations(bsp)
    assert "key 'weights' from element 0: push 2 of worker-1 was answered, but is in no update" in found
    assert "key 'weights' from element 0: version 2 was made without worker-1" in found


def test_a_gradient_that_was_applied_twice(bsp: Run) -> None:
    bsp.updates[1].tokens[1] = bsp.updates[0].tokens[1]
    assert "key 'weights' from element 0: push 1 of worker-1 was applied 2 times" in find_violations(bsp)


def test_a_gradient_of_another_round(bsp: Run) -> None:
    bsp.updates[0].tokens[0], bsp.updates[1].tokens[0] = bsp.updates[1].tokens[0], bsp.updates[0].tokens[0]
    assert find_violations(bsp)[0].endswith("version 1 holds pushes of other rounds, by ['worker-0']")


def test_a_stale_gradient_in_a_round(bsp: Run) -> None:
    bsp.updates[2].staleness[0] = 1
    [found] = find_violations(bsp)
    assert found.endswith("version 3 has gradients of staleness [1, 0]")


def test_a_sum_that_was_not_made_in_rank_order(bsp: Run) -> None:
    bsp.updates[0].tokens.reverse()
    bsp.updates[0].ranks.reverse()
    [found] = find_violations(bsp)
    assert found.endswith("version 1 was summed in the order [1, 0]")


def test_a_rank_that_did_not_send_what_is_said_to_be_its_own(bsp: Run) -> None:
    bsp.updates[0].tokens.reverse()
    [found] = find_violations(bsp)
    assert "but names the ranks [0, 1]" in found


def test_a_version_that_was_left_out(bsp: Run) -> None:
    bsp.updates[2].version = 4
    assert find_violations(bsp)[0].endswith("update 3 made version 4")


def test_a_wrong_staleness(asp: Run) -> None:
    asp.updates[3].staleness[0] += 1
    [found] = find_violations(asp)
    assert "version 4 says staleness" in found


def test_a_push_that_was_never_made(asp: Run) -> None:
    asp.workers[0].steps.pop()
    assert any("was applied, but never made" in text for text in find_violations(asp))


def test_time_that_is_neither_busy_nor_waiting(asp: Run) -> None:
    asp.workers[0].ended += 1.0
    [found] = find_violations(asp)
    assert found.startswith("worker-0: ")
    assert found.endswith("s elapsed")


def test_answers_without_any_update(asp: Run) -> None:
    asp.updates.clear()
    assert find_violations(asp) == ["pushes were answered, but no update was made"]
