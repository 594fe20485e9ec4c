"""The update rule of a server: set once, changed from a round on, and what is divided by what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import OptimizerError, SumOverflowError
from aiokv.optim import SGD, Assign
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server


def configure(server: Server, rank: int = 0, name: str = "sgd", *, reduction: str = "sum", **params: Any) -> Any:
    """Let a worker set the rule."""
    return server.ask(rank, m.SetOptimizer(name, dict(params), reduction, 5.0)).answer


def test_rule_is_validated_and_handed_on(server: Server) -> None:
    assert configure(server, learning_rate=0.5) == m.Done()
    assert server.seen(ef.Configure) == [ef.Configure(SGD(learning_rate=0.5))]


def test_rule_for_floats_and_key_of_integers_exclude_each_other(server: Server) -> None:
    server.init("n", dtype="int32")
    answer = configure(server)
    assert isinstance(answer, OptimizerError)
    assert answer.details == {"key": "n", "expected": "float", "got": "int32"}
    assert not server.seen(ef.Configure)


def test_key_of_integers_is_refused_when_the_rule_is_for_floats(server: Server) -> None:
    configure(server)
    assert isinstance(server.init("n", dtype="int32").answer, OptimizerError)


def test_same_rule_from_every_worker_is_set_once(server: Server) -> None:
    assert [configure(server, rank, learning_rate=0.5, momentum=0.9) for rank in range(3)] == [m.Done()] * 3
    assert len(server.seen(ef.Configure)) == 1


def test_defaults_written_out_are_the_same_rule(server: Server) -> None:
    configure(server)
    assert configure(server, 1, momentum=0.0) == m.Done()


@pytest.mark.parametrize(("name", "params"), [("sgd", {"learning_rate": 0.2}), ("assign", {})])
def test_another_rule_is_refused_with_both_named(server: Server, name: str, params: dict[str, Any]) -> None:
    configure(server, learning_rate=0.5)
    error = configure(server, 1, name, **params)
    assert isinstance(error, OptimizerError)
    assert "learning_rate=0.5" in error.details["expected"]
    assert len(server.seen(ef.Configure)) == 1


@pytest.mark.parametrize(("name", "params"), [("nope", {}), ("sgd", {"learning_rate": "fast"}), ("sgd", {"lr": 0.1})])
def test_scenario_22_rule_that_cannot_be_is_refused_and_none_is_set(
    server: Server, name: str, params: dict[str, Any]
) -> None:
    # Scenario 22.
    assert isinstance(configure(server, 0, name, **params), OptimizerError)
    assert configure(server, 0, "assign") == m.Done()
    assert server.seen(ef.Configure) == [ef.Configure(Assign())]


def test_reduction_belongs_to_the_rule(server: Server) -> None:
    configure(server, reduction="mean")
    assert isinstance(configure(server, 1, reduction="sum"), OptimizerError)
    assert isinstance(configure(server, 2, reduction="mode"), OptimizerError)
    assert configure(server, 1, reduction="mean") == m.Done()


@pytest.mark.parametrize(("reduction", "divisors"), [("sum", [1, 1]), ("mean", [3, 2]), ("mean_of_world", [3, 3])])
def test_sum_is_divided_by_those_who_contributed_or_by_all(server: Server, reduction: str, divisors: list[int]) -> None:
    configure(server, reduction=reduction)
    server.init()
    for rank in range(3):
        server.push(rank)
    server.leave(2)
    for rank in range(2):
        server.push(rank)
    assert [apply.divisor for apply in server.seen(ef.Apply)] == divisors


def test_mean_of_integers_is_refused(server: Server) -> None:
    server.init("n", dtype="int32")
    answer = server.ask(0, m.SetOptimizer("assign", {}, "mean", 5.0)).answer
    assert isinstance(answer, OptimizerError)
    assert answer.details == {"key": "n", "expected": "float", "got": "int32"}
    assert server.ask(0, m.SetOptimizer("assign", {}, "sum", 5.0)).answer == m.Done()


def test_median_is_made_when_all_contributions_are_there(server: Server) -> None:
    server.ask(0, m.SetOptimizer("assign", {}, "median", 5.0))
    server.init()
    server.init("empty", shape=(0,), stop=0)
    for rank, value in ((2, 1000.0), (0, 1.0), (1, 2.0)):
        server.push(rank, value)
        server.push(rank, key="empty", shape=(0,), stop=0)
    assert server.value() == 2.0
    (combined,) = server.seen(ef.Combine)
    assert (len(combined.sources), combined.dtype, combined.reduction) == (2, "float32", "median")
    assert [(apply.ranks, apply.divisor) for apply in server.seen(ef.Apply)] == [([0, 1, 2], 1)] * 2
    assert not server.seen(ef.Fold)


def test_median_of_a_round_is_made_once_while_the_one_before_is_applied(server: Server) -> None:
    server.ask(0, m.SetOptimizer("assign", {}, "median", 5.0))
    server.init()
    server.hold = True
    for sequence in (1, 2):
        for rank in range(3):
            server.push(rank, float(sequence), sequence=sequence)
    assert len(server.seen(ef.Combine)) == 2
    server.finish()
    server.finish()
    assert server.value() == 3.0


def test_median_that_is_set_in_an_open_round_counts_from_the_next_one(server: Server) -> None:
    server.init()
    server.push(0, 1.0)
    server.ask(0, m.SetOptimizer("assign", {}, "median", 5.0))
    server.push(1, 2.0)
    server.push(2, 1000.0)
    assert server.value() == 1003.0, "nothing of the sum that was begun is lost"
    for rank, value in ((2, 1000.0), (0, 1.0), (1, 2.0)):
        server.push(rank, value, sequence=2)
    assert server.value() == 1003.0 + 2.0


@pytest.mark.parametrize("first", ["table", "rule"])
def test_median_of_a_table_is_refused(server: Server, first: str) -> None:
    table = m.InitRows("t", (4, 2), "float32", 0, 4, 0, 0, 0, "bsp", 5.0, (), b"", True, {"name": "zeros"})
    rule = m.SetOptimizer("assign", {}, "median", 5.0)
    before, after = (table, rule) if first == "table" else (rule, table)
    assert server.ask(0, before).answer == m.Done()
    assert isinstance(server.ask(0, after).answer, OptimizerError)


def change(server: Server, since: int, rank: int = 0, **params: Any) -> Any:
    """Let a worker change the rule's parameters."""
    return server.ask(rank, m.ChangeOptimizer(since, params, 5.0)).answer


