"""The scheduler when connections end: a node that comes back within its grace goes on as if nothing had happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import BarrierTimeoutError, ClusterFullError, StaleEpochError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Scheduler


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler of two workers and one server, who have joined; they have 1 s to come back."""
    rig = make_scheduler(workers=2, servers=1, reconnect_grace=1.0)
    rig.form("worker-0", "worker-1", "server-0")
    return rig


def back(scheduler: Scheduler, name: str) -> m.Message | Exception | None:
    """Let a node register again over another connection; return an error if it gets one."""
    return scheduler.register(name, again=True, epoch=1).answer


@pytest.mark.parametrize("name", ["worker-1", "server-0"])
def test_a_node_that_comes_back_in_time_was_never_away(scheduler: Scheduler, name: str) -> None:
    scheduler.drop(name)
    scheduler.tick(0.9)
    assert back(scheduler, name) is None
    scheduler.tick(1.9)
    assert {views[-1].epoch for views in scheduler.views.values()} == {1}
    assert len(scheduler.views[name]) == 2, "it is told the view again"
    scheduler.beat("worker-0", "worker-1", "server-0")


@pytest.mark.parametrize("name", ["worker-1", "server-0"])
def test_a_node_that_does_not_come_back_is_lost(scheduler: Scheduler, name: str) -> None:
    scheduler.drop(name, "connection reset")
    scheduler.tick(1.0)
    view = scheduler.views["worker-0"][-1]
    entries = [(entry.name, entry.reason) for entry in view.workers if entry.state == "lost"]
    entries += [(entry.name, entry.reason) for entry in view.servers if entry.state == "lost"]
    assert entries == [(name, "connection reset, last heard 0.0 s before, and it has not come back")]
    late = scheduler.register(name, again=True, epoch=1)
    assert isinstance(late.error, StaleEpochError)
    assert f"{name}" in str(late.error)
    assert "connection reset" in str(late.error)


def test_silence_is_no_broken_connection(scheduler: Scheduler) -> None:
    """Who is silent for so long has had its time to come back."""
    scheduler.beat("worker-0", "server-0")
    scheduler.now = 1.0
    scheduler.beat("worker-0", "server-0")
    scheduler.tick(2.0)
    assert scheduler.views["worker-0"][-1].workers[1].state == "lost"


def test_a_barrier_is_entered_again(scheduler: Scheduler) -> None:
    scheduler.barrier("worker-1")
    scheduler.drop("worker-1")
    waiting = scheduler.barrier("worker-0")
    assert waiting.pending, "whoever is not connected is not here"
    back(scheduler, "worker-1")
    assert scheduler.barrier("worker-1").answer == waiting.answer == m.Met((), 1)


def test_what_was_answered_is_not_done_again(scheduler: Scheduler) -> None:
    """The answer may have got lost with the connection: the barrier is open, and the others have gone on."""
    asked = [scheduler.barrier("worker-0"), scheduler.barrier("worker-1")]
    scheduler.drop("worker-1")
    back(scheduler, "worker-1")
    again = scheduler.ask_again("worker-1", asked[1], m.Barrier("b", 5.0))
    assert again.answer == m.Met((), 1)
    assert scheduler.barrier("worker-0").pending


def test_a_refusal_is_remembered_too(scheduler: Scheduler) -> None:
    asked = scheduler.barrier("worker-1", timeout=0.5)
    scheduler.tick(0.5)
    scheduler.drop("worker-1")
    back(scheduler, "worker-1")
    again = scheduler.ask_again("worker-1", asked, m.Barrier("b", 5.0))
    assert isinstance(again.error, BarrierTimeoutError)


def test_who_has_finished_is_not_made_to_finish_again(scheduler: Scheduler) -> None:
    asked = scheduler.ask("worker-1", m.Finish())
    scheduler.drop("worker-1")
    back(scheduler, "worker-1")
    assert scheduler.ask_again("worker-1", asked, m.Finish()).answer == m.Done()
    assert scheduler.views["worker-0"][-1].epoch == 2
    scheduler.drop("worker-1")
    scheduler.tick(1.0)
    assert scheduler.views["worker-0"][-1].workers[1].state == "left"


