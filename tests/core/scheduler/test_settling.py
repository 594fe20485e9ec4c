"""A scheduler that is started again where processes may join later: which cluster it is, and who belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.errors import JoinTimeoutError, StaleEpochError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Scheduler

SETTLES = 1.5
JOINABLE: list[dict[str, Any]] = [{"max_workers": 2}, {"replication": 2}, {"elastic_servers": True}]


def view(epoch: int = 7, *, founder: int = 1, joined: tuple[m.WorkerEntry, ...] = ()) -> m.View:
    """Return what the nodes of a cluster of one worker and two servers know."""
    workers = (m.WorkerEntry(0, "worker-0", 1), *joined)
    servers = tuple(m.ServerEntry(index, f"server-{index}", 1, "127.0.0.1", 9000) for index in range(2))
    declared = 1 if joined else 0
    return m.View(epoch, workers, servers, 0.5, 2**19, 2**16, 2.0, declared=declared, founder=founder)


MEMBERS = ("server-0", "server-1", "worker-0")
STRANGERS = ("server-8", "server-9", "worker-9")


def restarted(make_scheduler: type[Scheduler], **settings: Any) -> Scheduler:
    """Return a scheduler, the second life of one, that has just begun to listen."""
    return make_scheduler(workers=1, servers=2, incarnation=2, settle_time=SETTLES, **settings)


def come_back(scheduler: Scheduler, known: m.View, *names: str) -> None:
    """Let nodes register that know a view; the first one tells it."""
    for name in names:
        again = name in scheduler.peers
        assert scheduler.register(name, epoch=known.epoch, founder=known.founder, again=again).answer is None
    scheduler.ask(names[0], scheduler.plan_of(known))


def joins(scheduler: Scheduler, epoch: int, *, rank: int = 1, name: str = "worker-1", incarnation: int = 1) -> Asked:
    """Let a worker register that has joined, as a view of an epoch has told it."""
    return scheduler.register(name, epoch=epoch, number=rank, incarnation=incarnation)


def workers(scheduler: Scheduler, name: str = "worker-0") -> list[tuple[str, int, str]]:
    """Return name, incarnation and state of all workers, by rank, as a node has heard last."""
    return [(each.name, each.incarnation, each.state) for each in scheduler.views[name][-1].workers]


# --- a cluster begins ---


@pytest.mark.parametrize("settings", JOINABLE)
def test_members_that_come_a_moment_later_are_not_replaced_by_others_that_wait(
    make_scheduler: type[Scheduler], settings: dict[str, Any]
) -> None:
    """Enough processes for a cluster wait to join when the scheduler is started again."""
    scheduler = restarted(make_scheduler, **settings)
    scheduler.form(*STRANGERS)
    scheduler.now = 1.0
    come_back(scheduler, view(), *MEMBERS)
    scheduler.tick(SETTLES)
    heard = scheduler.views["worker-0"][-1]
    assert (heard.founder, heard.workers[0]) == (1, m.WorkerEntry(0, "worker-0", 1))
    assert [server.name for server in heard.servers] == ["server-0", "server-1"]
    assert all(each.epoch > 1000 for views in scheduler.views.values() for each in views)


@pytest.mark.parametrize("settings", JOINABLE)
def test_a_cluster_begins_when_members_of_another_one_would_be_back(
    make_scheduler: type[Scheduler], settings: dict[str, Any]
) -> None:
    scheduler = restarted(make_scheduler, **settings)
    scheduler.form(*STRANGERS)
    assert scheduler.machine.deadline() == SETTLES
    scheduler.tick(SETTLES - 0.1)
    assert not any(scheduler.views.values())
    scheduler.tick(SETTLES)
    assert [(views[-1].epoch, views[-1].founder) for views in scheduler.views.values()] == [(1, 2)] * 3


def test_who_is_late_enough_waits_no_longer(make_scheduler: type[Scheduler]) -> None:
    scheduler = restarted(make_scheduler, replication=2)
    scheduler.now = SETTLES
    scheduler.form(*STRANGERS)
    assert all(scheduler.views.values())


def test_where_nobody_may_join_later_a_cluster_begins_at_once(make_scheduler: type[Scheduler]) -> None:
    scheduler = restarted(make_scheduler)
    scheduler.form(*STRANGERS)
    assert all(scheduler.views.values())


def test_a_cluster_that_is_not_complete_any_longer_does_not_begin(make_scheduler: type[Scheduler]) -> None:
    scheduler = restarted(make_scheduler, max_workers=2)
    scheduler.form(*STRANGERS)
    scheduler.drop("worker-9")
    scheduler.tick(SETTLES)
    assert not any(scheduler.views.values())
    scheduler.register("worker-9", again=True)
    assert all(scheduler.views.values())


def test_it_is_said_why_a_complete_cluster_does_not_begin(make_scheduler: type[Scheduler]) -> None:
    scheduler = restarted(make_scheduler, max_workers=2)
    scheduler.form(*STRANGERS[:2])
    asked = scheduler.register("worker-9", timeout=1.0)
    reason = "no member of an earlier cluster comes back within 1.5 s"
    assert ef.Log("info", f"worker worker-9 is here; waiting until {reason}") in scheduler.effects
    scheduler.ask("worker-9", m.GetWaiting())
    (report,) = [effect for effect in scheduler.effects if isinstance(effect, ef.Report)]
    assert isinstance(report.message, m.Waiting)
    assert {call.reason for call in report.message.calls} == {reason}
    scheduler.tick(1.0)
    assert isinstance(asked.error, JoinTimeoutError)
    assert str(asked.error) == f"the cluster is not complete after 1 s: it waits until {reason}"


def test_who_waits_has_its_time_and_no_more_when_it_turns_out_that_there_is_no_cluster(
    make_scheduler: type[Scheduler],
) -> None:
    """A place that an earlier scheduler has asked for comes before one member is there; nobody knows of a cluster."""
    scheduler = make_scheduler(workers=1, servers=2, incarnation=2, num_places=3)
    first = scheduler.register("server-0", timeout=9.0)
    scheduler.now = 1.0
    assert scheduler.register("server-8/2.0", Role.SERVER, standby=2).answer is None
    second = scheduler.register("server-1", timeout=9.0)
    scheduler.tick(3.0)
    scheduler.beat("server-0", "server-1")
    scheduler.tick(8.9)
    assert first.pending
    scheduler.tick(9.0)
    assert isinstance(first.error, JoinTimeoutError)
    assert second.pending
    scheduler.tick(10.0)
    assert isinstance(second.error, JoinTimeoutError)


# --- a cluster goes on ---


def test_it_goes_on_as_it_was_only_when_all_have_had_their_time_who_may_know_more(
    make_scheduler: type[Scheduler],
) -> None:
    """A worker has joined, and alone has heard so when the scheduler ended."""
    scheduler = restarted(make_scheduler, max_workers=3)
    come_back(scheduler, view(), *MEMBERS)
    assert not any(scheduler.views.values())
    scheduler.now = 1.2
    joined = m.WorkerEntry(1, "worker-1", 1, "joining")
    assert joins(scheduler, 8).answer is None
    scheduler.ask("worker-1", view(8, joined=(joined,)))
    scheduler.register("worker-2", incarnation=5)
    scheduler.tick(SETTLES)
    assert workers(scheduler) == [("worker-0", 1, "alive"), ("worker-1", 1, "joining"), ("worker-2", 5, "joining")]


def test_who_has_come_before_the_first_that_is_back_joins_when_it_goes_on(make_scheduler: type[Scheduler]) -> None:
    """With it there are more workers than the cluster begins with."""
    scheduler = restarted(make_scheduler, max_workers=3)
    scheduler.form(*STRANGERS[:1], "worker-8", "worker-9")
    come_back(scheduler, view(), *MEMBERS)
    scheduler.tick(SETTLES)
    assert [name for name, _, _ in workers(scheduler)] == ["worker-0", "worker-8", "worker-9"]


def test_when_all_are_back_after_that_it_goes_on_at_once(make_scheduler: type[Scheduler]) -> None:
    scheduler = restarted(make_scheduler, max_workers=2)
    come_back(scheduler, view(), *MEMBERS[:2])
    scheduler.tick(SETTLES)
    assert not any(scheduler.views.values())
    scheduler.register("worker-0", epoch=7)
    assert all(scheduler.views.values())


def test_who_is_waited_for_has_no_less_time_than_that(make_scheduler: type[Scheduler]) -> None:
    scheduler = make_scheduler(workers=1, servers=2, incarnation=2, settle_time=5.0, max_workers=2)
    come_back(scheduler, view(), *MEMBERS[:2])
    scheduler.tick(4.9)
    assert not any(scheduler.views.values())
    scheduler.tick(5.0)
    assert workers(scheduler, "server-0") == [("worker-0", 1, "lost")]


@pytest.mark.parametrize("is_back", [True, False])
def test_the_last_one_that_loses_its_connection_has_its_time_to_come_again(
    make_scheduler: type[Scheduler], *, is_back: bool
) -> None:
    scheduler = restarted(make_scheduler, max_workers=2)
    come_back(scheduler, view(), "server-0")
    scheduler.form(*STRANGERS)
    scheduler.tick(SETTLES)
    scheduler.now = 1.6
    scheduler.drop("server-0")
    assert not any(scheduler.views.values())
    scheduler.tick(3.0)
    assert not any(scheduler.views.values()), "the time of the others is over, but nobody is there who misses them"
    if is_back:
        come_back(scheduler, view(), *MEMBERS)
    scheduler.tick(1.6 + SETTLES)
    assert scheduler.views["worker-9"][-1].founder == (1 if is_back else 2)


# --- who has joined, and is late ---


@pytest.fixture
def goes_on(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler that was started again, and goes on with a cluster; nobody has heard of others."""
    scheduler = make_scheduler(workers=1, servers=2, incarnation=2, max_workers=3)
    come_back(scheduler, view(joined=(m.WorkerEntry(1, "worker-1", 1, "left", "left in good order"),)), *MEMBERS)
    return scheduler


