"""Clusters that begin with more places than processes of servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import JoinTimeoutError, StaleEpochError
from aiokv.types import Role
from aiokv.wire import messages as m
from tests.core.scheduler.test_standbys import fill, hosted, register, servers, standbys, view

if TYPE_CHECKING:
    from tests.core.conftest import Scheduler


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler of a worker and two servers with five places, who have registered."""
    rig = make_scheduler(workers=1, servers=2, num_places=5, elastic_servers=True)
    rig.form("worker-0", "server-0", "server-1")
    return rig


def begin(scheduler: Scheduler, *names: str) -> None:
    """Let nodes register that were started for places."""
    for name in names:
        assert register(scheduler, name, int(name.partition("/")[2].partition(".")[0])).answer is None


FIRST = ("server-0/2.0", "server-1/3.0", "server-0/4.0")


def test_processes_start_nodes_in_turn_and_then_the_cluster_is_complete(scheduler: Scheduler) -> None:
    assert hosted(scheduler) == [("server-0", 2), ("server-0", 4), ("server-1", 3)]
    assert scheduler.machine.missing == "3 of 5 places of servers"
    begin(scheduler, FIRST[2], FIRST[0])
    assert scheduler.views["worker-0"] == []
    assert scheduler.machine.missing == "1 of 5 places of servers"
    begin(scheduler, FIRST[1])
    assert [(entry.index, entry.name, entry.process) for entry in view(scheduler).servers] == [
        (0, "server-0", ""),
        (1, "server-1", ""),
        (2, "server-0/2.0", "server-0"),
        (3, "server-1/3.0", "server-1"),
        (4, "server-0/4.0", "server-0"),
    ]
    assert hosted(scheduler) == []
    assert scheduler.machine.missing == ""


def test_nodes_are_started_when_all_servers_are_there_whoever_else_is_missing(
    make_scheduler: type[Scheduler],
) -> None:
    scheduler = make_scheduler(workers=1, servers=2, num_places=3)
    scheduler.form("server-1")
    assert hosted(scheduler) == []
    scheduler.form("server-0")
    assert hosted(scheduler) == [("server-0", 2)]
    begin(scheduler, "server-0/2.0")
    assert scheduler.machine.missing == "1 of 1 workers"
    scheduler.form("worker-0")
    assert len(view(scheduler).servers) == 3


def test_servers_that_join_get_places_until_all_have_as_many(scheduler: Scheduler) -> None:
    begin(scheduler, *FIRST)
    for name in ("server-2", "server-3"):
        assert register(scheduler, name).answer is None
    places = [process for process, _ in servers(scheduler)]
    assert places == ["server-0", "server-1", "server-0", "server-1", "server-0"]
    for _ in range(2):
        (index,) = [index for index, standby in enumerate(standbys(scheduler)) if standby is not None]
        fill(scheduler, index)
    places = [process for process, _ in servers(scheduler)]
    assert sorted(map(places.count, ("server-0", "server-1", "server-2", "server-3"))) == [1, 1, 1, 2]
    assert standbys(scheduler) == [None] * 5


def test_copies_of_all_places_are_in_other_processes(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, num_places=4, replication=2)
    scheduler.form("worker-0", "server-0", "server-1")
    begin(scheduler, "server-0/2.0", "server-1/3.0")
    assert [standby and standby[0] for standby in standbys(scheduler)] == ["server-1", "server-0"] * 2


@pytest.mark.parametrize("lost", ["server-0", "server-0/2.0"])
def test_places_are_dealt_anew_when_somebody_is_lost_before(scheduler: Scheduler, lost: str) -> None:
    begin(scheduler, *FIRST[:2])
    hosted(scheduler)
    effects = scheduler.drop(lost)
    stopped = {effect.peer for effect in effects if isinstance(effect, ef.Send) and isinstance(effect.message, m.Stop)}
    assert stopped == {scheduler.peers[name] for name in FIRST[:2] if name != lost}
    if lost == "server-0":
        scheduler.register("server-0", incarnation=2, again=True)
    assert hosted(scheduler) == [("server-0", 2), ("server-0", 4), ("server-1", 3)]
    assert isinstance(register(scheduler, FIRST[2], 4).error, StaleEpochError), "it was asked for before"
    begin(scheduler, "server-0/2.0.1", "server-1/3.0.1", "server-0/4.0.1")
    assert [entry.name for entry in view(scheduler).servers[2:]] == [
        "server-0/2.0.1",
        "server-1/3.0.1",
        "server-0/4.0.1",
    ]


