"""The scheduler while the cluster forms: who gets which number, who is one too many, and who waits in vain."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.roster import natural_order
from aiokv.errors import ClusterFullError, ConfigError, JoinTimeoutError, MembershipError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Scheduler


def ranks(view: m.View) -> dict[str, int]:
    """Return the workers' ranks by name."""
    return {worker.name: worker.rank for worker in view.workers}


# --- forming ---


def test_view_goes_out_when_the_last_one_is_here(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=1)
    scheduler.form("worker-0", "server-0")
    assert scheduler.machine.missing == "1 of 2 workers"
    assert not any(scheduler.views.values())
    scheduler.form("worker-1")
    assert scheduler.machine.missing == ""
    assert {name: len(views) for name, views in scheduler.views.items()} == dict.fromkeys(scheduler.peers, 1)


def test_view_says_who_is_in_and_what_all_share(scheduler: Scheduler) -> None:
    assert scheduler.views["server-0"] == [
        m.View(
            1,
            (m.WorkerEntry(0, "worker-0", 1), m.WorkerEntry(1, "worker-1", 1)),
            (m.ServerEntry(0, "server-0", 1, "127.0.0.1", 9000),),
            0.5,
            2**19,
            2**16,
            2.0,
            founder=1,
        )
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(["worker-2", "worker-10", "server-b", "server-a"])))
def test_scenario_49_numbers_follow_the_names_and_not_the_order_of_arrival(
    make_scheduler: type[Scheduler], order: tuple[str, ...]
) -> None:
    # Scenario 49.
    scheduler = make_scheduler(workers=2, servers=2)
    scheduler.form(*order)
    (view,) = scheduler.views["worker-2"]
    assert ranks(view) == {"worker-2": 0, "worker-10": 1}
    assert [(server.index, server.name) for server in view.servers] == [(0, "server-a"), (1, "server-b")]


def test_servers_hear_of_a_view_before_workers_do(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=2)
    scheduler.form("worker-0", "server-1", "worker-1", "server-0")
    sends = [e for e in scheduler.effects if isinstance(e, ef.Send) and isinstance(e.message, m.View)]
    names = {peer: name for name, peer in scheduler.peers.items()}
    assert [names[send.peer] for send in sends] == ["server-0", "server-1", "worker-0", "worker-1"]


def test_log_says_who_is_waited_for(make_scheduler: type[Scheduler], like: type[Like]) -> None:
    scheduler = make_scheduler(workers=2, servers=3)
    scheduler.form("worker-0")
    text = "worker worker-0 is here; waiting for 1 of 2 workers and 3 of 3 servers"
    assert scheduler.effects == [ef.Log("info", text)]


# --- names ---


def test_numbers_in_names_count_as_numbers() -> None:
    names = ["worker-10", "worker-9", "worker-2", "a10b2", "a10b10", "a9b1", "10", "9"]
    assert sorted(names, key=natural_order) == [
        "9", "10", "a9b1", "a10b2", "a10b10", "worker-2", "worker-9", "worker-10"
    ]  # fmt: skip


@pytest.mark.parametrize("names", [["w1", "w01"], ["w", "W"], ["1a", "01a"], ["a", "a0"]])
def test_order_of_two_names_does_not_depend_on_who_came_first(names: list[str]) -> None:
    assert natural_order(names[0]) != natural_order(names[1])


@pytest.mark.parametrize("name", ["worker-²", "²", "٣", "9" * 5000, "", "\x00"])
def test_any_name_can_be_ordered(make_scheduler: type[Scheduler], name: str) -> None:
    scheduler = make_scheduler(workers=2, servers=1)
    scheduler.form("server-0", "worker-1")
    scheduler.register(name, Role.WORKER)
    assert name in ranks(scheduler.views["worker-1"][0])


