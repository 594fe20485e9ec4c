"""RecordIO: bytes as MXNet writes them, every record in exactly one part, and damage that is named."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.data import IndexedRecordReader, IRHeader, RecordReader, RecordWriter, pack_record, unpack_record
from aiokv.data import recordio as module
from aiokv.errors import ClosedError, ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = bytes.fromhex("0a23d7ce")
GOLDEN = [
    (b"abc", "0a23d7ce 03000000 61626300"),
    (b"", "0a23d7ce 00000000"),
    # The magic at a multiple of 4 bytes splits the record: a first and a last piece.
    (b"wxyz" + MAGIC + b"!", "0a23d7ce 04000020 7778797a  0a23d7ce 01000060 21000000"),
    # Twice, with nothing around: first, middle and last piece are empty.
    (MAGIC + MAGIC, "0a23d7ce 00000020  0a23d7ce 00000040  0a23d7ce 00000060"),
    # Elsewhere it may stay.
    (b"x" + MAGIC, "0a23d7ce 05000000 780a23d7 ce000000"),
]
"""Records and their bytes, written by hand from the description of the format."""

payloads = st.lists(st.sampled_from([b"", b"a", b"bcd", b"efgh", MAGIC, MAGIC[:2], bytes(5)]), max_size=6).map(b"".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


def write(path: Path, records: list[bytes]) -> list[int]:
    with RecordWriter(path, path.with_suffix(".idx")) as writer:
        return [writer.write(record, key=10 * number) for number, record in enumerate(records)]


def golden_bytes() -> bytes:
    return b"".join(bytes.fromhex(text) for _, text in GOLDEN)


# --- the format ---


@pytest.mark.parametrize(("record", "expected"), GOLDEN)
def test_a_record_is_written_as_the_format_says(record: bytes, expected: str, tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [record])
    assert (tmp_path / "a.rec").read_bytes() == bytes.fromhex(expected)


def test_the_index_has_a_line_for_each_record(tmp_path: Path) -> None:
    assert write(tmp_path / "a.rec", [record for record, _ in GOLDEN[:3]]) == [0, 12, 20]
    assert (tmp_path / "a.idx").read_bytes() == b"0\t0\n10\t12\n20\t20\n"


def test_records_are_read_as_the_format_says(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(golden_bytes())
    with RecordReader(path) as reader:
        assert list(reader) == [record for record, _ in GOLDEN]
        assert reader.read_at(20) == b"wxyz" + MAGIC + b"!"


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    path.write_bytes(b"")
    with RecordReader(path) as reader:
        assert list(reader) == []
        assert list(reader.part(1, 3)) == []
        with pytest.raises(DataError, match="at byte 0: expected a header of 8 bytes, got 0 bytes"):
            reader.read_at(0)


# --- parts ---


@given(records=st.lists(payloads, max_size=12), num_parts=st.integers(1, 12))
def test_every_record_is_in_one_part_of_the_bytes(folder: Path, records: list[bytes], num_parts: int) -> None:
    write(folder / "a.rec", records)
    with RecordReader(folder / "a.rec") as reader:
        assert [record for number in range(num_parts) for record in reader.part(number, num_parts)] == records


@given(records=st.lists(payloads, max_size=12), num_parts=st.integers(1, 12))
def test_every_record_is_in_one_part_of_the_index(folder: Path, records: list[bytes], num_parts: int) -> None:
    write(folder / "a.rec", records)
    with IndexedRecordReader(folder / "a.rec") as reader:
        parts = [list(reader.part(number, num_parts)) for number in range(num_parts)]
    assert [record for part in parts for record in part] == records
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_that_begins_within_a_split_record_begins_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    # 36 bytes: half of them end within the middle pieces of the first record.
    write(path, [MAGIC + MAGIC, b"next"])
    with RecordReader(path) as reader:
        assert [list(reader.part(number, 2)) for number in range(2)] == [[MAGIC + MAGIC], [b"next"]]


@pytest.mark.parametrize("part_index", [-1, 2])
def test_a_part_that_does_not_exist_is_refused(part_index: int, tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"abc"])
    message = rf"part_index {part_index} is not one of 2 parts: expected 0 <= part_index < 2"
    with RecordReader(tmp_path / "a.rec") as reader, pytest.raises(ConfigError, match=message):
        reader.part(part_index, 2)
    with IndexedRecordReader(tmp_path / "a.rec") as reader, pytest.raises(ConfigError, match=message):
        reader.part(part_index, 2)


def test_records_in_any_order_by_the_index(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"zero", b"one", b"two"])
    (tmp_path / "b.idx").write_text("7\t24\n5\t0\n")
    with IndexedRecordReader(tmp_path / "a.rec") as reader:
        assert (len(reader), reader[2], reader[0], reader[-1], reader.read(10)) == (3, b"two", b"zero", b"two", b"one")
    with IndexedRecordReader(tmp_path / "a.rec", tmp_path / "b.idx") as reader:
        assert (reader.keys, list(reader)) == ([7, 5], [b"two", b"zero"])
        with pytest.raises(KeyError):
            reader.read(0)
        with pytest.raises(IndexError):
            reader[2]


# --- damage ---


@pytest.mark.parametrize(
    ("damaged", "offset", "expected", "got"),
    [
        ("0a23d7ce 030000", 0, "a header of 8 bytes", "7 bytes"),
        ("89504e47 0d0a1a0a", 0, "the magic 0a 23 d7 ce", "89 50 4e 47"),
        ("0a23d7ce 05000000 61626300", 8, "8 bytes of payload and padding", "the end of the file after 4"),
        ("0a23d7ce 03000000 616263", 8, "4 bytes of payload and padding", "the end of the file after 3"),
        ("0a23d7ce 00000060", 4, "a whole record or a first piece", "a last piece"),
        ("0a23d7ce 000000e0", 4, "a whole record or a first piece", "the unknown flag 7"),
        ("0a23d7ce 00000020 0a23d7ce 00000000", 12, "a middle piece or a last piece", "a whole record"),
        ("0a23d7ce 00000020", 8, "a header of 8 bytes", "0 bytes"),
        ("0a23d7ce 00000000 00000000 00000000", 8, "the magic 0a 23 d7 ce", "00 00 00 00"),
    ],
)
def test_damage_is_named_with_its_place(damaged: str, offset: int, expected: str, got: str, tmp_path: Path) -> None:
    path = tmp_path / "torn.rec"
    path.write_bytes(bytes.fromhex(damaged))
    with RecordReader(path) as reader, pytest.raises(DataError) as caught:
        list(reader)
    assert str(caught.value) == f"{path} is damaged at byte {offset}: expected {expected}, got {got}"
    assert caught.value.details == {"path": str(path), "offset": offset, "expected": expected, "got": got}


@given(damage=st.integers(0, 75), num_parts=st.integers(1, 8))
def test_no_part_split_hides_a_broken_magic(folder: Path, damage: int, num_parts: int) -> None:
    content = bytearray(golden_bytes())
    starts = [at for at in range(0, len(content), 4) if content[at : at + 4] == MAGIC]
    content[starts[damage % len(starts)]] ^= 0xFF
    (folder / "b.rec").write_bytes(content)
    with RecordReader(folder / "b.rec") as reader, pytest.raises(DataError, match="is damaged at byte"):
        [list(reader.part(number, num_parts)) for number in range(num_parts)]


def test_an_index_that_points_elsewhere_is_noticed(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"abcd", b"efgh"])
    (tmp_path / "a.idx").write_text("0\t4\n1\t999\n")
    with IndexedRecordReader(tmp_path / "a.rec") as reader:
        with pytest.raises(DataError, match="at byte 4: expected the magic 0a 23 d7 ce, got 04 00 00 00"):
            reader[0]
        with pytest.raises(DataError, match="at byte 999: expected a header of 8 bytes, got 0 bytes"):
            reader[1]


@pytest.mark.parametrize(
    ("text", "offset", "got"),
    [
        ("0\t0\n1 \n", 4, r"'1 \\n'"),
        ("a\t0\n", 0, r"'a\\t0\\n'"),
        ("0\t-4\n", 0, "'0"),
        ("3\t0\n3\t8\n", 4, "key 3 again"),
    ],
)
def test_a_damaged_index_is_named_with_its_place(text: str, offset: int, got: str, tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"abcd"])
    (tmp_path / "a.idx").write_bytes(text.encode())
    with pytest.raises(DataError, match=rf"a\.idx is damaged at byte {offset}: expected .*, got {got}"):
        IndexedRecordReader(tmp_path / "a.rec")


# --- mistakes ---


def test_a_key_is_needed_where_there_is_an_index_and_nowhere_else(tmp_path: Path) -> None:
    with (
        RecordWriter(tmp_path / "a.rec") as writer,
        pytest.raises(ConfigError, match="expected no key, as there is no"),
    ):
        writer.write(b"", key=1)
    with (
        RecordWriter(tmp_path / "a.rec", tmp_path / "a.idx") as writer,
        pytest.raises(ConfigError, match="expected a key for the index"),
    ):
        writer.write(b"")


def test_a_record_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The true limit is half a gigabyte.
    monkeypatch.setattr(module, "_LONGEST", 8)
    with RecordWriter(tmp_path / "a.rec") as writer:
        writer.write(bytes(8))
        with pytest.raises(ConfigError, match="a record of 9 bytes is too long: expected at most 8"):
            writer.write(bytes(9))


def test_what_is_closed_says_so(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "a.rec")
    writer.write(b"abc")
    writer.close()
    with pytest.raises(ClosedError, match=r"a\.rec is closed"):
        writer.write(b"abc")
    reader = RecordReader(tmp_path / "a.rec")
    reader.close()
    with pytest.raises(ClosedError, match=r"a\.rec is closed"):
        reader.read_at(0)


def test_a_writer_that_cannot_open_its_index_leaves_nothing_open(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RecordWriter(tmp_path / "a.rec", tmp_path / "nowhere" / "a.idx")


# --- headers ---


def test_a_header_with_one_label() -> None:
    packed = pack_record(IRHeader(0, 1.5, 7, 9), b"payload")
    assert packed == bytes.fromhex("00000000 0000c03f 0700000000000000 0900000000000000") + b"payload"
    assert unpack_record(packed) == (IRHeader(0, 1.5, 7, 9), b"payload")


def test_a_header_with_several_labels() -> None:
    packed = pack_record(IRHeader(0, np.array([1.0, -2.0], np.float32), 7, 0), b"payload")
    assert packed == (
        bytes.fromhex("02000000 00000000 0700000000000000 0000000000000000")
        + bytes.fromhex("0000803f 000000c0")
        + b"payload"
    )
    header, payload = unpack_record(packed)
    assert (header.flag, header.id, header.id2, payload) == (2, 7, 0, b"payload")
    np.testing.assert_array_equal(header.label, np.array([1.0, -2.0], np.float32))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (bytes(23), "a record of 23 bytes is too short: expected a header of 24 bytes"),
        (struct.pack("<IfQQf", 2, 0, 0, 0, 1), "a record of 28 bytes is too short: expected 2 labels in the first 32"),
    ],
)
def test_a_record_that_is_too_short_for_its_header_is_named(record: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        unpack_record(record)


def test_headers_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot store an empty array of labels"):
        pack_record(IRHeader(0, np.zeros(0, np.float32), 0, 0), b"")
    with pytest.raises(ConfigError, match=r"id2=-1 is out of range: expected 0 <= id2 < 2\^64"):
        pack_record(IRHeader(0, 0.0, 0, -1), b"")