def test_a_spare_that_is_lost_before_changes_nothing(scheduler: Scheduler) -> None:
    assert register(scheduler, "server-9").answer is None
    hosted(scheduler)
    scheduler.drop("server-9")
    assert hosted(scheduler) == []
    begin(scheduler, *FIRST)
    assert len(view(scheduler).servers) == 5


def test_a_process_that_connects_again_hears_again_what_it_is_to_start(scheduler: Scheduler) -> None:
    begin(scheduler, FIRST[0])
    hosted(scheduler)
    scheduler.register("server-0", again=True)
    assert hosted(scheduler) == [("server-0", 4)]
    begin(scheduler, *FIRST[1:])
    assert len(view(scheduler).servers) == 5


def test_a_node_may_connect_again(scheduler: Scheduler) -> None:
    begin(scheduler, FIRST[0])
    before = scheduler.peers[FIRST[0]]
    assert register(scheduler, FIRST[0], 2, again=True).answer is None
    assert any(isinstance(effect, ef.Disconnect) and effect.peer == before for effect in scheduler.effects)
    begin(scheduler, *FIRST[1:])
    assert view(scheduler, FIRST[0]).servers[2].name == FIRST[0]


def test_a_process_that_starts_no_node_is_waited_for_as_long_as_others(scheduler: Scheduler) -> None:
    begin(scheduler, FIRST[0])
    scheduler.beat("worker-0", "server-0", "server-1", FIRST[0])
    effects = scheduler.tick(10.0)
    refused = [effect for effect in effects if isinstance(effect, ef.Refuse)]
    assert {type(effect.error) for effect in refused} == {JoinTimeoutError}
    assert "missing 2 of 5 places of servers" in str(refused[0].error)


def test_a_scheduler_that_is_started_again_knows_all_places(scheduler: Scheduler) -> None:
    begin(scheduler, *FIRST)
    old = view(scheduler)
    again = type(scheduler)(workers=1, servers=2, num_places=5, elastic_servers=True)
    again.register("worker-0", epoch=old.epoch)
    for entry in old.servers:
        again.register(entry.name, Role.SERVER, incarnation=entry.incarnation, epoch=old.epoch, number=entry.index)
    again.handle(st.Received(again.peers["worker-0"], 0, old))
    assert [entry.name for entry in view(again).servers] == [entry.name for entry in old.servers]


def test_nodes_that_another_scheduler_had_asked_for_end_when_nobody_knows_of_a_cluster(scheduler: Scheduler) -> None:
    """That one has ended before the cluster was complete; the nodes that are started now have other names."""
    left, *others = FIRST[1], "worker-0", "server-0", "server-1"
    again = type(scheduler)(workers=1, servers=2, num_places=5, elastic_servers=True)
    old = register(again, left, 3)
    waiting = [again.register(name) for name in others]
    assert old.pending
    again.tick(2.0)
    assert isinstance(old.error, StaleEpochError)
    assert str(old.error) == f"{left} is no longer wanted as server 3: nobody is back who knows of a cluster"
    assert hosted(again) == [("server-0", 2), ("server-0", 4), ("server-1", 3)]
    begin(again, FIRST[0], f"{left}.1", FIRST[2])
    assert [entry.name for entry in view(again).servers[2:]] == [FIRST[0], f"{left}.1", FIRST[2]]
    assert [one.answer for one in waiting] == [None] * 3, "they have a view"


def test_nodes_of_a_cluster_that_was_there_before_come_first(scheduler: Scheduler) -> None:
    """The others take part in that; what they were asked for is not needed any longer."""
    begin(scheduler, *FIRST)
    old = view(scheduler)
    again = type(scheduler)(workers=1, servers=2, num_places=5, elastic_servers=True)
    again.form("server-8", "server-9")
    ours = register(again, "server-8/2.0", 2)
    assert ours.answer is None
    again.register("worker-0", epoch=old.epoch)
    for entry in old.servers:
        again.register(entry.name, Role.SERVER, incarnation=entry.incarnation, epoch=old.epoch, number=entry.index)
    again.handle(st.Received(again.peers["worker-0"], 0, old))
    assert [entry.name for entry in view(again).servers] == [entry.name for entry in old.servers]
    assert isinstance(ours.error, StaleEpochError)
    spares = [name for name in ("server-8", "server-9") if view(again, name) == view(again)]
    assert spares == ["server-8", "server-9"]
