"""A scheduler that did not run for a while, because it was stopped or starved: nobody is lost by that."""

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


def test_one_that_stays_silent_is_lost_a_heartbeat_later(scheduler: Scheduler) -> None:
    scheduler.tick(GOES_ON)
    scheduler.beat("worker-0", "server-0")
    scheduler.tick(GOES_ON + 0.5)
    assert states(scheduler) == ["alive", "lost", "alive"]


def test_the_silence_of_all_is_a_loss_a_heartbeat_after_the_death_timeout(scheduler: Scheduler) -> None:
    scheduler.tick(STOPPED + 2.0)
    scheduler.tick(STOPPED + 2.5)
    assert {member.state for member in scheduler.machine._members.by_name.values()} == {"lost"}