def push_all(server: Server, clock: int, key: str = "w") -> None:
    for rank in range(3):
        server.push(rank, key=key, clock=clock)


def test_scenario_19_change_holds_from_its_round_on(server: Server) -> None:
    configure(server, learning_rate=0.1)
    server.init()
    push_all(server, 1)
    assert [change(server, 3, rank, learning_rate=0.01) for rank in range(3)] == [m.Done()] * 3
    push_all(server, 2)
    push_all(server, 3)
    rates = [apply.rule.learning_rate for apply in server.seen(ef.Apply) if isinstance(apply.rule, SGD)]
    assert rates == [0.1, 0.1, 0.01]
    assert len(server.seen(ef.Configure)) == 1, "what the rule keeps for the weights goes on"


def test_round_is_that_of_its_contributors_whatever_other_keys_do(server: Server) -> None:
    configure(server, learning_rate=0.1)
    server.init("a")
    server.init("b")
    change(server, 2, learning_rate=0.01)
    push_all(server, 2, "a")
    push_all(server, 1, "b")
    applied = {apply.key: apply for apply in server.seen(ef.Apply)}
    assert applied["a"].rule == SGD(learning_rate=0.01)
    assert applied["b"].rule == SGD(learning_rate=0.1)
    assert (applied["a"].clock, applied["b"].clock) == (2, 1)


def test_clock_of_a_round_is_the_largest_of_its_contributors(server: Server) -> None:
    server.init()
    for rank, clock in enumerate((4, 9, 2)):
        server.push(rank, clock=clock)
    assert [apply.clock for apply in server.seen(ef.Apply)] == [9]


