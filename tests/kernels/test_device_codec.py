"""Compression on the device against the reference of the codecs. Only collected where CUDA is, or the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.codec import reference
from aiokv.errors import SpecMismatchError
from aiokv.kernels.cuda import codec, select
from aiokv.kernels.cuda.memory import SIMULATED

Array = NDArray[Any]
OnDevice = Callable[[Array], Any]
Read = Callable[[Any, Array], Array]

SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 255, 257, 311 if SIMULATED else 100_003]


def pair(size: int) -> tuple[Array, Array]:
    """Return gradient and residual; some of their sums are the threshold itself."""
    rng = np.random.default_rng(size)
    gradient, residual = (rng.integers(-8, 9, size).astype(np.float32) / np.float32(8) for _ in range(2))
    return gradient, residual


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [1, 2])
def test_a_few_bits_for_each_value(on_device: OnDevice, read: Read, bits: int, size: int) -> None:
    gradient, residual = pair(size)
    payload = np.full(-(-size * bits // 32), 0xDEADBEEF, np.uint32)
    kept, packed = on_device(residual), on_device(payload)
    codec.encode_bits(bits, on_device(gradient), kept, 0.5, packed)
    expected, left = np.zeros(payload.nbytes, np.uint8), residual.copy()
    getattr(reference, f"encode_{bits}bit")(gradient, left, np.float32(0.5), expected)
    assert read(packed, payload).tobytes() == expected.tobytes()
    assert read(kept, residual).tobytes() == left.tobytes()

    out, target = on_device(np.ones(size, np.float32)), on_device(gradient)
    codec.decode_bits(bits, packed, 0.5, out)
    codec.decode_bits(bits, packed, 0.5, target, adds=True)
    threshold = [np.float32(0.5)] if bits == 2 else []
    values, sums = np.empty(size, np.float32), gradient.copy()
    getattr(reference, f"decode_{bits}bit")(expected, *threshold, values)
    getattr(reference, f"accumulate_{bits}bit")(expected, *threshold, sums)
    assert read(out, gradient).tobytes() == values.tobytes()
    assert read(target, gradient).tobytes() == sums.tobytes()


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_leave_the_rest_in_the_residual(on_device: OnDevice, read: Read, dtype: str, size: int) -> None:
    rng = np.random.default_rng(size)
    gradient, residual = (rng.standard_normal(size).astype(np.float32) * np.float32(1e4) for _ in range(2))
    gradient[0] = 3e38
    most = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    codes = np.empty(size, dtype)
    kept, cast, bare = on_device(residual), on_device(codes), on_device(codes)
    codec.encode_half(on_device(gradient), kept, cast, most)
    codec.encode_half(on_device(gradient), None, bare, most)
    expected, left = np.empty(size, dtype), residual.copy()
    with np.errstate(all="ignore"):
        reference.encode_half(gradient, left, expected)
        assert read(cast, codes).tobytes() == expected.tobytes()
        assert read(kept, residual).tobytes() == left.tobytes()
        reference.encode_half(gradient, None, expected)
    assert read(bare, codes).tobytes() == expected.tobytes()


def test_every_float8_is_read_and_written_as_ml_dtypes_does(on_device: OnDevice, read: Read) -> None:
    """All 254 numbers, what lies half-way between two of them, and a little more and less than that."""
    every = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    numbers = every.view(reference.FLOAT8).astype(np.float32)
    out = np.empty(every.size, np.float32)
    device = on_device(out)
    codec.decode_float8(1.0, on_device(every), device)
    assert read(device, out).tobytes() == numbers.tobytes()
    ordered = np.unique(numbers)
    middle = (ordered[1:] + ordered[:-1]) / 2
    tried = np.concatenate(
        [ordered, middle, np.nextafter(middle, np.float32(1e9)), np.nextafter(middle, np.float32(-1e9))]
    )
    tried = tried.astype(np.float32)
    codes = np.empty(tried.size, np.uint8)
    cast = on_device(codes)
    codec.encode_float8(on_device(tried), on_device(np.zeros_like(tried)), 1.0, cast)
    assert read(cast, codes).tobytes() == (tried + np.float32(0)).astype(reference.FLOAT8).tobytes()


@pytest.mark.parametrize("size", SIZES[1:])
def test_float8_in_units_of_a_scale(on_device: OnDevice, read: Read, size: int) -> None:
    rng = np.random.default_rng(size)
    gradient, residual = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    device_gradient, kept = on_device(gradient), on_device(residual)
    largest = codec.largest(device_gradient, kept).copy_to_host()[0]
    assert largest == reference.largest(gradient, residual)
    scale = np.float32(largest / 448)
    codes = np.empty(size, np.uint8)
    cast, target = on_device(codes), on_device(gradient)
    codec.encode_float8(device_gradient, kept, float(scale), cast)
    codec.decode_float8(float(scale), cast, target, adds=True)
    expected, left, sums = np.empty(size, np.uint8), residual.copy(), gradient.copy()
    reference.encode_fp8(gradient, left, scale, expected)
    reference.accumulate_fp8(scale, expected, sums)
    assert read(cast, codes).tobytes() == expected.tobytes()
    assert read(kept, residual).tobytes() == left.tobytes()
    assert read(target, gradient).tobytes() == sums.tobytes()


@pytest.mark.parametrize(("size", "count"), [(1, 1), (31, 31), (32, 1), (33, 5), (255, 128), (257, 1), (300, 300)])
def test_the_largest_values_and_of_equal_ones_the_first(on_device: OnDevice, size: int, count: int) -> None:
    values = np.random.default_rng(size).integers(-20, 21, size).astype(np.float32) / np.float32(4)
    places, found = select.largest_places(on_device(values), count)
    expected = reference.largest_places(values, count)
    assert places.copy_to_host().tolist() == expected.tolist()
    assert found.copy_to_host().tobytes() == values[expected].tobytes()


def test_of_equal_magnitudes_the_first_are_taken_and_cleared(on_device: OnDevice, read: Read) -> None:
    """More of them than are wanted, in several parts of the tensor, and of both signs."""
    values = np.where(np.arange(300) % 2, np.float32(2), np.float32(-2)).astype(np.float32)
    device = on_device(values)
    places, found = select.largest_places(device, 140)
    assert places.copy_to_host().tolist() == list(range(140))
    assert found.copy_to_host().tobytes() == values[:140].tobytes()
    select.clear_places(device, places)
    assert read(device, values).tolist() == [0] * 140 + values[140:].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 130, 256])
def test_what_is_no_number_makes_the_largest_infinite(on_device: OnDevice, bad: float, place: int) -> None:
    gradient = np.ones(257, np.float32)
    gradient[place] = bad
    found = codec.largest(on_device(gradient), on_device(np.zeros_like(gradient)))
    assert found.copy_to_host()[0] == np.inf


def test_payloads_of_another_length_are_refused(on_device: OnDevice) -> None:
    arrays = [on_device(np.zeros(33, np.float32)) for _ in range(2)]
    with pytest.raises(SpecMismatchError, match=r"payload must be uint32\[2\] to fit gradient; got uint32\[1\]"):
        codec.encode_bits(1, arrays[0], arrays[1], 0.5, on_device(np.zeros(1, np.uint32)))
    with pytest.raises(SpecMismatchError, match=r"array must be float32 with at least 34 elements; got float32\[33\]"):
        select.largest_places(arrays[0], 34)
    with pytest.raises(SpecMismatchError, match="array must be float32; got float64"):
        select.clear_places(on_device(np.zeros(3)), on_device(np.zeros(1, np.uint32)))
