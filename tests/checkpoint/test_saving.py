"""The files of a save: what was put in comes out, and nothing else is taken for one."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as hs

from aiokv.checkpoint.files import Reader, checksum
from aiokv.checkpoint.residuals import merged, residual_file
from aiokv.checkpoint.saving import (
    FORMAT,
    RESIDUALS,
    Content,
    ResidualContent,
    Saved,
    SavedKey,
    SavedResidual,
    SavedRule,
    file_head,
    open_saved,
)
from aiokv.checkpoint.tensorfile import bytes_of, in_order
from aiokv.errors import DataError

RULE = SavedRule("adam", {"lr_mult": [[5, 0.5]]}, "mean", ((4, {"learning_rate": 0.5}),), 3, "1/(1+tau)")
URL = "folder/state"


def sealed(pieces: list[Any]) -> bytes:
    """Return the bytes of a file with its checksum."""
    data = b"".join(pieces)
    return data + checksum(data)


def saved_of(arrays: dict[Any, dict[str, Any]]) -> Saved:
    """Return these arrays as saved ones."""
    keys = [
        SavedKey(
            key,
            named["value"].shape,
            named["value"].dtype.name,
            False,
            "bsp",
            (1, 2),
            False,
            {"name": "zeros"},
            updates=3,
            names=tuple(named),
        )
        for key, named in arrays.items()
    ]
    return Saved(Content("an id", 2, (1,), {"epoch": 7}, RULE, keys), arrays)


def encode(saved: Saved) -> bytes:
    """Return the bytes of a file."""
    named = {
        f"{name}/{'i' if isinstance(key, int) else 's'}:{key}": array
        for key, arrays in saved.arrays.items()
        for name, array in arrays.items()
    }
    shapes = {name: (array.dtype.name, array.shape) for name, array in named.items()}
    head = file_head(FORMAT, saved.content, shapes)
    return sealed([head, *(bytes_of(named[name]) for name in in_order(shapes))])


EXAMPLE = saved_of(
    {
        "layer/value": {"value": np.arange(6, dtype="float32").reshape(2, 3), "mean": np.ones((2, 3), "float32")},
        "layer": {"value": np.array([1, 2], "float16"), "mean": np.zeros(2, "float32")},
        5: {"value": np.array(7, "int64")},
        "5": {"value": np.zeros((0, 4), "uint8")},
        "bytes": {"value": np.arange(3, dtype="uint8")},
    }
)
DATA = encode(EXAMPLE)


def decode(data: bytes, path: str) -> Saved:
    """Open a file with this content."""
    return open_saved(Reader(io.BytesIO(data), path), path)


def assert_equal(got: Saved, expected: Saved) -> None:
    assert got.content == expected.content
    assert got.arrays.keys() == expected.arrays.keys()
    for key, named in expected.arrays.items():
        assert got.arrays[key].keys() == named.keys()
        for name, array in named.items():
            other = np.asarray(got.arrays[key][name])
            mine = np.asarray(array)
            assert (other.shape, other.dtype, other.tobytes()) == (mine.shape, mine.dtype, mine.tobytes())


def test_what_was_saved_comes_back_and_keys_that_look_alike_stay_apart() -> None:
    assert_equal(decode(DATA, URL), EXAMPLE)


def test_any_reader_of_the_format_finds_the_weights() -> None:
    np.testing.assert_array_equal(safetensors.numpy.load(DATA)["value/s:layer"], np.array([1, 2], "float16"))


@given(hs.integers(0, len(DATA) - 1))
def test_a_torn_file_is_refused_wherever_it_ends(length: int) -> None:
    with pytest.raises(DataError, match="torn-file"):
        decode(DATA[:length], "torn-file")


@given(hs.integers(0, len(DATA) - 1), hs.integers(1, 255))
def test_a_changed_byte_is_found_wherever_it_is(place: int, change: int) -> None:
    damaged = bytearray(DATA)
    damaged[place] ^= change
    with pytest.raises(DataError, match="damaged-file"):
        decode(bytes(damaged), "damaged-file")


def test_a_safetensors_file_of_somebody_else_is_refused() -> None:
    with pytest.raises(DataError, match="expected format 'aiokv', got None"):
        decode(safetensors.numpy.save({"w": np.ones(2)}), URL)


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(DataError, match="expected version '2', got '1'"):
        decode(safetensors.numpy.save({"w": np.ones(2)}, {"format": "aiokv", "version": "1"}), URL)


def test_a_file_whose_content_makes_no_sense_is_refused() -> None:
    keys = [SavedKey("w", (1,), "float32", False, "bsp", names=("value",))]
    content = Content("an id", 2, (), {}, RULE, keys)
    for made, complaint in ((content, "no tensor"), (SavedRule("sgd", {}, "sum", (), 0), "understood")):
        with pytest.raises(DataError, match=complaint):
            decode(sealed([file_head(FORMAT, made, {})]), URL)


# --- residuals of workers ---


def state(*values: float, step: int = 4) -> dict[str, Any]:
    residual = np.array(values, "float32")
    return {"dtype": "float32", "residual": residual, "codec": "topk", "params": {"k": 1}, "step": step}


def written(rank: int, kept: dict[Any, Any], save_id: str = "an id", keys: Any = None) -> bytes:
    return sealed(residual_file(kept, rank, save_id, keys))


def plain(states: dict[Any, Any]) -> dict[Any, Any]:
    return {key: one | {"residual": one["residual"].tolist()} for key, one in states.items()}


def test_what_a_worker_has_left_comes_back() -> None:
    kept = {"w": state(1, -2), "off": {"dtype": "bfloat16", "residual": np.array([0.5], "float32")}}
    assert plain(merged(URL, {3: written(3, kept)}, "an id", None)) == plain(kept)


def test_one_worker_in_the_place_of_two_goes_on_with_the_sum() -> None:
    """Ranks 0 and 2 of three become rank 0 of two; the step is that of the first."""
    contents = {0: written(0, {"w": state(1, -2)}), 2: written(2, {"w": state(10, 20, step=9), "v": state(5)})}
    assert plain(merged(URL, contents, "an id", None)) == plain({"w": state(11, 18), "v": state(5)})


def test_only_the_wanted_keys_are_written_and_read() -> None:
    data = written(0, {"a": state(1), "b": state(2), "c": state(3)}, keys=["a", "b"])
    assert merged(URL, {0: data}, "an id", ["b", "c"]).keys() == {"b"}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (written(3, {}, save_id="another"), "is not of the save"),
        (written(2, {}), "is not of the save"),
        (written(3, {"w": state(1)})[:-1], "whole safetensors file"),
        (DATA, "expected format 'aiokv residuals'"),
        (sealed([file_head(RESIDUALS, ResidualContent("an id", 3, []), {})])[:-1] + b"x", "damaged"),
        (sealed([file_head(RESIDUALS, msgspec.defstruct("Other", [("n", int)])(1), {})]), "understood"),
    ],
    ids=["another save", "another rank", "torn", "another file", "damaged", "nonsense"],
)
def test_a_file_of_residuals_that_does_not_belong_here_is_refused_and_named(data: bytes, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        merged(URL, {3: data}, "an id", None)
    assert caught.value.details["path"] == f"{URL}.rank3"


def test_a_residual_that_is_announced_has_to_be_there() -> None:
    content = ResidualContent("an id", 3, [SavedResidual("w", "float32")])
    with pytest.raises(DataError, match="no tensor"):
        merged(URL, {3: sealed([file_head(RESIDUALS, content, {})])}, "an id", None)
