"""Which faults are drawn."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest

from aiokv.chaos.plan import DISTURBANCES, Fault, FaultPlan, Kind, parse_words
from aiokv.errors import ConfigError

NAMES = ["scheduler", "server-0", "server-1", "worker-0", "worker-1", "worker-2"]


def drawn(number: int, **changes: Any) -> list[Fault]:
    """Return the first faults of a plan."""
    settings: dict[str, Any] = {
        "kill": ("worker", "server", "scheduler"),
        "disturb": DISTURBANCES,
        "every": 1.0,
        "longest": 2.0,
        "seed": 7,
    }
    return list(islice(FaultPlan(**settings | changes).faults(NAMES), number))


def test_equal_seeds_draw_equal_faults() -> None:
    assert drawn(50) == drawn(50)
    assert drawn(50) != drawn(50, seed=8)


def test_each_role_is_killed_as_often_as_the_others_however_many_nodes_it_has() -> None:
    kills = Counter(fault.node.partition("-")[0] for fault in drawn(3000, disturb=()))
    assert set(kills) == {"worker", "server", "scheduler"}
    assert all(900 < number < 1100 for number in kills.values())


def test_only_what_is_asked_for_is_done() -> None:
    assert {fault.kind for fault in drawn(200, kill=())} == set(DISTURBANCES)
    assert {fault.node for fault in drawn(200, kill=("scheduler",), disturb=())} == {"scheduler"}
    assert drawn(1, kill=(), disturb=()) == []


def test_connections_that_are_cut_are_those_that_lead_to_a_node_which_listens() -> None:
    cut = {fault.node for fault in drawn(500, kill=(), disturb=(Kind.CUT, Kind.DELAY))}
    assert cut == {"scheduler", "server-0", "server-1"}


def test_faults_come_as_often_as_asked_for() -> None:
    settled = [fault.wait for fault in drawn(4000, every=0.5) if fault.settled]
    assert sum(settled) / len(settled) == pytest.approx(0.5, rel=0.1)


def test_nothing_is_stopped_for_longer_than_asked_for() -> None:
    seconds = [fault.seconds for fault in drawn(500, longest=0.3)]
    assert max(seconds) <= 0.3


def test_words_are_read_once_each_and_none_is_none_of_them() -> None:
    assert parse_words("worker, server,worker", ["worker", "server"], "--kill") == ("worker", "server")
    assert parse_words("none", ["worker"], "--kill") == ()


def test_unknown_word_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="--kill: 'cat' is none of worker, server, none"):
        parse_words("worker,cat", ["worker", "server"], "--kill")
