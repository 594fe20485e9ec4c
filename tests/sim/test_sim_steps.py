"""Steps that are kept as rows of numbers read as those that were put in."""

from __future__ import annotations

import pytest

from sim.steps import Step, Steps

PLAIN = Step(0.0, 1.0, 1.5, communicated=0.25)
FAILED = Step(1.5, 2.0, 3.0, answered=False)
STALLED = Step(3.0, 4.0, 5.0, stalled=0.5)
ABANDONED = Step(5.0, 6.0, 6.0, answered=True, cancelled=True)
NUMBERED = Step(6.0, 7.0, 8.0, number=9)
PAUSED = Step(8.0, 9.0, 9.0, paused=0.125)
HALTED = Step(9.0, 9.0, 12.0, halted=2.0)
ALL = [PLAIN, FAILED, STALLED, ABANDONED, NUMBERED, PAUSED, HALTED]


def test_what_is_put_in_is_read_in_the_same_order() -> None:
    steps = Steps(ALL)
    assert len(steps) == len(ALL)
    assert list(steps) == ALL
    assert list(reversed(steps)) == ALL[::-1]
    assert [steps[index] for index in range(-len(ALL), len(ALL))] == ALL * 2
    assert steps[1:4] == ALL[1:4]
    assert (steps.answered, steps.pushed) == (6, 6)


def test_a_worker_that_has_taken_none() -> None:
    steps = Steps()
    assert not steps
    assert (list(steps), steps.answered, steps.pushed) == ([], 0, 0)
    with pytest.raises(IndexError):
        steps[0]


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("step", [PLAIN, FAILED])
def test_a_step_is_put_back(place: int, step: Step) -> None:
    steps, expected = Steps(ALL), list(ALL)
    steps[place] = expected[place] = step
    assert list(steps) == expected
    assert steps.answered == sum(each.answered for each in expected)
