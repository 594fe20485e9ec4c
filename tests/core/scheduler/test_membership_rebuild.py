"""A scheduler that was started again rebuilds the cluster from the nodes that come back, at a higher epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import ClusterFullError, MembershipError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Scheduler


def view(epoch: int = 7, *, last: str = "alive") -> m.View:
    """Return what the nodes know: three workers, one of them has left, and two servers."""
    workers = (
        m.WorkerEntry(0, "worker-0", 1),
        m.WorkerEntry(1, "worker-1", 1, "left", "left in good order"),
        m.WorkerEntry(2, "worker-2", 1, last),
    )
    servers = tuple(m.ServerEntry(index, f"server-{index}", 1, "127.0.0.1", 9000) for index in range(2))
    return m.View(epoch, workers, servers, 0.5, 2**19, 2**16, 2.0, founder=1)


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler that has just been started; the death time-out is 2 s, and nodes have as long to come back."""
    return make_scheduler(workers=3, servers=2)


def come_back(scheduler: Scheduler, *names: str, epoch: int = 7) -> None:
    """Let nodes register that know an epoch."""
    for name in names:
        assert scheduler.register(name, epoch=epoch, again=name in scheduler.peers).answer is None


def tell(scheduler: Scheduler, name: str, known: m.View) -> None:
    """Let a node say what the cluster was, which had the settings of this scheduler."""
    scheduler.ask(name, scheduler.plan_of(known))


def asked(scheduler: Scheduler) -> list[str]:
    """Return the nodes that were asked for their view."""
    names = {peer: name for name, peer in scheduler.peers.items()}
    sends = [one for one in scheduler.effects if isinstance(one, ef.Send)]
    return [names.get(send.peer, "gone") for send in sends if send.message == m.GetView()]


def states(scheduler: Scheduler, name: str = "worker-0") -> dict[str, str]:
    """Return who is not alive, in the last view that a node was sent."""
    known = scheduler.views[name][-1]
    entries = [(entry.name, entry.state) for entry in known.workers]
    entries += [(entry.name, entry.state) for entry in known.servers]
    return {each: state for each, state in entries if state != "alive"}


def test_it_goes_on_when_all_are_back(scheduler: Scheduler) -> None:
    come_back(scheduler, "server-1", "worker-2", "server-0")
    tell(scheduler, "server-1", view())
    assert not any(scheduler.views.values())
    come_back(scheduler, "worker-0")
    assert [views[-1].epoch for views in scheduler.views.values()] == [1008] * 4
    assert states(scheduler) == {"worker-1": "left"}
    assert [entry.rank for entry in scheduler.views["worker-2"][-1].workers] == [0, 1, 2]
    waiting = scheduler.barrier("worker-0")
    assert scheduler.barrier("worker-2").answer == waiting.answer == m.Met((), 1)


def test_who_knows_a_newer_epoch_is_asked(scheduler: Scheduler) -> None:
    come_back(scheduler, "server-1", epoch=6)
    come_back(scheduler, "server-0")
    come_back(scheduler, "worker-0", "worker-2")
    assert asked(scheduler) == ["server-1", "server-0"]
    tell(scheduler, "server-0", view(last="finished"))
    tell(scheduler, "server-1", view(6))
    assert scheduler.views["worker-0"][-1].epoch == 1008
    assert states(scheduler) == {"worker-1": "left", "worker-2": "finished"}


def test_others_are_asked_when_the_one_that_was_is_gone_before_it_has_answered(scheduler: Scheduler) -> None:
    """The first has connected again, and says once more what it alone knows; then it is gone for good."""
    come_back(scheduler, "server-1", "server-0", "worker-0")
    come_back(scheduler, "worker-2", epoch=8)
    lost = scheduler.peers["worker-2"]
    come_back(scheduler, "worker-2", epoch=8)
    scheduler.handle(st.PeerLost(lost, "reset"))
    assert asked(scheduler) == ["server-1", "gone", "worker-2"]
    scheduler.drop("worker-2")
    assert asked(scheduler)[3:] == ["server-1"]
    tell(scheduler, "server-1", view())
    scheduler.drop("server-0")
    assert len(asked(scheduler)) == 4, "it has answered"
    come_back(scheduler, "server-0", "worker-2")
    assert scheduler.views["worker-0"][-1].epoch == 1008


