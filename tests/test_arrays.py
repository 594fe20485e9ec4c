"""From a call's arguments to arrays: what is refused, and whose memory is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv.arrays import exchanging, receiving, sending
from aiokv.errors import KeyUseError, SpecMismatchError
from aiokv.types import Key, TensorSpec


def unknown(key: Key) -> None:
    """Know nothing of any key."""


W = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_contiguous_array_is_sent_from_its_own_memory() -> None:
    assert sending("w", W).sources[0] is W


def test_a_list_or_a_number_is_sent_as_an_array() -> None:
    assert [array.dtype.name for array in sending({"a": [1.0, 2.0], "b": 3}, None).sources] == ["float64", "int64"]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: sending("w", None), KeyUseError, "'w': a value is missing"),
        (lambda: sending({"w": W, "v": None}, None), KeyUseError, "'v': a value is missing"),
        (lambda: sending({"w": W}, W), KeyUseError, "not both"),
        (lambda: receiving("w", None, unknown), KeyUseError, "'w': pass `out`"),
        (lambda: receiving("w", W.tolist(), unknown), SpecMismatchError, "'w': out must be a NumPy array, got list"),
        (lambda: receiving("w", W.astype(">f4"), unknown), SpecMismatchError, "'w': out is not in native byte order"),
        (lambda: receiving("w", np.broadcast_to(W, (4, 2, 3)), unknown), SpecMismatchError, "'w': out is read-only"),
        (lambda: exchanging("w", W, W.T.copy()), SpecMismatchError, r"'w': pushed float32\[2, 3\], but out has"),
        (lambda: exchanging({"w": W}, None, W), KeyUseError, "same keys; expected .* got ndarray"),
        (lambda: exchanging({"w": W}, None, {"v": W}), KeyUseError, r"expected \[\"'w'\"\], got \[\"'v'\"\]"),
    ],
)
def test_what_cannot_be_is_refused_by_name(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_known_key_is_received_into_a_new_array() -> None:
    arguments = receiving({"w": None}, None, lambda _: TensorSpec((2, 3), "float16"))
    (value,) = arguments.finish()
    assert (value.shape, value.dtype.name) == ((2, 3), "float16")


def test_a_strided_out_gets_the_values_in_the_end() -> None:
    out = np.zeros((3, 2), np.float32).T
    arguments = exchanging("w", W, out)
    assert arguments.targets[0] is not out
    arguments.targets[0][...] = W
    assert arguments.finish() is out
    np.testing.assert_array_equal(out, W)
