"""Servers that join and leave while the others go on: places change hands by way of standbys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.roster import standbys_of
from aiokv.errors import ClusterFullError, MembershipError
from aiokv.types import Role
from aiokv.wire import messages as m
from tests.core.scheduler.test_standbys import (
    SERVERS,
    beat,
    fill,
    hosted,
    name_of,
    register,
    say,
    servers,
    standbys,
    start,
    view,
)

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


def test_who_has_lost_its_connection_only_may_go_on_with_what_another_one_had(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, elastic_servers=True, reconnect_grace=1.0)
    scheduler.form("worker-0", "server-0", "server-1")
    scheduler.drop("server-1")
    assert leave(scheduler, "server-0").pending
    scheduler.register("server-1", again=True, epoch=1, number=1)
    assert hosted(scheduler) == [("server-1", 0)]


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
    # Server 1 has a copy in the process of server-2 already, which is to have one itself before it serves.
    assert asked.pending
    assert hosted(scheduler) == [("server-2", 0), ("server-0", 1)]
    fill_tail(scheduler, 1)
    assert asked.answer == m.Done()
    assert servers(scheduler) == [("server-0", "alive"), ("server-2", "alive"), ("server-2", "alive")]
    assert standbys(scheduler) == [("server-2", "expected"), ("server-0", "ready"), ("server-0", "ready")]


def test_who_leaves_waits_for_no_second_copy_where_there_can_be_none(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    scheduler.form("worker-0", "server-0", "server-1")
    fill(scheduler, 0, 1)
    assert leave(scheduler, "server-1").answer == m.Done()
    assert servers(scheduler) == [("server-0", "alive")] * 2


def test_who_leaves_does_not_wait_for_a_second_copy_that_fails(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=3, replication=2)
    scheduler.form("worker-0", *SERVERS)
    fill(scheduler, 0, 1, 2)
    asked = leave(scheduler, "server-1")
    say(scheduler, 1, m.DropStandby(1, tail_of(scheduler, 1).name))
    assert asked.answer == m.Done()


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


@pytest.fixture
def uneven(make_scheduler: type[Scheduler]) -> Scheduler:
    """Three servers with copies, of which server-1 serves 0 and 1, and server-0 has come again, with nothing yet.

    Server 0 is about to move there. Its copy is in server-2.
    """
    scheduler = make_scheduler(workers=1, servers=3, replication=2)
    scheduler.form("worker-0", *SERVERS)
    fill(scheduler, 0, 1, 2)
    scheduler.drop("server-0")
    hosted(scheduler)
    register(scheduler, "server-0", incarnation=9, again=True)
    fill(scheduler, 0)
    hosted(scheduler)
    fill(scheduler, 2)
    assert servers(scheduler) == [("server-1", "alive"), ("server-1", "alive"), ("server-2", "alive")]
    assert standbys(scheduler) == [("server-2", "ready"), ("server-2", "ready"), ("server-1", "ready")]
    return scheduler


def tail_of(scheduler: Scheduler, index: int) -> m.StandbyEntry:
    """Return the standby of a server's standby."""
    standby = view(scheduler).servers[index].standby
    assert standby is not None
    assert standby.standby is not None
    return standby.standby


def fill_tail(scheduler: Scheduler, index: int) -> str:
    """Let the standby of a server's standby register and be filled; return its name."""
    name = tail_of(scheduler, index).name
    assert register(scheduler, name, index).answer is None
    assert tail_of(scheduler, index).state == "filling"
    say(scheduler, index, m.StandbyReady(index, name))
    return name


def test_a_place_with_a_copy_moves_along_a_chain_so_that_two_always_have_all(uneven: Scheduler) -> None:
    assert hosted(uneven) == [("server-0", 0)]
    first, second = name_of(uneven, 0), fill_tail(uneven, 0)
    # The copy serves now, and the one in the right process is its standby, which gets one itself.
    entry = view(uneven).servers[0]
    assert (entry.name, entry.process, name_of(uneven, 0)) == (first, "server-2", second)
    assert standbys(uneven)[0] == ("server-0", "ready")
    assert hosted(uneven) == [("server-1", 0)]
    third = fill_tail(uneven, 0)
    entry = view(uneven).servers[0]
    assert (entry.name, entry.process, name_of(uneven, 0)) == (second, "server-0", third)
    assert servers(uneven) == [("server-0", "alive"), ("server-1", "alive"), ("server-2", "alive")]
    assert [state for _, state in filter(None, standbys(uneven))] == ["ready"] * 3
    assert hosted(uneven) == []