def test_those_whose_connections_end_again_have_their_time_to_come_back_anew(scheduler: Scheduler) -> None:
    """One is missing, and just before its time is over the network cuts off others for a moment."""
    come_back(scheduler, "server-0", "server-1", "worker-0")
    tell(scheduler, "server-0", view())
    scheduler.now = 1.5
    scheduler.drop("server-0")
    scheduler.drop("server-1")
    scheduler.tick(2.5)
    come_back(scheduler, "server-0", "server-1")
    scheduler.tick(3.5)
    assert states(scheduler) == {"worker-1": "left", "worker-2": "lost"}


def test_all_whose_connections_end_again_have_their_time_to_come_back_anew(make_scheduler: type[Scheduler]) -> None:
    """Where others may join, it waits for the cluster that has deserted it."""
    scheduler = make_scheduler(workers=3, servers=2, elastic_servers=True, settle_time=2.0)
    scheduler.now = 10.0
    come_back(scheduler, "server-0", "server-1", "worker-0")
    tell(scheduler, "server-0", view())
    scheduler.now = 11.5
    for name in ("server-0", "server-1", "worker-0"):
        scheduler.drop(name)
    scheduler.now = 11.9
    come_back(scheduler, "worker-0")
    scheduler.tick(12.5)
    come_back(scheduler, "server-0", "server-1")
    scheduler.tick(13.5)
    assert states(scheduler) == {"worker-1": "left", "worker-2": "lost"}


def test_it_does_not_wait_for_ever_for_one_whose_connections_end_again_and_again(scheduler: Scheduler) -> None:
    come_back(scheduler, "server-0", "worker-0")
    tell(scheduler, "server-0", view())
    for second in range(1, 60):
        scheduler.now = float(second)
        come_back(scheduler, "worker-2")
        scheduler.drop("worker-2")
        scheduler.tick(second + 0.5)
        assert not scheduler.views["worker-0"]
    scheduler.tick(60.0)
    assert states(scheduler) == {"worker-1": "left", "worker-2": "lost", "server-1": "lost"}


def test_who_does_not_come_back_is_lost(scheduler: Scheduler) -> None:
    come_back(scheduler, "server-1", "worker-0", "worker-2")
    tell(scheduler, "server-1", view())
    scheduler.drop("worker-2")
    assert scheduler.machine.deadline() == 0.5
    back = [scheduler.peers[name] for name in ("server-1", "worker-0")]
    assert scheduler.tick(1.9) == [ef.Send(peer, 0, m.Heartbeat()) for peer in back], "it is there"
    scheduler.tick(2.0)
    assert states(scheduler) == {"worker-1": "left", "worker-2": "lost", "server-0": "lost"}
    assert "was not there when the scheduler was started again" in scheduler.views["worker-0"][-1].workers[2].reason


@pytest.mark.parametrize(("last", "failed"), [("left", False), ("lost", True)])
def test_it_ends_when_no_worker_is_left(scheduler: Scheduler, last: str, *, failed: bool) -> None:
    known = view(last=last)
    workers = (m.WorkerEntry(0, "worker-0", 1, "left"), *known.workers[1:])
    come_back(scheduler, "server-1", "server-0")
    tell(scheduler, "server-1", structs.replace(known, workers=workers))
    effects = scheduler.effects
    (stop,) = [effect for effect in effects if isinstance(effect, ef.Stop)]
    assert stop.failed == failed
    told = [effect.peer for effect in effects if isinstance(effect, ef.Send) and isinstance(effect.message, m.Stop)]
    assert told == [scheduler.peers["server-0"], scheduler.peers["server-1"]]


def test_a_place_is_still_kept(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=3, servers=2, on_worker_loss="respawn", respawn_timeout=3.0)
    come_back(scheduler, "server-1", "worker-0", "server-0")
    tell(scheduler, "server-1", view(last="away"))
    assert states(scheduler) == {"worker-1": "left", "worker-2": "away"}
    scheduler.register("worker-2", incarnation=9)
    assert states(scheduler) == {"worker-1": "left"}
    scheduler.beat("server-1", "worker-0", "server-0")
    scheduler.tick(3.0)
    assert "lost" not in states(scheduler).values()


