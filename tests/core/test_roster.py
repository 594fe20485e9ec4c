"""The workers of a view: who counts, and how they are named."""

from __future__ import annotations

import pytest

from aiokv.core.roster import Roster
from aiokv.errors import MembershipError
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


@pytest.fixture
def joined() -> Roster:
    """Two workers, a third one that counts after clock 5, and a fourth that is about to come."""
    workers = (
        m.WorkerEntry(0, "worker-1", 1),
        m.WorkerEntry(1, "worker-2", 1, "left"),
        m.WorkerEntry(2, "another", 1, "alive", "", 5),
        m.WorkerEntry(3, "worker-0", 1, "joining"),
    )
    view = m.View(7, workers, (), 1.0, 1, 1, 10.0, declared=2)
    return Roster(view, m.Boundary(8, 3))


def test_who_joins_counts_after_its_clock(joined: Roster) -> None:
    assert [joined.members_after(clock, ()) for clock in (5, 6, 8, 9)] == [[0], [0, 2], [0, 2], [0, 2, 3]]
    assert joined.members_after(9, (0, 1, 3)) == [0, 3]
    assert joined.bounded(None).members_after(9, ()) == [0, 2]
    assert (joined.members, joined.world) == ([0, 2], 2)


def test_who_joins_has_a_rank_behind_the_others_whatever_its_name(joined: Roster) -> None:
    names = ("worker-1", "worker-2", "another", "worker-0")
    assert [joined.rank_of(name) for name in names] == [0, 1, 2, 3]


def test_a_group_of_all_who_were_there_is_everybody(joined: Roster) -> None:
    assert joined.check_group((1, 0)) == joined.check_group((2, 0, 1)) == ()
    assert joined.check_group((0, 2)) == (0, 2)
    with pytest.raises(MembershipError, match="ranks are 0 to 3"):
        joined.check_group((4,))


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1)])
def test_entry_is_found_wherever_it_stands(ranks: tuple[int, ...]) -> None:
    workers = tuple(m.WorkerEntry(rank, f"worker-{rank}", 1) for rank in ranks)
    roster = Roster(m.View(1, workers, (), 1.0, 64, 64, 5.0))
    found = [roster.entry(rank) for rank in (-1, 0, 1, 2, 3)]
    assert [entry and entry.name for entry in found] == [None, "worker-0", "worker-1", "worker-2", None]
