"""The scheduler with `on_worker_loss = "respawn"`: a lost worker's place is kept, and another process takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.errors import ClusterFullError, StaleEpochError, WorkerLostError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Scheduler


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler of two workers and one server, who have joined; a place is kept for 3 s."""
    rig = make_scheduler(workers=2, servers=1, on_worker_loss="respawn", respawn_timeout=3.0)
    rig.form("worker-0", "worker-1", "server-0")
    return rig


def entry(scheduler: Scheduler, rank: int = 1, *, of: str = "server-0") -> m.WorkerEntry:
    """Return a worker's entry in the last view that a node was sent."""
    return scheduler.views[of][-1].workers[rank]


def test_members_learn_the_mode_from_the_view(scheduler: Scheduler) -> None:
    assert {views[-1].on_worker_loss for views in scheduler.views.values()} == {"respawn"}


def test_the_place_of_a_lost_worker_is_kept(scheduler: Scheduler) -> None:
    scheduler.drop("worker-1")
    assert (entry(scheduler).state, entry(scheduler).incarnation) == ("away", 1)
    assert "connection closed" in entry(scheduler).reason


def test_another_process_gets_rank_and_place(scheduler: Scheduler) -> None:
    scheduler.drop("worker-1")
    back = scheduler.register("worker-1", again=True, incarnation=7)
    assert back.answer is None
    assert entry(scheduler) == m.WorkerEntry(1, "worker-1", 7)
    assert entry(scheduler, of="worker-1") == m.WorkerEntry(1, "worker-1", 7)
    assert [views[-1].epoch for views in scheduler.views.values()] == [3, 3, 3]


def test_a_process_that_was_only_thought_lost_takes_its_own_place(scheduler: Scheduler) -> None:
    scheduler.drop("worker-1")
    scheduler.register("worker-1", again=True, incarnation=1)
    assert entry(scheduler) == m.WorkerEntry(1, "worker-1", 1)


def test_an_earlier_process_is_too_late(scheduler: Scheduler) -> None:
    scheduler.drop("worker-1")
    scheduler.register("worker-1", again=True, incarnation=7)
    late = scheduler.register("worker-1", again=True, incarnation=1)
    assert isinstance(late.error, StaleEpochError)
    assert late.error.details == {"ranks": [1]}
    assert entry(scheduler).incarnation == 7


def test_a_later_process_does_not_wait_until_the_earlier_one_is_missed(scheduler: Scheduler, like: type[Like]) -> None:
    """Its machine may have gone without a word: the connection looks alive until the death time-out."""
    before = scheduler.peers["worker-1"]
    scheduler.register("worker-1", again=True, incarnation=7)
    assert like(ef.Disconnect, peer=before) in scheduler.effects
    assert entry(scheduler) == m.WorkerEntry(1, "worker-1", 7)


def test_the_same_process_goes_on_over_its_later_connection(scheduler: Scheduler, like: type[Like]) -> None:
    before = scheduler.peers["worker-1"]
    scheduler.register("worker-1", again=True, incarnation=1, epoch=1)
    assert like(ef.Disconnect, peer=before) in scheduler.effects
    assert entry(scheduler, of="worker-1") == m.WorkerEntry(1, "worker-1", 1)


def test_barriers_wait_for_who_is_away(scheduler: Scheduler) -> None:
    waiting = scheduler.barrier("worker-0", timeout=20.0)
    scheduler.drop("worker-1")
    assert waiting.pending
    scheduler.register("worker-1", again=True, incarnation=7)
    assert waiting.pending
    assert scheduler.barrier("worker-1").answer == waiting.answer == m.Met((), 1)


def test_what_the_process_before_had_entered_counts_no_longer(scheduler: Scheduler) -> None:
    """Its successor begins anew, and comes to the barrier itself."""
    scheduler.barrier("worker-1", timeout=20.0)
    scheduler.drop("worker-1")
    scheduler.register("worker-1", again=True, incarnation=7)
    waiting = scheduler.barrier("worker-0", timeout=20.0)
    assert waiting.pending
    assert scheduler.barrier("worker-1").answer == waiting.answer == m.Met((), 1)


def test_a_place_that_nobody_takes_is_lost(scheduler: Scheduler) -> None:
    waiting = scheduler.barrier("worker-0", timeout=20.0)
    scheduler.drop("worker-1")
    scheduler.beat("worker-0", "server-0")
    scheduler.tick(1.9)
    scheduler.beat("worker-0", "server-0")
    scheduler.tick(2.9)
    assert waiting.pending
    scheduler.tick(3.0)
    assert entry(scheduler).state == "lost"
    assert isinstance(waiting.error, WorkerLostError)
    assert "nobody has taken its place within 3 s" in str(waiting.error)
    late = scheduler.register("worker-1", again=True, incarnation=7)
    assert isinstance(late.error, ClusterFullError)


def test_the_job_goes_on_while_its_only_worker_is_away(make_scheduler: type[Scheduler], like: type[Like]) -> None:
    scheduler = make_scheduler(workers=1, servers=1, on_worker_loss="respawn", respawn_timeout=3.0)
    scheduler.form("worker-0", "server-0")
    scheduler.drop("worker-0")
    assert like(ef.Stop) not in scheduler.effects
    scheduler.beat("server-0")
    scheduler.tick(1.9)
    scheduler.beat("server-0")
    scheduler.tick(3.0)
    assert like(ef.Stop, failed=True) in scheduler.effects


@pytest.mark.parametrize("name", ["server-0", "worker-1"])
def test_places_of_servers_and_of_who_has_finished_are_not_kept(scheduler: Scheduler, name: str) -> None:
    if name == "worker-1":
        scheduler.ask(name, m.Finish())
    scheduler.drop(name)
    again = scheduler.register(name, again=True, incarnation=7)
    assert isinstance(again.error, ClusterFullError)


def test_without_respawn_no_place_is_kept(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=1)
    scheduler.form("worker-0", "worker-1", "server-0")
    scheduler.drop("worker-1")
    assert entry(scheduler).state == "lost"
    again = scheduler.register("worker-1", again=True, incarnation=7)
    assert isinstance(again.error, ClusterFullError)


def test_a_name_is_taken_while_the_cluster_forms(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=1, on_worker_loss="respawn")
    scheduler.form("worker-0")
    again = scheduler.register("worker-0", again=True, incarnation=7)
    assert isinstance(again.error, ClusterFullError)


def test_a_worker_that_comes_back_after_its_grace_goes_on(scheduler: Scheduler) -> None:
    """Nobody has taken its place, and it is the process that it was."""
    scheduler.drop("worker-1")
    scheduler.register("worker-1", again=True, incarnation=1, epoch=1)
    assert entry(scheduler) == m.WorkerEntry(1, "worker-1", 1)
    assert scheduler.views["worker-0"][-1].epoch == 3