def test_newcomers_wait_until_it_is_known_what_the_cluster_is(make_scheduler: type[Scheduler]) -> None:
    """One process has taken the place of a worker before anybody else was back, one later."""
    scheduler = make_scheduler(workers=3, servers=2, on_worker_loss="respawn")
    scheduler.register("worker-2", incarnation=9)
    come_back(scheduler, "server-1", "server-0")
    stranger = scheduler.register("worker-9")
    assert stranger.pending
    tell(scheduler, "server-1", view(last="away"))
    come_back(scheduler, "worker-0")
    assert not stranger.pending, "all places are taken"
    assert scheduler.views["worker-2"][-1].workers[2] == m.WorkerEntry(2, "worker-2", 9)


def back_from_barrier(scheduler: Scheduler, **opened: int) -> None:
    """Let all come back, after a barrier "b" that some workers know to be opened, in the 5th opening of any."""
    come_back(scheduler, "server-0", "server-1", "worker-0", "worker-2")
    known = view()
    known.barriers = 4
    tell(scheduler, "server-1", known)
    for name, number in opened.items():
        scheduler.ask(name.replace("_", "-"), m.Opened("b", (), number, ((0, {"n": 1}),)))


@pytest.mark.parametrize("is_first", [True, False], ids=["who waits is back first", "who was told is back first"])
def test_a_barrier_that_had_opened_for_some_opens_for_the_others(scheduler: Scheduler, *, is_first: bool) -> None:
    """Of those who waited there one was told, and has gone on; the other asks again, and is told the same."""
    message = m.Barrier("b", 5.0, after=3)
    if is_first:
        back_from_barrier(scheduler)
        waiting = scheduler.ask("worker-2", message)
        assert waiting.pending
        scheduler.ask("worker-0", m.Opened("b", (), 5, ((0, {"n": 1}),)))
    else:
        back_from_barrier(scheduler, worker_0=5)
        waiting = scheduler.ask("worker-2", message)
    assert waiting.answer == m.Met(((0, {"n": 1}),), 5)
    nexts = [scheduler.ask(name, m.Barrier("b", 5.0, after=5)) for name in ("worker-2", "worker-0")]
    assert [each.answer for each in nexts] == [m.Met((), 6)] * 2


def test_a_barrier_that_had_opened_for_all_is_closed_again(scheduler: Scheduler) -> None:
    back_from_barrier(scheduler, worker_0=5, worker_2=4)
    waiting = scheduler.ask("worker-2", m.Barrier("b", 5.0, after=5))
    assert waiting.pending
    assert scheduler.ask("worker-2", m.Barrier("c", 5.0, after=4)).pending, "it is another one"
    assert scheduler.ask("worker-0", m.Barrier("b", 5.0, after=5)).answer == waiting.answer == m.Met((), 6)


def test_so_many_barriers_are_remembered_that_had_opened(scheduler: Scheduler) -> None:
    back_from_barrier(scheduler)
    for number in range(4097):
        scheduler.ask("worker-0", m.Opened(f"b{number}", (), 5 + number))
    assert scheduler.ask("worker-2", m.Barrier("b0", 5.0, after=4)).pending
    assert scheduler.ask("worker-2", m.Barrier("b1", 5.0, after=4)).answer == m.Met((), 6)


def test_only_members_say_which_barriers_have_opened(scheduler: Scheduler) -> None:
    assert isinstance(scheduler.ask("worker-0", m.Opened("b", (), 5)).error, MembershipError)


def test_who_was_not_told_of_the_cluster_is_of_it_all_the_same(scheduler: Scheduler) -> None:
    """The scheduler before has ended when it had sent the first view to some."""
    waiting = scheduler.register("worker-0")
    come_back(scheduler, "server-1", "worker-2")
    tell(scheduler, "server-1", view())
    assert waiting.pending
    assert scheduler.register("server-0").answer is None
    assert [views[-1].epoch for views in scheduler.views.values()] == [1008] * 4
    assert states(scheduler) == {"worker-1": "left"}


def test_another_process_of_the_name_is_not_taken_for_who_was_not_told(scheduler: Scheduler) -> None:
    other = scheduler.register("worker-0", incarnation=2)
    come_back(scheduler, "server-1", "worker-2", "server-0")
    tell(scheduler, "server-1", view())
    assert other.pending
    scheduler.tick(2.0)
    assert isinstance(other.error, ClusterFullError)


def test_nobody_tells_what_the_cluster_was(scheduler: Scheduler, like: type[Like]) -> None:
    come_back(scheduler, "server-0")
    scheduler.tick(2.0)
    assert like(ef.Disconnect, peer=scheduler.peers["server-0"]) in scheduler.effects
    tell(scheduler, "server-0", view())
    assert not any(scheduler.views.values())


