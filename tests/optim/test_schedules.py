"""Schedules: pure functions of the number of the update, with MXNet's numbers where those are right."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import OptimizerError
from aiokv.optim import (
    SCHEDULES,
    SGD,
    Cosine,
    Factor,
    Linear,
    MultiFactor,
    OneCycle,
    Poly,
    Schedule,
    StepDecay,
    make_schedule,
)


def rates(schedule: Schedule, updates: range, base: float = 1.0) -> list[float]:
    return [schedule.rate(base, n) for n in updates]


# --- the numbers of MXNet ---


def test_factor_drops_when_the_number_of_the_update_exceeds_a_boundary() -> None:
    expected = [1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.001]
    assert rates(Factor(step=2, factor=0.1), range(8)) == pytest.approx(expected, rel=1e-15)


def test_multifactor_drops_when_the_number_of_the_update_exceeds_a_boundary() -> None:
    expected = [1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert rates(MultiFactor(steps=(3, 5), factor=0.1), range(1, 8)) == pytest.approx(expected, rel=1e-15)


def test_poly_with_a_warm_up() -> None:
    schedule = Poly(max_update=10, power=2, warmup_steps=2, warmup_begin_lr=0.2)
    expected = [0.2, 0.6, 1, 0.765625, 0.5625, 0.390625, 0.25, 0.140625, 0.0625, 0.015625, 0, 0, 0]
    assert rates(schedule, range(13)) == pytest.approx(expected, rel=1e-12)


def test_cosine_to_a_last_rate() -> None:
    expected = [1, 0.9657457896, 0.8681980515, 0.7222075446, 0.55, 0.3777924554, 0.2318019485, 0.1342542104, 0.1, 0.1]
    assert rates(Cosine(max_update=8, final_lr=0.1), range(10)) == pytest.approx(expected, rel=1e-9)


# --- the others ---


def test_step_drops_at_each_multiple() -> None:
    """base * factor^floor(n / step), which is how MXNet describes its Factor."""
    assert rates(StepDecay(step=2, factor=0.5), range(7)) == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_linear_is_a_straight_line() -> None:
    assert rates(Linear(max_update=4, final_lr=0.2), range(7)) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
def test_onecycle_is_that_of_pytorch(anneal: str) -> None:
    """Its n = 0 is the rate of the optimizer's first step."""
    torch = pytest.importorskip("torch")
    total, rise = 41, 12
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    strategy = {"cosine": "cos", "linear": "linear"}[anneal]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        0.4,
        total_steps=total,
        pct_start=(rise + 1) / total,
        anneal_strategy=strategy,
        cycle_momentum=False,
    )
    expected = []
    for _ in range(total - 1):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected.append(optimizer.param_groups[0]["lr"])
    schedule = OneCycle(rise_updates=rise, max_update=total - 1, anneal=anneal)
    assert rates(schedule, range(total), base=0.4) == pytest.approx(expected, rel=1e-9)


def test_onecycle_stays_at_its_last_rate() -> None:
    schedule = OneCycle(rise_updates=2, max_update=6, div_factor=4, final_div_factor=10, anneal="linear")
    assert rates(schedule, range(9)) == pytest.approx([0.25, 0.625, 1, 0.75625, 0.5125, 0.26875, 0.025, 0.025, 0.025])


# --- warm-up, limits, purity ---


@pytest.mark.parametrize(("mode", "expected"), [("linear", [0.2, 0.4, 0.6, 0.8]), ("constant", [0.2, 0.2, 0.2, 0.2])])
@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "factor", "step": 100},
        {"name": "multifactor", "steps": [100]},
        {"name": "step", "step": 100},
        {"name": "poly", "max_update": 100},
        {"name": "cosine", "max_update": 100},
        {"name": "linear", "max_update": 100},
    ],
    ids=lambda data: data["name"],
)
def test_a_warm_up_ends_at_base(schedule: dict[str, Any], mode: str, expected: list[float]) -> None:
    warm_up = {"warmup_steps": 4, "warmup_begin_lr": 0.2, "warmup_mode": mode}
    assert rates(make_schedule(schedule | warm_up), range(5)) == pytest.approx([*expected, 1.0])


def test_boundaries_are_counted_from_the_beginning_warm_up_included() -> None:
    assert Factor(step=10, factor=0.5, warmup_steps=8).rate(1.0, 10) == 1.0
    assert Factor(step=10, factor=0.5, warmup_steps=8).rate(1.0, 11) == 0.5


def test_factor_stops_at_its_least_rate_and_never_raises_one() -> None:
    schedule = Factor(step=1, factor=0.1, stop_factor_lr=0.05)
    assert rates(schedule, range(1, 5)) == pytest.approx([1.0, 0.1, 0.05, 0.05])
    assert schedule.rate(0.01, 5) == 0.01