def test_only_so_many_answers_are_kept(scheduler: Scheduler) -> None:
    for number in range(70):
        first = scheduler.barrier("worker-0")
        assert scheduler.barrier("worker-1").answer == first.answer == m.Met((), number + 1)
    assert len(scheduler.machine._members.by_name["worker-0"].answered) == 64


def test_the_others_hear_of_a_view_that_a_node_has_missed(scheduler: Scheduler) -> None:
    scheduler.drop("worker-1")
    scheduler.ask("worker-0", m.Finish())
    back(scheduler, "worker-1")
    assert scheduler.views["worker-1"][-1].epoch == 2


def test_a_later_connection_takes_the_place_of_one_that_only_looks_alive(
    scheduler: Scheduler, like: type[Like]
) -> None:
    before = scheduler.peers["worker-1"]
    assert back(scheduler, "worker-1") is None
    assert like(ef.Disconnect, peer=before) in scheduler.effects


def test_a_name_is_not_given_to_another_role_or_process(scheduler: Scheduler) -> None:
    for asked in (
        scheduler.register("worker-1", Role.SERVER, again=True, epoch=1),
        scheduler.register("worker-1", again=True, incarnation=5),
    ):
        assert isinstance(asked.error, ClusterFullError)


def test_a_connection_that_ends_before_the_cluster_is_complete_gives_its_place_free(
    make_scheduler: type[Scheduler],
) -> None:
    scheduler = make_scheduler(workers=2, servers=1, reconnect_grace=1.0)
    scheduler.form("worker-0")
    scheduler.drop("worker-0")
    assert scheduler.machine.missing == "2 of 2 workers and 1 of 1 servers"


# --- before a node has the view ---


@pytest.mark.parametrize("name", ["worker-0", "server-0"])
def test_who_waits_for_the_cluster_may_do_so_over_another_connection(
    make_scheduler: type[Scheduler], like: type[Like], name: str
) -> None:
    """The end of the one before may not be known yet."""
    rig = make_scheduler(workers=2, servers=1)
    rig.form("worker-0", "server-0")
    before = rig.peers[name]
    assert rig.register(name, again=True).pending
    assert like(ef.Disconnect, peer=before) in rig.effects
    assert rig.handle(st.PeerLost(before, "closed")) == []
    rig.form("worker-1")
    assert [views[-1].epoch for views in rig.views.values()] == [1] * 3


def test_another_process_of_the_name_does_not_get_the_place_of_one_that_waits(
    make_scheduler: type[Scheduler],
) -> None:
    rig = make_scheduler(workers=2, servers=1)
    rig.form("worker-0")
    assert isinstance(rig.register("worker-0", again=True, incarnation=2).error, ClusterFullError)


@pytest.mark.parametrize("name", ["worker-1", "server-0"])
def test_who_has_not_got_the_first_view_gets_it_over_another_connection(scheduler: Scheduler, name: str) -> None:
    scheduler.drop(name)
    assert scheduler.register(name, again=True).answer is None
    scheduler.tick(1.9)
    assert [view.epoch for view in scheduler.views[name]] == [1, 1]
    assert {views[-1].epoch for views in scheduler.views.values()} == {1}


def test_a_newcomer_that_has_not_got_its_first_view_gets_it_over_another_connection(
    make_scheduler: type[Scheduler],
) -> None:
    rig = make_scheduler(workers=1, servers=1, max_workers=2, reconnect_grace=1.0)
    rig.form("worker-0", "server-0", "worker-1")
    rig.drop("worker-1")
    assert rig.register("worker-1", again=True).answer is None
    assert [view.workers[1].state for view in rig.views["worker-1"]] == ["joining", "joining"]
