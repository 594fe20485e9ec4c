"""A server's row-sparse keys: their rounds are those of dense keys, and rows are checked before they count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.errors import (
    AiokvError,
    AlreadyInitializedError,
    ConfigError,
    KeyDeletedError,
    MembershipError,
    OptimizerError,
    ProtocolError,
    RoundTimeoutError,
    SpecMismatchError,
    UnknownKeyError,
    WorkerLostError,
)
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Server

SUM = m.SetOptimizer("accumulate", {}, "sum", 5.0)


def answers(*asked: Asked) -> list[Any]:
    """Return what each request was answered."""
    return [each.answer for each in asked]


def test_a_round_closes_when_every_rank_has_pushed_rows_even_none(server: Server) -> None:
    server.init_rows({1: 5.0})
    first, second = server.push_rows(0, {1: 1.0, 9: 2.0}), server.push_rows(1, {})
    assert first.pending
    assert second.pending
    third = server.push_rows(2, {9: 4.0})
    assert answers(first, second, third) == [m.Done(1)] * 3
    assert server.pull_rows(2, 1, 2, 9).payload == [6, 0, 6]


def test_contributions_are_summed_in_rank_order_whatever_the_order_of_arrival(server: Server) -> None:
    """1 + 1e8 - 1e8 is 0 in float32; backwards it is 1."""
    server.init_rows()
    for rank in (2, 0, 1):
        server.push_rows(rank, {3: (1.0, 1e8, -1e8)[rank]})
    assert server.pull_rows(0, 3).payload == [0]
    (apply,) = server.seen(ef.ApplyRows)
    assert apply.update.ranks == [0, 1, 2]
    assert apply.update.slot is None


def test_async_pushes_are_applied_one_by_one(make_server: type[Server]) -> None:
    server = make_server(2, "asp")
    server.init_rows()
    assert server.push_rows(1, {3: 1.0}).answer == m.Done(1)
    assert server.push_rows(1, {3: 1.0}).answer == m.Done(2)
    assert server.pull_rows(0, 3).payload == [2]


def test_a_pull_waits_until_the_ranks_own_push_is_in_the_value(server: Server) -> None:
    server.init_rows()
    server.push_rows(0, {3: 1.0})
    pull = server.pull_rows(0, 3, 4)
    early = server.pull_rows(1, 3)
    assert pull.pending
    assert early.payload == [0]
    server.push_rows(1, {})
    server.push_rows(2, {})
    assert pull.answer == m.Value(1)
    assert pull.payload == [1, 0]


def test_others_wait_for_the_roots_init_and_must_agree_with_it(server: Server) -> None:
    waiting, other = server.init_rows(rank=1), server.init_rows(rank=2, lazy=False)
    assert waiting.pending
    server.init_rows({2: 1.0})
    assert waiting.answer == m.Done()
    assert isinstance(other.error, SpecMismatchError)
    assert "lazy=False" in str(other.error)


def test_the_same_init_again_is_no_error_and_another_one_is(server: Server) -> None:
    server.init_rows({2: 1.0})
    assert server.init_rows({2: 1.0}).answer == m.Done()
    assert isinstance(server.init_rows({2: 3.0}).error, AlreadyInitializedError)
    seeded = {"name": "normal", "seed": 3}
    assert isinstance(server.init_rows({2: 1.0}, initializer=seeded).error, SpecMismatchError)
    assert isinstance(server.init("t", shape=(10,), stop=10).error, SpecMismatchError)


def test_only_the_root_brings_rows(server: Server) -> None:
    error = server.init_rows({2: 1.0}, rank=1).error
    assert isinstance(error, ProtocolError)
    assert "only rank 0" in str(error)


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"initializer": {"name": "nope"}}, ConfigError, "unknown initializer 'nope'"),
        ({"shape": ()}, SpecMismatchError, "at least one dimension"),
        ({"shape": (10, 2**25)}, SpecMismatchError, "at most 16777216"),
        ({"dtype": "complex64"}, SpecMismatchError, "not supported"),
        ({"stop": 11}, ProtocolError, "rows 0 to 11 are no part"),
        ({"start": 5, "stop": 4}, ProtocolError, "rows 5 to 4 are no part"),
        ({"policy": "nope"}, AiokvError, "nope"),
        ({"timeout": float("inf")}, ConfigError, "timeout"),
    ],
)
def test_an_init_that_can_not_be_is_refused(
    server: Server, changes: dict[str, Any], kind: type[AiokvError], reason: str
) -> None:
    error = server.init_rows(**changes).error
    assert isinstance(error, kind)
    assert reason in str(error)
    assert server.init_rows().answer == m.Done()


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"facts": {"span": (-1, 3)}}, SpecMismatchError, "row -1 is not one of 0 to 9"),
        ({"facts": {"span": (3, 10)}}, SpecMismatchError, "row 10 is not one of 0 to 9"),
        ({"facts": {"span": None}}, ProtocolError, "increasing"),
        ({"facts": {"nbytes": 13}}, ProtocolError, "13 bytes for 1 rows"),
        ({"count": 2, "total": 2}, ProtocolError, "12 bytes for 2 rows"),
        ({"count": -1}, ProtocolError, "for -1 rows"),
        ({"total": 0}, ProtocolError, "after 0 of 0"),
        ({"first": 1, "total": 2}, ProtocolError, "1 rows should have come before, got 0"),
        ({"shape": (10, 1)}, SpecMismatchError, "shape and dtype of a key never change"),
        ({"stop": 9}, ProtocolError, "no chunk of this server"),
        ({"sequence": 2}, ProtocolError, "expected push 1"),
        ({"read_version": 1}, ProtocolError, "read version 1"),
        ({"key": "unknown"}, UnknownKeyError, "call init first"),
    ],
)
def test_a_push_that_can_not_be_is_refused_and_changes_nothing(
    server: Server, changes: dict[str, Any], kind: type[AiokvError], reason: str
) -> None:
    server.init_rows()
    error = server.push_rows(0, {3: 1.0}, **changes).error
    assert isinstance(error, kind)
    assert reason in str(error)
    for rank in range(3):
        server.push_rows(rank, {3: 1.0})
    assert server.pull_rows(0, 3).payload == [3]


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"rows": b"123"}, ProtocolError, "3 bytes of row ids"),
        ({"shape": (10, 2**21), "rows": bytes(8 * 9)}, ProtocolError, "too many rows at once"),
        ({"stop": 9}, ProtocolError, "no chunk of this server"),
    ],
)
def test_a_pull_that_can_not_be_is_refused(
    server: Server, changes: dict[str, Any], kind: type[AiokvError], reason: str
) -> None:
    server.init_rows()
    error = server.pull_rows(0, 3, **changes).error
    assert isinstance(error, kind)
    assert reason in str(error)


def test_rows_of_a_pull_are_checked(server: Server) -> None:
    server.init_rows()
    assert isinstance(server.pull_rows(0, 3, 10).error, SpecMismatchError)
    assert server.pull_rows(0).payload == []


def test_a_pull_waits_for_a_table_until_its_deadline(server: Server) -> None:
    early, late, dense = server.pull_rows(1, 3), server.pull_rows(1, 3, key="u"), server.pull(1, key="t")
    assert early.pending
    server.init_rows({3: 3.0})
    assert early.payload == [3]
    assert isinstance(dense.error, SpecMismatchError)
    server.tick(6.0)
    assert isinstance(late.error, UnknownKeyError)


def test_a_dense_pull_of_another_chunk_than_the_tables_is_refused_at_once(server: Server) -> None:
    server.init_rows(start=5, key="t")
    assert isinstance(server.pull(1, key="t").error, SpecMismatchError)


def test_dense_and_row_sparse_keys_are_not_used_as_each_other(server: Server) -> None:
    server.init_rows()
    server.init("w", shape=(10,), stop=10)
    push = server.push(0, key="t", shape=(10,), stop=10)
    for error in (push.error, server.pull(0, key="t", shape=(10,), stop=10).error):
        assert isinstance(error, SpecMismatchError)
        assert "row_sparse_pull" in str(error)
    for error in (server.push_rows(0, {}, key="w").error, server.pull_rows(0, key="w").error):
        assert isinstance(error, SpecMismatchError)
        assert "dense" in str(error)


def test_a_contribution_in_several_messages_counts_when_the_last_is_there(server: Server) -> None:
    server.init_rows()
    server.push_rows(0, {9: 1.0})
    server.push_rows(1, {})
    first = server.push_rows(2, {1: 1.0, 2: 2.0}, total=4)
    second = server.push_rows(2, {5: 5.0}, first=2, total=4)
    assert server.pull_rows(0, 1, at_least=0).answer == m.Value(0)
    assert first.pending, "it would not come again, if the connection ended now"
    assert server.push_rows(2, {9: 9.0}, first=3, total=4).answer == m.Done(1)
    assert answers(first, second) == [m.Done(), m.Done()]
    assert server.pull_rows(0, 1, 2, 5, 9).payload == [1, 2, 5, 10]


def test_initial_values_in_several_messages(server: Server) -> None:
    first = server.init_rows({1: 1.0}, total=2, digest=b"d")
    early = server.pull_rows(0, 1)
    assert early.pending, "the key is not there before all of it is"
    assert first.pending
    assert server.init_rows({2: 2.0}, first=1, total=2, digest=b"d").answer == m.Done()
    assert first.answer == m.Done()
    assert early.payload == [1]
    assert server.pull_rows(0, 1, 2).payload == [1, 2]


def test_a_contribution_that_begins_anew_drops_what_was_not_completed(server: Server) -> None:
    server.init_rows()
    server.push_rows(0, {1: 1.0}, total=2)
    server.push_rows(1, {})
    server.push_rows(2, {})
    assert server.push_rows(0, {2: 2.0}).answer == m.Done(1)
    assert server.pull_rows(0, 1, 2).payload == [0, 2]


@pytest.mark.parametrize("piece", [({1: 1.0}, 1), ({5: 1.0}, 2)], ids=["rows are not increasing", "a gap"])
def test_a_message_that_does_not_follow_the_one_before_is_refused(
    server: Server, piece: tuple[dict[int, float], int]
) -> None:
    server.init_rows()
    server.push_rows(0, {1: 1.0}, total=3)
    assert isinstance(server.push_rows(0, piece[0], first=piece[1], total=3).error, ProtocolError)


def test_what_a_lost_connection_has_not_completed_is_freed(server: Server, like: Any) -> None:
    server.init_rows()
    server.push_rows(0, {1: 1.0}, total=2)
    server.push_rows(1, {1: 1.0}, total=2)
    assert len(server.slots) == 2
    server.lose_peer(0)
    assert len(server.slots) == 1


def test_a_refused_contribution_in_several_messages_is_freed(server: Server) -> None:
    server.init_rows()
    server.push_rows(0, {1: 1.0}, total=2)
    assert isinstance(server.push_rows(0, {2: 1.0}, first=1, total=2, sequence=7).error, ProtocolError)
    assert not server.slots


def test_a_late_round_names_the_missing_rank_and_what_was_pushed_stays(server: Server) -> None:
    server.init_rows()
    late = server.push_rows(0, {1: 1.0}, timeout=1.0)
    pull = server.pull_rows(0, 1, timeout=2.0)
    server.push_rows(1, {1: 1.0})
    server.tick(3.0)
    for asked in (late, pull):
        assert isinstance(asked.error, RoundTimeoutError)
        assert asked.error.details["ranks"] == [2]
    assert server.push_rows(2, {}).answer == m.Done(1)
    assert server.pull_rows(0, 1).payload == [2]


def test_a_lost_rank_fails_the_round(server: Server) -> None:
    server.init_rows()
    push = server.push_rows(0, {1: 1.0})
    server.lose(2)
    assert isinstance(push.error, WorkerLostError)


def test_a_key_of_a_group_takes_no_rows_of_others(server: Server) -> None:
    server.init_rows(group=(0, 2))
    assert isinstance(server.push_rows(1, {1: 1.0}).error, MembershipError)
    server.push_rows(0, {1: 1.0})
    assert server.push_rows(2, {}).answer == m.Done(1)


def test_deleting_frees_rows_that_wait_for_a_round(server: Server) -> None:
    server.init_rows()
    push = server.push_rows(0, {1: 1.0})
    assert server.ask(0, m.Delete(("t",), 5.0)).answer == m.Done()
    assert isinstance(push.error, KeyDeletedError)
    assert not server.slots
    server.pushed.clear()
    assert isinstance(server.push_rows(0, {1: 1.0}).error, UnknownKeyError)


def test_rules_that_need_whole_tensors_are_refused_for_tables_in_both_orders(server: Server) -> None:
    lamb = m.SetOptimizer("lamb", {}, "sum", 5.0)
    server.init_rows()
    error = server.ask(0, lamb).error
    assert isinstance(error, OptimizerError)
    assert "row-sparse" in str(error)
    assert server.ask(0, SUM).answer == m.Done()


def test_a_table_is_refused_when_the_rule_needs_whole_tensors(server: Server) -> None:
    assert server.ask(0, m.SetOptimizer("lamb", {}, "sum", 5.0)).answer == m.Done()
    assert isinstance(server.init_rows().error, OptimizerError)


def test_workers_that_have_not_said_who_they_are_push_no_rows(make_server: type[Server]) -> None:
    server = make_server(attach=False)
    assert isinstance(server.push_rows(0, {1: 1.0}).error, MembershipError)
    assert not server.slots
