"""Urgent frames go first, and nothing waits for ever."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.wire.sendqueue import FAIR_SHARE, SendQueue


def drain(queue: SendQueue[str]) -> list[str]:
    return [queue.take() for _ in range(len(queue))]


def test_higher_priority_goes_first_and_equal_ones_in_order() -> None:
    queue: SendQueue[str] = SendQueue()
    for name, priority in [("a", 0), ("b", -9), ("c", 5), ("d", 0), ("e", 5)]:
        queue.add(name, priority)
    assert list(queue) == ["c", "e", "a", "d", "b"]
    assert drain(queue) == ["c", "e", "a", "d", "b"]
    assert not queue


def test_scenario_36_a_stream_of_urgent_frames_does_not_starve_the_others() -> None:
    queue: SendQueue[str] = SendQueue()
    queue.add("big", -9)
    urgent = itertools.count()
    for position in range(FAIR_SHARE + 1):
        queue.add(f"small {next(urgent)}", 0)
        if queue.take() == "big":
            assert position == FAIR_SHARE
            return
    pytest.fail("the frame of low priority never went")


def test_an_empty_queue_has_nothing_to_take() -> None:
    queue: SendQueue[str] = SendQueue()
    queue.add("a", 1)
    queue.clear()
    assert not queue
    with pytest.raises(IndexError):
        queue.take()


@given(hs.lists(hs.integers(-3, 3)))
def test_every_frame_goes_once_and_in_order_within_its_priority(priorities: list[int]) -> None:
    queue: SendQueue[tuple[int, int]] = SendQueue()
    for number, priority in enumerate(priorities):
        queue.add((priority, number), priority)
    taken = []
    while queue:
        foreseen = queue.peek()
        taken.append(queue.take())
        assert taken[-1] == foreseen
    assert sorted(taken) == sorted(zip(priorities, range(len(priorities)), strict=True))
    for priority in set(priorities):
        numbers = [number for own, number in taken if own == priority]
        assert numbers == sorted(numbers)