def test_name_that_is_taken_is_refused(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler()
    scheduler.form("worker-0")
    scheduler.peers["twin"] = 50
    twin = scheduler.ask("twin", m.Register(Role.WORKER, "worker-0", 2, "", 0, 5.0))
    assert isinstance(twin.error, ClusterFullError)
    assert "'worker-0' is taken" in str(twin.error)


# --- one too many ---


def test_scenario_16_third_worker_of_two_is_refused_at_once(scheduler: Scheduler) -> None:
    asked = scheduler.register("worker-2")
    assert isinstance(asked.error, ClusterFullError)
    assert asked.error.details == {"expected": 2}
    assert "'worker-2' is one too many" in str(asked.error)
    assert len(scheduler.views["worker-0"]) == 1


def test_places_are_counted_by_role(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=1)
    scheduler.form("server-0")
    assert isinstance(scheduler.register("server-1").answer, ClusterFullError)
    scheduler.form("worker-0", "worker-1")


def test_place_of_one_who_has_left_stays_taken(scheduler: Scheduler) -> None:
    scheduler.ask("worker-1", m.Leave())
    assert isinstance(scheduler.register("worker-2").answer, ClusterFullError)


@pytest.mark.parametrize("name", ["worker-0", "other"])
def test_connection_registers_one_node(make_scheduler: type[Scheduler], name: str) -> None:
    scheduler = make_scheduler()
    scheduler.form("worker-0")
    again = scheduler.ask("worker-0", m.Register(Role.WORKER, name, 1, "", 0, 5.0))
    assert isinstance(again.answer, MembershipError)


def test_second_scheduler_is_refused(make_scheduler: type[Scheduler]) -> None:
    assert isinstance(make_scheduler().register("scheduler-1").answer, MembershipError)


# --- waiting in vain ---


def test_cluster_that_stays_incomplete_says_what_is_missing(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=3, servers=2)
    asked = [scheduler.register(name, timeout=1.0) for name in ("worker-0", "server-0")]
    assert scheduler.machine.deadline() == 1.0
    scheduler.tick(1.0)
    assert isinstance(asked[0].error, JoinTimeoutError)
    assert "2 of 3 workers and 1 of 2 servers" in str(asked[0].error)
    assert isinstance(asked[1].answer, JoinTimeoutError)


def test_place_of_one_who_gave_up_is_free_again(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler()
    scheduler.register("worker-0", timeout=1.0)
    scheduler.tick(1.0)
    scheduler.now = 1.5
    scheduler.peers["worker-0"] = 50
    scheduler.form("worker-0", "worker-1", "server-0")
    assert ranks(scheduler.views["worker-0"][-1]) == {"worker-0": 0, "worker-1": 1}


def test_scenario_64_one_who_dies_before_the_cluster_is_complete_is_replaced(make_scheduler: type[Scheduler]) -> None:
    # Scenario 64: A joins and is killed, B and C come.
    scheduler = make_scheduler(workers=2, servers=1)
    scheduler.form("server-0", "worker-a")
    scheduler.drop("worker-a")
    scheduler.form("worker-b")
    assert scheduler.machine.missing == "1 of 2 workers"
    scheduler.form("worker-c")
    (view,) = scheduler.views["worker-b"]
    assert (view.epoch, ranks(view)) == (1, {"worker-b": 0, "worker-c": 1})
    assert scheduler.views["worker-a"] == []


def test_silence_before_the_cluster_is_complete_is_no_loss(make_scheduler: type[Scheduler]) -> None:
    # Nobody sends heartbeats before the first view, which says how often.
    scheduler = make_scheduler()
    scheduler.form("worker-0", "server-0")
    scheduler.beat("worker-0")
    scheduler.tick(9.0)
    scheduler.form("worker-1")
    scheduler.tick(10.5)
    assert len(scheduler.views["worker-0"]) == 1


@pytest.mark.parametrize("timeout", [float("inf"), float("nan")])
def test_wait_without_an_end_is_refused(scheduler: Scheduler, timeout: float) -> None:
    assert isinstance(scheduler.register("worker-2", timeout=timeout).answer, ConfigError)
    assert isinstance(scheduler.barrier("worker-0", timeout=timeout).answer, ConfigError)


# --- nonsense ---


def test_member_that_talks_nonsense_is_cut_off_and_lost(scheduler: Scheduler, like: type[Like]) -> None:
    effects = scheduler.handle(st.Received(scheduler.peers["worker-1"], 7, m.Done()))
    assert effects[0] == like(ef.Disconnect, peer=scheduler.peers["worker-1"])
    (worker,) = [entry for entry in scheduler.views["worker-0"][-1].workers if entry.state == "lost"]
    assert worker.name == "worker-1"


def test_stranger_that_talks_nonsense_is_cut_off(scheduler: Scheduler, like: type[Like]) -> None:
    assert scheduler.handle(st.Received(99, 7, m.Done())) == [like(ef.Disconnect, peer=99)]


@pytest.mark.parametrize("message", [m.Barrier("b", 1.0), m.Leave()])
def test_strangers_and_servers_get_nothing(scheduler: Scheduler, message: m.Message) -> None:
    for name in ("stranger", "server-0"):
        assert isinstance(scheduler.ask(name, message).answer, MembershipError)


@pytest.mark.parametrize("message", [m.Barrier("b", 1.0), m.Leave()])
def test_worker_has_to_wait_for_the_cluster(make_scheduler: type[Scheduler], message: m.Message) -> None:
    scheduler = make_scheduler()
    scheduler.form("worker-0")
    assert isinstance(scheduler.ask("worker-0", message).answer, MembershipError)


def test_stranger_may_say_that_it_is_alive(scheduler: Scheduler) -> None:
    assert scheduler.handle(st.Received(99, 0, m.Heartbeat())) == []
    assert scheduler.handle(st.PeerLost(99, "closed")) == []


@pytest.mark.parametrize("stimulus", [st.Cancel(1), st.Join(0, 1.0), st.Connected(0)])
def test_stimulus_of_another_machine_is_a_bug(scheduler: Scheduler, stimulus: Any) -> None:
    with pytest.raises(TypeError, match="not a stimulus for the scheduler"):
        scheduler.handle(stimulus)


def test_all_that_give_up_together_are_told_the_same_missing_nodes(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=3, servers=1)
    asked = [scheduler.register(name) for name in ("server-0", "worker-0", "worker-1")]
    scheduler.tick(1000.0)
    for answer in (request.answer for request in asked):
        assert isinstance(answer, JoinTimeoutError)
        assert answer.message.endswith("missing 1 of 3 workers")
