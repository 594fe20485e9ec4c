"""Update rules refuse parameters that can't work, however they are made."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from aiokv.errors import OptimizerError
from aiokv.optim import RULES, SGD, Adam, Assign, Optimizer, make_optimizer


def test_rules_by_name() -> None:
    assert make_optimizer("assign", {}) == Assign()
    assert make_optimizer("sgd", {"learning_rate": 0.5, "momentum": 0.9}) == SGD(learning_rate=0.5, momentum=0.9)
    assert make_optimizer("adam", {"beta1": 0.5}) == Adam(beta1=0.5)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_travels_under_its_name(name: str) -> None:
    assert msgspec.to_builtins(RULES[name]())["name"] == name


def test_parameters_that_are_not_given_keep_their_defaults() -> None:
    rule = SGD()
    assert (rule.learning_rate, rule.momentum, rule.wd, rule.rescale_grad) == (0.1, 0.0, 0.0, 1.0)


def test_the_defaults_of_adam_are_those_of_its_authors() -> None:
    rule = Adam()
    assert (rule.learning_rate, rule.beta1, rule.beta2, rule.epsilon) == (0.001, 0.9, 0.999, 1e-8)
    assert (rule.wd, rule.rescale_grad) == (0.0, 1.0)


def test_an_int_is_a_number_too() -> None:
    """One worker says 1, another 1.0: they mean the same rule."""
    rule = make_optimizer("sgd", {"learning_rate": 1, "rescale_grad": -1})
    assert repr(rule) == repr(SGD(learning_rate=1.0, rescale_grad=-1.0))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(OptimizerError, match="unknown optimizer 'lamb'; known: adam, assign, sgd") as caught:
        make_optimizer("lamb", {})
    assert caught.value.details == {"expected": "adam, assign, sgd", "got": "lamb"}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("adam", "learning_rate, beta1, beta2, epsilon, wd, rescale_grad"),
        ("assign", "none"),
        ("sgd", "learning_rate, momentum, wd, rescale_grad"),
    ],
)
def test_unknown_parameters_list_the_known_ones(name: str, known: str) -> None:
    with pytest.raises(OptimizerError, match=f"optimizer '{name}' has no parameter 'lr'; its parameters are: {known}"):
        make_optimizer(name, {"lr": 0.1})


NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, "0.1", None, True, 10**400]
AT_LEAST_0, FRACTION, ANY = "a finite number >= 0", "a number in [0, 1)", "a finite number"
WRONG: dict[tuple[str, str], tuple[str, list[Any]]] = {
    ("sgd", "learning_rate"): (AT_LEAST_0, [-0.1]),
    ("sgd", "momentum"): (FRACTION, [-0.1, 1, 1.5]),
    ("sgd", "wd"): (AT_LEAST_0, [-1]),
    ("sgd", "rescale_grad"): (ANY, []),
    ("adam", "learning_rate"): (AT_LEAST_0, [-0.1]),
    ("adam", "beta1"): (FRACTION, [-0.1, 1]),
    ("adam", "beta2"): (FRACTION, [-1e-9, 1.0]),
    ("adam", "epsilon"): ("a finite number > 0", [0, 0.0, -1e-8]),
    ("adam", "wd"): (AT_LEAST_0, [-1]),
    ("adam", "rescale_grad"): (ANY, []),
}


@pytest.mark.parametrize(
    ("name", "param", "value", "expected"),
    [
        (name, param, value, expected)
        for (name, param), (expected, values) in WRONG.items()
        for value in values + NO_NUMBERS
    ],
)
def test_wrong_parameters_are_named_with_what_was_expected(name: str, param: str, value: Any, expected: str) -> None:
    with pytest.raises(OptimizerError) as caught:
        make_optimizer(name, {param: value})
    assert caught.value.message.startswith(f"optimizer '{name}': {param} must be {expected}, got {value!r}")
    assert caught.value.details == {"expected": expected, "got": repr(value)}


@pytest.mark.parametrize("name", RULES)
def test_every_parameter_is_checked(name: str) -> None:
    """A rule whose new parameter is missing above fails here."""
    params = {param for rule, param in WRONG if rule == name}
    assert params == {field.name for field in msgspec.structs.fields(RULES[name])}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("sgd", {"learning_rate": 0, "momentum": 0, "wd": 0, "rescale_grad": 0}),
        ("adam", {"learning_rate": 0, "beta1": 0, "beta2": 0, "epsilon": 5e-324, "wd": 0, "rescale_grad": -1e308}),
        ("adam", {"beta1": math.nextafter(1, 0), "beta2": math.nextafter(1, 0)}),
    ],
)
def test_the_ends_of_the_ranges_are_in_them(name: str, params: dict[str, float]) -> None:
    rule = make_optimizer(name, params)
    assert {param: getattr(rule, param) for param in params} == params


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


# --- keys ---


@pytest.mark.parametrize("rule", [SGD(), Adam()], ids=["sgd", "adam"])
@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16"])
def test_rules_that_take_fractions_refuse_integers(rule: Optimizer, dtype: str) -> None:
    name = type(rule).__name__.lower()
    with pytest.raises(OptimizerError, match=f"optimizer '{name}' updates floats, but key 'w' has {dtype}") as caught:
        rule.check_dtype("w", dtype)
    assert caught.value.details == {"key": "w", "expected": "float", "got": dtype}


@pytest.mark.parametrize("rule", [SGD(), Adam()], ids=["sgd", "adam"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_rules_that_take_fractions_take_floats(rule: Optimizer, dtype: str) -> None:
    rule.check_dtype("w", dtype)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64"])
def test_assign_takes_everything(dtype: str) -> None:
    Assign().check_dtype("w", dtype)
    Assign().check_precision("float32")


TOO_FINE: list[tuple[Optimizer, str]] = [
    (SGD(learning_rate=1e39), "'sgd': learning_rate must be a finite number >= 0 when it is rounded to float32"),
    (SGD(rescale_grad=-1e300), "'sgd': rescale_grad must be a finite number when it is rounded to float32"),
    (Adam(beta2=0.99999999), r"'adam': beta2 must be a number in \[0, 1\) when it is rounded to float32"),
    (Adam(epsilon=1e-46), "'adam': epsilon must be a finite number > 0 when it is rounded to float32"),
]


@pytest.mark.parametrize(("rule", "message"), TOO_FINE)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_keys_that_are_updated_in_a_precision_too_low_for_a_parameter_are_refused(
    rule: Optimizer, message: str, dtype: str
) -> None:
    with pytest.raises(OptimizerError, match=message):
        rule.check_dtype("w", dtype)


@pytest.mark.parametrize("rule", [rule for rule, _ in TOO_FINE])
def test_double_precision_holds_every_parameter(rule: Optimizer) -> None:
    rule.check_dtype("w", "float64")
