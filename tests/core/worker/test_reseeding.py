"""Whose weights a new cluster begins with, when all servers of the one before are lost."""

from __future__ import annotations

import pytest

from aiokv.core.worker.reseeding import bringer


@pytest.mark.parametrize(
    ("steps", "rank"),
    [({0: 7}, 0), ({0: 3, 1: 5, 2: 4}, 1), ({2: 5, 1: 5, 0: 4}, 1), ({1: 0, 0: 0}, 0)],
    ids=["alone", "the most steps", "the lowest of several", "nobody has trained yet"],
)
def test_no_step_is_lost_that_any_worker_has_made(steps: dict[int, int], rank: int) -> None:
    assert bringer(steps) == rank
