"""Where the scheduler has standbys started, and which of them takes a lost server's place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import ClusterFullError, MembershipError, StaleEpochError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Scheduler

SERVERS = ("server-0", "server-1", "server-2")


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler of a worker and three servers, who have joined; the death time-out is 2 s."""
    rig = make_scheduler(workers=1, servers=3, replication=2)
    rig.form("worker-0", *SERVERS)
    return rig


def hosted(scheduler: Scheduler) -> list[tuple[str, int]]:
    """Return which nodes were told to start standbys of which servers, since this was asked last."""
    nodes = {peer: name for name, peer in scheduler.peers.items()}
    sends = [one for one in scheduler.effects if isinstance(one, ef.Send) and isinstance(one.message, m.HostStandby)]
    scheduler.effects.clear()
    return [(nodes[one.peer], one.message.index) for one in sends if isinstance(one.message, m.HostStandby)]


def view(scheduler: Scheduler, name: str = "worker-0") -> m.View:
    """Return the newest view that a node has."""
    return scheduler.views[name][-1]


def standbys(scheduler: Scheduler) -> list[tuple[str, str] | None]:
    """Return process and state of each server's standby."""
    entries = [entry.standby for entry in view(scheduler).servers]
    return [None if entry is None else (entry.process, entry.state) for entry in entries]


def servers(scheduler: Scheduler) -> list[tuple[str, str]]:
    """Return the process of each server, and its state."""
    return [(entry.process or entry.name, entry.state) for entry in view(scheduler).servers]


def name_of(scheduler: Scheduler, index: int) -> str:
    """Return the name of a server's standby."""
    standby = view(scheduler).servers[index].standby
    assert standby is not None
    return standby.name


def start(scheduler: Scheduler, *indices: int) -> list[str]:
    """Let the standbys of servers register; return their names."""
    names = [name_of(scheduler, index) for index in indices]
    for name, index in zip(names, indices, strict=True):
        assert register(scheduler, name, index).answer is None
    return names


def register(scheduler: Scheduler, name: str, index: int = -1, **facts: Any) -> Asked:
    """Let a standby register, or a server that has no place yet."""
    return scheduler.register(name, Role.SERVER, standby=index, **{"number": -1, "incarnation": 5, **facts})


def say(scheduler: Scheduler, index: int, message: m.Message) -> list[ef.Effect]:
    """Let a server tell the scheduler something."""
    peer = scheduler.peers[view(scheduler).servers[index].name]
    return scheduler.handle(st.Received(peer, 0, message))


def fill(scheduler: Scheduler, *indices: int) -> list[str]:
    """Let the standbys of servers register and be filled; return their names."""
    names = start(scheduler, *indices)
    for name, index in zip(names, indices, strict=True):
        say(scheduler, index, m.StandbyReady(index, name))
    return names


# --- where they are ---


def test_each_server_has_its_standby_in_the_next_process_of_the_ring(scheduler: Scheduler) -> None:
    assert hosted(scheduler) == [("server-1", 0), ("server-2", 1), ("server-0", 2)]
    assert view(scheduler).replication == 2
    assert standbys(scheduler) == [("server-1", "expected"), ("server-2", "expected"), ("server-0", "expected")]
    start(scheduler, 2)
    assert standbys(scheduler)[2] == ("server-0", "filling")
    entry = view(scheduler, "server-2").servers[2].standby
    assert entry is not None
    assert (entry.host, entry.port, entry.incarnation) == ("127.0.0.1", 9000, 5)
    assert hosted(scheduler) == []


def test_without_replication_there_are_none(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2)
    scheduler.form("worker-0", "server-0", "server-1")
    assert hosted(scheduler) == []
    assert isinstance(register(scheduler, "server-2").error, ClusterFullError)
    scheduler.drop("server-1")
    assert servers(scheduler) == [("server-0", "alive"), ("server-1", "lost")]


def test_a_standby_that_nobody_wants_is_refused(scheduler: Scheduler) -> None:
    assert "no longer wanted as a standby of server 0" in str(register(scheduler, "server-1/0.0", 0).error)
    assert "no longer wanted as a standby of server 7" in str(register(scheduler, "server-1/7.1", 7).error)


