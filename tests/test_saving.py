"""The file of saved state: what was put in comes out, and nothing else is taken for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as hs
from hypothesis.extra import numpy as hnp

from aiokv.errors import DataError
from aiokv.saving import Saved, SavedKey, SavedRule, decode, encode, read, write
from aiokv.types import ITEM_SIZES

if TYPE_CHECKING:
    from pathlib import Path

RULE = SavedRule("adam", {"lr_mult": [[5, 0.5]]}, "mean", ((4, {"learning_rate": 0.5}),), 3)


def saved_of(arrays: dict[Any, dict[str, Any]]) -> Saved:
    """Return these arrays as saved ones."""
    keys = [
        SavedKey(key, named["value"].shape, named["value"].dtype.name, False, 3, tuple(named))
        for key, named in arrays.items()
    ]
    return Saved(RULE, keys, arrays)


EXAMPLE = saved_of(
    {
        "layer/value": {"value": np.arange(6, dtype="float32").reshape(2, 3), "mean": np.ones((2, 3), "float32")},
        "layer": {"value": np.array([1, 2], "float16"), "mean": np.zeros(2, "float32")},
        5: {"value": np.array(7, "int64")},
        "5": {"value": np.zeros((0, 4), "uint8")},
    }
)
CONTENT = encode(EXAMPLE)

dtypes = hs.sampled_from([name for name in ITEM_SIZES if name != "bfloat16"]).map(np.dtype)
some_arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
keys = hs.text(min_size=1).filter(lambda text: text.isprintable()) | hs.integers(0, 2**63 - 1)


def assert_equal(got: Saved, expected: Saved) -> None:
    assert got.rule == expected.rule
    assert got.keys == expected.keys
    assert got.arrays.keys() == expected.arrays.keys()
    for key, named in expected.arrays.items():
        assert got.arrays[key].keys() == named.keys()
        for name, array in named.items():
            other = got.arrays[key][name]
            assert (other.shape, other.dtype, other.tobytes()) == (array.shape, array.dtype, array.tobytes())


@given(hs.dictionaries(keys, hs.tuples(some_arrays, some_arrays), max_size=4))
def test_what_was_saved_comes_back_with_its_keys_shapes_dtypes_and_bits(given_arrays: dict[Any, Any]) -> None:
    arrays = {key: {"value": value, "mean": mean} for key, (value, mean) in given_arrays.items()}
    assert_equal(decode(encode(saved_of(arrays)), "file"), saved_of(arrays))


def test_keys_that_look_alike_stay_apart() -> None:
    assert_equal(decode(CONTENT, "file"), EXAMPLE)


def test_bfloat16_is_a_dtype_of_the_file() -> None:
    saved = saved_of({"w": {"value": np.arange(3).astype("bfloat16")}})
    assert_equal(decode(encode(saved), "file"), saved)


def test_any_reader_of_the_format_finds_the_weights() -> None:
    np.testing.assert_array_equal(safetensors.numpy.load(CONTENT)["value/s:layer"], np.array([1, 2], "float16"))


@given(hs.integers(0, len(CONTENT) - 1))
def test_a_torn_file_is_refused_wherever_it_ends(length: int) -> None:
    with pytest.raises(DataError, match="torn-file"):
        decode(CONTENT[:length], "torn-file")


@given(hs.integers(0, len(CONTENT) - 1), hs.integers(1, 255))
def test_a_changed_byte_is_found_wherever_it_is(place: int, change: int) -> None:
    """In the padding of the header it changes nothing."""
    damaged = bytearray(CONTENT)
    damaged[place] ^= change
    try:
        decoded = decode(bytes(damaged), "damaged-file")
    except DataError:
        return
    assert_equal(decoded, EXAMPLE)


def test_more_bytes_than_a_file_has_are_refused() -> None:
    with pytest.raises(DataError, match="safetensors"):
        decode(CONTENT + b"\0", "file")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 20, b'{"weights": [1, 2, 3]}'])
def test_a_file_of_another_kind_is_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="expected a whole safetensors file"):
        decode(content, "file")


def test_a_safetensors_file_of_somebody_else_is_refused() -> None:
    with pytest.raises(DataError, match="expected format 'aiokv', got None"):
        decode(safetensors.numpy.save({"w": np.ones(2)}), "file")


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(DataError, match="expected version '1', got '2'"):
        decode(safetensors.numpy.save({"w": np.ones(2)}, {"format": "aiokv", "version": "2"}), "file")


def test_a_written_file_is_read_and_replaces_the_one_before(tmp_path: Path) -> None:
    url = str(tmp_path / "state")
    write(url, b"first")
    write(url, b"second")
    assert read(url) == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_url_of_any_file_system_will_do() -> None:
    write("memory://saving/state", b"first")
    write("memory://saving/state", b"second")
    assert read("memory://saving/state") == b"second"
    assert fsspec.filesystem("memory").ls("saving", detail=False) == ["/saving/state"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "state")
    write(url, b"old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("aiokv.saving.os.fsync", full)
    with pytest.raises(DataError, match="No space left"):
        write(url, b"new")
    assert read(url) == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("name", ["missing", "."])
def test_what_is_no_file_can_not_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="can't be read") as caught:
        read(str(tmp_path / name))
    assert caught.value.details["path"] == str(tmp_path / name)


@pytest.mark.parametrize("name", ["missing/state", "."])
def test_where_no_file_can_be_nothing_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="can't be written"):
        write(str(tmp_path / name), b"content")
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_of_url_is_refused() -> None:
    with pytest.raises(DataError, match="nosuch"):
        read("nosuch://bucket/state")
