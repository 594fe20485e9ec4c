"""Rounds that are decided for all keys at once, on one server: who is in which, who is told what and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.rounds import decisions, open_rounds
from aiokv.core.server.rounds import rounds as core_rounds
from aiokv.errors import (
    KeyDeletedError,
    PolicyError,
    ProtocolError,
    RoundTimeoutError,
    UpdateRefusedError,
    WorkerLostError,
)
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server


@pytest.fixture
def two_of_three(make_server: type[Server]) -> Server:
    """A server with the key "w" under "k_sync:2" and three workers."""
    return server_with(make_server, "k_sync:2")


def server_with(make_server: type[Server], policy: str, workers: int = 3, keys: str = "w") -> Server:
    server = make_server(workers, policy)
    for key in keys:
        assert server.init(key).answer == m.Done()
    return server


def rounds(server: Server, key: str = "w") -> list[list[int]]:
    """Return the ranks of each update of a key."""
    return [apply.ranks for apply in server.seen(ef.Apply) if apply.key == key]


# --- who is in a round, and who is answered when ---


def test_round_is_the_first_two_and_each_is_answered_when_it_is_made(two_of_three: Server) -> None:
    server = two_of_three
    server.hold = True
    first = server.push(2, 1.0)
    assert first.pending
    second = server.push(0, 2.0)
    assert first.pending
    assert second.pending
    server.finish()
    assert first.answer == second.answer == m.Done(1)
    assert rounds(server) == [[0, 2]]
    assert server.value() == 3.0


def test_sum_is_made_in_rank_order_whoever_came_first(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:3")
    for rank in (2, 0, 1):
        server.push(rank)
    slots = [fold.source for fold in server.seen(ef.Fold)]
    assert rounds(server) == [[0, 1, 2]]
    assert [apply.staleness for apply in server.seen(ef.Apply)] == [[0, 0, 0]]
    assert len(slots) == 2


def test_contribution_that_is_late_is_dropped_and_its_worker_told(two_of_three: Server) -> None:
    server = two_of_three
    server.push(0)
    server.push(1)
    late = server.push(2, 100.0)
    assert late.answer == m.Done(1, "late")
    assert server.value() == 2.0
    assert not server.slots
    assert server.pull(2).payload == 2.0, "it goes on from the round that it was too late for"
    server.push(2, 5.0, read_version=1)
    server.push(0, read_version=1)
    assert rounds(server) == [[0, 1], [0, 2]]


def test_late_pushpull_is_answered_with_the_value_of_the_round_it_was_too_late_for(two_of_three: Server) -> None:
    server = two_of_three
    server.hold = True
    server.push(0)
    server.push(1)
    pushed, late = server.push(2), server.push(2, want_value=True)
    pull = server.pull(2)
    assert pushed.answer == m.Done(0, "late"), "a push alone brings nothing, so nothing has to be awaited"
    assert late.pending
    assert pull.pending
    server.finish()
    assert (late.answer, late.payload) == (m.Value(1, dropped="late", round=1), 2.0)
    assert (pull.answer, pull.payload) == (m.Value(1, round=1), 2.0)


def test_pull_waits_for_the_own_push_and_no_other(two_of_three: Server) -> None:
    server = two_of_three
    server.push(0)
    mine, other = server.pull(0), server.pull(1)
    assert mine.pending
    assert other.answer == m.Value(0)
    server.push(2)
    assert (mine.answer, mine.payload) == (m.Value(1, round=1), 2.0)


def test_pushpull_is_answered_with_the_value_of_its_round(two_of_three: Server) -> None:
    server = two_of_three
    pushed = server.push(1, 4.0, want_value=True)
    assert pushed.pending
    server.push(0, 1.0)
    assert (pushed.answer, pushed.payload) == (m.Value(1, round=1), 5.0)


def test_worker_that_is_late_twice_is_in_the_round_after(two_of_three: Server) -> None:
    server = two_of_three
    for number in range(2):
        server.push(0, read_version=number)
        server.push(1, read_version=number)
    assert server.push(2).answer == m.Done(2, "late")
    server.push(2, read_version=2)
    server.push(1, read_version=2)
    assert rounds(server) == [[0, 1], [0, 1], [1, 2]]


def test_third_step_closes_a_round_of_any_workers_and_only_that_one_waits_for_it(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_batch_sync:3", workers=2)
    assert server.push(0, 1.0).answer == m.Done(0)
    read = server.push(0, 2.0, want_value=True)
    assert (read.answer, read.payload) == (m.Value(0), 0.0)
    assert server.pull(0).answer == m.Value(0), "it may read, though its pushes are in no value yet"
    server.hold = True
    closes, late = server.push(1, 4.0), server.push(1, 8.0, want_value=True)
    assert closes.pending
    assert late.pending
    server.finish()
    assert closes.answer == m.Done(1)
    assert (late.answer, late.payload) == (m.Value(1, dropped="late", round=1), 7.0)
    assert rounds(server) == [[0, 0, 1]]


def test_every_second_gradient_makes_a_round_however_old(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_batch_async:2")
    for rank in (0, 1, 2, 2):
        assert isinstance(server.push(rank).answer, m.Done)
    applies = server.seen(ef.Apply)
    assert [(apply.ranks, apply.staleness) for apply in applies] == [([0, 1], [0, 0]), ([2, 2], [1, 1])]
    assert server.value() == 4.0


def test_second_step_of_a_worker_waits_for_the_next_round_under_k_async(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_async:2")
    both = [server.push(0), server.push(0)]
    server.push(1)
    assert [asked.answer for asked in both] == [m.Done(1), None]
    server.push(1)
    assert rounds(server) == [[0, 1], [0, 1]]
    assert both[1].answer == m.Done(2)


def test_contribution_that_is_too_old_is_dropped(make_server: type[Server]) -> None:
    server = server_with(make_server, "ringmaster:2")
    server.push(0)
    server.push(0, read_version=1)
    assert server.push(1).answer == m.Done(2, "stale")
    assert server.push(1, read_version=1).answer == m.Done(3)
    assert [apply.staleness for apply in server.seen(ef.Apply)] == [[0], [0], [1]]


def test_updates_are_made_in_turns(make_server: type[Server]) -> None:
    server = server_with(make_server, "round_robin")
    last = server.push(2)
    server.push(1)
    assert last.pending
    server.push(0)
    assert rounds(server) == [[0], [1], [2]]
    assert last.answer == m.Done(3)


def test_round_closes_at_its_deadline_with_those_who_are_there(make_server: type[Server]) -> None:
    server = server_with(make_server, "quorum:2:3")
    server.now = 1.0
    pushed = [server.push(0), server.push(1)]
    server.tick(3.9)
    assert pushed[0].pending
    assert server.machine.deadline() == 4.0
    server.tick(4.0)
    assert [asked.answer for asked in pushed] == [m.Done(1)] * 2
    assert server.push(2).answer == m.Done(1, "late")


def test_what_became_of_contributions_is_counted(two_of_three: Server) -> None:
    server = two_of_three
    for rank in (0, 1, 2):
        server.push(rank)
    tally = server.ask(0, m.GetTally(5.0))
    expected = {rank: m.RankTally(1, {}, {0: 1}) for rank in (0, 1)} | {2: m.RankTally(0, {"late": 1})}
    assert tally.answer == m.Tally(expected)


# --- several keys ---


def test_round_has_the_same_workers_in_every_key_whatever_the_order(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", keys="ab")
    server.push(0, key="a")
    server.push(1, key="a")
    assert server.push(2, key="b").answer == m.Done(0, "late"), "its step was late for the round that key a has closed"
    assert not rounds(server, "b"), "the round waits for the same two workers"
    one = server.push(1, key="b")
    assert one.pending
    server.push(0, key="b")
    assert rounds(server, "a") == rounds(server, "b") == [[0, 1]]
    assert one.answer == m.Done(1)


def test_key_that_a_worker_leaves_out_of_a_step_goes_on_without_it(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", workers=2, keys="ab")
    for rank in (0, 1):
        server.push(rank, 1.0, key="a")
    waiting = server.push(0, 1.0, key="b")
    assert waiting.pending, "the other worker may still push it in this step"
    server.push(1, 2.0, key="a", read_version=1)
    assert waiting.answer == m.Done(1), "what it pushes in the next step says that nothing more comes of this one"
    server.push(1, 2.0, key="b", clock=2)
    assert rounds(server, "b") == [[0]]
    server.push(0, key="a", read_version=1)
    server.push(0, 4.0, key="b", clock=2, read_version=1)
    assert rounds(server, "b") == [[0], [0, 1]]
    assert server.value("b") == 7.0


def test_key_that_nobody_pushes_in_a_step_has_no_version_of_that_round(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", workers=2, keys="ab")
    for number in (1, 2):
        for rank in (0, 1):
            server.push(rank, key="a", clock=number, read_version=number - 1)
    for rank in (0, 1):
        assert server.push(rank, key="b", clock=3).pending is (rank == 0), "no gradient is older than the newest value"
    assert rounds(server, "b") == [[0, 1]]
    assert [apply.version for apply in server.seen(ef.Apply) if apply.key == "b"] == [1]


def test_key_that_is_pushed_in_every_other_step_is_never_late(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", workers=2, keys="ab")
    for number in range(1, 7):
        for rank in (0, 1):
            if number % 2:
                server.push(rank, key="b", clock=number, read_version=number // 2)
            server.push(rank, key="a", clock=number, read_version=number - 1)
    assert rounds(server, "a") == [[0, 1]] * 6
    assert rounds(server, "b") == [[0, 1]] * 3


def test_worker_is_late_at_a_key_that_has_the_round_before_it(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", keys="ab")
    for rank in (0, 1):
        server.push(rank, key="a")
    server.push(0, key="b")
    assert server.push(2, key="b").answer == m.Done(0, "late")


def test_key_that_comes_later_begins_with_the_round_of_its_first_push(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", workers=2)
    for number in (1, 2, 3):
        for rank in (0, 1):
            server.push(rank, clock=number, read_version=number - 1)
    server.init("late")
    pushed = [server.push(rank, key="late", clock=3) for rank in (0, 1)]
    assert [asked.answer for asked in pushed] == [m.Done(1)] * 2
    assert rounds(server, "late") == [[0, 1]]


def test_contribution_to_a_round_that_is_over_here_is_in_the_next_one(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_async:1", workers=2)
    server.push(1)
    server.push(0)
    server.init("late")
    server.push(0, 1.0, key="late", clock=1)
    assert rounds(server, "late") == [[0]]
    server.push(1, 2.0, key="late", clock=1)
    assert rounds(server, "late") == [[0]]
    server.push(1, clock=2)
    server.push(1, 4.0, key="late", clock=2)
    assert rounds(server, "late") == [[0], [1, 1]]
    assert server.value("late") == 7.0


def test_keys_of_another_group_have_rounds_of_their_own(make_server: type[Server]) -> None:
    server = make_server(3, "k_sync:2")
    server.init("all")
    server.init("some", group=(0, 2))
    server.push(1, key="all")
    server.push(0, key="some")
    server.push(0, key="all")
    assert rounds(server, "all") == [[0, 1]]
    assert not rounds(server, "some")
    server.push(2, key="some")
    assert rounds(server, "some") == [[0, 2]]


def test_small_keys_are_not_put_together(make_server: type[Server]) -> None:
    server = make_server(1, "k_sync:1")
    message = m.InitBundle(("a", "b"), ((1,), (1,)), "float32", "k_sync:1", 5.0, (), (b"1", b"2"))
    server.bundle_size = 2
    assert isinstance(server.ask(0, message, 1.0).error, PolicyError)


# --- other rules, other storage ---


def test_rows_are_summed_for_the_workers_of_the_round(make_server: type[Server]) -> None:
    server = make_server(3, "k_sync:2")
    server.init_rows()
    server.push_rows(2, {1: 1.0, 3: 1.0})
    server.push_rows(1, {1: 2.0})
    assert server.push_rows(0, {1: 100.0}).answer == m.Done(1, "late")
    assert server.pull_rows(0, 1, 2, 3).payload == [3.0, 0.0, 1.0]


def test_late_rows_that_are_none_free_nothing(make_server: type[Server]) -> None:
    server = make_server(1, "ringmaster:1")
    server.init_rows()
    server.push_rows(0, {1: 1.0})
    assert server.push_rows(0, {}).answer == m.Done(1, "stale")


def test_median_is_that_of_the_workers_of_the_round(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:3", workers=4)
    server.ask(0, m.SetOptimizer("sgd", {}, "median", 5.0))
    for rank, value in ((3, 5.0), (0, 1.0), (1, 100.0)):
        server.push(rank, value)
    assert server.value() == 5.0
    assert rounds(server) == [[0, 1, 3]]


def test_norms_come_before_the_update_of_a_round(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2")
    server.ask(0, m.SetOptimizer("lamb", {}, "sum", 5.0))
    pushed = [server.push(rank) for rank in (0, 2)]
    (wish,) = server.seen(ef.Norms)
    late = server.push(1, want_value=True)
    assert late.pending
    server.handle(st.Normed("w", 0, wish.version, wish.phase, [(1.0, 1.0)], None))
    assert [asked.answer for asked in pushed] == [m.Done(1)] * 2
    assert late.answer == m.Value(1, dropped="late", round=1)


def test_update_that_is_refused_counts_as_a_round(two_of_three: Server) -> None:
    server = two_of_three
    server.ask(0, m.SetOptimizer("lamb", {}, "sum", 5.0))
    pushed = [server.push(rank) for rank in (0, 2)]
    server.handle(st.Normed("w", 0, 1, 0, [], UpdateRefusedError("broken", key="w", round=1)))
    assert all(isinstance(asked.error, UpdateRefusedError) for asked in pushed)
    assert server.push(1).answer == m.Done(1, "late")
    assert server.pull(0).answer == m.Value(1, round=1)


# --- members ---


def test_round_closes_when_fewer_members_make_all(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:3")
    pushed = [server.push(rank) for rank in (0, 1)]
    assert pushed[0].pending
    server.leave(2)
    assert [asked.answer for asked in pushed] == [m.Done(1)] * 2


def test_step_of_who_has_left_counts_where_it_came_and_is_not_awaited_where_not(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", keys="ab")
    server.push(2, key="a")
    one = [server.push(0, key=key) for key in "ab"]
    assert rounds(server, "a") == [[0, 2]]
    assert one[1].pending
    server.leave(2)
    assert one[1].answer == m.Done(1)
    assert rounds(server, "b") == [[0]]


def test_round_needs_nobody_who_is_lost_while_enough_are_left(two_of_three: Server) -> None:
    server = two_of_three
    server.lose(1)
    pushed = [server.push(rank) for rank in (0, 2)]
    assert [asked.answer for asked in pushed] == [m.Done(1)] * 2


def test_who_waits_for_a_round_that_too_few_are_left_for_is_told(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:3")
    pushed = server.push(0, want_value=True)
    pull = server.pull(0)
    server.lose(1)
    for asked in (pushed, pull):
        assert isinstance(asked.error, WorkerLostError)
        assert asked.error.details["ranks"] == [1]
        assert "round 1 of policy k_sync:3" in str(asked.error)
    second = server.push(2)
    assert isinstance(second.error, WorkerLostError), "also who comes later"
    assert isinstance(server.pull(2).error, WorkerLostError)
    server.states.clear()
    server.publish()
    server.attach(1)
    assert server.push(1).answer == m.Done(1), "what was pushed has stayed counted"
    assert rounds(server) == [[0, 1, 2]]


def test_lost_worker_that_is_in_a_round_but_not_in_every_key_holds_it_up(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", keys="ab")
    server.push(1, key="a")
    pushed = server.push(0, key="b")
    server.push(0, key="a")
    pull, late = server.pull(0, key="b"), server.push(2, key="b", want_value=True)
    server.lose(1)
    for asked in (pushed, pull, late):
        assert isinstance(asked.error, WorkerLostError)
        assert asked.error.details == {"ranks": [1], "key": "b", "round": 1}
    assert isinstance(server.pull(0, key="b").error, WorkerLostError), "also who comes later"
    assert server.pull(0, key="a").answer == m.Value(1, round=1)


def test_connection_that_ends_leaves_what_was_pushed(two_of_three: Server) -> None:
    server = two_of_three
    server.push(0, want_value=True)
    server.lose_peer(0)
    server.push(2)
    assert rounds(server) == [[0, 2]]


def test_connection_that_ends_before_its_contribution_is_dropped_changes_nothing(two_of_three: Server) -> None:
    server = two_of_three
    server.hold = True
    server.push(0)
    server.push(1)
    server.push(2, want_value=True)
    server.lose_peer(2)
    server.finish()
    assert server.value() == 2.0
    assert not server.slots


def test_connection_that_ends_before_its_step_is_decided_changes_nothing(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_async:2")
    server.push(0)
    server.push(0, want_value=True)
    server.lose_peer(0)
    server.push(1)
    server.push(2)
    assert rounds(server) == [[0, 1], [0, 2]]


# --- waits that end in an error ---


def test_deadline_says_who_could_still_close_the_round(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", workers=3)
    pushed, pull = server.push(1), server.pull(1)
    server.tick(5.0)
    for asked in (pushed, pull):
        assert isinstance(asked.error, RoundTimeoutError)
        assert asked.error.details["ranks"] == [0, 2]
        assert "the round needs 1 more of rank 0 (worker-0), 2 (worker-2)" in str(asked.error)
    server.push(0)
    assert rounds(server) == [[0, 1]], "what was pushed has stayed counted"


def test_deadline_says_whose_contribution_is_missing_in_a_closed_round(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", keys="ab")
    server.push(1, key="a")
    server.push(0, key="a")
    pushed = server.push(0, key="b")
    server.tick(5.0)
    assert pushed.error.details["ranks"] == [1]
    assert "no contribution from rank 1 (worker-1) within 5 s" in str(pushed.error)


def test_deadline_while_an_update_is_made_says_so(two_of_three: Server) -> None:
    server = two_of_three
    server.hold = True
    pushed = [server.push(rank) for rank in (0, 1)]
    server.tick(5.0)
    for asked in pushed:
        assert asked.error.details["ranks"] == []
        assert "its update is not applied yet" in str(asked.error)


def test_deadline_of_a_pull_for_a_push_that_never_came_says_so(two_of_three: Server) -> None:
    pull = two_of_three.pull(0, at_least=1)
    assert pull.pending
    two_of_three.tick(5.0)
    assert isinstance(pull.error, RoundTimeoutError)
    two_of_three.push(1)
    pull = two_of_three.pull(0, at_least=1)
    two_of_three.tick(10.0)
    assert "its update is not applied yet" in str(pull.error)


def test_deletion_of_a_key_frees_all_that_it_holds(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", keys="ab")
    server.push(1, key="a")
    server.push(2, key="a")
    closed, late = server.push(1, key="b"), server.push(0, key="b", want_value=True)
    server.push(1, key="a", read_version=1)
    undecided, read = server.push(1, key="b"), server.pull(1, key="b")
    assert server.ask(0, m.Delete(("b",), 5.0)).answer == m.Done()
    for asked in (closed, late, undecided, read):
        assert isinstance(asked.error, KeyDeletedError)
    server.push(2, key="a", read_version=1)
    assert rounds(server, "a") == [[1, 2], [1, 2]]
    assert not rounds(server, "b")
    assert not server.slots


def test_deletion_of_a_key_with_an_undecided_step_leaves_that_of_the_others(make_server: type[Server]) -> None:
    server = server_with(make_server, "k_sync:2", keys="ab")
    gone, kept = [server.push(1, key=key) for key in "ab"]
    server.ask(0, m.Delete(("a",), 5.0))
    assert isinstance(gone.error, KeyDeletedError)
    server.push(0, key="b")
    assert kept.answer == m.Done(1)
    assert rounds(server, "b") == [[0, 1]]


def test_key_that_nobody_has_pushed_can_be_deleted(two_of_three: Server) -> None:
    assert two_of_three.ask(0, m.Delete(("w",), 5.0)).answer == m.Done()


# --- mistakes of peers, and bounds ---


def test_push_of_the_same_step_again_is_refused(two_of_three: Server) -> None:
    server = two_of_three
    server.push(0)
    again = server.push(0, clock=1)
    assert isinstance(again.error, ProtocolError)
    assert "expected a step of rank 0 after its step 1, got 1" in str(again.error)
    server.push(1)
    assert rounds(server) == [[0, 1]]


def test_worker_can_run_ahead_only_so_far(make_server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_rounds, "MAX_OPEN_PUSHES", 3)
    server = server_with(make_server, "k_async:2")
    for _ in range(3):
        assert server.push(0).pending
    assert "push 4 of rank 0, of whose pushes 0 are made; at most 3 may be open" in str(server.push(0).error)
    server.push(1)
    assert server.push(0).pending


def test_steps_and_versions_of_long_ago_are_forgotten(
    make_server: type[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "REMEMBERED", 4)
    monkeypatch.setattr(open_rounds, "REMEMBERED_VERSIONS", 3)
    server = server_with(make_server, "ringmaster:8", workers=1)
    for number in range(20):
        server.push(0, read_version=number)
    known = server.machine._deciding.of(("ringmaster:8", ()))
    assert (len(known.verdicts), sorted(known.rounds)) == (4, [17, 18, 19, 20])
    # The value before the oldest that is known had the rounds up to 16: the step is stale by four, or more.
    assert server.push(0, read_version=5).answer == m.Done(21)


def test_steps_that_are_dropped_are_forgotten_too(make_server: type[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "REMEMBERED", 2)
    server = server_with(make_server, "ringmaster:1", workers=1)
    server.push(0)
    for _ in range(5):
        assert server.push(0).answer == m.Done(1, "stale")
    known = server.machine._deciding.of(("ringmaster:1", ()))
    assert (len(known.verdicts), known.rounds) == (2, {})


def test_pulls_of_one_worker_wait_each_for_itself(two_of_three: Server) -> None:
    server = two_of_three
    server.push(0)
    short, long = server.pull(0, timeout=1.0), server.pull(0)
    server.tick(1.0)
    assert isinstance(short.error, RoundTimeoutError)
    assert long.pending
    server.push(1)
    assert long.answer == m.Value(1, round=1)
