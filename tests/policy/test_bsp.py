"""Bulk synchronous: push number r belongs to round r, and a round waits for every member."""

from __future__ import annotations

import pytest

from aiokv.policy import BSP


@pytest.mark.parametrize("newest", [0, 3, 7])
@pytest.mark.parametrize("sequence", [1, 5])
def test_push_belongs_to_the_round_of_its_number(sequence: int, newest: int) -> None:
    assert BSP().version_of(sequence=sequence, newest=newest) == sequence


@pytest.mark.parametrize("members", [[0, 1, 2], [1], []])
def test_round_waits_for_every_member(members: list[int]) -> None:
    assert list(BSP().expected(version=4, members=members)) == members
