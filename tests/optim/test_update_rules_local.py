"""Update rules as a user meets them: set by name, then applied to each push."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import OptimizerError

GRADIENTS = [0.5, 0.5, -0.25]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("assign", {}, GRADIENTS),
        ("sgd", {"learning_rate": 0.1}, [0.95, 0.8999999999999999, 0.9249999999999999]),
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, [0.949, 0.852151, 0.789134749]),
        ("adam", {}, [0.9990000006324551, 0.9980000010797804, 0.9974843478915586]),
    ],
    ids=["assign", "sgd", "sgd with momentum", "adam"],
)
def test_every_push_makes_one_update(backend: str, name: str, params: dict[str, Any], expected: list[float]) -> None:
    """From MXNet's update rules."""
    with aiokv.create("local", backend=backend) as kv:
        kv.init("w", np.ones(3))
        kv.set_optimizer(name, **params)
        got = [kv.pushpull("w", np.full(3, gradient))[0] for gradient in GRADIENTS]
    np.testing.assert_allclose(got, expected, rtol=1e-15, atol=0)


def test_each_key_counts_its_own_updates() -> None:
    """The first step of Adam is the learning rate, however many updates other keys have had."""
    with aiokv.create("local") as kv:
        kv.init({"v": np.zeros(1), "w": np.zeros(1)})
        kv.set_optimizer("adam", learning_rate=0.25)
        for _ in range(5):
            kv.push("v", np.ones(1))
        np.testing.assert_allclose(kv.pushpull("w", np.ones(1)), [-0.25], rtol=1e-6)


def test_updates_before_the_rule_was_set_do_not_count() -> None:
    with aiokv.create("local") as kv:
        kv.init("w", np.zeros(1))
        kv.push("w", np.ones(1))
        kv.set_optimizer("adam", learning_rate=0.25)
        np.testing.assert_allclose(kv.pushpull("w", np.ones(1)), [0.75], rtol=1e-6)


def test_a_parameter_that_a_key_can_not_hold_is_refused_before_any_update() -> None:
    with aiokv.create("local") as kv:
        kv.init("w", np.zeros(1, np.float32))
        with pytest.raises(OptimizerError, match=r"beta2 must be a number in .* rounded to float32"):
            kv.set_optimizer("adam", beta2=0.99999999)


@pytest.mark.parametrize("name", ["lars", "lamb", "lans", "groupadagrad", "dcasgd", "sgld"])
def test_rules_that_look_beyond_single_elements(name: str) -> None:
    """Every key is updated as if it were alone, in whatever call it was initialised."""
    values = {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(4)}
    got = []
    for groups in ([values], [{"a": values["a"]}, {"b": values["b"]}]):
        with aiokv.create("local") as kv:
            for group in groups:
                kv.init(group)
            kv.set_optimizer(name, learning_rate=0.5)
            kv.push(values)
            got.append(np.concatenate([value.reshape(-1) for value in kv.pushpull(values)]))
    np.testing.assert_array_equal(got[0], got[1])
    assert not np.array_equal(got[0], np.concatenate([value.reshape(-1) for value in values.values()]))