ANY: list[Schedule] = [
    Factor(step=7, factor=0.5, warmup_steps=3),
    MultiFactor(steps=(3, 50), factor=0.5),
    StepDecay(step=9),
    Poly(max_update=60, power=0.9),
    Cosine(max_update=60, warmup_steps=5),
    Linear(max_update=60),
    OneCycle(rise_updates=10, max_update=60),
]


@given(st.sampled_from(ANY), st.lists(st.integers(0, 10**12), min_size=1, max_size=6))
def test_the_rate_depends_on_the_number_alone(schedule: Schedule, asked: list[int]) -> None:
    """Asking for an earlier update later gives what it gave before: a resumed job has the same rates."""
    first = {n: schedule.rate(0.3, n) for n in asked}
    assert {n: schedule.rate(0.3, n) for n in reversed(asked)} == first
    assert all(0 <= rate <= 0.3 * (1 + 1e-15) for rate in first.values())


# --- in a rule ---


def test_a_rule_takes_a_schedule_as_data_and_its_rate_as_the_base() -> None:
    rule = SGD(learning_rate=0.5, schedule={"name": "factor", "step": 2, "factor": 0.1})  # type: ignore[arg-type]
    assert [rule.learning_rate_at(n) for n in (1, 2, 3)] == pytest.approx([0.5, 0.5, 0.05])


# --- wrong data ---


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "nope"}, "unknown schedule 'nope'; known: cosine, factor, linear, multifactor, onecycle, poly, step"),
    ({}, "unknown schedule None; known: "),
    ({"name": ["factor"]}, r"unknown schedule \['factor'\]"),
    ({"name": "factor"}, "schedule 'factor' needs 'step'"),
    ({"name": "onecycle", "rise_updates": 1}, "schedule 'onecycle' needs 'max_update'"),
    ({"name": "factor", "step": 1, "base": 1}, "schedule 'factor' has no parameter 'base'; its parameters are: .*step"),
    ({"name": "factor", "step": 0}, "'factor': step must be a whole number >= 1, got 0"),
    ({"name": "factor", "step": 1.0}, "step must be a whole number >= 1, got 1.0"),
    ({"name": "factor", "step": True}, "step must be a whole number >= 1, got True"),
    ({"name": "factor", "step": 1, "factor": 1.1}, r"factor must be a number in \(0, 1\], got 1.1"),
    ({"name": "factor", "step": 1, "factor": 0}, r"factor must be a number in \(0, 1\], got 0"),
    ({"name": "factor", "step": 1, "stop_factor_lr": -1}, "stop_factor_lr must be a finite number >= 0"),
    ({"name": "factor", "step": 1, "warmup_steps": -1}, "warmup_steps must be a whole number >= 0, got -1"),
    ({"name": "factor", "step": 1, "warmup_begin_lr": "0"}, "warmup_begin_lr must be a finite number >= 0, got '0'"),
    ({"name": "factor", "step": 1, "warmup_mode": "fast"}, "warmup_mode must be 'linear' or 'constant', got 'fast'"),
    ({"name": "multifactor", "steps": []}, r"steps must be a list of increasing whole numbers >= 1, got \[\]"),
    ({"name": "multifactor", "steps": [3, 3]}, r"increasing whole numbers >= 1, got \[3, 3\]"),
    ({"name": "multifactor", "steps": [0, 3]}, r"got \[0, 3\]"),
    ({"name": "multifactor", "steps": [1, 2.5]}, r"got \[1, 2.5\]"),
    ({"name": "multifactor", "steps": 3}, "got 3"),
    ({"name": "step", "step": 3, "factor": math.nan}, "factor must be a number in"),
    ({"name": "poly", "max_update": 5, "power": 0}, "power must be a finite number > 0, got 0"),
    ({"name": "cosine", "max_update": 0}, "max_update must be a whole number >= 1, got 0"),
    ({"name": "cosine", "max_update": 5, "warmup_steps": 5}, r"max_update must be more than warmup_steps \(5\), got 5"),
    ({"name": "linear", "max_update": 5, "final_lr": -0.1}, "final_lr must be a finite number >= 0, got -0.1"),
    ({"name": "onecycle", "rise_updates": 5, "max_update": 5}, r"max_update must be more than rise_updates \(5\)"),
    ({"name": "onecycle", "rise_updates": 1, "max_update": 5, "div_factor": 0}, "div_factor must be a finite number >"),
    ({"name": "onecycle", "rise_updates": 1, "max_update": 5, "anneal": 1}, "anneal must be 'cosine' or 'linear'"),
]


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_wrong_schedules_are_named_with_what_was_expected(data: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        make_schedule(data)


@pytest.mark.parametrize("data", ["cosine", 3, ["cosine"]])
def test_a_schedule_is_a_dict(data: Any) -> None:
    with pytest.raises(OptimizerError, match="a schedule must be a dict with a name, got "):
        SGD(schedule=data)


def test_every_schedule_was_asked_for_something_wrong() -> None:
    assert {data.get("name") for data, _ in WRONG if isinstance(data.get("name"), str)} >= set(SCHEDULES)