def test_one_that_does_not_register_is_given_up_and_the_next_one_is_elsewhere(scheduler: Scheduler) -> None:
    start(scheduler, 1, 2)
    hosted(scheduler)
    beat(scheduler, 1.9)
    scheduler.tick(1.9)
    assert standbys(scheduler)[0] == ("server-1", "expected")
    late = name_of(scheduler, 0)
    beat(scheduler, 2.0)
    scheduler.tick(2.0)
    assert standbys(scheduler) == [None, ("server-2", "filling"), ("server-0", "filling")]
    assert isinstance(register(scheduler, late, 0).error, StaleEpochError)
    beat(scheduler, 3.9)
    scheduler.tick(3.9)
    assert hosted(scheduler) == []
    beat(scheduler, 4.0)
    scheduler.tick(4.0)
    assert hosted(scheduler) == [("server-2", 0)]


def beat(scheduler: Scheduler, now: float) -> None:
    """Let all nodes say that they are alive."""
    scheduler.now = now
    scheduler.beat(*scheduler.peers)


# --- what servers say of them ---


def test_it_is_ready_when_its_server_says_so(scheduler: Scheduler) -> None:
    name = start(scheduler, 0)[0]
    wrong = [m.StandbyReady(1, name_of(scheduler, 1)), m.StandbyReady(0, "server-1/0.0"), m.StandbyReady(7, name)]
    for message in wrong:
        assert say(scheduler, 0, message) == []
    assert standbys(scheduler)[0] == ("server-1", "filling")
    say(scheduler, 0, m.StandbyReady(0, name))
    assert standbys(scheduler)[0] == ("server-1", "ready")
    assert say(scheduler, 0, m.StandbyReady(0, name)) == [], "it is known"


def test_only_servers_have_standbys(scheduler: Scheduler) -> None:
    name = start(scheduler, 0)[0]
    for node in ("worker-0", name):
        assert isinstance(scheduler.ask(node, m.StandbyReady(0, name)).error, MembershipError)


def test_one_that_can_not_be_reached_is_dropped(scheduler: Scheduler) -> None:
    name = fill(scheduler, 0)[0]
    dropped = say(scheduler, 0, m.DropStandby(0, name))
    assert ef.Send(scheduler.peers[name], 0, m.Stop("server 0 can't reach it")) in dropped
    assert standbys(scheduler)[0] is None
    assert view(scheduler, "server-0").servers[0].standby is None, "now it may answer without"
    assert say(scheduler, 0, m.DropStandby(0, name)) == []
    assert isinstance(register(scheduler, name, 0, epoch=4).error, StaleEpochError)


def test_one_whose_connection_has_ended_is_told_nothing_when_it_is_dropped(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=3, replication=2, reconnect_grace=1.0)
    scheduler.form("worker-0", *SERVERS)
    name = fill(scheduler, 0)[0]
    scheduler.drop(name)
    dropped = say(scheduler, 0, m.DropStandby(0, name))
    assert not [one for one in dropped if isinstance(one, ef.Send) and isinstance(one.message, m.Stop)]
    assert standbys(scheduler)[0] is None


# --- when nodes are lost ---


def test_a_standby_that_is_ready_takes_the_place_of_a_lost_server(scheduler: Scheduler) -> None:
    name = fill(scheduler, 0)[0]
    before = view(scheduler).epoch
    scheduler.drop("server-0")
    entry = view(scheduler).servers[0]
    assert (entry.name, entry.process, entry.incarnation, entry.state) == (name, "server-1", 5, "alive")
    assert view(scheduler, name).epoch == view(scheduler).epoch == before + 1
    assert len(view(scheduler).servers) == 3


def test_new_standbys_are_started_for_what_was_lost(scheduler: Scheduler) -> None:
    """Server 0 has lost its standby by taking its place, server 2 had its one in the process that is gone."""
    fill(scheduler, 0, 1, 2)
    hosted(scheduler)
    scheduler.drop("server-0")
    assert hosted(scheduler) == [("server-2", 0), ("server-1", 2)]
    assert standbys(scheduler) == [("server-2", "expected"), ("server-2", "ready"), ("server-1", "expected")]


