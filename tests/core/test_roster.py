"""The workers of a view: who counts, and how they are named."""

from __future__ import annotations

import pytest

from aiokv.core.roster import Roster
from aiokv.wire import messages as m


@pytest.fixture
def roster() -> Roster:
    """Four workers: one has left, one is lost."""
    workers = (
        m.WorkerEntry(0, "a", 1),
        m.WorkerEntry(3, "d", 1),
        m.WorkerEntry(1, "b", 1, "left", "left in good order"),
        m.WorkerEntry(2, "c", 1, "lost", "no heartbeat"),
    )
    return Roster(m.View(7, workers, (), 1.0, 1, 1, 10.0))


def test_members_have_not_left_and_are_in_order(roster: Roster) -> None:
    assert (roster.epoch, roster.members, roster.lost) == (7, [0, 2, 3], [2])


def test_nobody_is_a_member_before_the_first_view() -> None:
    roster = Roster()
    assert (roster.epoch, roster.members, roster.lost, roster.entry(0)) == (0, [], [], None)


def test_ranks_are_named(roster: Roster) -> None:
    assert roster.labels([0, 3, 9]) == "0 (a), 3 (d), 9"


def test_loss_names_rank_and_reason(roster: Roster) -> None:
    error = roster.loss([2], "barrier")
    assert "barrier" in str(error)
    assert "2 (c): no heartbeat" in str(error)
    assert error.details == {"ranks": [2]}
    assert roster.loss([2], "round", "w", 3).details == {"ranks": [2], "key": "w", "round": 3}