def test_changes_add_up(server: Server) -> None:
    configure(server, learning_rate=0.1)
    server.init()
    change(server, 1, learning_rate=0.5)
    change(server, 2, wd=0.25)
    push_all(server, 1)
    push_all(server, 2)
    assert [apply.rule for apply in server.seen(ef.Apply)] == [
        SGD(learning_rate=0.5),
        SGD(learning_rate=0.5, wd=0.25),
    ]


def test_change_of_a_round_that_is_over_is_refused(server: Server) -> None:
    configure(server, learning_rate=0.1)
    server.init()
    assert change(server, 2, wd=0.5) == m.Done()
    push_all(server, 2)
    assert change(server, 2, 1, wd=0.5) == m.Done(), "another worker says the same"
    for since, wd in [(2, 0.25), (1, 0.5)]:
        error = change(server, since, wd=wd)
        assert isinstance(error, OptimizerError)
        assert "updates of round 2 are made already" in str(error)


def test_change_that_float32_cannot_hold_is_refused_by_servers_without_such_a_key_too(server: Server) -> None:
    """Otherwise some would have it, and others not."""
    configure(server)
    error = change(server, 1, clip_gradient=1e-50)
    assert isinstance(error, OptimizerError)
    assert "clip_gradient" in str(error)
    assert "rounded to float32" in str(error)


def test_rule_that_is_for_float64_only_can_be_changed(server: Server) -> None:
    configure(server, clip_gradient=1e-50)
    assert change(server, 1, learning_rate=0.5) == m.Done()


def test_two_changes_of_one_round_are_refused(server: Server) -> None:
    configure(server)
    assert change(server, 5, wd=0.5) == m.Done()
    for since in (5, 4):
        error = change(server, since, 1, wd=0.25)
        assert isinstance(error, OptimizerError)
        assert "from round 5 on {'wd': 0.5} holds" in str(error)


@pytest.mark.parametrize("params", [{"momentum": 0.5}, {"nope": 1}, {"learning_rate": -1.0}])
def test_change_that_cannot_be_is_refused(server: Server, params: dict[str, Any]) -> None:
    configure(server)
    assert isinstance(change(server, 5, **params), OptimizerError)
    assert change(server, 5, wd=0.5) == m.Done()


def test_change_without_a_rule_is_refused(server: Server) -> None:
    assert "call set_optimizer first" in str(change(server, 5, learning_rate=0.5))


def test_update_that_was_not_made_is_told_to_those_who_pushed(server: Server) -> None:
    server.init()
    server.hold = True
    pushes = [server.push(rank) for rank in range(3)]
    reading = server.pull(0)
    (apply,) = server.applying
    server.applying.clear()
    server.slots.pop(apply.slot)  # type: ignore[arg-type]
    server.values["w", 0][1] = server.values["w", 0][0]
    error = SumOverflowError("too large", key="w", round=1)
    server.handle(st.Applied("w", 0, 1, error))
    assert [push.answer for push in pushes] == [error] * 3
    assert reading.answer == m.Value(1), "the round is over, with the value as it was"
    server.hold = False
    assert [server.push(rank, sequence=2).pending for rank in range(2)] == [True, True]
    assert server.push(2, sequence=2).answer == m.Done(2)


@pytest.mark.parametrize("reduction", ["mean", "median"])
def test_sums_are_kept_whatever_rule_is_set(server: Server, reduction: str) -> None:
    assert server.init("n", dtype="int32", policy="sum").answer == m.Done()
    assert configure(server, learning_rate=0.5, reduction=reduction) == m.Done(), "the rule is not for that key"
    assert server.init("later", dtype="int32", policy="sum").answer == m.Done()
    assert change(server, 1, wd=0.5) == m.Done()
    server.hold = True
    for rank in range(3):
        server.push(rank, key="n", dtype="int32")
    assert len(server.seen(ef.Fold)) == 2
    (apply,) = server.applying
    assert (apply.rule, apply.divisor) == (Assign(), 1)