@pytest.mark.parametrize("state", ["expected", "filling"])
def test_one_that_is_not_ready_takes_no_place(scheduler: Scheduler, state: str) -> None:
    if state == "filling":
        start(scheduler, 0)
    scheduler.drop("server-0")
    assert servers(scheduler) == [("server-0", "lost"), ("server-1", "alive"), ("server-2", "alive")]
    assert standbys(scheduler)[0] is None
    (told,) = [one for one in scheduler.effects if isinstance(one, ef.Log) and one.event == "parameters_lost"]
    assert told.facts == {"server": 0, "node": "server-0"}


def test_all_that_a_process_served_goes_over(scheduler: Scheduler) -> None:
    fill(scheduler, 0, 1, 2)
    scheduler.drop("server-0")
    fill(scheduler, 0, 2)
    scheduler.drop("server-1")
    assert servers(scheduler) == [("server-2", "alive")] * 3
    assert standbys(scheduler) == [None] * 3
    scheduler.drop("server-2")
    assert servers(scheduler) == [("server-2", "lost")] * 3


def test_all_nodes_of_a_process_are_lost_with_it(scheduler: Scheduler) -> None:
    """One connection is known to be over, those of its siblings are not."""
    names = fill(scheduler, 0, 1, 2)
    lost = scheduler.drop("server-1", "reset")
    why = "the process of server-1 is gone: reset, last heard 0.0 s before"
    assert ef.Disconnect(scheduler.peers[names[0]], why) in lost
    assert [process for process, _ in servers(scheduler)] == ["server-0", "server-2", "server-2"]
    assert isinstance(register(scheduler, names[0], 0, epoch=7).error, StaleEpochError)


def test_a_standby_may_get_lost_alone(scheduler: Scheduler) -> None:
    name = fill(scheduler, 0)[0]
    hosted(scheduler)
    scheduler.drop(name)
    assert hosted(scheduler) == [("server-1", 0)]
    assert standbys(scheduler)[0] == ("server-1", "expected")
    assert name_of(scheduler, 0) != name
    assert servers(scheduler)[1] == ("server-1", "alive")


def test_silence_of_a_whole_process_is_one_loss(scheduler: Scheduler) -> None:
    names = fill(scheduler, 0, 1, 2)
    here = [name for name in scheduler.peers if name not in {"server-0", names[2]}]
    scheduler.now = 1.0
    scheduler.beat(*here)
    scheduler.tick(2.0)
    assert servers(scheduler) == [("server-1", "alive"), ("server-1", "alive"), ("server-2", "alive")]


def test_a_server_that_was_replaced_is_fenced(scheduler: Scheduler) -> None:
    fill(scheduler, 0)
    epoch = view(scheduler).epoch
    scheduler.drop("server-0")
    late = scheduler.register("server-0", again=True, epoch=epoch)
    assert "server-0 was lost; another one is server 0 by now" in str(late.error)


def test_with_grace_a_process_that_comes_back_was_never_away(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2, reconnect_grace=1.0)
    scheduler.form("worker-0", "server-0", "server-1")
    names = fill(scheduler, 0, 1)
    for name in ("server-0", names[1]):
        scheduler.drop(name)
    assert register(scheduler, names[1], 1, epoch=5, again=True).answer is None
    assert scheduler.register("server-0", epoch=5, again=True).answer is None
    scheduler.tick(1.0)
    assert standbys(scheduler) == [("server-1", "ready"), ("server-0", "ready")]
    assert servers(scheduler) == [("server-0", "alive"), ("server-1", "alive")]


def test_what_a_node_was_told_over_a_lost_connection_it_is_told_again(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2, reconnect_grace=1.0)
    scheduler.form("worker-0", "server-0", "server-1")
    hosted(scheduler)
    scheduler.drop("server-1")
    scheduler.register("server-1", epoch=1, again=True)
    assert hosted(scheduler) == [("server-1", 0)]


def test_a_process_can_host_again_when_it_is_back(make_scheduler: type[Scheduler]) -> None:
    """The connection to the only host has ended when a standby was lost."""
    scheduler = make_scheduler(workers=1, servers=2, replication=2, reconnect_grace=1.0)
    scheduler.form("worker-0", "server-0", "server-1")
    name = fill(scheduler, 0)[0]
    scheduler.drop(name)
    scheduler.tick(0.5)
    scheduler.drop("server-1")
    hosted(scheduler)
    scheduler.tick(1.0)
    assert standbys(scheduler)[0] is None
    scheduler.register("server-1", epoch=1, again=True)
    assert hosted(scheduler)[0] == ("server-1", 0)
    assert standbys(scheduler)[0] == ("server-1", "expected")


