"""Update rules refuse parameters that can't work, however they are made, and travel as plain data."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.errors import OptimizerError
from aiokv.optim import (
    DCASGD,
    LAMB,
    NAG,
    RULES,
    SCHEDULES,
    SGD,
    Accumulate,
    Adam,
    Assign,
    Factor,
    LearningRule,
    Optimizer,
    RMSProp,
    make_optimizer,
    rule_to_params,
)

NAMES = [
    *["accumulate", "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamw", "assign", "dcasgd", "ftml", "ftrl"],
    *["groupadagrad", "lamb", "lans", "lars", "lion", "nadam", "nag", "rmsprop", "sgd", "sgld", "signum"],
]
LEARNING = [name for name in NAMES if name not in {"accumulate", "assign"}]


def test_the_rules_are_those_of_mxnet_and_a_few_more() -> None:
    assert sorted(RULES) == NAMES


def test_rules_by_name() -> None:
    assert make_optimizer("assign", {}) == Assign()
    assert make_optimizer("sgd", {"learning_rate": 0.5, "momentum": 0.9}) == SGD(learning_rate=0.5, momentum=0.9)
    assert make_optimizer("adam", {"beta1": 0.5}) == Adam(beta1=0.5)


# --- defaults ---


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("sgd", {"learning_rate": 0.1, "momentum": 0.0, "wd": 0.0, "rescale_grad": 1.0, "clip_gradient": None}),
        ("nag", {"learning_rate": 0.1, "momentum": 0.9}),
        ("sgld", {"learning_rate": 0.1}),
        ("signum", {"learning_rate": 0.01, "momentum": 0.9, "wd_lh": 0.0}),
        ("dcasgd", {"learning_rate": 0.1, "momentum": 0.0, "lamda": 0.04}),
        ("adam", {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
        ("adamax", {"learning_rate": 0.002, "beta1": 0.9, "beta2": 0.999}),
        ("nadam", {"learning_rate": 0.001, "schedule_decay": 0.004}),
        ("adagrad", {"learning_rate": 0.01, "epsilon": 1e-6}),
        ("adadelta", {"learning_rate": 1.0, "rho": 0.9, "epsilon": 1e-6}),
        ("rmsprop", {"learning_rate": 0.001, "rho": 0.9, "centered": False}),
        ("ftrl", {"learning_rate": 0.1, "lamda1": 0.01, "beta": 1.0}),
        ("ftml", {"learning_rate": 0.0025, "beta1": 0.6, "beta2": 0.999}),
    ],
)
def test_defaults_are_those_of_mxnet(name: str, params: dict[str, Any]) -> None:
    rule = RULES[name]()
    assert {param: getattr(rule, param) for param in params} == params


@pytest.mark.parametrize("name", LEARNING)
def test_nothing_common_happens_unless_asked_for(name: str) -> None:
    common = {"rescale_grad": 1.0, "clip_gradient": None, "wd": 0.0, "multi_precision": False, "schedule": None}
    params = rule_to_params(RULES[name]())
    assert params | common == params
    assert (params["lr_mult"], params["wd_mult"], params["begin_num_update"]) == ([], [], 0)


# --- numbers ---


def test_an_int_is_a_number_too() -> None:
    """One worker says 1, another 1.0: they mean the same rule."""
    rule = make_optimizer("sgd", {"learning_rate": 1, "rescale_grad": -1})
    assert repr(rule) == repr(SGD(learning_rate=1.0, rescale_grad=-1.0))


def test_unknown_names_list_the_known_ones() -> None:
    known = ", ".join(sorted(RULES))
    with pytest.raises(OptimizerError, match=f"unknown optimizer 'nope'; known: {known}") as caught:
        make_optimizer("nope", {})
    assert caught.value.details == {"expected": known, "got": "nope"}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("assign", "none"),
        ("accumulate", "rescale_grad, clip_gradient, multi_precision"),
        (
            "sgd",
            "rescale_grad, clip_gradient, multi_precision, learning_rate, wd, lr_mult, wd_mult, schedule, "
            "begin_num_update, momentum",
        ),
    ],
)
def test_unknown_parameters_list_the_known_ones(name: str, known: str) -> None:
    with pytest.raises(OptimizerError, match=f"optimizer '{name}' has no parameter 'lr'; its parameters are: {known}"):
        make_optimizer(name, {"lr": 0.1})


NO_NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, "0.1", True, 10**400, [0.1]]
AT_LEAST_0, MORE_THAN_0, FRACTION = "a finite number >= 0", "a finite number > 0", "a number in [0, 1)"
NONE_OR_MORE, FINITE = "None or a finite number > 0", "a finite number"
COMMON = {
    "learning_rate": AT_LEAST_0,
    "wd": AT_LEAST_0,
    "rescale_grad": FINITE,
    "clip_gradient": NONE_OR_MORE,
    "begin_num_update": "a whole number >= 0",
}
MEANS = {"beta1": FRACTION, "beta2": FRACTION, "epsilon": MORE_THAN_0}
BOUNDS = {"lower_bound": NONE_OR_MORE, "upper_bound": NONE_OR_MORE}
OWN: dict[str, dict[str, str]] = {
    "sgd": {"momentum": FRACTION},
    "nag": {"momentum": FRACTION},
    "sgld": {"seed": "a whole number >= 0"},
    "signum": {"momentum": FRACTION, "wd_lh": AT_LEAST_0},
    "dcasgd": {"momentum": FRACTION, "lamda": AT_LEAST_0},
    "lion": {"beta1": FRACTION, "beta2": FRACTION},
    "adam": MEANS,
    "adamw": MEANS,
    "adamax": MEANS,
    "nadam": MEANS | {"schedule_decay": AT_LEAST_0},
    "adabelief": MEANS,
    "adagrad": {"epsilon": MORE_THAN_0},
    "groupadagrad": {"epsilon": MORE_THAN_0},
    "adadelta": {"rho": FRACTION, "epsilon": MORE_THAN_0},
    "rmsprop": {"rho": FRACTION, "momentum": FRACTION, "epsilon": MORE_THAN_0},
    "ftrl": {"lamda1": AT_LEAST_0, "beta": MORE_THAN_0},
    "ftml": MEANS,
    "lars": {"momentum": FRACTION, "eta": MORE_THAN_0, "epsilon": MORE_THAN_0},
    "lamb": MEANS | BOUNDS,
    "lans": MEANS | BOUNDS,
    "accumulate": {},
    "assign": {},
}
OUTSIDE: dict[str, list[Any]] = {
    FINITE: [None],
    AT_LEAST_0: [-0.1, -1, None],
    MORE_THAN_0: [0, 0.0, -1e-8, None],
    NONE_OR_MORE: [0, -1.0],
    FRACTION: [-1e-9, 1, 1.5, None],
    "a whole number >= 0": [-1, 1.0, 2**63, None],
}


def numeric(name: str) -> dict[str, str]:
    """Return what each numeric parameter of a rule must be."""
    common = COMMON if name in LEARNING else {"rescale_grad": FINITE, "clip_gradient": NONE_OR_MORE}
    return {} if name == "assign" else common | OWN[name]


def test_every_number_is_checked() -> None:
    """A rule whose new parameter is missing above fails here."""
    others = {"lr_mult", "wd_mult", "schedule", "multi_precision", "centered", "bias_correction"}
    for name, rule in RULES.items():
        assert {field.name for field in msgspec.structs.fields(rule)} - others == set(numeric(name)), name


@pytest.mark.parametrize("name", NAMES)
def test_wrong_numbers_are_named_with_what_was_expected(name: str) -> None:
    for param, expected in numeric(name).items():
        for value in OUTSIDE[expected] + NO_NUMBERS:
            with pytest.raises(OptimizerError) as caught:
                make_optimizer(name, {param: value})
            assert caught.value.message == f"optimizer {name!r}: {param} must be {expected}, got {value!r}"
            assert caught.value.details == {"expected": expected, "got": repr(value)}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("sgd", {"learning_rate": 0, "momentum": 0, "wd": 0, "rescale_grad": 0, "clip_gradient": 5e-324}),
        ("adam", {"learning_rate": 0, "beta1": 0, "beta2": 0, "epsilon": 5e-324, "wd": 0, "rescale_grad": -1e308}),
        ("adam", {"beta1": math.nextafter(1, 0), "beta2": math.nextafter(1, 0), "begin_num_update": 2**63 - 1}),
    ],
)
def test_the_ends_of_the_ranges_are_in_them(name: str, params: dict[str, float]) -> None:
    rule = make_optimizer(name, params)
    assert {param: getattr(rule, param) for param in params} == params


@pytest.mark.parametrize(
    ("name", "param"),
    [("sgd", "multi_precision"), ("rmsprop", "centered"), ("lamb", "bias_correction"), ("lans", "bias_correction")],
)
@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_flags_are_true_or_false(name: str, param: str, value: Any) -> None:
    with pytest.raises(OptimizerError, match=f"optimizer '{name}': {param} must be True or False, got {value!r}"):
        make_optimizer(name, {param: value})


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(OptimizerError, match=r"'lamb': lower_bound must be less than upper_bound, got 2.0 and 1.0"):
        LAMB(lower_bound=2, upper_bound=1)


# --- multipliers ---


def test_multipliers_are_the_same_in_any_order_and_ints_stay_ints() -> None:
    rule = SGD(lr_mult={"b": 1, 10: 0.5, "a": 2, 9: 0})
    assert rule == SGD(lr_mult=[["a", 2.0], [9, 0.0], ["b", 1.0], [10, 0.5]])
    assert rule.lr_mult == ((9, 0.0), (10, 0.5), ("a", 2.0), ("b", 1.0))
    assert hash(rule) == hash(make_optimizer("sgd", rule_to_params(rule)))


@pytest.mark.parametrize("param", ["lr_mult", "wd_mult"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2.0, "must be a dict, or a list of pairs, of keys and numbers, got 2.0"),
        (None, "must be a dict, or a list of pairs, of keys and numbers, got None"),
        ([["w", 1.0, 2.0]], "must be a dict, or a list of pairs"),
        ([3], "must be a dict, or a list of pairs"),
        ({"": 1.0}, "must be by keys, each a name or an int >= 0, and there once, got ''"),
        ({-1: 1.0}, "got -1"),
        ({2**63: 1.0}, "got 9223372036854775808"),
        ({True: 1.0}, "got True"),
        ({2.0: 1.0}, r"got 2\.0"),
        ([["w", 1.0], ["w", 1.0]], "and there once, got 'w'"),
        ([[["w"], 1.0]], r"got \['w'\]"),
        ({"w": -1.0}, "'w' must be a finite number >= 0, got -1.0"),
        ({7: "fast"}, "7 must be a finite number >= 0, got 'fast'"),
    ],
)
def test_wrong_multipliers_are_refused(param: str, value: Any, message: str) -> None:
    with pytest.raises(OptimizerError, match=rf"optimizer 'adam': {param} .*{message}"):
        make_optimizer("adam", {param: value})


# --- as data ---


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_travels_under_its_name(name: str) -> None:
    assert msgspec.to_builtins(RULES[name]())["name"] == name


keys = st.text(min_size=1, max_size=5) | st.integers(0, 2**63 - 1)
multipliers = st.dictionaries(keys, st.floats(0, 1e6), max_size=4)


@given(
    name=st.sampled_from(LEARNING),
    lr_mult=multipliers,
    wd_mult=multipliers,
    clip=st.none() | st.floats(1e-9, 1e9),
    schedule=st.none() | st.fixed_dictionaries({"name": st.just("cosine"), "max_update": st.integers(1, 99)}),
)
def test_rules_survive_being_sent_as_data(
    name: str, lr_mult: Any, wd_mult: Any, clip: float | None, schedule: dict[str, Any] | None
) -> None:
    given_params = {"lr_mult": lr_mult, "wd_mult": wd_mult, "clip_gradient": clip, "schedule": schedule}
    rule = make_optimizer(name, given_params)
    params = rule_to_params(rule)
    for sent in (params, json.loads(json.dumps(params)), msgspec.msgpack.decode(msgspec.msgpack.encode(params))):
        assert sent == params
        assert make_optimizer(name, sent) == rule


@pytest.mark.parametrize("name", NAMES)
def test_records_decode_as_themselves(name: str) -> None:
    rule = RULES[name]()
    assert msgspec.json.decode(msgspec.json.encode(rule), type=RULES[name]) == rule


def test_a_schedule_is_part_of_the_data() -> None:
    rule = SGD(schedule=Factor(step=2, factor=0.5))
    params = rule_to_params(rule)
    assert params["schedule"]["name"] == "factor"
    assert make_optimizer("sgd", params) == rule
    assert set(SCHEDULES) == {"cosine", "factor", "linear", "multifactor", "onecycle", "poly", "step"}


def test_a_rule_made_directly_is_checked_too() -> None:
    with pytest.raises(OptimizerError, match="momentum must be"):
        SGD(momentum=2.0)


def test_a_rule_that_was_decoded_is_checked_too() -> None:
    class Known(msgspec.Struct):
        rule: Assign | SGD

    text = msgspec.json.encode(Known(SGD(learning_rate=0.5))).replace(b"0.5", b"-0.5")
    with pytest.raises(OptimizerError, match="learning_rate must be"):
        msgspec.json.decode(text, type=Known)


def test_a_rule_with_other_parameters_is_checked_too() -> None:
    """How a rate is changed while a rule is used."""
    assert msgspec.structs.replace(SGD(), learning_rate=0.5).learning_rate_at(1) == 0.5
    with pytest.raises(OptimizerError, match="learning_rate must be"):
        msgspec.structs.replace(SGD(), learning_rate=-0.5)


@pytest.mark.parametrize("param", ["learning_rate", "momentum"])
def test_rules_do_not_change(param: str) -> None:
    rule: Optimizer = SGD()
    with pytest.raises(AttributeError):
        setattr(rule, param, 0.5)


# --- what a rule keeps and needs ---


@pytest.mark.parametrize(
    ("rule", "keeps"),
    [
        (Assign(), ()),
        (Accumulate(), ()),
        (SGD(), ()),
        (SGD(momentum=0.5), ("momentum",)),
        (NAG(), ("momentum",)),
        (NAG(momentum=0.0), ()),
        (Adam(), ("mean", "variance")),
        (RMSProp(), ("squares",)),
        (RMSProp(centered=True, momentum=0.5), ("squares", "mean", "momentum")),
    ],
    ids=str,
)
def test_a_rule_keeps_what_its_form_needs(rule: Optimizer, keeps: tuple[str, ...]) -> None:
    assert rule.keeps == keeps


def test_what_rules_need_beside_their_chunk_is_known_before_they_are_used() -> None:
    phases = {name: rule().norm_phases for name, rule in RULES.items() if rule().norm_phases}
    assert phases == {"lars": 1, "lamb": 1, "lans": 2}
    assert [name for name, rule in RULES.items() if rule.reads_weight] == ["dcasgd"]
    assert [name for name, rule in RULES.items() if rule.by_row] == ["groupadagrad"]
    assert [name for name, rule in RULES.items() if rule.draws_noise] == ["sgld"]


# --- keys ---


@pytest.mark.parametrize("name", [name for name in NAMES if name != "assign"])
@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16"])
def test_rules_that_take_fractions_refuse_integers(name: str, dtype: str) -> None:
    with pytest.raises(OptimizerError, match=f"optimizer '{name}' updates floats, but key 'w' has {dtype}") as caught:
        RULES[name]().check_dtype("w", dtype)
    assert caught.value.details == {"key": "w", "expected": "float", "got": dtype}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_rule_takes_floats(name: str, dtype: str) -> None:
    RULES[name]().check_dtype("w", dtype)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64"])
def test_assign_takes_everything(dtype: str) -> None:
    Assign().check_dtype("w", dtype)
    Assign().check_precision("float32")


TOO_FINE: list[tuple[LearningRule, str]] = [
    (SGD(learning_rate=1e39), "'sgd': learning_rate must be a finite number >= 0 when it is rounded to float32"),
    (SGD(rescale_grad=-1e300), "'sgd': rescale_grad must be a finite number when it is rounded to float32"),
    (Adam(beta2=0.99999999), r"'adam': beta2 must be a number in \[0, 1\) when it is rounded to float32"),
    (Adam(epsilon=1e-46), "'adam': epsilon must be a finite number > 0 when it is rounded to float32"),
    (DCASGD(clip_gradient=1e-50), "'dcasgd': clip_gradient must be None or a finite number > 0 when it is rounded"),
]


@pytest.mark.parametrize(("rule", "message"), TOO_FINE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_keys_that_are_updated_in_a_precision_too_low_for_a_parameter_are_refused(
    rule: Optimizer, message: str, dtype: str
) -> None:
    with pytest.raises(OptimizerError, match=message):
        rule.check_dtype("w", dtype)


@pytest.mark.parametrize("rule", [rule for rule, _ in TOO_FINE])
def test_double_precision_holds_every_parameter(rule: Optimizer) -> None:
    rule.check_dtype("w", "float64")
