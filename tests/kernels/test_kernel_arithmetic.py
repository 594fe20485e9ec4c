"""Every backend: golden numbers, the same bits as the reference, and no surprises at the edges."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aiokv.kernels import Backend, get_backend
from aiokv.optim import SGD, Adam, Assign, Optimizer
from aiokv.types import ITEM_SIZES

Array = NDArray[Any]

DTYPES = list(ITEM_SIZES)
FLOATS = ["float16", "float32", "float64"]
# Around the widths of warps, blocks and vector registers, and one that fills none of them.
SIZES = [0, 1, 31, 32, 33, 255, 257, 10_007]

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

if SIMULATED:
    # The simulator computes with NumPy's scalars, which warn where compiled code does not.
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def bits(array: Array) -> bytes:
    """Return the memory, with all NaNs made equal: their payload is the processor's choice."""
    if array.dtype.kind != "f":
        return array.tobytes()
    return np.where(np.isnan(array), np.full_like(array, np.nan), array).tobytes()


def some(dtype: str, size: int, seed: int) -> Array:
    """Return numbers of all magnitudes, as bytes happen to mean them."""
    rng = np.random.default_rng([seed, size])
    return np.frombuffer(rng.bytes(size * ITEM_SIZES[dtype]), dtype).copy()


# --- accumulate ---


@pytest.mark.parametrize(
    ("dtype", "target", "source", "expected"),
    [
        ("float16", [1.0, 2048.0, 2048.0], [0.5, 1.0, 3.0], [1.5, 2048.0, 2052.0]),  # ties go to even
        ("float16", [65504.0, 6e-8], [65504.0, 6e-8], [np.inf, 1.2e-7]),
        ("float32", [1.0, 16777216.0, 1e-45], [0.1, 1.0, 1e-45], [1.1, 16777216.0, 3e-45]),
        ("float64", [0.1, 1e308], [0.2, 1e308], [0.30000000000000004, np.inf]),
        ("int8", [127, -128], [1, -1], [-128, 127]),
        ("int16", [32767], [1], [-32768]),
        ("int32", [2147483647, 1], [1, 2], [-2147483648, 3]),
        ("int64", [9223372036854775807], [1], [-9223372036854775808]),
        ("uint8", [200], [100], [44]),
        ("uint16", [65535], [2], [1]),
        ("uint32", [4294967295], [2], [1]),
        ("uint64", [18446744073709551615, 9007199254740992], [2, 1], [1, 9007199254740993]),
    ],
)
def test_sums_are_rounded_once_and_integers_wrap(
    backend: Backend, dtype: str, target: list[float], source: list[float], expected: list[float]
) -> None:
    total = np.array(target, dtype)
    backend.accumulate(total, np.array(source, dtype))
    np.testing.assert_array_equal(total, np.array(expected, dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_bits_of_the_reference(backend: Backend, dtype: str, size: int) -> None:
    source, total = some(dtype, size, 1), some(dtype, size, 2)
    expected = total.copy()
    get_backend("reference").accumulate(expected, source)
    backend.accumulate(total, source)
    assert bits(total) == bits(expected)


@given(data=st.data(), dtype=st.sampled_from(DTYPES), size=st.integers(0, 70))
@settings(max_examples=40)
def test_sums_of_anything_have_the_bits_of_single_additions(
    backend: Backend, data: st.DataObject, dtype: str, size: int
) -> None:
    total, source = (data.draw(hnp.arrays(dtype, size)) for _ in range(2))
    with np.errstate(all="ignore"):
        expected = [a + b for a, b in zip(total, source, strict=True)]
    backend.accumulate(total, source)
    assert bits(total) == bits(np.array(expected, dtype))


def test_every_float16_is_added_as_numpy_adds_it(backend: Backend) -> None:
    """Backends convert them with the processor's instructions, or those of the device."""
    # The simulator converts as NumPy does, and slowly: there some of them will do.
    every = np.arange(0, 1 << 16, 251 if SIMULATED else 1, dtype=np.uint16).view(np.float16)
    for summand in np.array([0, 6e-8, -1, 2049, np.inf], np.float16):
        with np.errstate(all="ignore"):
            expected = every + summand
        total = every.copy()
        backend.accumulate(total, np.full_like(total, summand))
        assert bits(total) == bits(expected)


def test_the_source_stays_as_it_is(backend: Backend) -> None:
    source = np.array([1, 2], np.float32)
    source.flags.writeable = False
    backend.accumulate(np.ones(2, np.float32), source)
    np.testing.assert_array_equal(source, [1, 2])


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_in_memory_at_odd_addresses(backend: Backend, dtype: str) -> None:
    """A payload may land anywhere in a buffer of bytes."""
    start, end = 1, 1 + 3 * ITEM_SIZES[dtype]
    total, source = (np.zeros(end, np.uint8)[start:].view(dtype) for _ in range(2))
    total[:], source[:] = [1, 2, 3], [10, 20, 30]
    backend.accumulate(total, source)
    np.testing.assert_array_equal(total, [11, 22, 33])


# --- updates ---


def precision(dtype: str) -> Any:
    """Return in what float16, float32 and float64 are computed."""
    return np.float64 if dtype == "float64" else np.float32


def run(backend: Backend, rule: Optimizer, weight: Array, gradients: list[Array]) -> tuple[Array, dict[str, Array]]:
    """Return weight and state after an update with each gradient, which are left as they are."""
    state = backend.new_state(rule, weight)
    for step, gradient in enumerate(gradients, 1):
        total = gradient.copy()
        backend.update(rule, weight, total, state, step)
        weight = total
    return weight, state


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 2e-3), ("float32", 1e-6), ("float64", 1e-15)])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SGD(learning_rate=0.1), [0.95, 0.8999999999999999, 0.9249999999999999]),
        (SGD(learning_rate=0.1, momentum=0.9, wd=0.01), [0.949, 0.852151, 0.789134749]),
        (Adam(), [0.9990000006324551, 0.9980000010797804, 0.9974843478915586]),
    ],
    ids=["sgd", "sgd with momentum and decay", "adam"],
)
def test_updates_follow_the_published_rules(
    backend: Backend, rule: Optimizer, expected: list[float], dtype: str, rtol: float
) -> None:
    """From MXNet's update rules: w = 1, then the gradients .5, .5 and -.25."""
    gradients = [np.full(3, gradient, dtype) for gradient in (0.5, 0.5, -0.25)]
    for count, value in enumerate(expected, 1):
        weight, _ = run(backend, rule, np.ones(3, dtype), gradients[:count])
        np.testing.assert_allclose(weight, np.full(3, value), rtol=rtol, atol=0)


