"""Sums on every backend: rounded once, exact or an error, and the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from aiokv.errors import SumOverflowError
from aiokv.kernels import Backend, get_backend
from aiokv.types import ITEM_SIZES

Array = NDArray[Any]
Bits = Callable[[Array], bytes]

FLOATS = ["bfloat16", "float16", "float32", "float64"]
INTS = [dtype for dtype in ITEM_SIZES if dtype not in FLOATS]
LOW = ["bfloat16", "float16"]
# Around the widths of warps, blocks and vector registers, and one that fills none of them.
SIZES = [0, 1, 31, 32, 33, 255, 257, 10_007]

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

if SIMULATED:
    # The simulator computes with NumPy's scalars, which warn where compiled code does not.
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def some(dtype: str, size: int, seed: int) -> Array:
    """Return numbers of all magnitudes, as bytes happen to mean them."""
    rng = np.random.default_rng([seed, size])
    return np.frombuffer(rng.bytes(size * ITEM_SIZES[dtype]), dtype).copy()


# --- floats ---


@pytest.mark.parametrize(
    ("dtype", "target", "source", "expected"),
    [
        ("bfloat16", [1.0, 256.0, 256.0, 258.0], [0.5, 1.0, 3.0, 1.0], [1.5, 256.0, 260.0, 260.0]),  # ties go to even
        ("bfloat16", [3.38953139e38, 1e-40], [3.38953139e38, 0], [np.inf, 1e-40]),
        ("float16", [1.0, 2048.0, 2048.0], [0.5, 1.0, 3.0], [1.5, 2048.0, 2052.0]),  # here, too
        ("float16", [65504.0, 6e-8], [65504.0, 6e-8], [np.inf, 1.2e-7]),
        ("float32", [1.0, 16777216.0, 1e-45], [0.1, 1.0, 1e-45], [1.1, 16777216.0, 3e-45]),
        ("float64", [0.1, 1e308], [0.2, 1e308], [0.30000000000000004, np.inf]),
    ],
)
def test_sums_of_floats_are_rounded_once(
    backend: Backend, dtype: str, target: list[float], source: list[float], expected: list[float]
) -> None:
    total = np.array(target, dtype)
    backend.accumulate(total, np.array(source, dtype))
    np.testing.assert_array_equal(total, np.array(expected, dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_have_the_bits_of_the_reference(backend: Backend, bits: Bits, dtype: str, size: int) -> None:
    source, total = some(dtype, size, 1), some(dtype, size, 2)
    expected = total.copy()
    get_backend("reference").accumulate(expected, source)
    backend.accumulate(total, source)
    assert bits(total) == bits(expected)


@given(
    data=st.data(), dtype=st.sampled_from([dtype for dtype in FLOATS if dtype != "bfloat16"]), size=st.integers(0, 70)
)
@settings(max_examples=40)
def test_sums_of_anything_have_the_bits_of_single_additions(
    backend: Backend, bits: Bits, data: st.DataObject, dtype: str, size: int
) -> None:
    total, source = (data.draw(hnp.arrays(dtype, size)) for _ in range(2))
    with np.errstate(all="ignore"):
        expected = [a + b for a, b in zip(total, source, strict=True)]
    backend.accumulate(total, source)
    assert bits(total) == bits(np.array(expected, dtype))


@pytest.mark.parametrize("dtype", LOW)
def test_every_low_precision_number_is_added_as_numpy_adds_it(backend: Backend, bits: Bits, dtype: str) -> None:
    """Backends convert them with the processor's instructions, or those of the device."""
    # The simulator converts as NumPy does, and slowly: there some of them will do.
    every = np.arange(0, 1 << 16, 251 if SIMULATED else 1, dtype=np.uint16).view(dtype)
    for summand in np.array([0, 6e-8, -1, 2049, np.inf]).astype(dtype):
        with np.errstate(all="ignore"):
            expected = every + summand
        total = every.copy()
        backend.accumulate(total, np.full_like(total, summand))
        assert bits(total) == bits(expected)


