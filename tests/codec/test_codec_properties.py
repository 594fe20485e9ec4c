"""What holds for every codec, gradient and cut."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aiokv.codec import PRECISIONS, Codec, OneBit, TwoBit
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder

Array = NDArray[Any]

EXAMPLES = 40
"""For each of many codecs, so that there are hundreds in all."""

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


@settings(max_examples=EXAMPLES)
@given(runs(), st.sampled_from([0.5, 0.1, 3.0, 1e-30]), st.booleans())
@pytest.mark.parametrize("kind", [OneBit, TwoBit])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_compiled_code_has_the_bits_of_the_oracle(
    kind: type[OneBit | TwoBit], dtype: str, run: list[list[float]], threshold: float, feedback: bool
) -> None:
    size = len(run[0])
    codec = kind(threshold=threshold, error_feedback=feedback)
    oracle, compiled = (Encoder(codec, "w", size, dtype, backend=name) for name in ("reference", "cpu"))
    plain, fast = (Decoder(codec, backend=name) for name in ("reference", "cpu"))
    total, total_fast = np.ones(size, dtype), np.ones(size, dtype)
    out, out_fast = np.empty(size, dtype), np.empty(size, dtype)
    for values in run:
        gradient = np.array(values, dtype)
        (payload,) = oracle.encode(gradient)
        assert compiled.encode(gradient) == [payload]
        residuals = [encoder.state().get("residual", np.empty(0)).tobytes() for encoder in (oracle, compiled)]
        assert residuals[0] == residuals[1]
        plain.decode_into(payload, out)
        fast.decode_into(payload, out_fast)
        assert out.tobytes() == out_fast.tobytes()
        plain.accumulate_into(payload, total)
        fast.accumulate_into(payload, total_fast)
        assert total.tobytes() == total_fast.tobytes()
