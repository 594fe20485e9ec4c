"""Servers that join and leave while the others go on: places change hands by way of standbys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.errors import ClusterFullError, MembershipError
from aiokv.wire import messages as m
from tests.core.test_standbys import SERVERS, beat, fill, hosted, name_of, register, say, servers, standbys, start, view

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Scheduler


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler of a worker and three servers without copies, who have joined; others may come."""
    rig = make_scheduler(workers=1, servers=3, elastic_servers=True)
    rig.form("worker-0", *SERVERS)
    return rig


def leave(scheduler: Scheduler, name: str) -> Asked:
    """Let a process of servers ask whether it may go."""
    return scheduler.ask(name, m.LeaveServer())


def test_who_leaves_is_replaced_when_another_one_has_all_that_it_had(scheduler: Scheduler) -> None:
    asked = leave(scheduler, "server-1")
    assert hosted(scheduler) == [("server-2", 1)]
    assert standbys(scheduler) == [None, ("server-2", "expected"), None]
    (name,) = start(scheduler, 1)
    assert asked.pending
    say(scheduler, 1, m.StandbyReady(1, name))
    assert asked.answer == m.Done()
    entry = view(scheduler).servers[1]
    assert (entry.name, entry.process, entry.state, entry.standby) == (name, "server-2", "alive", None)
    assert view(scheduler, "server-1").servers[1].name == name, "it knows that its work is over"
    before = len(scheduler.views["worker-0"])
    scheduler.drop("server-1")
    assert len(scheduler.views["worker-0"]) == before


def test_all_places_of_a_process_change_hands_at_once(scheduler: Scheduler) -> None:
    leave(scheduler, "server-1")
    fill(scheduler, 1)
    asked = leave(scheduler, "server-2")
    fill(scheduler, 1)
    assert asked.pending
    assert servers(scheduler)[1:] == [("server-2", "alive")] * 2
    fill(scheduler, 2)
    assert asked.answer == m.Done()
    assert servers(scheduler) == [("server-0", "alive")] * 3


def test_one_has_to_stay(scheduler: Scheduler) -> None:
    asked = [leave(scheduler, name) for name in SERVERS]
    assert "server-2 can't leave: there is no other process of servers" in str(asked[2].error)
    fill(scheduler, 0, 1)
    assert servers(scheduler) == [("server-2", "alive")] * 3


def test_only_processes_of_servers_leave_so(scheduler: Scheduler) -> None:
    leave(scheduler, "server-1")
    fill(scheduler, 1)
    sibling = view(scheduler).servers[1].name
    assert "server-2 stands for its process" in str(leave(scheduler, sibling).error)
    assert isinstance(leave(scheduler, "worker-0").error, MembershipError)
    assert isinstance(leave(scheduler, "stranger").error, MembershipError)


def test_who_is_lost_while_it_leaves_is_lost(scheduler: Scheduler) -> None:
    leave(scheduler, "server-1")
    (name,) = start(scheduler, 1)
    lost = scheduler.drop("server-1")
    assert servers(scheduler)[1] == ("server-1", "lost")
    assert standbys(scheduler)[1] is None
    assert ef.Send(scheduler.peers[name], 0, m.Stop("server 1 is lost")) in lost


def test_who_leaves_tries_another_one_when_the_first_one_is_lost(scheduler: Scheduler) -> None:
    asked = leave(scheduler, "server-1")
    start(scheduler, 1)
    hosted(scheduler)
    scheduler.drop("server-2")
    assert hosted(scheduler) == [("server-0", 1)]
    fill(scheduler, 1)
    assert asked.answer == m.Done()


def test_standbys_of_others_are_made_anew_elsewhere(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=3, replication=2)
    scheduler.form("worker-0", *SERVERS)
    names = fill(scheduler, 0, 1, 2)
    hosted(scheduler)
    asked = leave(scheduler, "server-1")
    stops = [one for one in scheduler.effects if isinstance(one, ef.Send) and isinstance(one.message, m.Stop)]
    assert [stop.peer for stop in stops] == [scheduler.peers[names[0]]]
    # Server 1 had a copy in the process of server-2 already.
    assert asked.answer == m.Done()
    assert servers(scheduler) == [("server-0", "alive"), ("server-2", "alive"), ("server-2", "alive")]
    assert hosted(scheduler) == [("server-2", 0), ("server-0", 1)]


