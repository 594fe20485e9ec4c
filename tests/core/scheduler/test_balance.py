"""Which process of servers gives a place to which other one."""

from __future__ import annotations

import pytest

from aiokv.core.scheduler.balance import unbalanced


@pytest.mark.parametrize(
    ("places", "hosts", "found"),
    [
        (["a", "a", "b"], ["a", "b", "c"], ("a", "c")),
        (["a", "a", "b", "c"], ["a", "b", "c"], None),
        (["a", "a", "a", "b"], ["a", "b"], ("a", "b")),
        (["a", "a", "b", "b"], ["a", "b"], None),
        (["a", "a", "b", "b"], ["a", "b", "c10", "c9"], ("b", "c9")),
        (["a", "a"], ["a"], None),
        (["a", "a"], [], None),
    ],
)
def test_a_process_gives_a_place_to_one_that_has_two_less(
    places: list[str], hosts: list[str], found: tuple[str, str] | None
) -> None:
    assert unbalanced(places, hosts) == found