def test_who_wants_to_join_makes_another_cluster_when_all_have_gone_that_knew_one(
    make_scheduler: type[Scheduler],
) -> None:
    """A worker comes back, hears that all servers are lost, and leaves; new ones wait for it."""
    scheduler = make_scheduler(workers=1, servers=1)
    come_back(scheduler, "worker-0")
    scheduler.register("server-new", role=Role.SERVER)
    known = view()
    tell(scheduler, "worker-0", structs.replace(known, workers=known.workers[:1], servers=known.servers[:1]))
    scheduler.drop("worker-0")
    scheduler.register("worker-new")
    assert scheduler.views["worker-new"][-1].epoch == 1
    assert [entry.name for entry in scheduler.views["worker-new"][-1].servers] == ["server-new"]


def test_newcomers_wait_as_long_as_somebody_knows_of_a_cluster(scheduler: Scheduler) -> None:
    come_back(scheduler, "worker-0", "server-1")
    scheduler.register("worker-9")
    scheduler.register("worker-8")
    scheduler.drop("worker-9")
    scheduler.drop("worker-0")
    tell(scheduler, "server-1", view())
    come_back(scheduler, "worker-0", "worker-2", "server-0")
    assert states(scheduler) == {"worker-1": "left"}


def test_a_newcomer_that_goes_away_before_anybody_is_back_is_forgotten(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=3, servers=2, replication=2)
    scheduler.register("standby-0", Role.SERVER, standby=0)
    scheduler.drop("standby-0")
    before = len(scheduler.effects)
    come_back(scheduler, "worker-0", "worker-2", "server-0", "server-1")
    tell(scheduler, "server-1", view())
    assert states(scheduler) == {"worker-1": "left"}
    gone = scheduler.peers["standby-0"]
    assert not any(isinstance(each, ef.Send) and each.peer == gone for each in scheduler.effects[before:])


def test_a_node_is_the_process_that_it_was(scheduler: Scheduler) -> None:
    come_back(scheduler, "server-1", "server-0", "worker-0")
    scheduler.register("worker-2", Role.WORKER, incarnation=5, epoch=7)
    tell(scheduler, "server-1", view())
    assert states(scheduler) == {"worker-1": "left"}
    scheduler.tick(0.0)
    assert states(scheduler)["worker-2"] == "lost"


def test_an_older_view_that_comes_later_changes_nothing(scheduler: Scheduler) -> None:
    come_back(scheduler, "server-1", epoch=6)
    come_back(scheduler, "server-0")
    tell(scheduler, "server-0", view())
    tell(scheduler, "server-1", view(6, last="left"))
    come_back(scheduler, "worker-0", "worker-2")
    assert states(scheduler) == {"worker-1": "left"}


@pytest.mark.parametrize("is_new", [True, False])
def test_only_who_has_come_back_is_believed(scheduler: Scheduler, *, is_new: bool) -> None:
    come_back(scheduler, "server-1", "worker-2", "server-0", "worker-0")
    if is_new:
        scheduler.register("worker-9")
    told = scheduler.ask("worker-9" if is_new else "stranger", view())
    assert isinstance(told.answer, MembershipError)
    assert not any(scheduler.views.values())


def test_a_worker_that_was_about_to_count_has_its_time_to_come_back(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=2, max_workers=3)
    known = view(last="joining")
    known.workers = (known.workers[0], m.WorkerEntry(1, "worker-1", 1), known.workers[2])
    known.declared = 2
    come_back(scheduler, "server-1", "server-0", "worker-0", "worker-1")
    tell(scheduler, "server-1", known)
    assert not any(scheduler.views.values())
    come_back(scheduler, "worker-2")
    assert states(scheduler) == {"worker-2": "joining"}


def test_each_scheduler_that_is_started_again_has_epochs_of_its_own(make_scheduler: type[Scheduler]) -> None:
    """Of the views of the one before nobody may have heard who is back, and others may."""
    epochs: list[int] = []
    for now in (3.0, 4.5):
        scheduler = make_scheduler(workers=3, servers=2)
        scheduler.now = now
        come_back(scheduler, "worker-0", "worker-2", "server-0", "server-1")
        tell(scheduler, "server-1", view())
        scheduler.drop("worker-2")
        epochs += [each.epoch for each in scheduler.views["worker-0"]]
    assert epochs == [3001, 3002, 4501, 4502]
