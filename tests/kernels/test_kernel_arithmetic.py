"""Every rule on every backend: the same bits as the reference, and no surprises at the edges."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aiokv.kernels import Backend, get_backend
from aiokv.optim import SGD, Adam, Assign, Ftrl, Lion, Optimizer, Signum, Step, make_optimizer, rule_to_params
from aiokv.types import ITEM_SIZES

Array = NDArray[Any]
Bits = Callable[[Array], bytes]
Run = Callable[..., tuple[Array, dict[str, Array]]]

FLOATS = ["bfloat16", "float16", "float32", "float64"]
LOW = ["bfloat16", "float16"]

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

# Around the widths of warps, blocks and vector registers, and one that fills none of them. Kernels of devices get all
# of these in one launch (`test_device_updates.py`).
SIZES = [33] if SIMULATED else [0, 1, 31, 32, 257, 2051]

if SIMULATED:
    # The simulator computes with NumPy's scalars, which warn where compiled code does not.
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def precision(dtype: str) -> Any:
    """Return in what floats of that dtype are computed."""
    return np.float64 if dtype == "float64" else np.float32


def changed(rule: Optimizer, **params: Any) -> Optimizer:
    """Return the rule with other parameters; `assign` has none."""
    return rule if isinstance(rule, Assign) else make_optimizer(rule.name, rule_to_params(rule) | params)


# --- the same bits ---


def check_bits(
    bits: Bits, run: Run, backend: Backend, rule: Optimizer, weight: Array, gradients: list[Array], **how: bool
) -> None:
    results = [run(each, rule, weight, gradients, **how) for each in (get_backend("reference"), backend)]
    expected, got = ([bits(new), {name: bits(array) for name, array in state.items()}] for new, state in results)
    assert got == expected


@pytest.mark.parametrize("dtype", FLOATS)
def test_updates_have_the_bits_of_the_reference(
    backend: Backend, bits: Bits, run: Run, rule: Optimizer, dtype: str
) -> None:
    for size in SIZES:
        rng = np.random.default_rng(size)
        weight, *gradients = (rng.normal(size=size).astype(dtype) for _ in range(4))
        check_bits(bits, run, backend, rule, weight, gradients)


@pytest.mark.parametrize(("dtype", "multi_precision"), [("bfloat16", False), ("float16", True)])
def test_updates_by_float32_sums_have_the_bits_of_the_reference(
    backend: Backend, bits: Bits, run: Run, rule: Optimizer, dtype: str, multi_precision: bool
) -> None:
    rng = np.random.default_rng(0)
    weight, *gradients = (rng.normal(size=67).astype(dtype) for _ in range(4))
    rule = changed(rule, multi_precision=multi_precision)
    check_bits(bits, run, backend, rule, weight, gradients, wide=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_updates_of_any_memory_have_the_bits_of_the_reference(
    backend: Backend, bits: Bits, run: Run, rule: Optimizer, dtype: str
) -> None:
    """Subnormal, huge, infinite, NaN: numbers as bytes happen to mean them, at odd addresses."""
    rng = np.random.default_rng(1)
    nbytes = 100 * ITEM_SIZES[dtype]
    weight, *gradients = (np.frombuffer(rng.bytes(nbytes + 1), np.uint8)[1:].view(dtype) for _ in range(3))
    check_bits(bits, run, backend, rule, weight, gradients)


# --- any numbers, against single operations ---


def one_sgd_step(rule: SGD, wide: Any, w: Any, total: Any, m: Any) -> tuple[Any, Any]:
    """Return the new weight and momentum of one element, each operation rounded to `wide`."""
    g = wide(rule.rescale_grad) * total + wide(rule.wd) * w
    m = wide(rule.momentum) * m - wide(rule.learning_rate) * g
    return w + m, m


def one_adam_step(rule: Adam, wide: Any, w: Any, total: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
    """Return new weight, mean and variance of one element after update 3, each operation rounded to `wide`."""
    beta1, beta2 = float(wide(rule.beta1)), float(wide(rule.beta2))
    rate = wide(rule.learning_rate * math.sqrt(1 - beta2**3) / (1 - beta1**3))
    g = wide(rule.rescale_grad) * total + wide(rule.wd) * w
    m = wide(beta1) * m + wide(1 - beta1) * g
    v = wide(beta2) * v + wide(1 - beta2) * (g * g)
    return w - rate * m / (np.sqrt(v) + wide(rule.epsilon)), m, v


parameters = {
    "learning_rate": st.floats(0, 1e30),
    "wd": st.floats(0, 1e30),
    "rescale_grad": st.floats(-1e30, 1e30),
}
fractions = st.floats(2.0**-20, 0.9999)


@given(
    data=st.data(),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    size=st.integers(0, 70),
    rule=st.builds(SGD, momentum=fractions, **parameters)
    | st.builds(Adam, beta1=fractions, beta2=fractions, epsilon=st.floats(1e-30, 1e30), **parameters),
)
@settings(max_examples=80)
def test_updates_of_anything_have_the_bits_of_single_operations(
    backend: Backend, bits: Bits, data: st.DataObject, dtype: str, size: int, rule: SGD | Adam
) -> None:
    wide = precision(dtype)
    weight, total = (data.draw(hnp.arrays(dtype, size)) for _ in range(2))
    state = {name: data.draw(hnp.arrays(wide, size)) for name in rule.keeps}
    with np.errstate(all="ignore"):
        elements = zip(weight.astype(wide), total.astype(wide), *state.values(), strict=True)
        if isinstance(rule, SGD):
            steps: list[tuple[Any, ...]] = [one_sgd_step(rule, wide, *numbers) for numbers in elements]
        else:
            steps = [one_adam_step(rule, wide, *numbers) for numbers in elements]
        expected = [np.array([step[i] for step in steps], wide) for i in range(1 + len(state))]
        expected[0] = expected[0].astype(dtype)
    backend.update(rule, weight, total, state, rule.step_for("w", count=3, num_update=3))
    assert [bits(array) for array in (total, *state.values())] == [bits(array) for array in expected]


def test_products_are_rounded_before_they_are_added(backend: Backend, run: Run) -> None:
    """(1 + 2^-12)^2 is 1 + 2^-11 + 2^-24: float32 drops the last term, and a fused operation would keep it."""
    x = 1 + 2.0**-12
    weight, _ = run(backend, SGD(learning_rate=x), np.array([1 + 2.0**-11], np.float32), [np.array([x], np.float32)])
    assert weight[0] == 0.0


# --- every rule ---


def test_the_old_weight_stays_as_it_is(backend: Backend, rule: Optimizer, run: Run) -> None:
    """It may be on its way to a worker."""
    weight = np.ones(3, np.float32)
    weight.flags.writeable = False
    run(backend, rule, weight, [np.ones(3, np.float32)])
    np.testing.assert_array_equal(weight, np.ones(3))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_rate_of_zero_leaves_every_weight_as_it_is(
    backend: Backend, run: Run, learning_rule: Optimizer, dtype: str
) -> None:
    """A key whose multiplier is 0 is frozen."""
    weight = np.array([1.0, -2.0, 0.5]).astype(dtype)
    gradients = [np.array([1.0, 0.0, -1.0]).astype(dtype)] * 2
    new, _ = run(backend, changed(learning_rule, lr_mult={"w": 0}), weight, gradients)
    np.testing.assert_array_equal(new.astype(float), weight.astype(float))


def test_what_is_not_finite_stays_visible(backend: Backend, run: Run, rule: Optimizer) -> None:
    """Nobody would look for the mistake in weights that look sound."""
    gradients = [np.array([np.nan, 1, np.nan], np.float32)]
    new, _ = run(backend, rule, np.array([1, np.nan, np.nan], np.float32), gradients)
    assert np.isnan(new[0])
    assert np.isnan(new[2])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_infinities_are_computed_with(backend: Backend, run: Run, dtype: str) -> None:
    weight, gradient = np.array([1, 1, np.nan, np.inf], dtype), np.array([np.nan, np.inf, 1, np.inf], dtype)
    new, _ = run(backend, SGD(learning_rate=0.5), weight, [gradient])
    np.testing.assert_array_equal(new, np.array([np.nan, -np.inf, np.nan, np.nan], dtype))


@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_assign_makes_the_sum_the_new_weight_whatever_its_dtype(backend: Backend, dtype: str) -> None:
    total = np.array([1, 2], dtype)
    backend.update(Assign(), np.zeros(2, dtype), total, {}, Step(1))
    np.testing.assert_array_equal(total.astype(int), [1, 2])


@pytest.mark.parametrize("dtype", LOW)
def test_assign_rounds_a_float32_sum_once(backend: Backend, dtype: str) -> None:
    out = np.zeros(2, dtype)
    backend.update(Assign(), np.zeros(2, dtype), np.array([3, 2049.0], np.float32), {}, Step(1), out=out)
    np.testing.assert_array_equal(out, np.array([3, 2049.0]).astype(dtype))


# --- low precision ---


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_half_precision_is_rounded_only_when_it_is_written(backend: Backend, run: Run, momentum: float) -> None:
    """Float16 has steps of 2 above 2048: rounding the step to 1.0 first would give the tie 2049, hence 2048."""
    rule = SGD(learning_rate=1.0004, momentum=momentum)
    weight, _ = run(backend, rule, np.array([2048], np.float16), [np.array([-1], np.float16)])
    assert weight[0] == 2050.0


@pytest.mark.parametrize(("dtype", "lost"), [("float16", 2.0**-12), ("bfloat16", 2.0**-10)])
@pytest.mark.parametrize(("multi_precision", "moved"), [(True, 64), (False, 0)])
def test_small_steps_add_up_in_the_master_copy(
    backend: Backend, run: Run, dtype: str, lost: float, multi_precision: bool, moved: int
) -> None:
    """Each step is less than half of the distance to the next number of the low precision."""
    rule = SGD(learning_rate=lost, multi_precision=multi_precision)
    weight, state = run(backend, rule, np.ones(2, dtype), [np.full(2, -1, dtype)] * 64)
    np.testing.assert_array_equal(weight, np.full(2, 1 + moved * lost).astype(dtype))
    assert set(state) == ({"master"} if multi_precision else set())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_higher_precisions_need_no_master_copy(backend: Backend, dtype: str) -> None:
    assert backend.new_state(SGD(multi_precision=True), np.ones(2, dtype)) == {}


# --- signs, adam, ftrl ---


@pytest.mark.parametrize("rule", [Signum(), Signum(momentum=0.0), Lion()], ids=["signum", "sign descent", "lion"])
def test_where_there_was_never_a_gradient_there_is_no_sign(backend: Backend, run: Run, rule: Optimizer) -> None:
    new, _ = run(backend, rule, np.array([1, -2], np.float32), [np.zeros(2, np.float32)] * 2)
    assert new.tolist() == [1, -2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_step_of_adam_is_the_learning_rate_whatever_the_gradient(
    backend: Backend, run: Run, dtype: str
) -> None:
    """Their squares are kept in float32: in float16 those of the small ones would be 0, and the step enormous."""
    gradients = np.array([6e-5, -1e-3, 1.0, -60000.0], dtype)
    weight, _ = run(backend, Adam(learning_rate=0.25), np.zeros(4, dtype), [gradients])
    np.testing.assert_allclose(weight.astype(float), [-0.25, 0.25, -0.25, 0.25], rtol=1e-2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_adam_leaves_what_never_had_a_gradient_as_it_is(backend: Backend, run: Run, dtype: str) -> None:
    weight = np.array([1.0, -2.0, 0.0], dtype)
    new, _ = run(backend, Adam(), weight, [np.zeros(3, dtype)] * 3)
    np.testing.assert_array_equal(new, weight)


@pytest.mark.parametrize("dtype", FLOATS)
def test_adam_without_memory_steps_by_the_sign_of_the_gradient(backend: Backend, run: Run, dtype: str) -> None:
    rule = Adam(learning_rate=0.5, beta1=0.0, beta2=0.0, epsilon=1e-30)
    new, _ = run(backend, rule, np.zeros(3, dtype), [np.array(g, dtype) for g in ([1, 2, -3], [1, -2, -3])])
    np.testing.assert_array_equal(new.astype(float), [-1, 0, 1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_adam_goes_on_after_very_many_steps(backend: Backend, dtype: str) -> None:
    """Its corrections have become 1."""
    rule, total = Adam(learning_rate=0.5), np.ones(1, dtype)
    state = {name: np.ones(1, precision(dtype)) for name in ("mean", "variance")}
    backend.update(rule, np.ones(1, dtype), total, state, Step(10**9, 0.5))
    np.testing.assert_allclose(total.astype(float), 0.5, rtol=1e-3)


def test_ftrl_makes_weights_zero_that_matter_little(backend: Backend, run: Run) -> None:
    rule = Ftrl(learning_rate=0.1, lamda1=1.0)
    new, _ = run(backend, rule, np.zeros(4, np.float32), [np.array([0.9, -0.9, 0, 1.5], np.float32)])
    assert new[:3].tolist() == [0, 0, 0]
    assert new[3] < 0
