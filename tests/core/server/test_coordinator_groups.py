"""Keys that belong to some of the workers, and keys that are deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.errors import KeyDeletedError, MembershipError, ProtocolError, UnknownKeyError, WorkerLostError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server


# --- groups ---


def test_round_of_a_group_waits_for_its_ranks_alone(server: Server) -> None:
    assert server.init(group=(1, 2), rank=2).pending, "it waits for the group's first rank"
    server.pushed.clear()
    first = server.ask(1, m.Init("w", (1,), "float32", 0, 1, "bsp", 5.0, (1, 2), b"0"), 0.0)
    assert first.answer == m.Done()
    pushed = server.push(2)
    assert pushed.pending
    assert server.push(1).answer == pushed.answer == m.Done(1)
    assert server.value() == 2.0


def test_mean_of_a_group_is_over_its_ranks(server: Server) -> None:
    server.ask(0, m.SetOptimizer("assign", {}, "mean_of_world", 5.0))
    server.init(group=(0, 2))
    for rank in (0, 2):
        server.push(rank)
    assert [apply.divisor for apply in server.seen(ef.Apply)] == [2]


def test_rank_outside_a_group_may_read_and_not_write(server: Server) -> None:
    server.init(group=(0, 2), value=5.0)
    for refused in (server.init(group=(0, 2), rank=1), server.push(1)):
        assert isinstance(refused.error, MembershipError)
        assert "rank 1 (worker-1) is none of them" in str(refused.error)
    assert server.pull(1).answer == m.Value(0)


@pytest.mark.parametrize(
    ("group", "error"),
    [((0, 9), MembershipError), ((2, 0), ProtocolError), ((0, 1, 2), ProtocolError)],
    ids=["no such rank", "not sorted", "all"],
)
def test_group_that_cannot_be_is_refused(server: Server, group: tuple[int, ...], error: type[Exception]) -> None:
    assert isinstance(server.init(group=group).answer, error)
    assert server.init().answer == m.Done()


def test_key_has_one_group(server: Server) -> None:
    server.init()
    other = server.init(rank=1, group=(0, 1)).error
    assert isinstance(other, MembershipError)
    assert other.details == {"key": "w", "expected": "all", "got": "[0, 1]"}


def test_loss_outside_a_group_harms_it_not(server: Server) -> None:
    server.init(group=(0, 2))
    pushed = server.push(0)
    server.lose(1)
    assert pushed.pending
    server.lose(2)
    assert isinstance(pushed.answer, WorkerLostError)


def test_init_whose_root_is_lost_is_refused_by_group(server: Server) -> None:
    waiting = server.init(rank=2, group=(1, 2))
    other = server.init("v", rank=2)
    server.lose(1)
    assert isinstance(waiting.answer, WorkerLostError)
    assert waiting.error.details["ranks"] == [1]
    assert other.pending


# --- deleting ---


def delete(server: Server, *keys: str, rank: int = 0) -> Any:
    return server.ask(rank, m.Delete(keys, 5.0))


def test_scenario_29_deleted_key_can_be_made_again_with_another_shape(server: Server) -> None:
    server.init()
    server.push(0)
    assert delete(server, "w").answer == m.Done()
    assert isinstance(server.push(0, sequence=2).answer, UnknownKeyError)
    server.values.clear()
    server.pushed.clear()
    assert server.init(shape=(2,), stop=2).answer == m.Done()
    assert server.pull(1, shape=(2,), stop=2).answer == m.Value(0)


def test_scenario_29_calls_for_a_deleted_key_end(server: Server) -> None:
    server.init()
    pending = [server.push(0), server.pull(0), server.push(1)]
    delete(server, "w")
    for asked in pending:
        assert isinstance(asked.error, KeyDeletedError)
        assert asked.error.details == {"key": "w"}
    assert server.seen(ef.Forget) == [ef.Forget("w", 0)]


def test_key_is_deleted_after_the_update_that_is_under_way(server: Server) -> None:
    server.init()
    server.hold = True
    pushes = [server.push(rank) for rank in range(3)]
    ahead = server.push(0)
    deleted = delete(server, "w")
    assert deleted.pending
    server.finish()
    assert deleted.answer == m.Done()
    assert [push.answer for push in pushes] == [m.Done(1)] * 3
    assert isinstance(ahead.answer, KeyDeletedError)


def bundle_of_three(server: Server) -> None:
    keys, shapes = ("a", "b", "c"), ((1,), (2,), ())
    server.bundle_size = 4
    server.ask(0, m.InitBundle(keys, shapes, "float32", "bsp", 5.0, (), (b"1", b"2", b"3")), 0.0)


def push_bundle(server: Server, rank: int) -> Any:
    return server.ask(rank, m.PushBundle(0, 1, 0, False, 5.0), 1.0)


def test_keys_of_a_bundle_can_be_deleted(server: Server) -> None:
    bundle_of_three(server)
    pushed = push_bundle(server, 0)
    assert delete(server, "a", "b").answer == m.Done()
    assert isinstance(pushed.answer, KeyDeletedError)
    assert isinstance(push_bundle(server, 1).answer, UnknownKeyError)
    assert server.pull(1, key="c", shape=()).answer == m.Value(0), "the other key goes on"


def test_keys_of_a_bundle_are_deleted_after_its_update(server: Server) -> None:
    bundle_of_three(server)
    server.hold = True
    pushes = [push_bundle(server, rank) for rank in range(3)]
    deleted = delete(server, "a")
    assert deleted.pending
    server.finish()
    assert [push.answer for push in pushes] == [m.Done(1)] * 3
    assert deleted.answer == m.Done()


def test_deleting_what_is_not_here_is_no_error(server: Server) -> None:
    server.init()
    assert delete(server, "other").answer == m.Done()
    assert server.pull(0).answer == m.Value(0)
