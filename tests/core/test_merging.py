"""What becomes of contributions before the rule sees them: each is scaled by its own staleness, then they are reduced.

The rig's rule is w += contribution, so numbers can be followed by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from aiokv.core import effects as ef
from aiokv.errors import OptimizerError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server

ZHANG, SUM_RATE = "1/max(1,tau)", "1/(1+tau)"


def configure(server: Server, rate: str, *, name: str = "accumulate", reduction: str = "sum", rank: int = 0) -> Any:
    return server.ask(rank, m.SetOptimizer(name, {}, reduction, 5.0, rate)).answer


def async_server(make_server: type[Server], rate: str, *, policy: str = "asp", reduction: str = "sum") -> Server:
    server = make_server(policy=policy, workers=4)
    assert configure(server, rate, reduction=reduction) == m.Done()
    server.init()
    return server


# tau is 0, 1, 2, 3, 0.
@pytest.mark.parametrize(
    ("rate", "values"),
    [("1", [12, 24, 36, 48, 60]), (ZHANG, [12, 24, 30, 34, 46]), (SUM_RATE, [12, 18, 22, 25, 37])],
)
def test_each_push_counts_by_its_staleness(make_server: type[Server], rate: str, values: list[float]) -> None:
    server = async_server(make_server, rate)
    found = []
    for rank, read in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 4)):
        server.push(rank, 12.0, read_version=read)
        found.append(server.value())
    assert found == values


def test_staleness_is_that_at_the_update_not_at_the_arrival(make_server: type[Server]) -> None:
    server = async_server(make_server, SUM_RATE)
    server.hold = True
    # All three arrive while the first is applied.
    for rank in range(3):
        server.push(rank, 12.0)
    while server.applying:
        server.finish()
    assert server.value() == 12 + 6 + 4
    assert [apply.staleness for apply in server.seen(ef.Apply)] == [[0], [1], [2]]


# Two rounds of ranks 0 and 1 make version 2; ranks 2, 1 and 0, with staleness 2, 1 and 0, make version 3.
@pytest.mark.parametrize(
    ("rate", "reduction", "value"),
    [
        ("1", "sum", 10 + 20 + 30),
        (ZHANG, "sum", 10 + 20 + 30 / 2),
        (SUM_RATE, "sum", 10 + 20 / 2 + 30 / 3),
        (ZHANG, "median", 15),
        (SUM_RATE, "median", 10),
    ],
)
def test_contributions_of_one_round_are_scaled_one_by_one(
    make_server: type[Server], rate: str, reduction: str, value: float
) -> None:
    server = async_server(make_server, rate, policy="k_batch_async:3", reduction=reduction)
    for clock, read in ((1, 0), (2, 1)):
        for rank in (0, 1, 3):
            server.push(rank, 0.0, read_version=read, clock=clock)
    for rank, read, number in ((2, 0, 30.0), (1, 1, 20.0), (0, 2, 10.0)):
        server.push(rank, number, read_version=read, clock=3)
    assert server.value() == value
    assert [apply.staleness for apply in server.seen(ef.Apply)][-1] == [0, 1, 2]


def test_mean_is_that_of_the_scaled_contributions(make_server: type[Server]) -> None:
    server = async_server(make_server, ZHANG, policy="k_batch_async:2", reduction="mean")
    for rank in range(4):
        server.push(rank, 10.0, clock=1)
    server.push(0, 10.0, read_version=2, clock=2)
    server.push(1, 10.0, read_version=0, clock=2)
    assert server.value() == 20 + 20 + (10 + 10 / 2)
    assert [apply.divisor for apply in server.seen(ef.Apply)] == [2, 2, 2]


def test_rounds_that_are_in_step_are_not_scaled(server: Server) -> None:
    configure(server, SUM_RATE)
    server.init()
    for _ in range(3):
        for rank in range(3):
            # Nobody has read what the others made.
            server.push(rank, read_version=0)
    assert server.value() == 9.0
    assert not server.seen(ef.Weigh)


def test_chunk_without_elements_has_nothing_to_scale(make_server: type[Server]) -> None:
    for reduction in ("sum", "median"):
        server = async_server(make_server, SUM_RATE, reduction=reduction)
        server.init("empty", shape=(0,), stop=0)
        for rank in range(2):
            assert server.push(rank, key="empty", shape=(0,), stop=0).answer == m.Done(rank + 1)
        assert not server.seen(ef.Weigh)


# tau is 0, 1, 2, 3: row 1 gets 12 each time, row 2 from the last one only.
@pytest.mark.parametrize(
    ("rate", "values"), [("1", [48, 12]), (ZHANG, [12 + 12 + 6 + 4, 4]), (SUM_RATE, [12 + 6 + 4 + 3, 3])]
)
def test_each_push_of_rows_counts_by_its_staleness(make_server: type[Server], rate: str, values: list[float]) -> None:
    server = async_server(make_server, rate)
    server.init_rows()
    for rank in range(3):
        server.push_rows(rank, {1: 12.0})
    server.push_rows(3, {1: 12.0, 2: 12.0})
    assert server.pull_rows(3, 1, 2).payload == values


def test_rows_of_one_round_are_scaled_one_by_one(make_server: type[Server]) -> None:
    """As above: version 3 is made with staleness 0, 1 and 2. One of them has no rows at all."""
    server = async_server(make_server, SUM_RATE, policy="k_batch_async:3", reduction="mean")
    server.init_rows()
    for clock, read in ((1, 0), (2, 1)):
        for rank in (0, 1, 3):
            server.push_rows(rank, {1: 0.0}, read_version=read, clock=clock)
    for rank, read, rows in ((2, 0, {1: 30.0, 2: 18.0}), (1, 1, {}), (0, 2, {1: 11.0})):
        server.push_rows(rank, rows, read_version=read, clock=3)
    assert server.pull_rows(0, 1, 2).payload == [11 + 30 / 3, 18 / 3]
    (*_, last) = server.seen(ef.ApplyRows)
    assert last.update.staleness == [0, 1, 2]
    assert (last.factors, last.update.divisor) == ([1.0, 1 / 3], 3)


def test_rows_that_are_in_step_are_not_scaled(server: Server) -> None:
    configure(server, SUM_RATE)
    server.init_rows()
    for _ in range(3):
        for rank in range(3):
            server.push_rows(rank, {1: 1.0}, read_version=0)
    assert server.pull_rows(0, 1).payload == [9]


def test_30_learners_diverge_with_15_softsync_unless_the_rate_is_divided_by_the_staleness(
    make_server: type[Server],
) -> None:
    """As Zhang et al. (2015) have seen it, here on the loss w**2 / 2, with learners that take turns two by two.

    Every gradient is then 14 updates old, and w' = w - a * (w of 14 updates before) is stable for a between 0 and
    2 * cos(14 * pi / 29) = 0.108 (Levin and May, 1976): not for 0.2, but for 0.2 / 14.
    """
    ends = {rate: descend(make_server(policy="k_batch_async:2", workers=30), rate) for rate in ("1", ZHANG)}
    assert abs(ends["1"]) > 1e6
    assert abs(ends[ZHANG]) < 1e-3


def descend(server: Server, rate: str, *, learning_rate: float = 0.2, updates: int = 600) -> float:
    """Return where the parameter is that was 1.0."""
    configure(server, rate)
    server.init("w", 1.0)
    read = [(0, 1.0)] * 30
    for update in range(updates):
        pair = [2 * update % 30, 2 * update % 30 + 1]
        for rank in pair:
            version, value = read[rank]
            server.push(rank, -learning_rate * value / 2, read_version=version, clock=update // 15 + 1)
        for rank in pair:
            read[rank] = (update + 1, server.value())
    assert server.seen(ef.Apply)[-1].staleness == [14, 14]
    return server.value()


# --- what can't be ---


def test_rate_belongs_to_the_rule(server: Server) -> None:
    assert configure(server, ZHANG) == m.Done()
    assert configure(server, ZHANG, rank=1) == m.Done()
    error = configure(server, "1", rank=2)
    assert isinstance(error, OptimizerError)
    assert "at staleness rate 1/max(1,tau)" in error.details["expected"]
    assert "staleness rate" not in error.details["got"]
    change = server.ask(0, m.ChangeOptimizer(1, {"staleness_rate": "1"}, 5.0)).answer
    assert isinstance(change, OptimizerError)
    assert change.details["got"] == "staleness_rate"


def test_unknown_rate_is_refused_with_those_that_there_are(server: Server) -> None:
    error = configure(server, "1/tau")
    assert isinstance(error, OptimizerError)
    assert error.details == {"expected": "1, 1/max(1,tau), 1/(1+tau)", "got": "1/tau"}


def test_values_that_are_assigned_are_not_scaled(server: Server) -> None:
    assert isinstance(configure(server, ZHANG, name="assign"), OptimizerError)
    assert configure(server, "1", name="assign") == m.Done()


@pytest.mark.parametrize("first", ["key", "rule"])
def test_integers_are_not_scaled(server: Server, first: str) -> None:
    if first == "key":
        server.init("n", dtype="int32")
        error = configure(server, ZHANG)
    else:
        configure(server, ZHANG)
        error = server.init("n", dtype="int32").answer
    assert isinstance(error, OptimizerError)
    assert error.details == {"key": "n", "expected": "float", "got": "int32"}


def test_rate_is_saved_with_the_rule_and_loaded(make_server: type[Server]) -> None:
    saved = async_server(make_server, SUM_RATE).ask(0, m.GetRules(5.0)).answer
    assert isinstance(saved, m.RulesState)
    server = make_server(policy="asp")
    assert server.ask(0, m.PutRules(**msgspec.structs.asdict(saved), timeout=5.0)).answer == m.Done()
    server.init()
    for rank in range(2):
        server.push(rank, 12.0)
    assert server.value() == 12 + 6
