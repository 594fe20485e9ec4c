"""Deadlines: what is due comes out once, and nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.core.deadlines import Deadlines, check_timeout, earliest
from aiokv.errors import ConfigError


def test_what_is_due_comes_out_in_the_order_of_its_entry() -> None:
    table: Deadlines[str] = Deadlines()
    for entry, time in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        table.add(entry, time)
    assert table.next() == 1.0
    assert table.due(0.9) == []
    assert table.due(3.0) == ["a", "b", "c"]
    assert (len(table), table.next()) == (0, None)


def test_entry_is_due_at_its_time_and_not_after() -> None:
    table: Deadlines[str] = Deadlines()
    table.add("a", 1.0)
    assert table.due(1.0) == ["a"]


def test_entry_can_get_another_time() -> None:
    table: Deadlines[str] = Deadlines()
    table.add("a", 1.0)
    table.add("a", 2.0)
    assert table.due(1.0) == []
    assert (len(table), table.next()) == (1, 2.0)


def test_entry_can_be_taken_out_also_twice() -> None:
    table: Deadlines[str] = Deadlines()
    table.add("a", 1.0)
    table.discard("a")
    table.discard("a")
    assert "a" not in table
    assert table.due(1.0) == []


@given(hs.lists(hs.tuples(hs.sampled_from(["add", "discard", "due"]), hs.integers(0, 5), hs.integers(0, 20))))
def test_same_as_a_plain_dict(steps: list[tuple[str, int, int]]) -> None:
    table: Deadlines[int] = Deadlines()
    plain: dict[int, int] = {}
    for what, entry, time in steps:
        if what == "add":
            table.add(entry, time)
            plain[entry] = time
        elif what == "discard":
            table.discard(entry)
            plain.pop(entry, None)
        else:
            late = [name for name, when in plain.items() if when <= time]
            assert table.due(time) == late
            for name in late:
                del plain[name]
        bound = table.next()
        assert (bound is None) == (not plain)
        assert bound is None or bound <= min(plain.values())
        assert all(name in table for name in plain)


def test_time_after_a_tick_is_exact() -> None:
    # Otherwise a driver would tick for ever.
    table: Deadlines[str] = Deadlines()
    table.add("a", 1.0)
    table.add("b", 5.0)
    table.discard("a")
    assert table.due(1.0) == []
    assert table.next() == 5.0


@pytest.mark.parametrize(("times", "first"), [((), None), ((None, None), None), ((None, 2.0, 1.0), 1.0), ((0.0,), 0.0)])
def test_earliest(times: tuple[float | None, ...], first: float | None) -> None:
    assert earliest(*times) == first


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9])
def test_finite_time_out_is_accepted(seconds: float) -> None:
    check_timeout(seconds)


@pytest.mark.parametrize("seconds", [math.inf, -math.inf, math.nan])
def test_time_out_that_never_comes_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="finite"):
        check_timeout(seconds)
