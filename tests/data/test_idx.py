"""IDX files: bytes written by hand from the format's description, and damage that is named."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.data import read_idx
from aiokv.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

GOLDEN = [
    ("00000802 00000002 00000003 010203 0405ff", np.array([[1, 2, 3], [4, 5, 255]], np.uint8)),
    ("00000901 00000002 80 7f", np.array([-128, 127], np.int8)),
    ("00000b01 00000002 0102 fffe", np.array([258, -2], np.int16)),
    ("00000c01 00000001 00000102", np.array([258], np.int32)),
    ("00000d01 00000001 3fc00000", np.array([1.5], np.float32)),
    ("00000e03 00000001 00000001 00000001 bff8000000000000", np.array([[[-1.5]]])),
    ("00000802 00000000 0000001c", np.zeros((0, 28), np.uint8)),
]
LABELS = bytes.fromhex("00000801 00000003 050004")


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(("content", "expected"), GOLDEN)
def test_an_array_is_read_in_native_byte_order(
    content: str, expected: np.ndarray, compress: bool, tmp_path: Path
) -> None:
    raw = bytes.fromhex(content)
    (tmp_path / "a").write_bytes(gzip.compress(raw) if compress else raw)
    array = read_idx(tmp_path / "a")
    np.testing.assert_array_equal(array, expected, strict=True)
    assert array.dtype.isnative
    assert array.flags.writeable


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "at byte 0: expected 00 00, a type .* and 1 to 32 axes, got an empty file"),
        ("000008", "at byte 0: .*, got 00 00 08"),
        ("89504e47", "at byte 0: .*, got 89 50 4e 47"),
        ("00000701 00000000", "at byte 0: .*, got 00 00 07 01"),
        ("00000800", "at byte 0: .*, got 00 00 08 00"),
        ("000008ff", "at byte 0: .*, got 00 00 08 ff"),
        ("00000802 00000001 0000", "at byte 4: expected the lengths of 2 axes, got 6 bytes"),
        ("00000801 00000001 0102", "at byte 9: expected the end of the file after 1 bytes of uint8 .*, got more"),
    ],
)
def test_files_of_another_format_are_named(content: str, message: str, compress: bool, tmp_path: Path) -> None:
    raw = bytes.fromhex(content)
    (tmp_path / "a").write_bytes(gzip.compress(raw) if compress else raw)
    with pytest.raises(DataError, match=rf"a is damaged {message}"):
        read_idx(tmp_path / "a")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(LABELS[:-1])
    with pytest.raises(DataError, match=r"at byte 8: expected 3 bytes of uint8 with shape \(3,\), got at most 2"):
        read_idx(tmp_path / "a")


def test_a_truncated_file_that_was_compressed_then_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(LABELS[:-1]))
    with pytest.raises(DataError, match=r"at byte 10: expected 3 bytes .*, got the end of the file after 2"):
        read_idx(tmp_path / "a")


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzip"])
def test_a_size_that_the_file_cannot_hold_is_refused_before_it_is_allocated(compress: bool, tmp_path: Path) -> None:
    # 8 x 2^96 bytes: to allocate them would be a MemoryError or a ValueError.
    raw = bytes.fromhex("00000e03 ffffffff ffffffff ffffffff")
    (tmp_path / "a").write_bytes(gzip.compress(raw) if compress else raw)
    with pytest.raises(DataError, match=r"at byte 16: expected 6338.* bytes of float64"):
        read_idx(tmp_path / "a")


@pytest.mark.parametrize("cut", [15, -1], ids=["in the data", "in the checksum"])
def test_a_gzip_file_that_was_cut_is_named(cut: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(LABELS)[:cut])
    with pytest.raises(DataError, match="expected a whole gzip file, got Compressed file ended"):
        read_idx(tmp_path / "a")


def test_a_gzip_file_with_another_checksum_is_named(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(LABELS))
    content[-8] ^= 1
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match="expected a whole gzip file, got CRC check failed"):
        read_idx(tmp_path / "a")
