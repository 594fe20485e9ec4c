"""Numbers from outside: three steps of MXNet's rules, and the traces of what it gets wrong and we do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.optim import DCASGD, Accumulate, Optimizer, make_optimizer

if TYPE_CHECKING:
    from aiokv.kernels import Backend

Array = NDArray[Any]
Run = Callable[..., tuple[Array, dict[str, Array]]]

# w = 1, then the gradients .5, .5 and -.25.
TRACES: dict[str, tuple[str, dict[str, float], list[float]]] = {
    "sgd": ("sgd", {"learning_rate": 0.1}, [0.95, 0.8999999999999999, 0.9249999999999999]),
    "sgd with momentum and decay": (
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
        [0.949, 0.852151, 0.789134749],
    ),
    "nag": ("nag", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, [0.9031, 0.76507411, 0.732709958191]),
    "adam": ("adam", {}, [0.9990000006324551, 0.9980000010797804, 0.9974843478915586]),
    "adagrad": ("adagrad", {"learning_rate": 0.1}, [0.9000001999996, 0.8292896218808039, 0.8626229107697521]),
    "rmsprop": ("rmsprop", {"learning_rate": 0.01}, [0.968377225398316, 0.9454356530638914, 0.956729501340003]),
    "adadelta": ("adadelta", {}, [0.9968377855834876, 0.9935934237550185, 0.9955340251614778]),
    "ftrl": (
        "ftrl",
        {"learning_rate": 0.1, "lamda1": 0.01},
        [0.29933333333333334, 0.27004401145198814, 0.2843297257377024],
    ),
    "signum": ("signum", {"learning_rate": 0.01}, [0.99, 0.98, 0.97]),
    "adamax": ("adamax", {"learning_rate": 0.002}, [0.99800000004, 0.99600000008, 0.9951061172851936]),
    "assign": ("assign", {}, [0.5, 0.5, -0.25]),
}


@pytest.mark.parametrize(
    ("dtype", "rtol"), [("bfloat16", 2e-2), ("float16", 3e-3), ("float32", 3e-6), ("float64", 1e-14)]
)
@pytest.mark.parametrize("trace", TRACES)
def test_three_steps_are_those_of_mxnet(backend: Backend, run: Run, trace: str, dtype: str, rtol: float) -> None:
    name, params, expected = TRACES[trace]
    gradients = [np.full(3, gradient, dtype) for gradient in (0.5, 0.5, -0.25)]
    for count, value in enumerate(expected, 1):
        weight, _ = run(backend, make_optimizer(name, params), np.ones(3, dtype), gradients[:count])
        np.testing.assert_allclose(weight.astype(float), np.full(3, value), rtol=rtol, atol=0)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_adding_up_the_sums_gives_the_numbers_of_the_old_test_rule(backend: Backend, run: Run, workers: int) -> None:
    """Seven rounds in which worker r pushes r + 1 and the rule is w += 2 * sum: 1 + n (n + 1) (i + 1)."""
    expected = {1: 15.0, 2: 43.0, 3: 85.0, 4: 141.0, 7: 393.0}[workers]
    pushed = np.full(2, sum(range(1, workers + 1)), np.float32)
    weight, _ = run(backend, Accumulate(rescale_grad=2.0), np.ones(2, np.float32), [pushed] * 7)
    assert weight.tolist() == [expected] * 2


# --- what a worker had read ---


def one_push(backend: Backend, rule: Optimizer, weight: Array, read: Array | None) -> Array:
    total = np.full_like(weight, 0.5)
    step = rule.step_for("w", count=1, num_update=1)
    backend.update(rule, weight, total, backend.new_state(rule, weight), step, read=read)
    return total


def test_delay_is_compensated_by_what_the_worker_itself_had_read(backend: Backend) -> None:
    """Worker 0 pushes thrice and reads after each push, so it has no delay; worker 1 still has the first weight."""
    rule = DCASGD(learning_rate=0.1, lamda=0.04)
    weights = [np.ones(1)]
    for _ in range(3):
        weights.append(one_push(backend, rule, weights[-1], weights[-1]))
    weights.append(one_push(backend, rule, weights[-1], weights[0]))
    np.testing.assert_allclose(
        np.concatenate(weights[1:]), [0.95, 0.8999999999999999, 0.8499999999999999, 0.8001499999999999], rtol=1e-15
    )


@pytest.mark.parametrize(("dtype", "summed"), [("float64", "float64"), ("float32", "float32"), ("float16", "float32")])
def test_a_contribution_to_a_sum_is_compensated_by_itself(backend: Backend, dtype: str, summed: str) -> None:
    """By hand: g + lamda g g (w - read)."""
    gradient = np.array([0.5, -2.0, 3.0], summed)
    weight, read = np.array([1.0, 1.5, -1.0], dtype), np.array([0.5, 2.0, -1.0], dtype)
    backend.compensate(gradient, weight, read, 0.25)
    assert gradient.tolist() == [0.5 + 0.25 * 0.25 * 0.5, -2.0 - 0.25 * 4.0 * 0.5, 3.0]


def test_a_contribution_that_has_no_elements_is_compensated_at_once(backend: Backend) -> None:
    empty = np.empty(0)
    backend.compensate(empty, empty.copy(), empty.copy(), 0.25)
    assert not empty.size


def test_with_the_last_weight_as_what_was_read_it_is_the_trace_of_mxnet(backend: Backend) -> None:
    rule = DCASGD(learning_rate=0.1, lamda=0.04)
    first = one_push(backend, rule, np.ones(1), np.ones(1))
    second = one_push(backend, rule, first, np.ones(1))
    np.testing.assert_allclose([first[0], second[0]], [0.95, 0.9000499999999999], rtol=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_without_a_delay_the_master_copy_is_not_compensated_for_its_rounding(backend: Backend, dtype: str) -> None:
    """With a huge lamda, the difference of a weight and its rounded value would show."""
    rule = DCASGD(learning_rate=1.0, lamda=1e6, multi_precision=True)
    weight, total = np.full(2, 1 / 3).astype(dtype), np.zeros(2, dtype)
    state = backend.new_state(rule, weight)
    state["master"][:] = 1 / 3
    backend.update(rule, weight, total, state, rule.step_for("w", count=1, num_update=1))
    np.testing.assert_array_equal(total.astype(float), weight.astype(float))
