"""A rule of one's own: a record and its arithmetic in one class, on every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.errors import OptimizerError
from aiokv.kernels import get_backend
from aiokv.optim import OwnRule, Step, make_optimizer, register, registry, rule_to_params
from aiokv.optim.checks import MORE_THAN_0

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = NDArray[Any]


class Cautious(OwnRule, tag="cautious", frozen=True, kw_only=True):
    """SGD that moves no element by more than `limit`, and remembers the largest gradient."""

    ranges = OwnRule.ranges | {"limit": MORE_THAN_0}
    arrays = ("largest",)

    limit: float = 0.1

    def compute(self, weight: Array, gradient: Array, state: dict[str, Array], step: Step) -> Array:
        state["largest"][...] = np.maximum(state["largest"], np.abs(gradient))
        return weight - np.clip(step.learning_rate * gradient, -self.limit, self.limit)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Registered rules are the whole process's: forget those of a test."""
    before = dict(registry._rules)
    yield
    registry._rules.clear()
    registry._rules.update(before)


def test_a_registered_rule_is_made_and_checked_as_any_other() -> None:
    assert register(Cautious) is Cautious
    rule = make_optimizer("cautious", {"limit": 1, "learning_rate": 0.5})
    assert rule == Cautious(limit=1.0, learning_rate=0.5)
    assert make_optimizer("cautious", rule_to_params(rule)) == rule
    with pytest.raises(OptimizerError, match="'cautious': limit must be a finite number > 0, got 0"):
        make_optimizer("cautious", {"limit": 0})
    with pytest.raises(OptimizerError, match=r"unknown optimizer 'nope'; known: .*cautious"):
        make_optimizer("nope", {})


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_its_arithmetic_is_computed_by_every_backend(name: str, dtype: str) -> None:
    """The gradient is rescaled and decayed before: 2 * 0.25 + 0.5 * 1 = 1, and -8 * 2 + 0.5 * 1."""
    backend, rule = get_backend(name), Cautious(learning_rate=0.125, rescale_grad=2.0, wd=0.5, limit=0.5)
    weight, total = np.ones(2, dtype), np.array([0.25, -8], dtype)
    state = backend.new_state(rule, weight)
    backend.update(rule, weight, total, state, rule.step_for("w", count=1, num_update=1))
    assert total.astype(float).tolist() == [0.875, 1.5]
    assert state["largest"].tolist() == [1, 15.5]
    assert weight.astype(float).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_may_keep_a_master_copy(dtype: str) -> None:
    backend, rule = get_backend("reference"), Cautious(learning_rate=2.0**-12, multi_precision=True)
    weight = np.ones(2, dtype)
    state = backend.new_state(rule, weight)
    for count in range(1, 65):
        total, out = np.full(2, -1, np.float32), np.empty(2, dtype)
        step = rule.step_for("w", count=count, num_update=count)
        backend.update(rule, weight, total, state, step, out=out)
        weight = out
    assert state["master"].tolist() == [1 + 2.0**-6] * 2
    assert weight.astype(float).tolist() == [1 + 2.0**-6] * 2


def test_the_weight_that_is_being_sent_is_safe_from_it() -> None:
    class Rude(OwnRule, tag="rude", frozen=True):
        def compute(self, weight: Array, gradient: Array, state: dict[str, Array], step: Step) -> Array:
            weight -= gradient
            return weight

    backend, weight, total = get_backend("reference"), np.ones(2), np.ones(2)
    backend.update(Rude(), weight, total, {}, Step(1))
    assert (weight.tolist(), total.tolist()) == ([1, 1], [0, 0])


@pytest.mark.parametrize(
    ("result", "got"), [(np.ones(3), r"float64\[3\]"), (np.ones(2, np.float32), r"float32\[2\]"), (None, "NoneType")]
)
def test_a_result_that_does_not_fit_is_refused(result: Any, got: str) -> None:
    class Odd(OwnRule, tag="odd", frozen=True):
        def compute(self, weight: Array, gradient: Array, state: dict[str, Array], step: Step) -> Any:
            return result

    total = np.ones(2)
    with pytest.raises(OptimizerError, match=rf"optimizer 'odd' must compute float64\[2\], got {got}"):
        get_backend("reference").update(Odd(), np.ones(2), total, {}, Step(1))
    assert total.tolist() == [1, 1]


def test_only_rules_of_ones_own_can_be_registered() -> None:
    with pytest.raises(OptimizerError, match="only a class made of OwnRule can be registered, got 3"):
        register(3)  # type: ignore[type-var]
    with pytest.raises(OptimizerError, match="only a class made of OwnRule"):
        register(int)  # type: ignore[type-var]


def test_a_name_belongs_to_one_rule() -> None:
    class Other(OwnRule, tag="sgd", frozen=True):
        pass

    with pytest.raises(OptimizerError, match="optimizer 'sgd' is already SGD"):
        register(Other)
    register(Cautious)
    register(Cautious)


def test_a_rule_needs_a_name_and_does_not_change() -> None:
    class Changing(OwnRule, tag="changing", frozen=False):  # type: ignore[misc]
        pass

    class Nameless(OwnRule, tag=7, frozen=True):
        pass

    for wrong in (Changing, Nameless):
        with pytest.raises(OptimizerError, match=r'needs a name and must not change: class \w+\(OwnRule, tag="..."'):
            register(wrong)
