"""Which reads wait: SSP, DSSP, and barriers over a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.policy import Gate, get_policy
from aiokv.policy.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

FOUR = [0, 1, 2, 3]


def gate_of(text: str) -> Gate:
    gate = get_policy(text).gate()
    assert gate is not None
    return gate


def push(gate: Gate, counts: dict[int, int], rank: int, now: float = 0.0, members: list[int] = FOUR) -> bool:
    counts[rank] = counts.get(rank, 0) + 1
    return gate.advanced(rank, counts[rank], members, now)


# --- ssp: a worker that has made c pushes may start the next step only if c - min <= s (Ho et al., 2013) ---


@pytest.mark.parametrize("name", ["ssp", "essp"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_worker_may_lead_by_the_staleness_and_no_more(name: str, staleness: int) -> None:
    gate, counts = gate_of(f"{name}:{staleness}"), dict[int, int]()
    assert gate.waits_for(0, FOUR) == []
    for pushes in range(1, staleness + 3):
        push(gate, counts, 0)
        assert gate.waits_for(0, FOUR) == ([] if pushes <= staleness else [1, 2, 3])


def test_who_waits_is_free_when_the_last_of_the_slowest_has_pushed() -> None:
    gate, counts = gate_of("ssp:0"), dict[int, int]()
    push(gate, counts, 2)
    assert [push(gate, counts, rank) for rank in (0, 3)] == [False, False]
    assert gate.waits_for(2, FOUR) == [1]
    assert push(gate, counts, 1)
    assert gate.waits_for(2, FOUR) == []


def test_worker_that_has_left_holds_nobody_back() -> None:
    gate, counts = gate_of("ssp:0"), dict[int, int]()
    for rank in (0, 1, 2):
        push(gate, counts, rank)
    assert gate.waits_for(0, FOUR) == [3]
    gate.changed([0, 1, 2])
    assert gate.waits_for(0, [0, 1, 2]) == []
    assert not push(gate, counts, 0, members=[0, 1, 2])
    assert gate.waits_for(0, [0, 1, 2]) == [1, 2]


# --- dssp: between two bounds, as predicted waiting is shorter or longer (Zhao et al., 2019) ---


def test_dssp_with_equal_bounds_is_ssp() -> None:
    gate, counts = gate_of("dssp:2:2"), dict[int, int]()
    for pushes in range(1, 5):
        push(gate, counts, 0, float(pushes))
        assert gate.waits_for(0, FOUR) == ([] if pushes <= 2 else [1, 2, 3])


def test_fastest_goes_on_to_where_it_meets_the_slowest() -> None:
    """Steps take 2 s and 5 s. At 12 s the fast worker leads by 4: waiting now takes 3 s, after one more step 1 s, and
    after two more 4 s.
    """
    gate, counts = gate_of("dssp:3:5"), dict[int, int]()
    members = [0, 1]
    for rank, now in [(0, 2.0), (0, 4.0), (1, 5.0), (0, 6.0), (0, 8.0), (1, 10.0), (0, 10.0)]:
        push(gate, counts, rank, now, members)
        assert gate.waits_for(rank, members) == []
    push(gate, counts, 0, 12.0, members)
    assert gate.waits_for(0, members) == []
    push(gate, counts, 0, 14.0, members)
    assert gate.waits_for(0, members) == [1]


def test_nobody_is_ever_further_ahead_than_the_upper_bound() -> None:
    """The slow worker has just pushed when the fast one is at the lower bound: going on for long is the best."""
    gate, counts = gate_of("dssp:1:4"), dict[int, int]()
    members = [0, 1]
    for rank, now in [(1, 0.0), (0, 98.0), (1, 100.0), (0, 100.0)]:
        push(gate, counts, rank, now, members)
    while not gate.waits_for(0, members):
        push(gate, counts, 0, 100.0 + counts[0], members)
    # The step that it has made with the last permission is one more than it may read with.
    assert counts[0] - counts[1] == 4 + 1


def test_only_the_fastest_gets_more_than_the_lower_bound() -> None:
    gate, counts = gate_of("dssp:1:3"), dict[int, int]()
    members = [0, 1, 2]
    for rank, now in [
        (2, 1.0),
        (0, 1.0),
        (0, 2.0),
        (2, 11.0),
        (0, 3.0),
        (0, 4.0),
        (0, 5.0),
        (1, 5.5),
        (1, 6.0),
        (1, 7.0),
    ]:
        push(gate, counts, rank, now, members)
    push(gate, counts, 1, 8.0, members)
    assert counts == {0: 5, 1: 4, 2: 2}
    assert gate.waits_for(1, members) == [2]


def test_without_a_push_of_the_slowest_there_is_nothing_to_predict() -> None:
    gate, counts = gate_of("dssp:0:3"), dict[int, int]()
    push(gate, counts, 0, 1.0)
    assert gate.waits_for(0, FOUR) == [1, 2, 3]


def test_after_one_push_of_the_slowest_there_is_nothing_to_predict() -> None:
    gate, counts = gate_of("dssp:0:3"), dict[int, int]()
    members = [0, 1]
    for rank, now in [(1, 1.0), (0, 1.0), (0, 2.0)]:
        push(gate, counts, rank, now, members)
    assert gate.waits_for(0, members) == [1]


def test_gate_of_ones_own_needs_no_more_than_to_say_for_whom_it_waits() -> None:
    class Nobody(Gate):
        """Lets rank 0 wait for rank 1 for ever."""

        def advanced(self, rank: int, count: int, members: Sequence[int], now: float) -> bool:
            """Take no note."""
            return False

        def waits_for(self, rank: int, members: Sequence[int]) -> list[int]:
            """Return rank 1 for rank 0."""
            return [1] if rank == 0 else []

    gate = Nobody()
    gate.changed(FOUR)
    assert [gate.may_read(rank, FOUR) for rank in FOUR] == [False, True, True, True]


# --- pbsp, pssp: the barrier is over a sample (Wang et al., 2017) ---


@given(st.integers(0, 12), st.integers(0, 2**64))
def test_sample_is_so_many_different_ranks_and_the_same_for_every_server(size: int, seed: int) -> None:
    ranks = [3 * number for number in range(10)]
    drawn = sample(ranks, size, seed)
    assert drawn == sample(tuple(ranks), size, seed)
    assert drawn == sorted(set(drawn) & set(ranks))
    assert len(drawn) == min(size, 10)


def test_every_rank_is_drawn_about_as_often() -> None:
    """Of 10 ranks 3 are drawn 10,000 times: each 3,000 times, with a standard deviation of 46."""
    times = dict.fromkeys(range(10), 0)
    for seed in range(10_000):
        for rank in sample(list(range(10)), 3, seed):
            times[rank] += 1
    assert all(abs(count - 3000) < 5 * 46 for count in times.values())


@pytest.mark.parametrize(("text", "like"), [("pbsp:3", "ssp:0"), ("pssp:3:2", "ssp:2")])
def test_sample_of_all_is_ssp(text: str, like: str) -> None:
    gates, counts = [gate_of(text), gate_of(like)], [dict[int, int](), dict[int, int]()]
    for rank in (0, 0, 1, 0, 2, 3, 3, 0, 1):
        for gate, count in zip(gates, counts, strict=True):
            push(gate, count, rank)
        for reader in FOUR:
            assert gates[0].waits_for(reader, FOUR) == gates[1].waits_for(reader, FOUR)


def test_sample_of_nobody_never_waits() -> None:
    gate, counts = gate_of("pbsp:0"), dict[int, int]()
    for _ in range(5):
        push(gate, counts, 0)
        assert gate.waits_for(0, FOUR) == []


def test_sample_is_kept_until_the_next_push_and_forgets_who_has_left() -> None:
    gate, counts = gate_of("pbsp:1"), dict[int, int]()
    push(gate, counts, 0)
    [drawn] = gate.waits_for(0, FOUR)
    assert gate.waits_for(0, FOUR) == [drawn]
    assert gate.waits_for(0, [rank for rank in FOUR if rank != drawn]) == []
    push(gate, counts, drawn)
    assert gate.waits_for(0, FOUR) == []


@pytest.mark.parametrize("text", ["ssp:1", "essp:1", "dssp:1:1", "pssp:3:1"])
def test_a_rank_may_read_while_it_waits_for_nobody(text: str) -> None:
    gate, counts = gate_of(text), dict.fromkeys(FOUR, 0)
    gate.changed(FOUR)
    free = []
    for _ in range(3):
        free.append(gate.may_read(0, FOUR))
        assert free[-1] == (not gate.waits_for(0, FOUR))
        push(gate, counts, 0)
    assert free == [True, True, False]
