"""Async updates on a server: every push on its own, in the order of arrival, and nobody waits for anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core.server.rounds.rounds import MAX_OPEN_PUSHES
from aiokv.errors import MembershipError, ProtocolError, RoundTimeoutError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Like, Server


@pytest.fixture
def server(make_server: type[Server]) -> Server:
    """An async server with three workers and the key `w` = 0."""
    rig = make_server(policy="asp")
    rig.init()
    return rig


def test_each_push_is_an_update_of_its_own(server: Server) -> None:
    assert [server.push(rank).answer for rank in (2, 2, 0)] == [m.Done(1), m.Done(2), m.Done(3)]
    assert server.value() == 3.0


def test_updates_are_applied_in_the_order_of_arrival(server: Server, like: type[Like]) -> None:
    for rank in (2, 0, 1):
        server.push(rank)
    assert server.seen(ef.Apply) == [
        like(ef.Apply, version=version, ranks=[rank]) for version, rank in ((1, 2), (2, 0), (3, 1))
    ]
    assert not server.seen(ef.Fold)


def test_pushes_queue_up_behind_an_update_that_takes_long(server: Server) -> None:
    server.hold = True
    pushes = [server.push(rank, value) for rank, value in ((1, 1.0), (0, 10.0), (1, 100.0))]
    values = []
    while server.applying:
        assert len(server.applying) == 1
        server.finish()
        values.append(server.value())
    assert values == [1.0, 11.0, 111.0]
    assert [push.answer for push in pushes] == [m.Done(1), m.Done(2), m.Done(3)]


def test_pull_after_a_push_holds_that_push(server: Server) -> None:
    server.hold = True
    server.push(0)
    server.push(1)
    server.push(0)
    pull = server.pull(0)
    server.finish()
    server.finish()
    assert pull.pending
    server.finish()
    assert (pull.answer, pull.payload) == (m.Value(3), 3.0)


def test_pull_without_a_push_never_waits(server: Server) -> None:
    server.hold = True
    server.push(1)
    pull = server.pull(0)
    assert (pull.answer, pull.payload) == (m.Value(0), 0.0)
    server.finish()


def test_pushpull_returns_the_value_that_its_push_made(server: Server) -> None:
    server.push(1, 5.0)
    asked = server.push(0, 1.0, want_value=True)
    assert (asked.answer, asked.payload) == (m.Value(2), 6.0)


def test_scenario_59_staleness_is_the_number_of_versions_since_the_one_that_was_read(server: Server) -> None:
    # Scenario 59: version read 0, the store is at 5.
    for _ in range(5):
        server.push(1, read_version=0)
    server.push(0, read_version=0)
    server.push(0, read_version=6)
    assert [apply.staleness for apply in server.seen(ef.Apply)[5:]] == [[5], [0]]


def test_staleness_counts_up_to_when_the_update_is_applied(server: Server) -> None:
    server.hold = True
    for rank in range(3):
        server.push(rank, read_version=0)
    while server.applying:
        server.finish()
    assert [apply.staleness for apply in server.seen(ef.Apply)] == [[0], [1], [2]]


def test_scenario_5_others_go_on_after_one_has_left(make_server: type[Server]) -> None:
    # Scenario 5: rank 0 pushes 1 and leaves, rank 1 pushes five times.
    server = make_server(workers=2, policy="asp")
    server.init()
    server.push(0)
    server.leave(0)
    for _ in range(5):
        assert isinstance(server.push(1).answer, m.Done)
    assert server.value() == 6.0


def test_others_go_on_after_one_is_lost(server: Server) -> None:
    server.hold = True
    server.push(0)
    waiting = server.push(1)
    server.lose(2)
    server.finish()
    server.finish()
    assert waiting.answer == m.Done(2)
    server.push(1)
    pull = server.pull(1)
    server.finish()
    assert pull.payload == 3.0


def test_worker_that_is_lost_changes_nothing_any_more(server: Server) -> None:
    server.push(2)
    server.lose(2)
    assert isinstance(server.push(2, 100.0).answer, MembershipError)
    assert server.value() == 1.0


def test_push_of_a_worker_that_has_left_still_counts(server: Server) -> None:
    # It was sent before; on another connection than the scheduler's word it may come later.
    server.leave(2)
    assert server.push(2).answer == m.Done(1)


def test_update_that_takes_too_long_ends_the_wait(server: Server) -> None:
    server.hold = True
    server.push(0)
    push = server.push(1, timeout=1.0)
    server.tick(1.0)
    assert isinstance(push.error, RoundTimeoutError)
    assert push.error.details == {"ranks": [], "key": "w", "round": 2}
    server.finish()
    server.finish()
    assert server.value() == 2.0


def test_open_pushes_of_a_worker_are_bounded(server: Server) -> None:
    server.hold = True
    for _ in range(MAX_OPEN_PUSHES):
        assert server.push(0).pending
    assert isinstance(server.push(0).answer, ProtocolError)
    assert server.push(1).pending, "another worker's pushes are its own"
    server.finish()
    assert server.push(0).pending


def test_thousands_of_updates_leave_nothing_behind(server: Server) -> None:
    for number in range(3000):
        server.push(number % 3)
        server.pull(number % 3)
    (chunk,) = server.machine._catalog.chunks.values()
    assert server.value() == 3000.0
    assert not chunk.updates
    assert not server.machine._answers._waiters
    assert len(server.machine._deadlines) == 0
