"""Sync-Switch: rounds at first, every push by itself later."""

from __future__ import annotations

from aiokv.policy import ChunkPolicy, get_policy


def switch() -> ChunkPolicy:
    policy = get_policy("sync_switch:0.25:8")
    assert isinstance(policy, ChunkPolicy)
    return policy


def test_first_quarter_of_eight_steps_is_synchronous() -> None:
    assert [switch().version_of(sequence=number, newest=6) for number in (1, 2, 3)] == [1, 2, 7]


def test_who_joins_begins_with_the_round_of_the_others_or_as_one_that_waits_for_nobody() -> None:
    assert [switch().is_in_step(number) for number in (1, 2, 3)] == [True, True, False]
    assert switch().admits


def test_rounds_wait_for_all_and_later_pushes_for_nobody() -> None:
    assert [list(switch().expected(version=number, members=[0, 1])) for number in (1, 2, 3)] == [[0, 1], [0, 1], []]