# --- spares ---


def test_a_server_that_is_started_again_is_a_spare(scheduler: Scheduler) -> None:
    fill(scheduler, 0, 1, 2)
    scheduler.drop("server-0")
    scheduler.drop("server-1")
    assert servers(scheduler)[0] == ("server-1", "lost")
    hosted(scheduler)
    assert register(scheduler, "server-0", incarnation=9, again=True).answer is None
    assert len(view(scheduler, "server-0").servers) == 3, "it has a view"
    assert hosted(scheduler) == [("server-0", 1), ("server-0", 2)]


def test_a_later_process_means_that_the_earlier_one_is_gone(scheduler: Scheduler) -> None:
    """Nobody has noticed yet that its connections are over."""
    fill(scheduler, 0, 1, 2)
    hosted(scheduler)
    before = scheduler.peers["server-0"]
    register(scheduler, "server-0", incarnation=9, again=True)
    assert servers(scheduler)[0] == ("server-1", "alive")
    assert ef.Disconnect(before, "a later process has its name") in scheduler.effects


def test_a_later_process_can_not_bring_back_what_is_lost(scheduler: Scheduler) -> None:
    late = register(scheduler, "server-0", incarnation=9, again=True)
    assert "the name 'server-0' is taken by a member that is alive" in str(late.error)


