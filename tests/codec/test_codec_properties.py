"""What holds for every codec, gradient and cut."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiokv.codec import PRECISIONS, Codec
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder
from aiokv.errors import NotFiniteError

Array = NDArray[Any]

EXAMPLES = 20
"""For each of many codecs, so that there are hundreds in all."""

BACKENDS = ("reference", "cpu")

# Numbers that meet a threshold of 0.5, or its neighbours, are as likely as others.
numbers = st.one_of(
    st.floats(-(2.0**40), 2.0**40, width=32),
    st.floats(-2, 2, width=32),
    st.sampled_from([0.0, -0.0, 0.5, -0.5, 0.49999997, -0.49999997, 1e-45, -1e-45]),
)


@st.composite
def runs(draw: st.DrawFn) -> list[list[float]]:
    """Draw the gradients of some steps."""
    size = draw(st.integers(0, 70))
    return draw(st.lists(st.lists(numbers, min_size=size, max_size=size), min_size=1, max_size=5))


@st.composite
def cuts_of(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Cut range(size) anywhere; ranges may be empty."""
    places = sorted(draw(st.lists(st.integers(0, size), max_size=6)))
    return list(itertools.pairwise([0, *places, size]))


def joined(codec: Codec, payloads: list[memoryview], cuts: list[tuple[int, int]]) -> Array:
    """Return what the payloads of a tensor say."""
    decoder = Decoder(codec)
    parts = [decoder.decode(payload, stop - start) for payload, (start, stop) in zip(payloads, cuts, strict=True)]
    return np.concatenate([np.empty(0, np.float32), *parts])


@settings(max_examples=EXAMPLES)
@given(runs())
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_was_said_and_the_residual_are_the_sum_of_the_gradients(
    codec: Codec, dtype: str, run: list[list[float]]
) -> None:
    size = len(run[0])
    encoder = Encoder(codec, "w", size, dtype)
    said, given_in, slack = np.zeros(size), np.zeros(size), np.zeros(size)
    residual = np.zeros(size)
    half_digit = float(np.finfo(PRECISIONS[dtype]).eps) / 2
    for values in run:
        gradient = np.array(values, dtype)
        cuts = [(0, size)]
        said += joined(codec, encoder.encode(gradient, cuts), cuts)
        given_in += gradient
        # The sum of gradient and residual is rounded, and so is what is left of it.
        slack += half_digit * (np.abs(gradient) + np.abs(residual))
        residual = encoder.state()["residual"].astype(np.float64)
        slack += half_digit * np.abs(residual)
    # The additions of this test are rounded too.
    slack = slack * 1.01 + 1e-15 * (np.abs(said) + np.abs(given_in))
    assert (np.abs(said + residual - given_in) <= slack).all()


@settings(max_examples=EXAMPLES)
@given(st.data(), runs())
def test_cut_anywhere_the_payloads_say_the_same(codec: Codec, data: st.DataObject, run: list[list[float]]) -> None:
    size = len(run[0])
    whole, parts = Encoder(codec, "w", size), Encoder(codec, "w", size)
    for values in run:
        gradient = np.array(values, np.float32)
        cuts = data.draw(cuts_of(size))
        uncut = joined(codec, whole.encode(gradient), [(0, size)])
        payloads = parts.encode(gradient, cuts)
        assert joined(codec, payloads, cuts).tobytes() == uncut.tobytes()
        for payload, (start, stop) in zip(payloads, cuts, strict=True):
            assert payload.nbytes <= codec.max_nbytes(stop - start)
            assert codec.nbytes(stop - start) in {None, payload.nbytes}
    assert parts.state()["residual"].tobytes() == whole.state()["residual"].tobytes()


@settings(max_examples=EXAMPLES)
@given(runs())
def test_adding_is_decoding_and_adding(codec: Codec, run: list[list[float]]) -> None:
    size = len(run[0])
    for dtype in ("float32", "float64"):
        encoder, decoder = Encoder(codec, "w", size), Decoder(codec)
        total, expected = np.full(size, 0.75, dtype), np.full(size, 0.75, dtype)
        for values in run:
            (payload,) = encoder.encode(np.array(values, np.float32))
            decoder.accumulate_into(payload, total)
            expected += decoder.decode(payload, size)
        assert total.tobytes() == expected.tobytes()


def assert_same_bits(codec: Codec, dtype: str, gradients: list[Array]) -> None:
    """Encode and decode with NumPy and with compiled code, and compare all that comes out."""
    size = gradients[0].size
    oracle, compiled = (Encoder(codec, "w", size, dtype, backend=name) for name in BACKENDS)
    readers = [Decoder(codec, backend=name) for name in BACKENDS]
    for gradient in gradients:
        (payload,) = oracle.encode(gradient)
        assert compiled.encode(gradient) == [payload]
        residuals = [encoder.state().get("residual", np.empty(0)).tobytes() for encoder in (oracle, compiled)]
        assert residuals[0] == residuals[1]
        # Where the values of a payload lie is not the decoder's choice.
        moved = memoryview(b"x" + payload.tobytes())[1:]
        read = []
        for decoder in readers:
            out, total = np.full(size, np.nan, dtype), np.full(size, 0.75, dtype)
            decoder.decode_into(moved, out)
            decoder.accumulate_into(payload, total)
            read.append((out.tobytes(), total.tobytes()))
        assert read[0] == read[1]


@settings(max_examples=EXAMPLES)
@given(runs(), st.booleans(), st.sampled_from([1.0, 1e-38, 1e-42, 1e20]))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compiled_code_has_the_bits_of_the_oracle(
    codec: Codec, dtype: str, run: list[list[float]], feedback: bool, factor: float
) -> None:
    codec = msgspec.structs.replace(codec, error_feedback=feedback)
    # In units of 1e-38 and 1e-42 nearly all are subnormal numbers.
    assert_same_bits(codec, dtype, [(np.array(values) * factor).astype(dtype) for values in run])


@given(st.sampled_from([31, 33, 1023, 1025, 65_535, 65_537, 150_001]), st.integers(0, 2**32), st.booleans())
@settings(max_examples=8)
def test_compiled_code_has_the_bits_of_the_oracle_in_any_length(
    codec: Codec, size: int, seed: int, any_bits: bool
) -> None:
    rng = np.random.default_rng(seed)
    gradient = rng.standard_normal(size, np.float32)
    if any_bits:
        gradient = rng.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
        gradient[~(np.abs(gradient) < 1e38)] = -0.0
    assert_same_bits(codec, "float32", [gradient, np.sign(gradient), np.zeros(size, np.float32)])


@given(st.integers(0, 40), st.sampled_from([np.nan, np.inf, -np.inf]))
@settings(max_examples=EXAMPLES // 4)
def test_what_is_not_finite_is_refused_and_leaves_the_residual(
    codec: Codec, backend: str, place: int, number: float
) -> None:
    encoder = Encoder(codec, "w", 41, backend=backend)
    encoder.encode(np.linspace(-2, 2, 41, dtype=np.float32))
    before = encoder.state()["residual"].tobytes()
    gradient = np.ones(41, np.float32)
    gradient[place] = number
    with pytest.raises(NotFiniteError, match=f"at element {place}"):
        encoder.encode(gradient)
    assert encoder.state()["residual"].tobytes() == before
