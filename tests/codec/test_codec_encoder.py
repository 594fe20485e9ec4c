"""Encoders and decoders as their callers use them: dtypes, cuts, states, backends."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import aiokv.codec
from aiokv.codec import QSGD, BFloat16, Codec, Float16, OneBit, RandomK, TwoBit
from aiokv.codec.backends import get_kernels
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder
from aiokv.codec.formats import make_format, warm_up
from aiokv.errors import CodecError, ConfigError, MissingExtraError, NotFiniteError, SpecMismatchError

Array = NDArray[Any]


def gradients(size: int, steps: int) -> list[Array]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(steps)]


# --- gradients ---


def test_the_gradient_stays_as_it_is(codec: Codec, backend: str) -> None:
    (gradient,) = gradients(50, 1)
    before = gradient.copy()
    Encoder(codec, "w", 50, backend=backend).encode(gradient)
    assert gradient.tobytes() == before.tobytes()
    gradient.flags.writeable = False
    Encoder(codec, "w", 50, backend=backend).encode(gradient)


def test_payloads_stay_as_they_are_when_the_next_gradient_comes(codec: Codec) -> None:
    encoder = Encoder(codec, "w", 50)
    first, second = gradients(50, 2)
    payloads = encoder.encode(first)
    kept = [payload.tobytes() for payload in payloads]
    encoder.encode(second)
    assert payloads == kept
    assert all(payload.readonly and payload.format == "B" for payload in payloads)


def test_any_shape_and_layout(codec: Codec) -> None:
    (flat,) = gradients(60, 1)
    expected = Encoder(codec, "w", 60).encode(flat)
    across = np.asfortranarray(flat.reshape(6, 10))
    assert Encoder(codec, "w", 60).encode(across) == expected
    every_other = np.zeros(120, np.float32)
    every_other[::2] = flat
    assert Encoder(codec, "w", 60).encode(every_other[::2]) == expected
    moved = np.frombuffer(b"x" + flat.tobytes(), np.float32, 60, 1)
    assert Encoder(codec, "w", 60).encode(moved) == expected


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,)])
def test_small_shapes(codec: Codec, shape: tuple[int, ...], backend: str) -> None:
    gradient = np.full(shape, 0.5, np.float32)
    (payload,) = Encoder(codec, "w", gradient.size, backend=backend).encode(gradient)
    assert Decoder(codec, backend=backend).decode(payload, gradient.size).shape == (gradient.size,)


def test_zeros_and_the_smallest_and_largest_numbers_pass(codec: Codec, backend: str) -> None:
    largest, smallest = np.finfo(np.float32).max, np.float32(1e-45)
    for values in ([0, 0, 0], [smallest, -smallest, 0], [2e-43, 1e-43, smallest], [largest, -largest, 1]):
        encoder = Encoder(codec, "w", 3, backend=backend)
        gradient = np.array(values, np.float32)
        (payload,) = encoder.encode(gradient)
        said = Decoder(codec, backend=backend).decode(payload, 3)
        assert np.isfinite(said).all()
        np.testing.assert_allclose(said.astype(float) + encoder.flush(), gradient, rtol=1e-6, atol=1e-6)


def test_a_wrong_gradient_names_the_key(codec: Codec) -> None:
    encoder = Encoder(codec, 12, 4)
    wrong = [(np.zeros(5, np.float32), r"float32\[5\]"), (np.zeros(4), r"float64\[4\]"), ([0.0] * 4, "list")]
    wrong.append((np.zeros(4, ">f4"), r">f4\[4\]"))
    for gradient, got in wrong:
        with pytest.raises(SpecMismatchError, match=rf"gradient of key 12 must be float32\[4\], got {got}") as caught:
            encoder.encode(gradient)  # type: ignore[arg-type]
        assert caught.value.details["key"] == 12
    assert encoder.step == 0


def test_a_sum_that_is_too_large_is_refused(backend: str) -> None:
    encoder = Encoder(TwoBit(), "w", 2, backend=backend)
    gradient = np.array([3e38, 0], np.float32)
    encoder.encode(gradient)
    with pytest.raises(NotFiniteError, match="key 'w' and its residual have a sum that is too large"):
        encoder.encode(gradient)
    assert encoder.step == 1


def test_float64_beyond_float32_is_refused(codec: Codec, backend: str) -> None:
    encoder = Encoder(codec, "w", 1, "float64", backend=backend)
    with pytest.raises(NotFiniteError, match=r"1e\+39 at element 0"):
        encoder.encode(np.array([1e39]))


def test_float64_keeps_a_float64_residual(backend: str) -> None:
    encoder = Encoder(TwoBit(threshold=0.1), "w", 1, "float64", backend=backend)
    (payload,) = encoder.encode(np.array([0.1 + 1e-8]))
    assert payload.hex() == "c0000000"
    # What the payload says is float32, which is a little more than 0.1.
    assert encoder.flush().tolist() == [0.1 + 1e-8 - float(np.float32(0.1))]


# --- cuts ---


@pytest.mark.parametrize(
    "cuts", [[], [(0, 5)], [(0, 4), (5, 10)], [(0, 6), (5, 10)], [(1, 10)], [(0, 12), (12, 10)], [(0, 5), (5, 11)]]
)
def test_cuts_that_do_not_cover_the_tensor_are_refused(cuts: list[tuple[int, int]]) -> None:
    encoder = Encoder(TwoBit(), "w", 10)
    with pytest.raises(SpecMismatchError, match="cuts of key 'w' must be neighbouring ranges from 0 to 10"):
        encoder.encode(np.zeros(10, np.float32), cuts)
    assert encoder.step == 0


# --- states ---


def test_a_restored_encoder_goes_on_with_the_same_bits(codec: Codec) -> None:
    encoder, other = Encoder(codec, "w", 50), Encoder(codec, "w", 50)
    steps = gradients(50, 6)
    for gradient in steps[:3]:
        encoder.encode(gradient)
    other.restore(encoder.state())
    for gradient in steps[3:]:
        assert other.encode(gradient) == encoder.encode(gradient)


def test_a_state_is_a_copy() -> None:
    encoder = Encoder(TwoBit(), "w", 1)
    encoder.encode(np.array([0.25], np.float32))
    state = encoder.state()
    encoder.encode(np.array([0.125], np.float32))
    assert state["residual"] == 0.25
    encoder.restore(state)
    encoder.encode(np.array([0.125], np.float32))
    assert state["residual"] == 0.25


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, "residual and step, got nothing"),
        ({"step": 1}, "residual and step, got step"),
        ({"step": -1, "residual": np.zeros(2, np.float32)}, "step of key 'w' must be an integer from 0"),
        ({"step": True, "residual": np.zeros(2, np.float32)}, "step of key 'w' must be an integer from 0"),
        ({"step": 1, "residual": [0.0, 0.0]}, "got list"),
        ({"step": 1, "residual": np.zeros(3, np.float32)}, r"float32\[2\], got float32\[3\]"),
        ({"step": 1, "residual": np.zeros(2)}, r"float32\[2\], got float64\[2\]"),
        ({"step": 1, "residual": np.array([np.nan, 0], np.float32)}, "got NaN or infinity"),
    ],
)
def test_the_state_of_another_encoder_is_refused(state: dict[str, Any], expected: str) -> None:
    encoder = Encoder(TwoBit(), "w", 2)
    encoder.encode(np.array([0.25, 0], np.float32))
    with pytest.raises(SpecMismatchError, match=expected):
        encoder.restore(state)
    assert encoder.step == 1
    assert encoder.flush().tolist() == [0.25, 0]


def test_without_error_feedback_nothing_is_kept() -> None:
    encoder = Encoder(TwoBit(error_feedback=False), "w", 1)
    for _ in range(3):
        assert encoder.encode(np.array([0.4], np.float32))[0].hex() == "00000000"
    assert encoder.state() == {"step": 3}
    assert encoder.flush().tolist() == [0]
    encoder.restore({"step": 7})
    assert encoder.step == 7


@pytest.mark.parametrize("codec", [RandomK(k=5, seed=4), QSGD(levels=3, seed=4)])
def test_random_choices_follow_from_seed_key_rank_and_step(codec: RandomK | QSGD) -> None:
    (gradient,) = gradients(200, 1)

    def second(codec: Codec, key: str | int, rank: int = 0, step: int = 1) -> bytes:
        encoder = Encoder(codec, key, 200, rank=rank)
        encoder.restore({"step": step, "residual": np.zeros(200, np.float32)})
        return encoder.encode(gradient)[0].tobytes()

    same = second(codec, "1")
    assert second(codec, "1") == same
    others = [second(codec, 1), second(codec, "2"), second(codec, "1", rank=1), second(codec, "1", step=2)]
    others.append(second(msgspec.structs.replace(codec, seed=5), "1"))
    assert len({same, *others}) == 6


# --- what is written to ---


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(4, np.float16),
        np.zeros(4, np.int32),
        np.zeros((2, 2), np.float32),
        np.zeros(8, np.float32)[::2],
        np.frombuffer(bytes(16), np.float32),
        np.zeros(4, ">f4"),
        [0.0] * 4,
    ],
)
def test_targets_that_can_not_be_written_are_refused(out: Any) -> None:
    decoder = Decoder(TwoBit())
    for read in (decoder.decode_into, decoder.accumulate_into):
        with pytest.raises(SpecMismatchError, match="must be float32 or float64, one-dimensional"):
            read(bytes(4), out)


# --- backends ---


def test_a_backend_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="unknown backend 'cuda'; known: auto, cpu, reference"):
        Encoder(TwoBit(), "w", 1, backend="cuda")
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "aiokv.codec.compiled", raising=False)
    monkeypatch.delattr(aiokv.codec, "compiled", raising=False)
    with pytest.raises(MissingExtraError, match=r"numba.*pip install \"aiokv\[cpu\]\""):
        get_kernels("cpu")
    with caplog.at_level(logging.INFO, "aiokv"):
        assert get_kernels("auto") is get_kernels("reference")
    assert "numba" in caplog.text


def test_a_codec_without_a_format_is_refused() -> None:
    class Other(Codec, tag="other", frozen=True):
        pass

    with pytest.raises(CodecError, match="no format for"):
        make_format(Other(), "auto")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_warming_up_changes_nothing(codec: Codec, dtype: str, backend: str) -> None:
    warm_up(codec, dtype, backend)
    encoder = Encoder(codec, "w", 1, dtype, backend=backend)
    assert encoder.step == 0
    assert not encoder.flush().any()


def test_they_say_what_they_are() -> None:
    encoder = Encoder(OneBit(), "w", 3)
    assert "'w', float32[3]" in repr(encoder)
    assert encoder.codec == Decoder(OneBit()).codec == OneBit()
    assert "OneBit" in repr(Decoder(OneBit()))


def test_a_processor_without_float16_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_whole = pytest.importorskip("aiokv.codec.compiled_whole")
    monkeypatch.setattr(compiled_whole, "_HALF_PRECISION", False)
    (gradient,) = gradients(33, 1)
    for codec in (Float16(), BFloat16()):
        payload = Encoder(codec, "w", 33, backend="cpu").encode(gradient)[0]
        assert payload == Encoder(codec, "w", 33, backend="reference").encode(gradient)[0]
        total = np.ones(33, np.float32)
        Decoder(codec, backend="cpu").accumulate_into(payload, total)
        assert total.tobytes() == (1 + Decoder(codec, backend="reference").decode(payload, 33)).tobytes()
