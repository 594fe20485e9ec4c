"""Sums, norms and clipping on the device, against NumPy. Only collected where CUDA is, or the simulator."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda
from numpy.typing import NDArray

from aiokv.errors import SpecMismatchError
from aiokv.kernels import devices_for, get_backend
from aiokv.kernels.cuda import launch, reduce
from aiokv.kernels.cuda.launches import Launches
from aiokv.kernels.cuda.memory import SIMULATED

Array = NDArray[Any]
Bits = Callable[[Array], bytes]
OnDevice = Callable[[Array], Any]
Read = Callable[[Any, Array], Array]

# Around the widths of vectors, warps and parts; prime; and several parts and blocks.
SIZES = [0, 1, 31, 32, 33, 255, 257, 1009 if SIMULATED else 100_003]

if SIMULATED:
    pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def some(dtype: str, size: int, seed: int) -> Array:
    """Return numbers of all magnitudes, as bytes happen to mean them, NaN and infinities among them."""
    rng = np.random.default_rng([seed, size])
    return np.frombuffer(rng.bytes(size * np.dtype(dtype).itemsize), dtype).copy()


def one_after_the_other(dtype: str, arrays: list[Array]) -> Array:
    """Return the sum that the reference makes."""
    with np.errstate(all="ignore"):
        total = arrays[0].astype(dtype)
    for array in arrays[1:]:
        get_backend("reference").accumulate(total, array)
    return total


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_of_eight_has_the_bits_of_one_addition_after_the_other(
    bits: Bits, on_device: OnDevice, read: Read, size: int
) -> None:
    arrays = [some("float32", size, n) for n in range(8)]
    out = np.ones(size, np.float32)
    device = on_device(out)
    reduce.sum_into([device], [[on_device(array) for array in arrays]])
    assert bits(read(device, out)) == bits(one_after_the_other("float32", arrays))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 15, 16, 17, 64])
def test_however_many_are_added_the_order_is_theirs(bits: Bits, on_device: OnDevice, read: Read, count: int) -> None:
    rng = np.random.default_rng(count)
    arrays = [rng.standard_normal(33).astype(np.float32) * 10.0 ** rng.integers(-6, 6) for _ in range(count)]
    arrays = [array.astype(np.float32) for array in arrays]
    out = np.empty(33, np.float32)
    device = on_device(out)
    reduce.sum_into([device], [[on_device(array) for array in arrays]])
    assert bits(read(device, out)) == bits(one_after_the_other("float32", arrays))


@pytest.mark.parametrize(
    ("out", "dtypes"),
    [
        ("float32", ["float16", "bfloat16", "float32", "float16"]),
        ("float32", ["bfloat16"] * 3),
        ("float16", ["float16"] * 3),
        ("bfloat16", ["bfloat16"] * 9),
        ("float64", ["float64"] * 3),
    ],
)
@pytest.mark.parametrize("size", [1, 33, 257])
def test_sums_of_all_dtypes(
    bits: Bits, on_device: OnDevice, read: Read, out: str, dtypes: list[str], size: int
) -> None:
    arrays = [some(dtype, size, n) for n, dtype in enumerate(dtypes)]
    target = np.empty(size, out)
    device = on_device(target)
    reduce.sum_into([device], [[on_device(array) for array in arrays]])
    assert bits(read(device, target)) == bits(one_after_the_other(out, arrays))


def test_one_launch_sums_a_table_of_tensors(bits: Bits, on_device: OnDevice, read: Read) -> None:
    sizes = [5, 0, 257, 1, 130]
    rows = [[some("float32", size, n) for n in range(3)] for size in sizes]
    outs = [np.empty(size, np.float32) for size in sizes]
    devices = [on_device(out) for out in outs]
    reduce.sum_into(devices, [[on_device(array) for array in row] for row in rows])
    for device, out, row in zip(devices, outs, rows, strict=True):
        assert bits(read(device, out)) == bits(one_after_the_other("float32", row))


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from(["float16", "bfloat16", "float32"]), min_size=1, max_size=10),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_tables_of_any_shape(
    bits: Bits, on_device: OnDevice, read: Read, sizes: list[int], dtypes: list[str], seed: int
) -> None:
    rows = [[some(dtype, size, seed + n) for n, dtype in enumerate(dtypes)] for size in sizes]
    outs = [np.empty(size, np.float32) for size in sizes]
    devices = [on_device(out) for out in outs]
    reduce.sum_into(devices, [[on_device(array) for array in row] for row in rows])
    for device, out, row in zip(devices, outs, rows, strict=True):
        assert bits(read(device, out)) == bits(one_after_the_other("float32", row))


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])
def test_memory_that_starts_between_two_vectors(bits: Bits, on_device: OnDevice, read: Read, offset: int) -> None:
    """A chunk of a tensor may begin anywhere."""
    whole = [some("float32", 300, n) for n in range(2)]
    out = np.empty(300, np.float32)
    device = on_device(out)
    reduce.sum_into([device[offset:]], [[on_device(array)[offset:] for array in whole]])
    assert bits(read(device, out)[offset:]) == bits(one_after_the_other("float32", [each[offset:] for each in whole]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [1, 33, 257])
def test_a_scaled_sum_rounds_product_and_sum(
    bits: Bits, on_device: OnDevice, read: Read, dtype: str, size: int
) -> None:
    target, source = some("float32", size, 1), some(dtype, size, 2)
    device = on_device(target)
    reduce.accumulate_scaled([device], [on_device(source)], 0.1)
    with np.errstate(all="ignore"):
        expected = target + np.float32(0.1) * source.astype(np.float32)
    assert bits(read(device, target)) == bits(expected)


# --- norms ---


@pytest.mark.parametrize("size", SIZES)
def test_the_squares_of_a_sum_come_with_it(bits: Bits, on_device: OnDevice, read: Read, size: int) -> None:
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal(size).astype(np.float32) for _ in range(3)]
    out = np.empty(size, np.float32)
    device = on_device(out)
    squares = reduce.sum_and_squares([device], [[on_device(array) for array in arrays]])
    total = one_after_the_other("float32", arrays)
    assert bits(read(device, out)) == bits(total)
    exact = math.fsum(float(number) ** 2 for number in total)
    assert squares.copy_to_host()[0] == pytest.approx(exact, rel=1e-13, abs=0)


@pytest.mark.parametrize("place", [0, 128, 300])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3e38])
def test_squares_are_finite_if_all_sums_are(on_device: OnDevice, place: int, wrong: float) -> None:
    """Twice 3e38 is more than a float32 can hold; the square of the largest one is not too large for a float64."""
    array = np.full(301, np.finfo(np.float32).max / 2, np.float32)
    fine = reduce.sum_and_squares([on_device(array.copy())], [[on_device(array), on_device(array)]])
    assert np.isfinite(fine.copy_to_host()[0])
    array[place] = wrong
    squares = reduce.sum_and_squares([on_device(array.copy())], [[on_device(array), on_device(array)]])
    assert not np.isfinite(squares.copy_to_host()[0])


def test_squares_do_not_depend_on_how_many_blocks_there_are(
    on_device: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    found = set()
    for blocks in (1, 2, 3):
        monkeypatch.setattr(launch, "SIMULATED_BLOCKS", blocks)
        monkeypatch.setattr(launch, "BLOCKS_PER_MULTIPROCESSOR", blocks)
        squares = reduce.sum_and_squares([on_device(array.copy())], [[on_device(array)]])
        found.add(float(squares.copy_to_host()[0]))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("limit", "square", "factor"), [(1.0, 25, 0.2), (5.0, 25, 1), (7.0, 25, 1), (1.0, np.inf, 1), (1.0, np.nan, 1)]
)
def test_tensors_are_clipped_to_the_norm_of_all(
    on_device: OnDevice, read: Read, limit: float, square: float, factor: float
) -> None:
    """3 and 4 have the norm 5."""
    arrays = [np.array([3.0], np.float32), np.array([0.0, 4.0], np.float32)]
    devices = [on_device(array) for array in arrays]
    squares = cuda.to_device(np.array([square]))
    reduce.clip(devices, squares, limit)
    for device, array in zip(devices, arrays, strict=True):
        np.testing.assert_array_equal(read(device, array), array * np.float32(factor))


# --- refusing ---


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_is_rounded_to_nearest_even(bits: Bits, on_device: OnDevice, read: Read, dtype: str, size: int) -> None:
    """What is too large becomes infinite."""
    numbers = some("float32", size, 5)
    with np.errstate(all="ignore"):
        expected = numbers.astype(dtype)
    out = on_device(np.zeros(size, dtype))
    reduce.narrow([on_device(numbers)], [out])
    assert bits(read(out, expected)) == bits(expected)


def test_what_does_not_fit_is_refused(on_device: OnDevice) -> None:
    five, six = on_device(np.ones(5, np.float32)), on_device(np.ones(6, np.float32))
    with pytest.raises(SpecMismatchError, match=r"out must be float32\[6\] to fit source_0; got float32\[5\]"):
        reduce.sum_into([five], [[six]])
    with pytest.raises(SpecMismatchError, match="out must be apart from source_1 in memory"):
        reduce.sum_into([five], [[on_device(np.ones(5, np.float32)), five]])
    with pytest.raises(SpecMismatchError, match="every tensor needs equally many buffers"):
        reduce.sum_into([five], [[]])
    with pytest.raises(SpecMismatchError, match=r"a sum must be all of one float dtype.*; got float16 of float32"):
        reduce.sum_into([on_device(np.ones(6, np.float16))], [[six]])
    with pytest.raises(SpecMismatchError, match="got int32"):
        reduce.sum_into([on_device(np.ones(5, np.int32))], [[on_device(np.ones(5, np.int32))]])


def test_threads_may_launch_at_the_same_time(on_device: OnDevice, read: Read) -> None:
    """A worker and the server in its process do."""
    ones, begin = np.ones(300, np.float32), threading.Barrier(2)

    def add(many: int) -> Array:
        target = on_device(ones)
        begin.wait(timeout=60)
        for _ in range(many):
            reduce.accumulate_scaled([target], [on_device(ones)], 1.0)
        return read(target, ones)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(add, (8, 9)))
    assert [set(array.tolist()) for array in found] == [{9.0}, {10.0}]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("something is made on the device once more")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_push_like_the_one_before_makes_nothing_on_the_device(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when its arrays are the same, nor when they lie elsewhere."""
    device = devices_for("cuda")[0]

    def lists(value: float) -> list[list[Any]]:
        return [[cuda.to_device(np.full(size, value, dtype)) for _ in range(3)] for size in (5, 300)]

    first, second = lists(1), lists(2)
    device.sum_lists(first)
    monkeypatch.setattr(launch, "to_device", refuse)
    monkeypatch.setattr(launch, "new_on_device", refuse)
    for pushed, expected in ((first, 3), (second, 6), (first, 3)):
        assert [set(array.tolist()) for array in device.sum_lists(pushed)] == [{expected}] * 2


def test_arrays_in_the_place_of_others_are_looked_at(on_device: OnDevice) -> None:
    """What is written must lie apart, the second time too."""
    run, spec = Launches().run, reduce.sum_spec("float32", ("float32",), adds=True)
    whole = on_device(np.ones(64, np.float32))
    run(spec, [[whole[:32], whole[32:]]])
    with pytest.raises(SpecMismatchError, match="apart from"):
        run(spec, [[whole[:32], whole[16:48]]])
