"""A scheduler that was started again with other settings: it says so once, and leaves the cluster to another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.errors import OtherSettingsError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Scheduler

TEXT = (
    "this scheduler was started with other settings than the cluster that comes back: num_workers = 3, where the "
    "cluster has 2; start it again with those of the cluster"
)


def view(epoch: int = 7, **others: Any) -> m.View:
    """Return what the nodes know: two workers and a server."""
    workers = tuple(m.WorkerEntry(rank, f"worker-{rank}", 1) for rank in range(2))
    servers = (m.ServerEntry(0, "server-0", 1, "127.0.0.1", 9000),)
    return structs.replace(m.View(epoch, workers, servers, 0.5, 2**19, 2**16, 2.0), **others)


@pytest.fixture
def other(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler for three workers; the server and one of two workers are back, and the time of the other is over."""
    scheduler = make_scheduler(workers=3, servers=1)
    back(scheduler, "server-0", "worker-0")
    scheduler.ask("server-0", view())
    scheduler.tick(2.0)
    return scheduler


def back(scheduler: Scheduler, *names: str, epoch: int = 7) -> None:
    """Let nodes register that know an epoch."""
    for name in names:
        scheduler.register(name, epoch=epoch, again=name in scheduler.peers)


def lines(scheduler: Scheduler) -> list[ef.Log]:
    """Return what it has said of that."""
    return [one for one in scheduler.effects if isinstance(one, ef.Log) and one.event == "not_rebuilt"]


def refused(scheduler: Scheduler) -> list[str]:
    """Return who was told why."""
    names = {peer: name for name, peer in scheduler.peers.items()}
    found = [one for one in scheduler.effects if isinstance(one, ef.Refuse)]
    assert {type(one.error) for one in found} == {OtherSettingsError}
    return [names[one.peer] for one in found]


def test_it_says_once_which_settings_differ_and_tells_all_who_are_back(other: Scheduler, like: type[Like]) -> None:
    assert lines(other) == [like(ef.Log, level="error", text=TEXT)]
    assert refused(other) == ["server-0", "worker-0"]
    back(other, "worker-1")
    assert refused(other) == ["server-0", "worker-0", "worker-1"]
    assert len(lines(other)) == 1
    assert not any(other.views.values())


@pytest.mark.parametrize(
    ("others", "differs"),
    [
        ({"declared": 4}, "num_workers = 2, where the cluster has 4"),
        ({"servers": ()}, "num_servers or num_places = 1, where the cluster has 0"),
        ({"chunk_bytes": 1024}, "chunk_bytes = 524288, where the cluster has 1024"),
        ({"split_bytes": 1024}, "split_bytes = 65536, where the cluster has 1024"),
        ({"on_worker_loss": "shrink"}, "on_worker_loss = fail, where the cluster has shrink"),
        (
            {"replication": 2, "declared": 4},
            "num_workers = 2, where the cluster has 4; replication = 1, where the cluster has 2",
        ),
    ],
)
def test_each_setting_that_a_cluster_keeps_is_named(
    make_scheduler: type[Scheduler], others: dict[str, Any], differs: str
) -> None:
    scheduler = make_scheduler(workers=2, servers=1)
    back(scheduler, "server-0")
    scheduler.ask("server-0", view(**others))
    scheduler.tick(2.0)
    [line] = lines(scheduler)
    assert f": {differs}; start it again" in line.text


def test_times_may_be_others(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=2, servers=1)
    back(scheduler, "server-0", "worker-0", "worker-1")
    scheduler.ask("server-0", view(heartbeat=1.0, death_timeout=9.0))
    assert scheduler.views["worker-1"][-1].epoch > 1000


def test_who_is_back_stays_and_hears_from_it_without_end(other: Scheduler) -> None:
    for beat in range(5, 60):
        before = len(other.effects)
        other.tick(beat * 0.5)
        beats = [one.peer for one in other.effects[before:] if isinstance(one, ef.Send)]
        assert beats == [other.peers["server-0"], other.peers["worker-0"]]
    assert len(lines(other)) == 1
    assert not [one for one in other.effects if isinstance(one, ef.Disconnect)]


def test_who_wants_to_join_waits_for_another_cluster_and_hears_in_the_end_why_there_is_none(
    make_scheduler: type[Scheduler],
) -> None:
    scheduler = make_scheduler(workers=3, servers=1)
    before = scheduler.register("worker-8", timeout=4.0)
    back(scheduler, "server-0")
    scheduler.ask("server-0", view())
    scheduler.tick(2.0)
    after = scheduler.register("worker-9", timeout=4.0)
    scheduler.tick(3.9)
    assert before.pending
    scheduler.tick(4.0)
    assert isinstance(before.error, OtherSettingsError)
    assert after.pending
    scheduler.tick(5.5)
    assert scheduler.machine.deadline() == 6.0
    scheduler.tick(6.0)
    assert isinstance(after.error, OtherSettingsError)


def test_who_asks_what_it_waits_for_is_told(other: Scheduler) -> None:
    other.now = 5.0
    waiting = other.ask("watcher", m.GetWaiting()).answer
    assert isinstance(waiting, m.Waiting)
    assert waiting.calls == (m.WaitingCall("the scheduler", "going on with the cluster of epoch 7", TEXT, seconds=3.0),)


def test_another_cluster_can_begin_when_all_have_gone(other: Scheduler) -> None:
    for name in ("server-0", "worker-0"):
        other.drop(name)
    other.form("server-8", "worker-7", "worker-8", "worker-9")
    assert other.views["worker-9"][-1].epoch == 1


def test_a_cluster_that_had_begun_later_goes_on(other: Scheduler) -> None:
    # Those who are back of the one before are told twice: now that they belong to an earlier one.
    other.asked.clear()
    workers = tuple(m.WorkerEntry(rank, f"worker-{rank + 5}", 1) for rank in range(3))
    servers = (m.ServerEntry(0, "server-5", 1, "127.0.0.1", 9000),)
    for name in ("worker-5", "worker-6", "worker-7", "server-5"):
        assert other.register(name, epoch=3, founder=5).pending
    other.ask("worker-5", view(3, workers=workers, servers=servers, founder=5))
    assert other.views["worker-7"][-1].epoch > 1000


def test_what_nodes_say_meanwhile_is_for_another_scheduler(other: Scheduler) -> None:
    assert other.ask("worker-0", m.Opened("b", (), 1, ())).pending