def test_who_alone_has_heard_that_it_has_joined_gets_the_rank_that_it_was_told(goes_on: Scheduler) -> None:
    assert joins(goes_on, 8, rank=2, name="worker-2").answer is None
    assert workers(goes_on, "worker-2")[2] == ("worker-2", 1, "joining")


def test_who_alone_has_heard_that_it_has_come_again_gets_its_rank(goes_on: Scheduler) -> None:
    assert joins(goes_on, 8, rank=1, incarnation=2).answer is None
    assert workers(goes_on, "worker-1")[1] == ("worker-1", 2, "joining")


def test_who_was_told_a_rank_that_is_another_s_by_now_is_refused(goes_on: Scheduler) -> None:
    goes_on.register("worker-9")
    late = joins(goes_on, 8, rank=2, name="worker-2")
    assert isinstance(late.error, StaleEpochError)
    assert str(late.error) == "the cluster has gone on without this process of worker-2"


# --- two clusters ---


@pytest.fixture
def another(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler of a cluster that has begun when no member of an earlier one was back in time."""
    scheduler = make_scheduler(
        workers=1, servers=2, incarnation=2, replication=2, max_workers=4, on_worker_loss="respawn"
    )
    scheduler.form(*MEMBERS)
    return scheduler


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("worker-1", {"number": 1}),
        ("worker-0", {"incarnation": 9}),
        ("worker-0", {"incarnation": 1}),
        ("server-7", {"number": -1}),
        ("server-1", {"number": 1, "incarnation": 9}),
    ],
    ids=["a worker", "a later process of a name", "a process of a name", "a spare", "a server"],
)
def test_members_of_an_earlier_cluster_are_refused(another: Scheduler, name: str, facts: dict[str, Any]) -> None:
    before = [len(another.views[each]) for each in MEMBERS]
    late = another.register(name, epoch=7, again=name in another.peers, **{"number": 0, **facts})
    assert isinstance(late.error, StaleEpochError)
    assert str(late.error) == f"{name} belongs to an earlier cluster: it was not back when this one began without it"
    assert [len(another.views[each]) for each in MEMBERS] == before


@pytest.mark.parametrize("is_first", [True, False], ids=["the earlier is back first", "the later is back first"])
def test_of_two_clusters_the_later_one_goes_on(make_scheduler: type[Scheduler], *, is_first: bool) -> None:
    """A third scheduler meets members of both."""
    scheduler = make_scheduler(workers=1, servers=2, incarnation=3)
    known = view(3, founder=2)
    if not is_first:
        come_back(scheduler, known, "server-0")
    late = scheduler.register("worker-7", epoch=7, founder=1)
    if is_first:
        scheduler.ask("worker-7", view(7, founder=1))
        come_back(scheduler, known, "server-0")
    assert isinstance(late.error, StaleEpochError)
    assert str(late.error).startswith("worker-7 belongs to an earlier cluster than ")
    come_back(scheduler, known, "server-1", "worker-0")
    heard = scheduler.views["worker-0"][-1]
    assert (heard.founder, heard.epoch, len(heard.workers)) == (2, 1004, 1)
    assert not scheduler.views["worker-7"]


# --- places ---


def test_a_place_that_both_schedulers_have_asked_for_is_that_of_the_cluster(make_scheduler: type[Scheduler]) -> None:
    """The first view had come to one place only; all others ask anew, and so does the scheduler."""
    places = ("server-0/2.0", "server-1/3.0")
    scheduler = restarted(make_scheduler, num_places=4)
    scheduler.form(*MEMBERS)
    assert scheduler.register(places[1], Role.SERVER, standby=3).answer is None
    known = view(1)
    known.servers += tuple(
        m.ServerEntry(index, name, 1, "127.0.0.1", 9000, process=name.partition("/")[0])
        for index, name in enumerate(places, 2)
    )
    assert scheduler.register(places[0], Role.SERVER, epoch=1, number=2, standby=2).answer is None
    scheduler.ask(places[0], known)
    scheduler.tick(SETTLES)
    heard = scheduler.views["worker-0"][-1]
    assert (heard.epoch, heard.founder) == (1501, 1)
    assert [(each.name, each.state) for each in heard.servers] == [
        *((name, "alive") for name in ("server-0", "server-1")),
        *((name, "alive") for name in places),
    ]
    assert not any(isinstance(each, ef.Refuse | ef.Disconnect) for each in scheduler.effects)
