"""Payloads of a peer that is mistaken, or means harm: a typed error, and nothing written."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.codec import QSGD, BFloat16, Codec, Float8, Float16, OneBit, RandomK, TopK, TwoBit
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder
from aiokv.errors import ProtocolError

EXAMPLES = 40
"""For each of many codecs, so that there are hundreds in all."""

NAN, INF = float("nan"), float("inf")


def refused(codec: Codec, payload: bytes, size: int, backend: str = "reference") -> str:
    """Return why it is refused; what it would have been written to must stay as it is."""
    decoder = Decoder(codec, backend=backend)
    out = np.full(size, 7, np.float32)
    reasons = set()
    for read in (decoder.decode_into, decoder.accumulate_into):
        with pytest.raises(ProtocolError, match=codec.name) as caught:
            read(payload, out)
        reasons.add(caught.value.message)
    assert (out == 7).all()
    with pytest.raises(ProtocolError):
        decoder.decode(payload, size)
    (reason,) = reasons
    return reason


@pytest.mark.parametrize(
    ("codec", "payload", "size", "reason"),
    [
        (TwoBit(), b"\x40\0\0\0", 3, "the codes 00, 10 and 11, got 01 in byte 0"),
        (TwoBit(), b"\0\0\0\0\x02\0\0\0", 17, "zeros after the last one"),
        (OneBit(), b"\x01\0\0\0", 7, "zeros after the last one"),
        (OneBit(), b"\0\0\0\1", 31, "zeros after the last one"),
        (Float16(), struct.pack("<e", NAN), 1, "finite numbers"),
        (Float16(), struct.pack("<e", -INF), 1, "finite numbers"),
        (BFloat16(), b"\x80\x7f", 1, "finite numbers"),
        (BFloat16(), b"\xc0\x7f", 1, "finite numbers"),
        (Float8(), struct.pack("<fB", NAN, 1), 1, "a scale from 0"),
        (Float8(), struct.pack("<fB", -1, 1), 1, "a scale from 0"),
        (Float8(), struct.pack("<fB", 1e37, 1), 1, "a scale from 0"),
        (Float8(), struct.pack("<fB", 1, 0xFF), 1, "finite numbers, got NaN"),
        (TopK(k=2), struct.pack("<If", 5, 1), 5, "indices below 5"),
        (TopK(k=2), struct.pack("<IIff", 1, 1, 1, 1), 5, "increasing indices"),
        (TopK(k=2), struct.pack("<IIff", 2, 1, 1, 1), 5, "increasing indices"),
        (TopK(k=2), struct.pack("<IIff", 2**32 - 1, 1, 1, 1), 5, "increasing indices"),
        (TopK(k=1), struct.pack("<If", 1, NAN), 5, "finite numbers"),
        (RandomK(fraction=0.5), struct.pack("<If", 1, INF), 5, "finite numbers"),
        (QSGD(levels=1), struct.pack("<fB", NAN, 0), 1, "a unit from 0"),
        (QSGD(levels=127), struct.pack("<fB", 1e37, 0), 1, "a unit from 0"),
        (QSGD(levels=1), struct.pack("<fB", 1, 0b11_00_00_00), 1, "codes from 0 to 2, got 3"),
        (QSGD(levels=100), struct.pack("<fB", 1, 201), 1, "codes from 0 to 200, got 201"),
        (QSGD(levels=1), struct.pack("<fB", 1, 0b00_00_00_01), 3, "zeros after the last one"),
    ],
)
def test_what_no_encoder_makes_is_refused(codec: Codec, payload: bytes, size: int, reason: str) -> None:
    assert reason in refused(codec, payload, size)


def test_compiled_code_never_sees_a_wrong_length() -> None:
    for nbytes in (0, 4, 7, 9, 12):
        assert "must have 8 bytes" in refused(TwoBit(), bytes(nbytes), 17, "cpu")


def test_a_wrong_length_is_refused_before_anything_is_allocated(codec: Codec) -> None:
    with pytest.raises(ProtocolError):
        Decoder(codec).decode(b"abc", 2**50)


@settings(max_examples=EXAMPLES)
@given(payload=st.binary(max_size=200), size=st.integers(0, 100))
def test_any_bytes_are_numbers_or_refused(codec: Codec, payload: bytes, size: int) -> None:
    out = np.full(size, 7, np.float32)
    try:
        Decoder(codec).decode_into(payload, out)
    except ProtocolError:
        assert (out == 7).all()
    else:
        assert np.isfinite(out).all()


@settings(max_examples=EXAMPLES)
@given(data=st.data(), size=st.integers(1, 100))
def test_a_changed_byte_is_a_number_or_refused(codec: Codec, data: st.DataObject, size: int) -> None:
    gradient = np.linspace(-2, 2, size, dtype=np.float32)
    payload = bytearray(Encoder(codec, "w", size).encode(gradient)[0])
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] = data.draw(st.integers(0, 255))
    total = np.full(size, 7, np.float32)
    try:
        Decoder(codec).accumulate_into(payload, total)
    except ProtocolError:
        assert (total == 7).all()
    else:
        assert np.isfinite(total).all()


def test_payloads_may_lie_at_any_address(codec: Codec) -> None:
    gradient = np.linspace(-2, 2, 37, dtype=np.float32)
    (payload,) = Encoder(codec, "w", 37).encode(gradient)
    moved = memoryview(b"x" + payload.tobytes())[1:]
    decoder = Decoder(codec)
    assert decoder.decode(moved, 37).tobytes() == decoder.decode(payload, 37).tobytes()
