"""The numbers of one update: rate, decay, count and seed of one key."""

from __future__ import annotations

import pytest

from aiokv.errors import OptimizerError
from aiokv.optim import SGD, SGLD, Adam, Assign, Factor, Nadam, Optimizer, Step
from aiokv.optim.adam import momentum_at, momentum_product


def test_without_anything_else_a_step_has_the_parameters_of_the_rule() -> None:
    assert SGD(learning_rate=0.5, wd=0.1).step_for("w", count=3, num_update=7) == Step(3, 0.5, 0.1)
    assert Assign().step_for("w", count=3, num_update=7) == Step(3)


def test_multipliers_are_those_of_the_key() -> None:
    rule = SGD(learning_rate=0.5, wd=0.1, lr_mult={"w": 0.5, 3: 0.0}, wd_mult={"b": 0})
    assert rule.step_for("w", count=1, num_update=1) == Step(1, 0.25, 0.1)
    assert rule.step_for("b", count=1, num_update=1) == Step(1, 0.5, 0.0)
    assert rule.step_for(3, count=1, num_update=1) == Step(1, 0.0, 0.1)
    assert rule.step_for("3", count=1, num_update=1) == Step(1, 0.5, 0.1)


def test_the_schedule_sees_the_largest_count_and_the_key_its_own() -> None:
    """Key a was updated in each round, b for the first time in the fifth."""
    rule = Adam(learning_rate=1.0, schedule=Factor(step=2, factor=0.5))
    assert rule.step_for("a", count=5, num_update=5) == Step(5, 0.25, 0.0)
    assert rule.step_for("b", count=1, num_update=5) == Step(1, 0.25, 0.0)


def test_earlier_updates_count_for_the_schedule_and_not_for_the_key() -> None:
    """The means of Adam are new, whatever another job did before."""
    rule = Adam(learning_rate=1.0, schedule=Factor(step=2, factor=0.5), begin_num_update=4)
    assert rule.step_for("w", count=1, num_update=1) == Step(1, 0.25, 0.0)
    assert rule.learning_rate_at(1) == 0.25


@pytest.mark.parametrize("rule", [SGD(), Assign()], ids=["sgd", "assign"])
@pytest.mark.parametrize(("count", "num_update", "message"), [(0, 1, "count 0"), (1, 0, "num_update 0")])
def test_updates_are_counted_from_1(rule: Optimizer, count: int, num_update: int, message: str) -> None:
    with pytest.raises(OptimizerError, match=f"updates are counted from 1, got {message}"):
        rule.step_for("w", count=count, num_update=num_update)


def test_seeds_differ_by_seed_key_and_count_and_by_nothing_else() -> None:
    def seed(rule: SGLD, key: str | int = "w", count: int = 1, num_update: int = 1) -> int:
        return rule.step_for(key, count=count, num_update=num_update).seed

    seeds = [
        seed(SGLD()),
        seed(SGLD(seed=1)),
        seed(SGLD(), "v"),
        seed(SGLD(), 1),
        seed(SGLD(), "1"),
        seed(SGLD(), "w", 2),
    ]
    assert len(set(seeds)) == len(seeds)
    assert seed(SGLD(learning_rate=9.0), num_update=5) == seeds[0]


# --- the momentum of nadam ---


@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.999])
def test_the_momentum_of_nadam_depends_on_the_count_of_the_key_alone(beta1: float) -> None:
    """However many keys a server holds: in MXNet every update of any key is a factor."""
    product = 1.0
    for count in range(1, 300):
        product *= beta1 * (1 - 0.5 * 0.96 ** (count * 0.004))
        assert momentum_product(beta1, 0.004, count) == pytest.approx(product, rel=1e-12, abs=1e-17)


def test_the_momentum_of_nadam_after_very_many_updates() -> None:
    assert momentum_at(0.9, 0.004, 10**9) == 0.9
    assert momentum_product(0.9, 0.004, 10**12) < 1e-18
    assert Nadam().step_for("w", count=10**12, num_update=10**12).count == 10**12