@pytest.mark.parametrize("dtype", LOW)
def test_low_precisions_are_summed_in_float32(backend: Backend, dtype: str) -> None:
    """Seven workers push 10,000: the sum is more than a float16 can hold, the mean is not."""
    total = np.zeros(3, np.float32)
    pushed = np.full(3, 10_000).astype(dtype)
    for _ in range(7):
        backend.accumulate(total, pushed)
    np.testing.assert_array_equal(total, 7 * pushed.astype(np.float32))
    np.testing.assert_array_equal((total / 7).astype(dtype), pushed)


@pytest.mark.parametrize("dtype", LOW)
def test_every_low_precision_number_becomes_the_same_float32(backend: Backend, bits: Bits, dtype: str) -> None:
    every = np.arange(0, 1 << 16, 251 if SIMULATED else 1, dtype=np.uint16).view(dtype)
    total = np.zeros(every.size, np.float32)
    backend.accumulate(total, every)
    with np.errstate(all="ignore"):
        assert bits(total) == bits(np.float32(0) + every.astype(np.float32))


def test_the_source_stays_as_it_is(backend: Backend) -> None:
    source = np.array([1, 2], np.float32)
    source.flags.writeable = False
    backend.accumulate(np.ones(2, np.float32), source)
    np.testing.assert_array_equal(source, [1, 2])


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_sums_in_memory_at_odd_addresses(backend: Backend, dtype: str) -> None:
    """A payload may land anywhere in a buffer of bytes."""
    start, end = 1, 1 + 3 * ITEM_SIZES[dtype]
    total, source = (np.zeros(end, np.uint8)[start:].view(dtype) for _ in range(2))
    total[:], source[:] = [1, 2, 3], [10, 20, 30]
    backend.accumulate(total, source)
    np.testing.assert_array_equal(total.astype(float), [11, 22, 33])


# --- integers ---


@pytest.mark.parametrize("dtype", INTS)
def test_sums_of_integers_are_exact_up_to_the_ends_of_their_range(backend: Backend, dtype: str) -> None:
    limits = np.iinfo(dtype)
    total = np.array([limits.max - 1, limits.min + 1, limits.max, limits.min, 5], dtype)
    source = np.array([1, limits.min and -1, 0, 0, 7], dtype)
    backend.accumulate(total, source)
    assert total.tolist() == [limits.max, limits.min or 1, limits.max, limits.min, 12]


@pytest.mark.parametrize("dtype", INTS)
def test_a_sum_of_integers_that_is_out_of_range_is_refused_and_nothing_is_added(backend: Backend, dtype: str) -> None:
    limits = np.iinfo(dtype)
    wrong = [(limits.max, 1), (limits.max // 2 + 1, limits.max // 2 + 1), (limits.max, limits.max)]
    if limits.min:
        wrong += [(limits.min, -1), (limits.min, limits.min), (limits.min // 2 - 1, limits.min // 2)]
    for target, source in wrong:
        total = np.array([1, 2, target, 4], dtype)
        with pytest.raises(SumOverflowError, match=f"a sum of {dtype} is out of range; nothing was added"):
            backend.accumulate(total, np.array([1, 1, source, 1], dtype))
        assert total.tolist() == [1, 2, target, 4]


@given(data=st.data(), dtype=st.sampled_from(INTS), size=st.integers(0, 40))
@settings(max_examples=60)
def test_integers_are_added_as_python_adds_them_or_refused(
    backend: Backend, data: st.DataObject, dtype: str, size: int
) -> None:
    total, source = (data.draw(hnp.arrays(dtype, size)) for _ in range(2))
    expected = [int(a) + int(b) for a, b in zip(total, source, strict=True)]
    limits = np.iinfo(dtype)
    if all(limits.min <= number <= limits.max for number in expected):
        backend.accumulate(total, source)
        assert total.tolist() == expected
    else:
        with pytest.raises(SumOverflowError):
            backend.accumulate(total, source)
