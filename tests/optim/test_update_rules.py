"""Update rules refuse parameters that can't work, however they are made."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from aiokv.errors import OptimizerError
from aiokv.optim import SGD, Assign, Optimizer, make_optimizer


def test_rules_by_name() -> None:
    assert make_optimizer("assign", {}) == Assign()
    assert make_optimizer("sgd", {"learning_rate": 0.5, "momentum": 0.9}) == SGD(learning_rate=0.5, momentum=0.9)


def test_parameters_that_are_not_given_keep_their_defaults() -> None:
    rule = SGD()
    assert (rule.learning_rate, rule.momentum, rule.wd, rule.rescale_grad) == (0.1, 0.0, 0.0, 1.0)


def test_an_int_is_a_number_too() -> None:
    """One worker says 1, another 1.0: they mean the same rule."""
    rule = make_optimizer("sgd", {"learning_rate": 1, "rescale_grad": -1})
    assert repr(rule) == repr(SGD(learning_rate=1.0, rescale_grad=-1.0))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(OptimizerError, match="unknown optimizer 'adam'; known: assign, sgd") as caught:
        make_optimizer("adam", {})
    assert caught.value.details == {"expected": "assign, sgd", "got": "adam"}


@pytest.mark.parametrize(("name", "known"), [("sgd", "learning_rate, momentum, wd, rescale_grad"), ("assign", "none")])
def test_unknown_parameters_list_the_known_ones(name: str, known: str) -> None:
    with pytest.raises(OptimizerError, match=f"optimizer '{name}' has no parameter 'lr'; its parameters are: {known}"):
        make_optimizer(name, {"lr": 0.1})


WRONG: list[tuple[str, Any, str]] = [
    ("learning_rate", -0.1, "a finite number >= 0, got -0.1"),
    ("learning_rate", math.nan, "a finite number >= 0, got nan"),
    ("learning_rate", math.inf, "a finite number >= 0, got inf"),
    ("learning_rate", "0.1", "a finite number >= 0, got '0.1'"),
    ("learning_rate", None, "a finite number >= 0, got None"),
    ("learning_rate", True, "a finite number >= 0, got True"),
    ("momentum", -0.1, "a number in [0, 1), got -0.1"),
    ("momentum", 1, "a number in [0, 1), got 1"),
    ("momentum", math.nan, "a number in [0, 1), got nan"),
    ("wd", -1, "a finite number >= 0, got -1"),
    ("wd", math.inf, "a finite number >= 0, got inf"),
    ("rescale_grad", math.nan, "a finite number, got nan"),
    ("rescale_grad", -math.inf, "a finite number, got -inf"),
    ("rescale_grad", False, "a finite number, got False"),
    ("rescale_grad", 10**400, "a finite number, got 1"),
]


@pytest.mark.parametrize(("param", "value", "expected"), WRONG)
def test_wrong_parameters_are_named_with_what_was_expected(param: str, value: Any, expected: str) -> None:
    with pytest.raises(OptimizerError) as caught:
        make_optimizer("sgd", {param: value})
    assert caught.value.message.startswith(f"optimizer 'sgd': {param} must be {expected}")
    assert caught.value.details == {"expected": expected.rpartition(", got")[0], "got": repr(value)}


def test_a_rule_made_directly_is_checked_too() -> None:
    with pytest.raises(OptimizerError, match="momentum must be"):
        SGD(momentum=2.0)


def test_a_rule_that_was_decoded_is_checked_too() -> None:
    class Known(msgspec.Struct):
        rule: Assign | SGD

    text = msgspec.json.encode(Known(SGD(learning_rate=0.5))).replace(b"0.5", b"-0.5")
    with pytest.raises(OptimizerError, match="learning_rate must be"):
        msgspec.json.decode(text, type=Known)


@pytest.mark.parametrize("param", ["learning_rate", "momentum"])
def test_rules_do_not_change(param: str) -> None:
    rule: Optimizer = SGD()
    with pytest.raises(AttributeError):
        setattr(rule, param, 0.5)
