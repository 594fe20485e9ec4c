"""Keys and tensors: what may be one."""

from __future__ import annotations

import enum

import numpy as np
import pytest

from aiokv.core.keys import check_key, check_kind, check_same_spec, check_spec
from aiokv.errors import KeyUseError, SpecMismatchError
from aiokv.types import ITEM_SIZES, TensorSpec


class Number(enum.IntEnum):
    """An int with a name."""

    THREE = 3


@pytest.mark.parametrize("key", [0, 2**32 + 2, 2**63 - 1, "w", "layer.0/weight", "ключ", "x" * 1024, "é" * 512])
def test_key_is_returned_as_it_is(key: str | int) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(("key", "plain"), [(Number.THREE, 3), (np.str_("w"), "w")])
def test_subclass_is_taken_for_what_it_contains(key: str | int, plain: str | int) -> None:
    checked = check_key(key)
    assert (type(checked), checked) == (type(plain), plain)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (True, "got bool True"),
        (None, "got NoneType None"),
        (1.0, "got float 1.0"),
        (b"w", "got bytes b'w'"),
        (np.int64(3), "got int64"),
        (-1, "0 <= key < 2**63, got -1"),
        (2**63, "got 9223372036854775808"),
        pytest.param(2**16609, "got a number of 16610 bits", id="huge"),
        ("", "1 to 1024 bytes, got 0"),
        ("é" * 513, "1 to 1024 bytes, got 1026"),
        ("\ud800", "valid Unicode"),
    ],
)
def test_what_is_no_key_is_refused_with_the_reason(key: object, words: str) -> None:
    with pytest.raises(KeyUseError) as caught:
        check_key(key)
    assert words in str(caught.value)


def test_first_key_decides_the_kind() -> None:
    assert check_kind("w", None) is str
    assert check_kind(1, None) is int
    assert check_kind("v", str) is str


@pytest.mark.parametrize(("key", "kind"), [("w", int), (1, str)])
def test_other_kind_is_refused(key: str | int, kind: type) -> None:
    with pytest.raises(KeyUseError, match="never mix"):
        check_kind(key, kind)


@pytest.mark.parametrize("dtype", list(ITEM_SIZES))
@pytest.mark.parametrize("shape", [(), (0, 5), (1,), (2, 3), (1,) * 64])
def test_any_shape_of_a_known_dtype_is_accepted(shape: tuple[int, ...], dtype: str) -> None:
    check_spec("w", TensorSpec(shape, dtype))


def test_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecMismatchError, match="float16, float32") as caught:
        check_spec("w", TensorSpec((1,), "object"))
    assert caught.value.details["got"] == "object"


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (1,) * 65])
def test_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecMismatchError, match="'w'"):
        check_spec("w", TensorSpec(shape, "float32"))


@pytest.mark.parametrize("got", [TensorSpec((6,), "float32"), TensorSpec((2, 3), "int32")])
def test_spec_never_changes(got: TensorSpec) -> None:
    expected = TensorSpec((2, 3), "float32")
    check_same_spec("w", expected, TensorSpec((2, 3), "float32"))
    with pytest.raises(SpecMismatchError) as caught:
        check_same_spec("w", expected, got)
    assert caught.value.details == {"key": "w", "expected": "float32[2, 3]", "got": str(got)}
