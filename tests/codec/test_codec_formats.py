"""The formats against plain code written from the definitions, and the laws that random codecs obey."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiokv.codec import QSGD, BFloat16, Codec, Float8, Float16, OneBit, RandomK, TopK, TwoBit
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder

Array = NDArray[Any]

numbers = st.floats(-(2.0**66), 2.0**66, width=32)
vectors = st.lists(numbers, min_size=1, max_size=70)


def float32(values: list[float]) -> Array:
    return np.array(values, np.float32)


def said(codec: Codec, gradient: Array, *, backend: str = "auto") -> Array:
    """Return what the first payload of a gradient says."""
    (payload,) = Encoder(codec, "w", gradient.size, backend=backend).encode(gradient)
    return Decoder(codec, backend=backend).decode(payload, gradient.size)


# --- plain code ---


@given(vectors, st.floats(2.0**-20, 2.0**20, width=32))
def test_2bit_value_by_value(values: list[float], threshold: float) -> None:
    for backend in ("reference", "cpu"):
        (payload,) = Encoder(TwoBit(threshold=threshold), "w", len(values), backend=backend).encode(float32(values))
        bits = "".join("11" if x >= threshold else "10" if x <= -threshold else "00" for x in values)
        words = bits + "0" * (-len(bits) % 32)
        assert payload == int(words, 2).to_bytes(len(words) // 8, "big")


@given(vectors, st.floats(-(2.0**20), 2.0**20, width=32))
def test_1bit_value_by_value(values: list[float], threshold: float) -> None:
    for backend in ("reference", "cpu"):
        (payload,) = Encoder(OneBit(threshold=threshold), "w", len(values), backend=backend).encode(float32(values))
        bits = "".join("1" if x > threshold else "0" for x in values)
        words = bits + "0" * (-len(bits) % 32)
        assert payload == int(words, 2).to_bytes(len(words) // 8, "big")


@given(vectors)
def test_fp16_as_python_packs_it(values: list[float]) -> None:
    # Python refuses what would round to infinity.
    expected = [struct.unpack("<e", struct.pack("<e", min(max(x, -65504.0), 65504.0)))[0] for x in values]
    assert said(Float16(), float32(values)).tolist() == expected


@given(vectors)
def test_bf16_is_the_upper_half_of_float32_rounded_to_even(values: list[float]) -> None:
    expected = []
    for x in values:
        (bits,) = struct.unpack("<I", struct.pack("<f", x))
        upper = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        expected.append(struct.unpack("<f", struct.pack("<I", upper << 16))[0])
    assert said(BFloat16(), float32(values)).tolist() == expected


def every_float8() -> list[float]:
    """The non-negative numbers of E4M3 in the order of their codes: subnormal ones first, NaN (the last) left out."""
    subnormal = [mantissa / 8 * 2**-6 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return (subnormal + normal)[:-1]


@given(vectors)
def test_fp8_takes_the_nearest_number_in_units_of_the_scale(values: list[float]) -> None:
    gradient = float32(values)
    scale = np.float32(np.abs(gradient).max() / np.float32(448))
    got = said(Float8(), gradient)
    if scale == 0:
        assert not got.any()
        return
    table = every_float8()
    for x, value in zip(gradient, got, strict=True):
        unit = min(abs(float(x / scale)), 448.0)
        code = min(range(len(table)), key=lambda code: (abs(table[code] - unit), code % 2))
        assert value == math.copysign(np.float32(table[code]) * scale, x)


@given(vectors, st.integers(1, 80))
def test_topk_by_sorting(values: list[float], k: int) -> None:
    gradient = float32(values)
    kept = sorted(range(len(values)), key=lambda i: (-abs(gradient[i]), i))[:k]
    expected = [gradient[i] if i in kept else 0.0 for i in range(len(values))]
    assert said(TopK(k=k), gradient).tolist() == expected


@given(vectors, st.integers(1, 80))
def test_randomk_keeps_k_values_as_they_are(values: list[float], k: int) -> None:
    gradient = float32(values)
    (payload,) = Encoder(RandomK(k=k), "w", gradient.size).encode(gradient)
    count = min(k, gradient.size)
    assert payload.nbytes == 8 * count
    indices = np.frombuffer(payload[: 4 * count], np.uint32)
    assert np.frombuffer(payload[4 * count :], np.float32).tolist() == gradient[indices].tolist()


@given(vectors, st.integers(1, 32767))
def test_qsgd_takes_a_neighbouring_level(values: list[float], levels: int) -> None:
    gradient = float32(values)
    got = said(QSGD(levels=levels, error_feedback=False), gradient).astype(np.float64)
    unit = np.abs(gradient).max().astype(np.float64) / levels
    # The unit is rounded to float32, as is the quotient.
    slack = 2.0**-22 * levels * unit + levels * 2.0**-148
    assert (np.abs(got - gradient) <= unit + slack).all()


# --- random codecs: the mean is the gradient ---

STEPS = 4000


def mean_said(codec: Codec, gradient: Array) -> Array:
    encoder, decoder = Encoder(codec, "w", gradient.size), Decoder(codec)
    total = np.zeros(gradient.size)
    for _ in range(STEPS):
        decoder.accumulate_into(encoder.encode(gradient)[0], total)
    return total / STEPS


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_qsgd_is_unbiased(levels: int) -> None:
    gradient = np.linspace(-1, 0.7, 40, dtype=np.float32)
    unit = 1 / levels
    fraction = np.abs(gradient) / unit % 1
    standard_error = unit * np.sqrt(fraction * (1 - fraction) / STEPS)
    error = np.abs(mean_said(QSGD(levels=levels, seed=3, error_feedback=False), gradient) - gradient)
    assert (error <= 4 * standard_error + 1e-6).all()


def test_randomk_is_unbiased() -> None:
    gradient = np.linspace(-1, 0.7, 40, dtype=np.float32)
    chance = 6 / 40
    standard_error = np.abs(gradient) / chance * math.sqrt(chance * (1 - chance) / STEPS)
    error = np.abs(mean_said(RandomK(k=6, seed=3, error_feedback=False), gradient) - gradient)
    assert (error <= 4 * standard_error).all()


# --- error feedback ---


@pytest.mark.parametrize("codec", [TopK(fraction=0.1), RandomK(fraction=0.1), QSGD(levels=1), QSGD(levels=7), Float8()])
def test_the_residual_stays_below_the_bound_of_karimireddy_2019(codec: Codec) -> None:
    """Lemma 3: a codec that keeps a part d of the squared norm has |residual|^2 <= 4 (1 - d) / d^2 |gradient|^2.

    d is k / n for topk and randomk; for one level, where it is least, 1 / (1 + w) with w < sqrt(n), as in QSGD.
    """
    size = 400
    part = 0.1 if isinstance(codec, TopK | RandomK) else 1 / math.sqrt(size)
    rng = np.random.default_rng(1)
    encoder = Encoder(codec, "w", size)
    for _ in range(300):
        gradient = rng.standard_normal(size).astype(np.float32)
        gradient /= np.linalg.norm(gradient)
        encoder.encode(gradient)
        assert np.linalg.norm(encoder.state()["residual"]) ** 2 <= 4 * (1 - part) / part**2


def test_one_level_does_not_pile_up_a_residual() -> None:
    """Of 10,000 normal values the largest is below 5, the mean magnitude 0.8: a part of 1 / (5 * 0.8) is kept.

    The bound above is then 48. Unbiased values, as without error feedback, would bring it over 1000.
    """
    size = 10_000
    rng = np.random.default_rng(1)
    encoder = Encoder(QSGD(levels=1), "w", size)
    for _ in range(150):
        gradient = rng.standard_normal(size).astype(np.float32)
        gradient /= np.linalg.norm(gradient)
        encoder.encode(gradient)
    assert np.linalg.norm(encoder.state()["residual"]) ** 2 <= 48


def test_zero_gradients_bring_out_the_rest(codec: Codec) -> None:
    """What the sender of a pull keeps for a worker reaches it when nothing new comes."""
    size = 60
    value = np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)
    encoder, decoder = Encoder(codec, "w", size), Decoder(codec)
    if codec == TwoBit(threshold=1e-7):
        value *= 1e-5
    got = np.zeros(size)
    decoder.accumulate_into(encoder.encode(value)[0], got)
    for _ in range(400):
        decoder.accumulate_into(encoder.encode(np.zeros(size, np.float32))[0], got)
    # Bits can't say less than their value.
    least = {"1bit": 1.5, "2bit": getattr(codec, "threshold", 0)}.get(codec.name, 1e-5)
    assert np.abs(got - value).max() <= least