ALL_RULES = [
    Assign(),
    SGD(learning_rate=0.1, wd=0.01, rescale_grad=0.3),
    SGD(learning_rate=0.1, momentum=0.9, wd=0.01, rescale_grad=0.3),
    Adam(learning_rate=0.1, wd=0.01, rescale_grad=0.3),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_updates_have_the_bits_of_the_reference(backend: Backend, dtype: str, rule: Optimizer, size: int) -> None:
    rng = np.random.default_rng(size)
    weight, *gradients = (rng.normal(size=size).astype(dtype) for _ in range(4))
    results = [run(each, rule, weight, gradients) for each in (get_backend("reference"), backend)]
    expected, got = ([bits(new), {name: bits(array) for name, array in state.items()}] for new, state in results)
    assert got == expected


@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
def test_the_old_weight_stays_as_it_is(backend: Backend, rule: Optimizer) -> None:
    """It may be on its way to a worker."""
    weight = np.ones(3, np.float32)
    weight.flags.writeable = False
    backend.update(rule, weight, np.zeros(3, np.float32), backend.new_state(rule, weight), 1)
    np.testing.assert_array_equal(weight, np.ones(3))


@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_assign_makes_the_sum_the_new_weight_whatever_its_dtype(backend: Backend, dtype: str) -> None:
    total = np.array([1, 2], dtype)
    backend.update(Assign(), np.zeros(2, dtype), total, {}, 1)
    np.testing.assert_array_equal(total, [1, 2])


@pytest.mark.parametrize("rule", ALL_RULES[1:], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_updates_in_memory_at_odd_addresses(backend: Backend, dtype: str, rule: Optimizer) -> None:
    start, end = 1, 1 + 3 * ITEM_SIZES[dtype]
    weight, total = (np.zeros(end, np.uint8)[start:].view(dtype) for _ in range(2))
    weight[:], total[:] = [1, 2, 3], [10, -20, 30]
    expected, _ = run(get_backend("reference"), rule, np.array(weight), [np.array(total)])
    backend.update(rule, weight, total, backend.new_state(rule, weight), 1)
    assert bits(total) == bits(expected)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_half_precision_is_rounded_only_when_it_is_written(backend: Backend, momentum: float) -> None:
    """Float16 has steps of 2 above 2048: rounding the step to 1.0 first would give the tie 2049, hence 2048."""
    rule = SGD(learning_rate=1.0004, momentum=momentum)
    weight, _ = run(backend, rule, np.array([2048], np.float16), [np.array([-1], np.float16)])
    assert weight[0] == 2050.0


def test_products_are_rounded_before_they_are_added(backend: Backend) -> None:
    """(1 + 2^-12)^2 is 1 + 2^-11 + 2^-24: float32 drops the last term, and a fused operation would keep it."""
    x = 1 + 2.0**-12
    weight, _ = run(backend, SGD(learning_rate=x), np.array([1 + 2.0**-11], np.float32), [np.array([x], np.float32)])
    assert weight[0] == 0.0


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_stays_visible(backend: Backend, dtype: str) -> None:
    weight = np.array([1, 1, np.nan, np.inf], dtype)
    gradient = np.array([np.nan, np.inf, 1, np.inf], dtype)
    new, _ = run(backend, SGD(learning_rate=0.5), weight, [gradient])
    np.testing.assert_array_equal(new, np.array([np.nan, -np.inf, np.nan, np.nan], dtype))


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
    dtype=st.sampled_from(FLOATS),
    size=st.integers(0, 70),
    rule=st.builds(SGD, momentum=fractions, **parameters)
    | st.builds(Adam, beta1=fractions, beta2=fractions, epsilon=st.floats(1e-30, 1e30), **parameters),
)
@settings(max_examples=80)
def test_updates_of_anything_have_the_bits_of_single_operations(
    backend: Backend, data: st.DataObject, dtype: str, size: int, rule: SGD | Adam
) -> None:
    wide = precision(dtype)
    weight, total = (data.draw(hnp.arrays(dtype, size)) for _ in range(2))
    names = ["momentum"] if isinstance(rule, SGD) else ["mean", "variance"]
    state = {name: data.draw(hnp.arrays(wide, size)) for name in names}
    with np.errstate(all="ignore"):
        elements = zip(weight.astype(wide), total.astype(wide), *state.values(), strict=True)
        if isinstance(rule, SGD):
            steps: list[tuple[Any, ...]] = [one_sgd_step(rule, wide, *numbers) for numbers in elements]
        else:
            steps = [one_adam_step(rule, wide, *numbers) for numbers in elements]
        expected = [np.array([step[i] for step in steps], wide) for i in range(1 + len(names))]
        expected[0] = expected[0].astype(dtype)
    backend.update(rule, weight, total, state, 3)
    assert [bits(array) for array in (total, *state.values())] == [bits(array) for array in expected]


# --- adam ---


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 2e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("rule", [Adam(), Adam(learning_rate=0.02, beta1=0.5, beta2=0.9, wd=0.1, rescale_grad=2.0)])
def test_fifty_steps_of_adam_follow_algorithm_1_of_the_paper(
    backend: Backend, rule: Adam, dtype: str, rtol: float
) -> None:
    """There the means are corrected one by one. Their epsilon is ours over sqrt(1 - beta2^t)."""
    rng = np.random.default_rng(0)
    start, *gradients = rng.uniform(0.5, 1.5, (51, 20)) * rng.choice([-1, 1], (51, 20))
    w, m, v = start, np.zeros(20), np.zeros(20)
    for t, gradient in enumerate(gradients, 1):
        g = rule.rescale_grad * gradient + rule.wd * w
        m = rule.beta1 * m + (1 - rule.beta1) * g
        v = rule.beta2 * v + (1 - rule.beta2) * g**2
        epsilon = rule.epsilon / np.sqrt(1 - rule.beta2**t)
        w = w - rule.learning_rate * (m / (1 - rule.beta1**t)) / (np.sqrt(v / (1 - rule.beta2**t)) + epsilon)
    weight, _ = run(backend, rule, start.astype(dtype), [gradient.astype(dtype) for gradient in gradients])
    np.testing.assert_allclose(weight, w, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_step_of_adam_is_the_learning_rate_whatever_the_gradient(backend: Backend, dtype: str) -> None:
    """Their squares are kept in float32: in float16 those of the small ones would be 0, and the step enormous."""
    gradients = np.array([6e-5, -1e-3, 1.0, -60000.0], dtype)
    weight, _ = run(backend, Adam(learning_rate=0.25), np.zeros(4, dtype), [gradients])
    np.testing.assert_allclose(weight, [-0.25, 0.25, -0.25, 0.25], rtol=1e-2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_adam_leaves_what_never_had_a_gradient_as_it_is(backend: Backend, dtype: str) -> None:
    weight = np.array([1.0, -2.0, 0.0], dtype)
    new, _ = run(backend, Adam(), weight, [np.zeros(3, dtype)] * 3)
    np.testing.assert_array_equal(new, weight)


@pytest.mark.parametrize("dtype", FLOATS)
def test_adam_without_memory_steps_by_the_sign_of_the_gradient(backend: Backend, dtype: str) -> None:
    rule = Adam(learning_rate=0.5, beta1=0.0, beta2=0.0, epsilon=1e-30)
    new, _ = run(backend, rule, np.zeros(3, dtype), [np.array(g, dtype) for g in ([1, 2, -3], [1, -2, -3])])
    np.testing.assert_array_equal(new, [-1, 0, 1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_adam_goes_on_after_very_many_steps(backend: Backend, dtype: str) -> None:
    """Its corrections have become 1."""
    rule, total = Adam(learning_rate=0.5), np.ones(1, dtype)
    state = {name: np.ones(1, precision(dtype)) for name in ("mean", "variance")}
    backend.update(rule, np.ones(1, dtype), total, state, 10**9)
    np.testing.assert_allclose(total, 0.5, rtol=1e-3)