def test_a_spare_leaves_at_once(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    scheduler.form("worker-0", "server-0", "server-1")
    register(scheduler, "server-9")
    assert leave(scheduler, "server-9").answer == m.Done()


def test_a_process_that_comes_later_takes_a_place_of_one_that_has_several(scheduler: Scheduler) -> None:
    leave(scheduler, "server-1")
    fill(scheduler, 1)
    old = view(scheduler).servers[1].name
    hosted(scheduler)
    assert register(scheduler, "server-9").answer is None
    assert hosted(scheduler) == [("server-9", 1)]
    (name,) = fill(scheduler, 1)
    assert servers(scheduler) == [("server-0", "alive"), ("server-9", "alive"), ("server-2", "alive")]
    assert view(scheduler, old).servers[1].name == name, "it ends, and its process goes on"
    assert standbys(scheduler) == [None] * 3
    assert hosted(scheduler) == []


@pytest.mark.parametrize("how", ["lost", "dropped", "late"])
def test_a_move_that_fails_leaves_all_as_it_was(scheduler: Scheduler, how: str) -> None:
    leave(scheduler, "server-1")
    fill(scheduler, 1)
    register(scheduler, "server-9")
    before = servers(scheduler)
    if how == "late":
        beat(scheduler, 2.0)
        scheduler.tick(2.0)
    else:
        (name,) = start(scheduler, 1)
        if how == "lost":
            scheduler.drop("server-9")
        else:
            say(scheduler, 1, m.DropStandby(1, name))
    assert servers(scheduler) == before
    hosted(scheduler)


def test_a_place_whose_server_is_lost_on_the_way_is_lost(scheduler: Scheduler) -> None:
    leave(scheduler, "server-1")
    fill(scheduler, 1)
    register(scheduler, "server-9")
    start(scheduler, 1)
    scheduler.drop("server-2")
    assert servers(scheduler)[1:] == [("server-2", "lost")] * 2
    assert standbys(scheduler) == [None] * 3


def test_who_was_to_get_a_place_may_leave(scheduler: Scheduler) -> None:
    leave(scheduler, "server-1")
    fill(scheduler, 1)
    register(scheduler, "server-9")
    start(scheduler, 1)
    assert leave(scheduler, "server-9").answer == m.Done()
    assert standbys(scheduler) == [None] * 3


def test_with_copies_the_copy_moves_first(make_scheduler: type[Scheduler]) -> None:
    """Server 0 and its standby are both in processes that have enough."""
    scheduler = make_scheduler(workers=1, servers=3, replication=2)
    scheduler.form("worker-0", *SERVERS)
    fill(scheduler, 0, 1, 2)
    scheduler.drop("server-0")
    hosted(scheduler)
    register(scheduler, "server-0", incarnation=9, again=True)
    fill(scheduler, 0)
    fill(scheduler, 2)
    assert hosted(scheduler) == [("server-0", 0)]
    fill(scheduler, 0)
    assert servers(scheduler) == [("server-0", "alive"), ("server-1", "alive"), ("server-2", "alive")]
    assert hosted(scheduler) == [("server-1", 0)]


def test_no_copy_moves_while_somebody_may_be_lost(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=3, replication=2, reconnect_grace=1.0)
    scheduler.form("worker-0", *SERVERS)
    fill(scheduler, 0, 1, 2)
    scheduler.drop("server-0")
    scheduler.tick(1.0)
    fill(scheduler, 0, 2)
    scheduler.drop("server-1")
    register(scheduler, "server-0", incarnation=9, again=True)
    assert standbys(scheduler)[0] == ("server-2", "ready")


def test_with_copies_in_the_right_place_none_moves(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    scheduler.form("worker-0", "server-0", "server-1")
    fill(scheduler, 0, 1)
    scheduler.drop("server-0")
    register(scheduler, "server-0", incarnation=9, again=True)
    fill(scheduler, 1)
    before = name_of(scheduler, 0)
    scheduler.effects.clear()
    fill(scheduler, 0)
    assert view(scheduler).servers[0].name == before
    assert hosted(scheduler) == [("server-1", 0)]
    assert servers(scheduler) == [("server-0", "alive"), ("server-1", "alive")]


def test_without_leave_to_join_nobody_joins(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2)
    scheduler.form("worker-0", "server-0", "server-1")
    leave(scheduler, "server-0")
    fill(scheduler, 0)
    assert isinstance(register(scheduler, "server-9").error, ClusterFullError)
