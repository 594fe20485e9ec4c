"""A scheduler that was away for a while, stopped, starved or cut off: nobody is lost by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.core.conftest import Scheduler

NAMES = ("worker-0", "worker-1", "server-0")
STOPPED, GOES_ON = 1.0, 9.0


@pytest.fixture
def scheduler(make_scheduler: type[Scheduler]) -> Scheduler:
    """A scheduler that was stopped 1 s after it had heard all its nodes; a silent one is lost after 2 s."""
    rig = make_scheduler(workers=2, servers=1, reconnect_grace=1.0)
    rig.form(*NAMES)
    rig.now = STOPPED
    rig.beat(*NAMES)
    return rig


def states(scheduler: Scheduler) -> list[str]:
    """Return the states of all members in the newest view that anybody has."""
    view = max((views[-1] for views in scheduler.views.values()), key=lambda view: view.epoch)
    return [worker.state for worker in view.workers] + [server.state for server in view.servers]


def test_silence_in_its_own_absence_is_no_loss(scheduler: Scheduler) -> None:
    """Its timer is the first thing that goes on; what the nodes have said lies in its sockets."""
    scheduler.tick(GOES_ON)
    scheduler.beat(*NAMES)
    scheduler.tick(GOES_ON + 1.0)
    assert states(scheduler) == ["alive"] * 3


def test_nodes_that_had_given_it_up_have_time_to_come_back(scheduler: Scheduler) -> None:
    scheduler.now = GOES_ON
    for name in NAMES:
        scheduler.drop(name)
    scheduler.tick(GOES_ON + 1.5)
    for name in NAMES:
        assert scheduler.register(name, again=True, epoch=1).answer is None
    scheduler.tick(GOES_ON + 3.0)
    assert states(scheduler) == ["alive"] * 3


def test_one_that_stays_silent_is_lost_after_the_time_in_which_it_could_have_come_back(scheduler: Scheduler) -> None:
    scheduler.tick(GOES_ON)
    for seconds, state in ((0.5, "alive"), (1.5, "alive"), (2.0, "lost")):
        scheduler.now = GOES_ON + seconds - 0.5
        scheduler.beat("worker-0", "server-0")
        scheduler.tick(GOES_ON + seconds)
        assert states(scheduler) == ["alive", state, "alive"]


def test_silence_of_all_is_taken_for_its_own(scheduler: Scheduler) -> None:
    """The network may be out where it is; the others train on, and come back one after the other."""
    for second in range(3, 31):
        scheduler.tick(float(second))
    assert states(scheduler) == ["alive"] * 3
    for second, name in enumerate(NAMES, start=31):
        scheduler.now = second - 0.5
        scheduler.drop(name)
        assert scheduler.register(name, again=True, epoch=1).answer is None
        scheduler.beat(*NAMES[: second - 30])
        scheduler.tick(float(second) - 0.1)
    assert states(scheduler) == ["alive"] * 3


def test_the_silence_of_all_is_a_loss_after_a_minute(scheduler: Scheduler) -> None:
    for second in range(2, 60):
        scheduler.tick(STOPPED + second)
    assert {member.state for member in scheduler.machine._members.by_name.values()} == {"alive"}
    scheduler.tick(STOPPED + 60.0)
    assert {member.state for member in scheduler.machine._members.by_name.values()} == {"lost"}
