"""From a call's arguments to arrays: what is refused, and whose memory is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiokv.arrays import exchanging, receiving, sending
from aiokv.errors import KeyUseError, SpecMismatchError, SumOverflowError
from aiokv.kernels import get_backend
from aiokv.list_sums import Merger
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
        (lambda: receiving("w", W.tolist(), unknown), SpecMismatchError, "'w': out must be a NumPy array or one on"),
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


BUFFER = np.zeros(100)
PLACES = {
    "in place": ([(0, 10), (10, 20)], [(0, 10), (10, 20)], []),
    "beside": ([(0, 10), (20, 30)], [(10, 20), (30, 40)], []),
    "one place further": ([(0, 10)], [(1, 11)], [0]),
    "one place before": ([(5, 15)], [(4, 14)], [0]),
    "they trade places": ([(0, 10), (10, 20)], [(10, 20), (0, 10)], [0, 1]),
    "only the second": ([(0, 10), (10, 20)], [(0, 10), (15, 25)], [1]),
    "inside a longer one": ([(0, 50), (5, 8), (60, 62)], [(50, 100), (5, 8), (40, 42)], [0, 2]),
    "nothing inside something": ([(0, 50), (5, 5)], [(50, 100), (6, 6)], []),
}
"""Where in one buffer the arrays of a call lie that are sent, and those that are received into -> which must be new."""


@pytest.mark.parametrize(("sent", "received", "apart"), PLACES.values(), ids=PLACES)
def test_an_out_in_which_something_lies_that_is_still_to_be_sent_is_received_aside(
    sent: list[tuple[int, int]], received: list[tuple[int, int]], apart: list[int]
) -> None:
    names: list[Any] = [str(i) for i in range(len(sent))]
    outs = [BUFFER[start:end] for start, end in received]
    arguments = exchanging(names, [BUFFER[start:end] for start, end in sent], outs)
    new = [i for i, target in enumerate(arguments.targets) if target.size and not np.shares_memory(target, BUFFER)]
    assert new == apart
    assert all(out is given for out, given in zip(arguments.outs, outs, strict=True))


# --- lists ---


def merged(key: Any, value: Any) -> list[Any]:
    """Return what is sent."""
    arguments = sending(key, value)
    arguments.merge(Merger(get_backend("reference")))
    return arguments.sources


def test_arrays_of_one_key_are_summed_and_stay_as_they_are() -> None:
    first, second = W.copy(), np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(merged("w", [first, second])[0], W + 1)
    np.testing.assert_array_equal(first, W)
    np.testing.assert_array_equal(merged({"w": (first, second, second)}, None)[0], W + 2)


def test_a_list_of_one_array_is_that_array() -> None:
    assert merged("w", [W])[0] is W


def test_low_precisions_are_summed_in_float32() -> None:
    """2048 + 1 + 1 is 2050; a float16 has only even numbers there, so each 1 alone would be lost."""
    parts = [np.full(2, value, np.float16) for value in (2048, 1, 1)]
    (total,) = merged("w", parts)
    assert (total.dtype.name, total.tolist()) == ("float16", [2050, 2050])


def test_a_sum_that_a_low_precision_cannot_hold_is_infinite() -> None:
    assert merged("w", [np.full(1, 60_000, np.float16)] * 2)[0].tolist() == [np.inf]


def test_a_sum_of_whole_numbers_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(SumOverflowError, match="key 'n': a sum of uint8 is out of range"):
        merged("n", [np.full(1, 200, np.uint8)] * 2)


def test_a_list_of_numbers_is_an_array() -> None:
    assert sending("w", [[1.0, 2.0], [3.0, 4.0]]).sources[0].shape == (2, 2)
    assert sending("w", [np.float32(1), np.float32(2)]).sources[0].shape == (2,)


def test_a_list_of_keys_has_a_list_of_values() -> None:
    arguments = sending(["a", "b"], [W, [W, W]])
    assert (arguments.keys, arguments.single, list(arguments.lists)) == (["a", "b"], False, [1])
    assert receiving(["a"], None, lambda _: TensorSpec((1,), "float32")).finish()[0].shape == (1,)


def test_every_array_of_an_out_receives_the_value() -> None:
    outs = [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32).T]
    arguments = exchanging("w", W, outs)
    arguments.targets[0][...] = W
    assert arguments.finish() is outs
    for out in outs:
        np.testing.assert_array_equal(out, W)
    into = receiving(["w"], [tuple(outs)], unknown)
    into.targets[0][...] = 1
    assert into.finish()[0][1] is outs[1]
    np.testing.assert_array_equal(outs[1], np.ones((2, 3)))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: sending("w", [W, 1.0]), KeyUseError, "'w': a list is one of arrays or .* got ndarray, float"),
        (lambda: sending("w", [W, W.T]), SpecMismatchError, r"'w': .* float32\[2, 3\], number 1 is float32\[3, 2\]"),
        (lambda: sending("w", [W, W], lists=False), KeyUseError, "'w': expected one array, got a list of 2"),
        (lambda: sending(["a", "b"], [W]), KeyUseError, "2 keys need a list of 2 arrays, one for each, got 1"),
        (lambda: sending(["a", "b"], W), KeyUseError, "2 keys need a list of 2 arrays, one for each, got ndarray"),
        (lambda: sending([1, 2, 1], [W, W, W]), KeyUseError, "key 1 stands twice in the list"),
        (lambda: sending(["a"], None), KeyUseError, "'a': a value is missing"),
        (lambda: exchanging("w", W, [W.copy(), W.T.copy()]), SpecMismatchError, "'w': the first"),
        (lambda: receiving("w", [], unknown), SpecMismatchError, "on a device, got list"),
    ],
)
def test_lists_that_cannot_be_are_refused(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
