"""Every backend: golden numbers, the same bits as the reference, and no surprises at the edges."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aiokv.kernels import Backend, get_backend
from aiokv.optim import SGD
from aiokv.types import ITEM_SIZES

Array = NDArray[Any]

DTYPES = list(ITEM_SIZES)
FLOATS = ["float16", "float32", "float64"]
# Around the widths of warps, blocks and vector registers, and one that fills none of them.
SIZES = [0, 1, 31, 32, 33, 255, 257, 10_007]

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
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


# --- sgd ---


@pytest.mark.parametrize(("dtype", "rtol"), [("float16", 2e-3), ("float32", 1e-6), ("float64", 1e-15)])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SGD(learning_rate=0.1), [0.95, 0.8999999999999999, 0.9249999999999999]),
        (SGD(learning_rate=0.1, momentum=0.9, wd=0.01), [0.949, 0.852151, 0.789134749]),
    ],
    ids=["plain", "momentum and decay"],
)
def test_sgd_follows_the_published_rule(
    backend: Backend, rule: SGD, expected: list[float], dtype: str, rtol: float
) -> None:
    """From MXNet's update rule: w = 1, then the gradients .5, .5 and -.25."""
    weight = np.ones(3, dtype)
    state = np.zeros(3, dtype) if rule.momentum else None
    for gradient, value in zip([0.5, 0.5, -0.25], expected, strict=True):
        out = np.empty(3, dtype)
        backend.sgd(weight, np.full(3, gradient, dtype), state, out, rule)
        np.testing.assert_allclose(out, np.full(3, value), rtol=rtol, atol=0)
        weight = out


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_half_precision_is_rounded_only_when_it_is_written(backend: Backend, momentum: float) -> None:
    """Float16 has steps of 2 above 2048: rounding the step to 1.0 first would give the tie 2049, hence 2048."""
    state = np.zeros(1, np.float16) if momentum else None
    out = np.empty(1, np.float16)
    weight, gradient = np.array([2048], np.float16), np.array([-1], np.float16)
    backend.sgd(weight, gradient, state, out, SGD(learning_rate=1.0004, momentum=momentum))
    assert out[0] == 2050.0
    assert state is None or state[0] == 1.0


def test_products_are_rounded_before_they_are_added(backend: Backend) -> None:
    """(1 + 2^-12)^2 is 1 + 2^-11 + 2^-24: float32 drops the last term, and a fused operation would keep it."""
    x = 1 + 2.0**-12
    weight, gradient = np.array([1 + 2.0**-11], np.float32), np.array([x], np.float32)
    out = np.empty(1, np.float32)
    backend.sgd(weight, gradient, None, out, SGD(learning_rate=x))
    assert out[0] == 0.0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sgd_has_the_bits_of_the_reference(backend: Backend, dtype: str, momentum: float, size: int) -> None:
    rule = SGD(learning_rate=0.1, momentum=momentum, wd=0.01, rescale_grad=0.3)
    rng = np.random.default_rng(size)
    weight, gradient, start = (rng.normal(size=size).astype(dtype) for _ in range(3))
    results = []
    for each in (get_backend("reference"), backend):
        state, out = start.copy() if momentum else None, np.empty(size, dtype)
        each.sgd(weight, gradient, state, out, rule)
        results.append((bits(out), None if state is None else bits(state)))
    assert results[0] == results[1]


def one_step(values: tuple[Any, Any, Any], rule: SGD, wide: Any) -> tuple[Any, Any]:
    """Return the new weight and momentum of one element, each operation rounded to `wide`."""
    w, g, m = (wide(value) for value in values)
    g = wide(rule.rescale_grad) * g + wide(rule.wd) * w
    m = wide(rule.momentum) * m - wide(rule.learning_rate) * g
    return w + m, m


positive = st.floats(0, 1e30)
rules = st.builds(
    SGD,
    learning_rate=positive,
    momentum=st.floats(2.0**-20, 0.9999),
    wd=positive,
    rescale_grad=st.floats(-1e30, 1e30),
)


@given(data=st.data(), dtype=st.sampled_from(FLOATS), size=st.integers(0, 70), rule=rules)
@settings(max_examples=40)
def test_sgd_on_anything_has_the_bits_of_single_operations(
    backend: Backend, data: st.DataObject, dtype: str, size: int, rule: SGD
) -> None:
    weight, gradient, state = (data.draw(hnp.arrays(dtype, size)) for _ in range(3))
    wide = np.float64 if dtype == "float64" else np.float32
    with np.errstate(all="ignore"):
        steps = [one_step(values, rule, wide) for values in zip(weight, gradient, state, strict=True)]
        weights, states = (np.array([step[i] for step in steps], wide).astype(dtype) for i in (0, 1))
    out = np.empty(size, dtype)
    backend.sgd(weight, gradient, state, out, rule)
    assert (bits(out), bits(state)) == (bits(weights), bits(states))


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_stays_visible(backend: Backend, dtype: str) -> None:
    weight = np.array([1, 1, np.nan, np.inf], dtype)
    gradient = np.array([np.nan, np.inf, 1, np.inf], dtype)
    out = np.empty(4, dtype)
    backend.sgd(weight, gradient, None, out, SGD(learning_rate=0.5))
    np.testing.assert_array_equal(out, np.array([np.nan, -np.inf, np.nan, np.nan], dtype))


def test_sgd_leaves_weight_and_gradient_as_they_are(backend: Backend) -> None:
    """The old weight may be on its way to a worker."""
    weight, gradient = np.ones(3, np.float32), np.ones(3, np.float32)
    weight.flags.writeable = gradient.flags.writeable = False
    backend.sgd(weight, gradient, np.zeros(3, np.float32), np.empty(3, np.float32), SGD(momentum=0.9))
    np.testing.assert_array_equal([weight, gradient], np.ones((2, 3)))
