"""Codecs as data: what they accept, and the lengths they promise."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from aiokv.codec import CODECS, PRECISIONS, QSGD, Codec, OneBit, RandomK, TopK, TwoBit, make_codec
from aiokv.errors import CodecError, ProtocolError, SpecMismatchError

# Words of 4 bytes that MXNet needs for so many values.
WORDS = {
    1: (1, 1),
    6: (1, 1),
    16: (1, 1),
    17: (2, 1),
    32: (2, 1),
    33: (3, 2),
    1_440_000: (90_000, 45_000),
    1_466_521: (91_658, 45_829),
}


def test_every_codec_is_made_by_its_name() -> None:
    params: dict[str, dict[str, Any]] = {"topk": {"k": 5}, "randomk": {"fraction": 0.5}}
    for name, kind in CODECS.items():
        codec = make_codec(name, params.get(name, {}))
        assert type(codec) is kind
        assert codec.name == name
        assert codec.error_feedback


def test_a_codec_travels_as_data() -> None:
    codec = make_codec("2bit", {"threshold": 1e-7, "error_feedback": False})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(codec), type=TwoBit) == codec


def test_an_unknown_codec_or_parameter_is_named_with_the_known_ones() -> None:
    with pytest.raises(CodecError, match=r"unknown codec 'zip'; known: 1bit, 2bit, bf16, fp16, fp8, qsgd"):
        make_codec("zip", {})
    with pytest.raises(CodecError, match=r"'2bit' has no parameter 'limit'.*: threshold, error_feedback"):
        make_codec("2bit", {"limit": 1})


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("2bit", {"threshold": 0}, "threshold must be more than 0 in float32, got 0"),
        ("2bit", {"threshold": -1.0}, "more than 0"),
        ("2bit", {"threshold": 1e-46}, "more than 0 in float32"),
        ("2bit", {"threshold": True}, "finite number"),
        ("2bit", {"threshold": "0.5"}, "finite number"),
        ("1bit", {"threshold": float("nan")}, "finite number"),
        ("1bit", {"threshold": 1e39}, "finite number in float32"),
        ("1bit", {"threshold": 10**400}, "finite number in float32"),
        ("fp16", {"error_feedback": 1}, "error_feedback must be true or false, got 1"),
        ("topk", {}, "one of fraction and k"),
        ("topk", {"fraction": 0.1, "k": 1}, "one of fraction and k"),
        ("topk", {"k": 0}, "k must be an integer from 1"),
        ("topk", {"k": 2.0}, "k must be an integer"),
        ("randomk", {"fraction": 0}, r"in \(0, 1\], got 0"),
        ("randomk", {"fraction": 1.5}, r"in \(0, 1\], got 1.5"),
        ("randomk", {"k": 1, "seed": -1}, "seed must be an integer from 0"),
        ("qsgd", {"levels": 0}, "levels must be an integer from 1 to 32767, got 0"),
        ("qsgd", {"levels": 32768}, "levels must be"),
        ("qsgd", {"levels": True}, "levels must be"),
        ("qsgd", {"seed": 2**64}, "seed must be"),
    ],
)
def test_wrong_parameters_are_refused(name: str, params: dict[str, Any], expected: str) -> None:
    with pytest.raises(CodecError, match=expected):
        make_codec(name, params)


@pytest.mark.parametrize("size", WORDS)
def test_bits_are_padded_to_words(size: int) -> None:
    two, one = WORDS[size]
    assert TwoBit().nbytes(size) == TwoBit().max_nbytes(size) == 4 * two
    assert OneBit().nbytes(size) == OneBit().max_nbytes(size) == 4 * one


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (2, 4), (7, 4), (8, 8), (127, 8), (128, 16), (32767, 16)])
def test_levels_take_as_few_bits_as_a_byte_can_be_divided_in(levels: int, bits: int) -> None:
    assert QSGD(levels=levels).bits == bits
    assert QSGD(levels=levels).nbytes(33) == 4 + (33 * bits + 7) // 8


def test_how_many_values_are_sent() -> None:
    assert [TopK(fraction=0.01).count(size) for size in (0, 1, 49, 100, 1000)] == [0, 1, 1, 1, 10]
    assert [RandomK(k=10).count(size) for size in (0, 4, 1000)] == [0, 4, 10]
    # In floats 0.07 * 100 is a little more than 7.
    assert TopK(fraction=0.07).count(100) == 7


def test_a_chunk_without_elements_has_an_empty_payload(codec: Codec) -> None:
    assert codec.nbytes(0) == codec.max_nbytes(0) == 0
    codec.check_nbytes(0, 0)
    with pytest.raises(ProtocolError):
        codec.check_nbytes(0, 8)


def test_lengths_are_checked_without_the_payload() -> None:
    with pytest.raises(ProtocolError, match="'2bit' of 17 elements must have 8 bytes, got 4"):
        TwoBit().check_nbytes(17, 4)
    TopK(k=3).check_nbytes(100, 24)
    for wrong in (20, 32):
        with pytest.raises(ProtocolError, match="a multiple of 8 bytes, at most 24"):
            TopK(k=3).check_nbytes(100, wrong)
    assert TopK(fraction=0.1).max_nbytes(100) == 800


def test_a_key_that_holds_no_floats_is_refused_when_the_codec_is_set(codec: Codec) -> None:
    for dtype in PRECISIONS:
        codec.check_dtype("w", dtype)
    for dtype in ("int32", "uint8", "int64"):
        with pytest.raises(SpecMismatchError, match=f"key 'w' has {dtype}") as caught:
            codec.check_dtype("w", dtype)
        assert caught.value.details["key"] == "w"


def test_the_records_need_no_arrays() -> None:
    code = "import sys, aiokv.codec; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == "False"