def test_what_is_said_of_a_standby_s_own_one(uneven: Scheduler) -> None:
    tail = tail_of(uneven, 0)
    assert register(uneven, tail.name, 0).answer is None
    assert uneven.machine._standbys.state_of(uneven.machine._members.by_name[tail.name]) == (
        "standby of the standby of 0, filling"
    )
    other = name_of(uneven, 1)
    for node, message in ((other, m.DropStandby(0, tail.name)), (tail.name, m.DropStandby(0, tail.name))):
        assert uneven.handle(st.Received(uneven.peers[node], 0, message)) == [], "it is not its own"
    dropped = uneven.handle(st.Received(uneven.peers[name_of(uneven, 0)], 0, m.DropStandby(0, tail.name)))
    assert any(
        isinstance(one, ef.Log) and one.text.startswith("the standby of server 0 has no standby for now")
        for one in dropped
    )
    assert ef.Send(uneven.peers[tail.name], 0, m.Stop(f"{name_of(uneven, 0)} can't reach it")) in dropped
    assert standbys(uneven)[0] == ("server-2", "ready")


def test_a_standby_s_own_one_goes_with_it(uneven: Scheduler) -> None:
    tail = tail_of(uneven, 0)
    assert register(uneven, tail.name, 0).answer is None
    lost = uneven.drop(name_of(uneven, 0))
    assert any(isinstance(one, ef.Send) and one.peer == uneven.peers[tail.name] for one in lost)
    assert view(uneven).servers[0].standby is not None, "another one is wanted"
    assert name_of(uneven, 0) != tail.name


def test_a_server_that_is_lost_on_the_way_leaves_a_chain(uneven: Scheduler) -> None:
    first, tail = name_of(uneven, 0), tail_of(uneven, 0)
    assert register(uneven, tail.name, 0).answer is None
    uneven.drop("server-1")
    entry = view(uneven).servers[0]
    assert (entry.name, name_of(uneven, 0), standbys(uneven)[0]) == (first, tail.name, ("server-0", "filling"))
    say(uneven, 0, m.StandbyReady(0, tail.name))
    assert standbys(uneven)[0] == ("server-0", "ready")


def test_a_chain_is_as_it_was_for_a_scheduler_that_is_started_again(uneven: Scheduler) -> None:
    name = tail_of(uneven, 0).name
    assert register(uneven, name, 0).answer is None
    old = view(uneven)
    scheduler = type(uneven)(workers=1, servers=3, replication=2)
    nodes = [("worker-0", Role.WORKER, 0, -1)]
    nodes += [(entry.name, Role.SERVER, entry.index, -1) for entry in old.servers]
    nodes += [(one.name, Role.SERVER, -1, entry.index) for entry in old.servers for one in standbys_of(entry)]
    nodes.append(("server-0", Role.SERVER, -1, -1))
    for node, role, number, standby in nodes:
        known = uneven.machine._members.by_name[node]
        scheduler.register(node, role, number=number, standby=standby, incarnation=known.incarnation, epoch=old.epoch)
    scheduler.handle(st.Received(scheduler.peers["worker-0"], 0, old))
    assert tail_of(scheduler, 0) == tail_of(uneven, 0)
    fill_tail_again = say(scheduler, 0, m.StandbyReady(0, name))
    assert fill_tail_again
    assert name_of(scheduler, 0) == name


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


def test_with_copies_in_the_right_place_the_next_one_is_where_the_server_is(make_scheduler: type[Scheduler]) -> None:
    """With two processes there is no other place for it until the server has gone over."""
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    scheduler.form("worker-0", "server-0", "server-1")
    fill(scheduler, 0, 1)
    scheduler.drop("server-0")
    register(scheduler, "server-0", incarnation=9, again=True)
    fill(scheduler, 1)
    before = name_of(scheduler, 0)
    scheduler.effects.clear()
    fill(scheduler, 0)
    assert hosted(scheduler) == [("server-1", 0)]
    assert standbys(scheduler)[0] == ("server-0", "ready")
    after = fill_tail(scheduler, 0)
    assert view(scheduler).servers[0].name == before
    assert name_of(scheduler, 0) == after
    assert servers(scheduler) == [("server-0", "alive"), ("server-1", "alive")]
    assert standbys(scheduler) == [("server-1", "ready"), ("server-0", "ready")]


def test_without_leave_to_join_nobody_joins(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2)
    scheduler.form("worker-0", "server-0", "server-1")
    leave(scheduler, "server-0")
    fill(scheduler, 0)
    assert isinstance(register(scheduler, "server-9").error, ClusterFullError)
