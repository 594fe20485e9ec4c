"""Asynchronous: every push makes the next version, and none waits for anybody."""

from __future__ import annotations

import pytest

from aiokv.policy import ASP


@pytest.mark.parametrize("sequence", [1, 2, 100])
def test_push_makes_the_next_version_whoever_pushes(sequence: int) -> None:
    assert ASP().version_of(sequence=sequence, newest=7) == 8


def test_nobody_is_waited_for() -> None:
    assert list(ASP().expected(version=8, members=[0, 1, 2])) == []
