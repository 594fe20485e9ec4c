"""Which steps make a round, where that depends on who comes first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.policy import Closed, Decider, Decision, Dropped, RoundPolicy, Token, get_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

THREE = [0, 1, 2]


class Rounds:
    """A decider with a clock for each rank. Steps are made from the newest values unless a round is given."""

    def __init__(self, text: str, members: list[int] = THREE) -> None:
        policy = get_policy(text)
        assert isinstance(policy, RoundPolicy)
        self.decider = policy.decider()
        self.members = members
        self._clocks: dict[int, int] = {}

    def push(self, rank: int, read: int | None = None, now: float = 0.0) -> list[Any]:
        self._clocks[rank] = self._clocks.get(rank, 0) + 1
        token = Token(rank, self._clocks[rank])
        return shown(self.decider.arrived(token, self.decider.round if read is None else read, self.members, now))

    def leave(self, rank: int) -> list[Any]:
        self.members = [member for member in self.members if member != rank]
        return shown(self.decider.changed(self.members, 0.0))

    @property
    def open(self) -> tuple[list[int], int]:
        return self.decider.missing(self.members), self.decider.needed(self.members)


def shown(decisions: list[Decision]) -> list[Any]:
    """Return rounds as (number, ranks and clocks), and what is dropped as (rank, clock, reason)."""
    result: list[Any] = []
    for one in decisions:
        if isinstance(one, Closed):
            result.append((one.round, [tuple(token) for token in one.tokens]))
        else:
            assert isinstance(one, Dropped)
            result.append((*one.token, one.reason))
    return result


# --- k_sync, backup ---


@pytest.mark.parametrize("text", ["k_sync:2", "backup:1"])
def test_first_k_make_the_round_and_the_late_one_is_dropped(text: str) -> None:
    rounds = Rounds(text)
    assert rounds.push(2) == []
    assert rounds.open == ([0, 1], 1)
    assert rounds.push(0) == [(1, [(0, 1), (2, 1)])]
    assert rounds.push(1, read=0) == [(1, 1, "late")]
    assert rounds.push(1) == []
    assert rounds.open == ([0, 2], 1)


@pytest.mark.parametrize("text", ["k_sync:3", "k_sync:9", "backup:0", "k_async:3"])
def test_k_of_all_waits_for_all(text: str) -> None:
    rounds = Rounds(text)
    assert rounds.push(1) == rounds.push(0) == []
    assert rounds.open == ([2], 1)
    assert rounds.push(2) == [(1, [(0, 1), (1, 1), (2, 1)])]


@pytest.mark.parametrize("text", ["k_sync:3", "backup:0", "k_async:3"])
def test_round_closes_when_who_is_missing_leaves(text: str) -> None:
    rounds = Rounds(text)
    rounds.push(1)
    rounds.push(0)
    assert rounds.leave(2) == [(1, [(0, 1), (1, 1)])]


def test_number_of_spare_workers_stays_when_one_leaves() -> None:
    rounds = Rounds("backup:1")
    assert rounds.leave(2) == []
    assert rounds.push(1) == [(1, [(1, 1)])]


def test_one_worker_always_makes_a_round() -> None:
    assert Rounds("backup:7").push(1) == [(1, [(1, 1)])]


def test_second_step_of_a_worker_waits_for_the_next_round() -> None:
    rounds = Rounds("k_async:2")
    rounds.push(1)
    assert rounds.push(1) == []
    assert rounds.push(0) == [(1, [(0, 1), (1, 1)])]
    assert rounds.open == ([0, 2], 1)
    assert rounds.push(2) == [(2, [(1, 2), (2, 1)])]


# --- k_batch_sync, k_async, k_batch_async ---


def test_batches_of_one_round_may_come_from_one_worker() -> None:
    rounds = Rounds("k_batch_sync:3")
    assert rounds.push(1) == rounds.push(1) == []
    assert rounds.open == (THREE, 1)
    assert rounds.push(0) == [(1, [(0, 1), (1, 1), (1, 2)])]
    assert rounds.push(2, read=0) == [(2, 1, "late")]


def test_async_rounds_take_gradients_of_any_age() -> None:
    rounds = Rounds("k_async:2")
    rounds.push(0)
    rounds.push(1)
    assert rounds.push(2, read=0) == []
    assert rounds.push(0) == [(2, [(0, 2), (2, 1)])]


def test_every_kth_gradient_closes_a_round() -> None:
    rounds = Rounds("k_batch_async:2")
    assert rounds.push(0) == []
    assert rounds.push(0) == [(1, [(0, 1), (0, 2)])]
    assert rounds.push(1, read=0) == []
    assert rounds.push(2, read=0) == [(2, [(1, 1), (2, 1)])]


@pytest.mark.parametrize("text", ["k_async:1", "k_batch_async:1"])
def test_rounds_of_one_are_asynchronous(text: str) -> None:
    rounds = Rounds(text)
    assert [rounds.push(rank, read=0) for rank in (2, 0, 2)] == [[(1, [(2, 1)])], [(2, [(0, 1)])], [(3, [(2, 2)])]]


# --- adasync: k_t = ceil(k sqrt(F_0 / F_t)) of the losses that are reported ---


def sizes(rounds: Rounds, losses: Sequence[float]) -> list[int]:
    """Return how many workers make a round after all of them have reported each of the losses."""
    found = []
    for loss in losses:
        for rank in rounds.members:
            rounds.decider.reported(rank, loss)
        size = 1
        while not rounds.push(size - 1):
            size += 1
        found.append(size)
    return found


def test_more_and_more_workers_make_a_round_as_the_loss_falls() -> None:
    rounds = Rounds("adasync:2", list(range(10)))
    # 2 sqrt of 1, 2, 4, 4.0001, 16, 20, rounded up, and back; of 100 it is twice as many as there are.
    losses = [8.0, 4.0, 2.0, 8.0 / 4.0001, 0.5, 0.4, 8.0, 0.08]
    assert sizes(rounds, losses) == [2, 3, 4, 5, 8, 9, 2, 10]


def test_fewer_make_a_round_than_at_first_when_the_loss_has_grown_but_one_at_least() -> None:
    assert sizes(Rounds("adasync:3", list(range(5))), [1.0, 2.0, 1e9]) == [3, 3, 1]


def test_the_loss_is_the_mean_of_the_last_ones_of_those_who_report() -> None:
    rounds = Rounds("adasync:1", list(range(4)))
    for rank, loss in ((1, 6.0), (2, 2.0), (1, 1.5), (2, 0.5)):
        rounds.decider.reported(rank, loss)
    # sqrt of 8 / 2
    assert rounds.open == ([0, 1, 2, 3], 2)
    rounds.decider.reported(1, 0.5)
    assert rounds.open == ([0, 1, 2, 3], 3)
    # Who has left does not count: 6 / 0.5 is 12, and all three are wanted.
    rounds.members = [0, 1, 3]
    assert rounds.open == ([0, 1, 3], 3)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_says_nothing(loss: float) -> None:
    rounds = Rounds("adasync:2", list(range(4)))
    assert sizes(rounds, [loss, 4.0, loss, 1.0, loss]) == [2, 2, 2, 4, 4]


@pytest.mark.parametrize(("losses", "expected"), [([0.0, -1.0], [2, 2]), ([1.0, 0.0, -1.0], [2, 4, 4])])
def test_where_the_ratio_is_none_nothing_or_everybody_is_wanted(losses: list[float], expected: list[int]) -> None:
    assert sizes(Rounds("adasync:2", list(range(4))), losses) == expected


def test_without_a_loss_so_many_make_a_round_as_at_first() -> None:
    rounds = Rounds("adasync:5")
    assert [rounds.push(rank) for rank in THREE][-1] == [(1, [(0, 1), (1, 1), (2, 1)])]


def test_who_goes_on_with_the_rounds_begins_with_as_many_workers() -> None:
    rounds, other = (Rounds("adasync:1", list(range(9))) for _ in range(2))
    assert sizes(rounds, [9.0, 1.0]) == [1, 3]
    other.decider.resume(2, [], rounds.decider.known())
    assert other.open[1] == 3
    assert sizes(other, [1.0, 0.25]) == [3, 6]


def test_other_policies_do_not_go_by_the_loss() -> None:
    rounds = Rounds("k_async:2", list(range(4)))
    assert sizes(rounds, [1.0, 0.01]) == [2, 2]


# --- quorum ---


def test_round_closes_at_its_deadline_with_those_who_are_there() -> None:
    rounds = Rounds("quorum:2:5")
    rounds.push(0, now=10.0)
    assert rounds.decider.deadline() == 15.0
    assert rounds.open == ([1, 2], 1)
    rounds.push(2, now=12.0)
    assert shown(rounds.decider.due(THREE, 14.0)) == []
    assert shown(rounds.decider.due(THREE, 15.0)) == [(1, [(0, 1), (2, 1)])]
    assert rounds.decider.deadline() is None
    assert rounds.push(1, read=0, now=15.1) == [(1, 1, "late")]


def test_round_closes_early_when_all_are_there() -> None:
    rounds = Rounds("quorum:1:5")
    rounds.push(0)
    rounds.push(1)
    assert rounds.push(2, now=1.0) == [(1, [(0, 1), (1, 1), (2, 1)])]
    assert rounds.decider.deadline() is None


def test_fewer_than_k_wait_beyond_the_deadline_for_the_kth() -> None:
    rounds = Rounds("quorum:2:5")
    rounds.push(0)
    assert shown(rounds.decider.due(THREE, 5.0)) == []
    assert rounds.decider.deadline() is None, "nothing more happens by itself"
    assert rounds.push(1, now=9.0) == [(1, [(0, 1), (1, 1)])]


def test_worker_that_is_late_too_often_is_not_waited_for_until_it_is_in_time() -> None:
    rounds = Rounds("quorum:2:5:2")
    for number in (1, 2):
        rounds.push(0)
        rounds.push(1)
        assert shown(rounds.decider.due(THREE, 5.0)) == [(number, [(0, number), (1, number)])]
    rounds.push(0)
    assert rounds.open == ([1], 1)
    assert rounds.push(1) == [(3, [(0, 3), (1, 3)])]
    rounds.push(2)
    rounds.push(0)
    assert rounds.push(1) == [(4, [(0, 4), (1, 4), (2, 1)])]
    rounds.push(0)
    rounds.push(1)
    assert rounds.open == ([2], 0)


def test_evicted_worker_hears_so_and_comes_back_with_what_it_computes_from_the_last_round() -> None:
    rounds = Rounds("quorum:2:5:2")
    for number, reason in [(1, "late"), (2, "evicted")]:
        rounds.push(0)
        rounds.push(1)
        rounds.decider.due(THREE, 5.0)
        assert rounds.push(2, read=number - 1) == [(2, number, reason)]
    rounds.push(0)
    assert rounds.push(1) == [(3, [(0, 3), (1, 3)])], "before its deadline"
    assert rounds.push(2, read=2) == [(2, 3, "evicted")]
    assert rounds.push(2) == []
    rounds.push(0)
    assert rounds.push(1) == [(4, [(0, 4), (1, 4), (2, 4)])]
    rounds.push(0)
    rounds.push(1)
    assert shown(rounds.decider.due(THREE, 5.0)) == [(5, [(0, 5), (1, 5)])]
    assert rounds.push(2, read=4) == [(2, 5, "late")], "its strikes are counted anew"


def test_without_strikes_nobody_is_evicted() -> None:
    rounds = Rounds("quorum:2:5")
    for number in range(1, 10):
        rounds.push(0)
        rounds.push(1)
        rounds.decider.due(THREE, 5.0)
        assert rounds.push(2, read=0) == [(2, number, "late")]


def test_fewer_than_k_make_no_round_even_if_nobody_else_is_waited_for() -> None:
    rounds = Rounds("quorum:2:5:1", [0, 1, 2, 3])
    rounds.push(0)
    rounds.push(1)
    assert shown(rounds.decider.due(rounds.members, 5.0)) == [(1, [(0, 1), (1, 1)])]
    # Ranks 2 and 3 were late. Now rank 1 is lost for good, so with rank 0 alone nobody is waited for.
    rounds.leave(1)
    assert rounds.push(0) == []
    assert rounds.open == ([2, 3], 1)
    assert rounds.push(3) == [(2, [(0, 2), (3, 1)])]


def test_second_step_of_a_worker_in_an_open_round_is_dropped() -> None:
    rounds = Rounds("quorum:2:5")
    rounds.push(0)
    assert rounds.push(0) == [(0, 2, "late")]


# --- ringmaster: applied if its staleness is below r (Maranjyan et al., 2025) ---


def test_gradient_that_is_too_old_is_dropped() -> None:
    rounds = Rounds("ringmaster:2")
    assert rounds.push(0) == [(1, [(0, 1)])]
    assert rounds.push(1, read=0) == [(2, [(1, 1)])]
    assert rounds.push(2, read=0) == [(2, 1, "stale")]
    assert rounds.push(2, read=1) == [(3, [(2, 2)])]
    assert rounds.open == (THREE, 1)


def test_when_nothing_waits_neither_time_nor_members_matter() -> None:
    rounds = Rounds("ringmaster:2")
    assert rounds.leave(0) == []
    assert rounds.decider.deadline() is None
    assert rounds.decider.due(THREE, 9.0) == []


# --- round_robin: one after the other, in the order of the ranks (Chen et al., 2019) ---


def test_workers_take_turns() -> None:
    rounds = Rounds("round_robin")
    assert rounds.push(2) == rounds.push(1) == rounds.push(1) == []
    assert rounds.open == ([0], 1)
    assert rounds.push(0) == [(1, [(0, 1)]), (2, [(1, 1)]), (3, [(2, 1)])]
    assert rounds.push(0) == [(4, [(0, 2)]), (5, [(1, 2)])]


def test_turn_of_who_has_left_is_over_but_not_what_it_pushed() -> None:
    rounds = Rounds("round_robin")
    rounds.push(2)
    assert rounds.leave(0) == []
    assert rounds.leave(2) == []
    assert rounds.push(1) == [(1, [(1, 1)]), (2, [(2, 1)])]


def test_step_of_who_has_left_before_it_came_has_its_turn() -> None:
    rounds = Rounds("round_robin", [1, 2])
    assert rounds.push(0) == [(1, [(0, 1)])]
    assert rounds.push(1) == [(2, [(1, 1)])]


def test_without_members_nobody_is_missing() -> None:
    rounds = Rounds("round_robin", [])
    assert rounds.open == ([], 1)


# --- a decider that goes on where another one was ---


@pytest.mark.parametrize("text", ["k_sync:2", "k_async:2", "ringmaster:1"])
def test_rounds_are_counted_on_from_those_of_the_one_before(text: str) -> None:
    rounds = Rounds(text)
    rounds.decider.resume(7, [Token(0, 1)], {})
    rounds.push(2)
    assert rounds.push(0)[-1][0] == (9 if text == "ringmaster:1" else 8)


@pytest.mark.parametrize("text", ["k_batch_sync:3", "k_batch_async:3"])
def test_round_goes_on_with_the_steps_on_which_workers_have_gone_on(text: str) -> None:
    rounds = Rounds(text)
    rounds.decider.resume(7, (), {}, [Token(1, 4), Token(1, 5)])
    assert rounds.push(0) == [(8, [(0, 1), (1, 4), (1, 5)])]


def test_quorum_remembers_who_was_late_before_it() -> None:
    before = Rounds("quorum:2:1.0:1")
    before.push(0)
    before.push(1)
    assert shown(before.decider.due(THREE, 1.0)) == [(1, [(0, 1), (1, 1)])]
    rounds = Rounds("quorum:2:1.0:1")
    rounds.decider.resume(1, [Token(0, 1), Token(1, 1)], before.decider.known())
    assert rounds.push(0) == []
    assert rounds.push(1) == [(2, [(0, 1), (1, 1)])]


def test_turns_go_on_behind_the_last_one() -> None:
    rounds = Rounds("round_robin")
    rounds.decider.resume(2, [Token(1, 1)], {})
    assert rounds.push(0) == []
    assert rounds.push(2) == [(3, [(2, 1)]), (4, [(0, 1)])]


def test_a_rule_that_looks_at_nothing_but_the_step_has_nothing_else_to_hand_on() -> None:
    assert ringmaster().known() == {}


def ringmaster() -> Decider:
    """Return what decides the rounds of ringmaster."""
    policy = get_policy("ringmaster:3")
    assert isinstance(policy, RoundPolicy)
    return policy.decider()