def test_a_spare_may_come_before_the_others(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    scheduler.form("server-0", "server-1", "server-2")
    assert scheduler.machine.missing == "1 of 1 workers"
    scheduler.drop("server-2")
    register(scheduler, "server-2", again=True)
    scheduler.form("worker-0")
    assert [process for process, _ in servers(scheduler)] == ["server-0", "server-1"]
    assert hosted(scheduler) == [("server-1", 0), ("server-2", 1)]


def test_a_spare_that_is_gone_is_missed_by_nobody(scheduler: Scheduler) -> None:
    register(scheduler, "server-3")
    scheduler.drop("server-3")
    assert isinstance(scheduler.ask("worker-0", m.Leave()).answer, m.Done)
    stop = next(one for one in scheduler.effects if isinstance(one, ef.Stop))
    assert not stop.failed


def test_people_are_told_of_all_nodes(scheduler: Scheduler) -> None:
    names = fill(scheduler, 0)
    register(scheduler, "server-3")
    answer = scheduler.ask("anybody", m.GetWaiting()).answer
    assert isinstance(answer, m.Waiting)
    shown = {member.name: member.state for member in answer.members}
    assert shown == dict.fromkeys(("worker-0", *SERVERS), "alive") | {
        names[0]: "standby of 0, ready",
        "server-3": "spare",
    }


def test_the_end_of_the_job_is_theirs_too(scheduler: Scheduler) -> None:
    names = fill(scheduler, 0)
    register(scheduler, "server-3")
    scheduler.effects.clear()
    scheduler.ask("worker-0", m.Leave())
    sends = [one for one in scheduler.effects if isinstance(one, ef.Send) and isinstance(one.message, m.Stop)]
    assert [one.peer for one in sends] == [scheduler.peers[name] for name in (*SERVERS, *names, "server-3")]
    # What is lost now makes no difference.
    scheduler.drop("server-0")
    scheduler.tick(2.0)


# --- a scheduler that was started again ---


def test_a_scheduler_that_is_started_again_knows_them_from_the_view(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    known = old_view("ready")
    come_back(scheduler, known, "server-0", "server-1/0.3", "worker-0", "server-0/1.3", "server-1")
    assert view(scheduler).epoch == 1008
    assert standbys(scheduler) == [("server-1", "ready"), ("server-0", "ready")]
    scheduler.drop("server-0")
    assert servers(scheduler)[0] == ("server-1", "alive")


def test_who_was_a_spare_is_one_again(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    come_back(scheduler, old_view("ready"), "server-2", "server-0", "server-1/0.3", "worker-0", "server-0/1.3")
    assert register(scheduler, "server-9/7.3", 0, epoch=7).pending
    scheduler.register("server-1", epoch=7)
    assert view(scheduler, "server-2").epoch == view(scheduler).epoch
    old = next(one for one in scheduler.asked.values() if one.peer == scheduler.peers["server-9/7.3"])
    assert isinstance(old.error, StaleEpochError)
    hosted(scheduler)
    scheduler.drop("server-1")
    assert hosted(scheduler) == [("server-2", 0), ("server-2", 1)]


def test_a_server_that_is_not_back_is_replaced(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    come_back(scheduler, old_view("ready"), "server-1", "server-1/0.3", "worker-0")
    scheduler.tick(2.0)
    assert servers(scheduler) == [("server-1", "alive")] * 2


def test_what_servers_say_meanwhile_is_heard_afterwards(make_scheduler: type[Scheduler]) -> None:
    """A refusal would end their connections, and they would not be back in time."""
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    come_back(scheduler, old_view("filling"), "server-0", "server-1/0.3", "worker-0", "server-0/1.3")
    for name, message in (("server-0", m.StandbyReady(0, "server-1/0.3")), ("stranger", m.CheckpointClock(1, 1))):
        scheduler.peers.setdefault(name, 99)
        assert scheduler.handle(st.Received(scheduler.peers[name], 0, message)) == []
    scheduler.register("server-1", epoch=7)
    assert standbys(scheduler) == [("server-1", "ready"), ("server-0", "filling")]


def test_what_a_server_said_over_a_connection_that_has_ended_it_says_again(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    come_back(scheduler, old_view("filling"), "server-0", "server-1/0.3", "worker-0", "server-0/1.3")
    gone, ready = scheduler.peers["server-0"], m.StandbyReady(0, "server-1/0.3")
    assert scheduler.handle(st.Received(gone, 0, ready)) == []
    scheduler.drop("server-0")
    scheduler.register("server-0", epoch=7, again=True)
    scheduler.register("server-1", epoch=7)
    assert standbys(scheduler) == [("server-1", "filling"), ("server-0", "filling")]
    assert all(effect.peer != gone for effect in scheduler.effects if isinstance(effect, ef.Refuse))
    say(scheduler, 0, ready)
    assert standbys(scheduler) == [("server-1", "ready"), ("server-0", "filling")]


def test_who_has_taken_a_place_in_the_process_of_another_server_is_known_to_be_there(
    make_scheduler: type[Scheduler],
) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    known = old_view("ready")
    server = m.ServerEntry(1, "server-0/1.3", 5, "127.0.0.1", 9000, process="server-0")
    known.servers = (known.servers[0], server)
    come_back(scheduler, known, "server-0", "server-1/0.3", "worker-0", "server-0/1.3")
    assert servers(scheduler) == [("server-0", "alive")] * 2
    scheduler.drop("server-0")
    assert servers(scheduler) == [("server-1", "alive"), ("server-0", "lost")]


def test_a_standby_that_is_expected_may_come_before_or_after(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, replication=2)
    early = register(scheduler, "server-1/0.3", 0)
    come_back(scheduler, old_view("expected"), "server-0", "worker-0", "server-1")
    assert early.answer is None
    assert standbys(scheduler) == [("server-1", "filling"), ("server-0", "expected")]
    scheduler.beat(*scheduler.peers)
    start(scheduler, 1)
    assert standbys(scheduler)[1] == ("server-0", "filling")


def old_view(state: str) -> m.View:
    """Return what nodes know of a cluster of two servers; server 1 has taken somebody's place before."""
    nodes = [(0, "server-0", "server-1"), (1, "server-1", "server-0")]
    facts = (0, "", 0) if state == "expected" else (5, "127.0.0.1", 9000)
    entries = tuple(
        m.ServerEntry(
            *(index, name, 1, "127.0.0.1", 9000),
            standby=m.StandbyEntry(f"{other}/{index}.3", other, *facts, state),
        )
        for index, name, other in nodes
    )
    return m.View(7, (m.WorkerEntry(0, "worker-0", 1),), entries, 0.5, 2**19, 2**16, 2.0, replication=2, founder=1)


def come_back(scheduler: Scheduler, known: m.View, *names: str) -> None:
    """Let nodes register that were there before; the first one tells what it knows."""
    for name in names:
        if "/" in name:
            register(scheduler, name, int(name.partition("/")[2][0]), epoch=7)
        elif name == "server-2":
            register(scheduler, name, incarnation=1, epoch=7)
        else:
            scheduler.register(name, epoch=7)
        if name == names[0]:
            scheduler.ask(name, known)
