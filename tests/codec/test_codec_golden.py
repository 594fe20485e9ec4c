"""Bytes, values and residuals of `1bit` and `2bit` as MXNet has them, and of the others as written by hand."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.codec import QSGD, BFloat16, Codec, Float8, Float16, OneBit, RandomK, TopK, TwoBit
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder
from aiokv.errors import NotFiniteError, SpecMismatchError

Array = NDArray[Any]


def float32(*values: float) -> Array:
    return np.array(values, np.float32)


def push(encoder: Encoder, *gradient: float) -> tuple[str, list[float]]:
    """Return the payload in hexadecimal, and what it says."""
    (payload,) = encoder.encode(float32(*gradient))
    return payload.hex(), Decoder(encoder.codec, backend="reference").decode(payload, len(gradient)).tolist()


def residual_of(encoder: Encoder) -> Array:
    residual: Array = encoder.state()["residual"]
    return residual


# --- MXNet's numbers ---


def test_2bit_with_a_residual(backend: str) -> None:
    encoder = Encoder(TwoBit(threshold=4), "w", 10, backend=backend)
    encoder.restore({"step": 0, "residual": float32(-3, 1, -1, 5, -2, 2, 3, -7, -2, -100)})
    payload, values = push(encoder, -6, -2, 3, 1, 10, 5, -3, 2, -8, 0)
    assert payload == "83f2a000"
    assert values == [-4, 0, 0, 4, 4, 4, 0, -4, -4, -4]
    assert residual_of(encoder).tolist() == [-5, -1, 2, 2, 4, 3, 0, -1, -6, -96]


def test_2bit_step_by_step(backend: str) -> None:
    encoder = Encoder(TwoBit(threshold=0.5), "w", 1, backend=backend)
    steps = [
        (0.4, 0.0, 0.4000000059604645, "00000000"),
        (0.1, 0.5, 0.0, "c0000000"),
        (0.2, 0.0, 0.20000000298023224, "00000000"),
        (0.3, 0.5, 0.0, "c0000000"),
    ]
    for gradient, value, residual, payload in steps:
        assert push(encoder, gradient) == (payload, [value])
        assert residual_of(encoder) == residual


def test_2bit_three_times_the_same_gradient(backend: str) -> None:
    encoder = Encoder(TwoBit(threshold=0.5), "w", 6, backend=backend)
    payloads = [push(encoder, 0.3, -0.7, 0.5, -0.2, 1.2, 0.0)[0] for _ in range(3)]
    assert payloads == ["2cc00000", "ecc00000", "2ec00000"]


def test_1bit_step_by_step(backend: str) -> None:
    encoder = Encoder(OneBit(threshold=0), "w", 1, backend=backend)
    steps = [(2, 1, 1, "80000000"), (0, 1, 0, "80000000"), (-2, -1, -1, "00000000"), (0, -1, 0, "00000000")]
    for gradient, value, residual, payload in [*steps, (0, -1, 1, "00000000")]:
        assert push(encoder, gradient) == (payload, [value])
        assert residual_of(encoder) == residual


def test_1bit_of_a_range(backend: str) -> None:
    encoder = Encoder(OneBit(threshold=0), "w", 11, backend=backend)
    payload, values = push(encoder, *range(-5, 6))
    assert payload == "03e00000"
    assert values == [-1] * 6 + [1] * 5
    assert residual_of(encoder).tolist() == [-4, -3, -2, -1, 0, 1, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [OneBit, TwoBit])
@pytest.mark.parametrize("threshold", [0.1, 0.3, 1e-7, 1 / 3])
def test_thresholds_are_those_of_float32(kind: type[OneBit | TwoBit], threshold: float, backend: str) -> None:
    """A gradient at the threshold counts for 2bit and does not for 1bit; its neighbours decide."""
    exact = np.float32(threshold)
    below, above = np.nextafter(exact, np.float32(-1)), np.nextafter(exact, np.float32(1))
    encoder = Encoder(kind(threshold=threshold, error_feedback=False), "w", 3, backend=backend)
    payload, values = push(encoder, float(below), float(exact), float(above))
    if kind is TwoBit:
        assert (payload, values) == ("3c000000", [0, exact, exact])
    else:
        assert (payload, values) == ("20000000", [-1, -1, 1])


# --- scenario 46 ---


def test_scenario_46_each_of_three_workers_adds_what_its_residual_let_through(backend: str) -> None:
    codec = TwoBit(threshold=0.5)
    workers = [Encoder(codec, "w", 1, rank=rank, backend=backend) for rank in range(3)]
    server = Decoder(codec, backend=backend)
    weight = float32(0)
    for gradient, expected in [(0.4, 0.0), (0.1, 0.5), (0.2, 0.5), (0.3, 1.0)]:
        for worker in workers:
            server.accumulate_into(worker.encode(float32(gradient))[0], weight)
        assert weight.tolist() == [3 * expected]


def test_scenario_46_a_tiny_threshold_is_no_zero_at_the_server(backend: str) -> None:
    codec = TwoBit(threshold=1e-7)
    (payload,) = Encoder(codec, "w", 2, backend=backend).encode(float32(2e-7, -2e-7))
    assert Decoder(codec, backend=backend).decode(payload, 2).tolist() == [np.float32(1e-7), np.float32(-1e-7)]


def test_scenario_46_dtypes_are_decided_when_the_encoder_is_made() -> None:
    assert Encoder(TwoBit(), "w", 1, "float16").encode(np.ones(1, np.float16))[0].hex() == "c0000000"
    with pytest.raises(SpecMismatchError, match="key 'w' has int32"):
        Encoder(TwoBit(), "w", 1, "int32")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scenario_46_nan_is_reported_and_the_residual_stays_clean(codec: Codec, bad: float, backend: str) -> None:
    encoder = Encoder(codec, "layer1", 5, backend=backend)
    encoder.encode(float32(0.1, 0.2, -0.3, 0.4, -7))
    before = encoder.state()
    with pytest.raises(NotFiniteError, match=r"key 'layer1' has -?(nan|inf) at element 3, and 0 more") as caught:
        encoder.encode(float32(0, 0, 0, bad, 0))
    assert caught.value.details["key"] == "layer1"
    after = encoder.state()
    assert after["step"] == before["step"] == 1
    assert after["residual"].tobytes() == before["residual"].tobytes()


def test_scenario_46_turning_it_off_sends_what_was_kept(codec: Codec, backend: str) -> None:
    encoder = Encoder(codec, "w", 4, backend=backend)
    gradient = float32(0.4, -0.1, 0.2, 0.05)
    sent = Decoder(codec, backend=backend).decode(encoder.encode(gradient)[0], 4)
    np.testing.assert_allclose(sent + encoder.flush(), gradient, rtol=1e-6)
    assert not encoder.flush().any()


# --- the others, by hand ---


def test_fp16_and_bf16() -> None:
    assert push(Encoder(Float16(), "w", 3), 1, -2, 65504) == ("003c00c0ff7b", [1, -2, 65504])
    # 1 + 2^-9 is nearer to 1 than to 1 + 2^-7; the residual keeps the rest.
    encoder = Encoder(BFloat16(), "w", 2)
    payload, values = push(encoder, 1 + 2**-9, -2)
    assert payload == "803f00c0"
    assert values == [1, -2]
    assert residual_of(encoder).tolist() == [2**-9, 0]


def test_what_is_too_large_for_fp16_stays_in_the_residual() -> None:
    encoder = Encoder(Float16(), "w", 1)
    assert push(encoder, 1e5) == ("ff7b", [65504])
    assert residual_of(encoder) == 1e5 - 65504
    assert push(encoder, 0)[1] == [np.float16(1e5 - 65504)]


def test_fp8_has_the_scale_in_front() -> None:
    payload, values = push(Encoder(Float8(), "w", 4), 448, -1, 0.5, 0)
    assert payload == struct.pack("<f", 1).hex() + "7eb83000"
    assert values == [448, -1, 0.5, 0]


def test_topk_takes_the_first_of_equal_magnitudes() -> None:
    encoder = Encoder(TopK(k=2), "w", 5)
    payload, values = push(encoder, 1, -3, 5, 3, -3)
    assert payload == struct.pack("<IIff", 1, 2, -3, 5).hex()
    assert values == [0, -3, 5, 0, 0]
    assert residual_of(encoder).tolist() == [1, 0, 0, 3, -3]


def test_indices_count_from_the_start_of_their_chunk() -> None:
    first, second = Encoder(TopK(k=2), "w", 5).encode(float32(1, -3, 5, 3, -3), [(0, 2), (2, 5)])
    assert first.hex() == struct.pack("<If", 1, -3).hex()
    assert second.hex() == struct.pack("<If", 0, 5).hex()


def test_randomk_without_error_feedback_makes_up_for_what_is_not_sent() -> None:
    _, values = push(Encoder(RandomK(k=1, error_feedback=False), "w", 4), 1, 1, 1, 1)
    assert sorted(values) == [0, 0, 0, 4]
    encoder = Encoder(RandomK(k=1), "w", 4)
    _, values = push(encoder, 1, 1, 1, 1)
    assert sorted(values) == [0, 0, 0, 1]
    assert (float32(*values) + residual_of(encoder)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("levels", "gradient", "codes"),
    [
        (1, (-0.5, 0, 0.5), "18"),
        (7, (-7, 7, 0), "0e70"),
        (127, (-127, 127, 0), "00fe7f"),
        (300, (-300, 300, 0), "000058022c01"),
    ],
)
def test_qsgd_on_its_levels_is_exact(levels: int, gradient: tuple[float, ...], codes: str) -> None:
    unit = max(gradient) / levels
    encoder = Encoder(QSGD(levels=levels), "w", 3)
    payload, values = push(encoder, *gradient)
    assert payload == struct.pack("<f", unit).hex() + codes
    assert values == list(gradient)
    assert not residual_of(encoder).any()


def test_bfloat16_gradients_are_corrected_in_float32() -> None:
    encoder = Encoder(TwoBit(threshold=0.5), "w", 1, "bfloat16")
    for step in range(1, 5):
        (payload,) = encoder.encode(np.array([0.125], ml_dtypes.bfloat16))
        assert payload.hex() == ("c0000000" if step == 4 else "00000000")
    assert encoder.flush().dtype == np.float32
