"""RecordIO files: many binary records in one file (`.rec`), with an index of their offsets beside it (`.idx`).

A record starts at a multiple of 4 bytes, and all numbers are little-endian::

    magic 0xced7230a | flag (upper 3 bits), length (lower 29 bits) | payload | zeros up to a multiple of 4 bytes

The format is MXNet's (class `dmlc::RecordIOWriter`). So that a reader can begin anywhere, no payload holds the magic at
a multiple of 4 bytes: there the writer leaves it out and starts a new piece. Flag 0 is a whole record, 1 its first
piece, 2 one in the middle, 3 the last one. The index is text: a line "key<tab>offset" for each record.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from aiokv.core.placement import split_range
from aiokv.data.damage import damaged
from aiokv.data.sharding import check_member
from aiokv.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from typing import BinaryIO, Self, TextIO

    Path_ = str | os.PathLike[str]

MAGIC = struct.pack("<I", 0xCED7230A)
_HEADER = struct.Struct("<4sI")
_ALIGNMENT = 4
_LENGTH_BITS = 29
_LONGEST = (1 << _LENGTH_BITS) - 1
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_FLAG_NAMES = ("a whole record", "a first piece", "a middle piece", "a last piece")


def _padding(length: int) -> int:
    """Return how many zeros follow a payload."""
    return -length % _ALIGNMENT


def _aligned_magic(payload: bytes, start: int) -> int:
    """Return where the magic next lies at a multiple of 4 bytes, or -1."""
    found = payload.find(MAGIC, start)
    while found % _ALIGNMENT and found >= 0:
        found = payload.find(MAGIC, found + 1)
    return found


def _pieces(payload: bytes) -> list[bytes]:
    """Cut a payload where the magic lies in it at a multiple of 4 bytes; the magic itself is left out."""
    pieces = []
    start = 0
    while (found := _aligned_magic(payload, start)) >= 0:
        pieces.append(payload[start:found])
        start = found + len(MAGIC)
    return [*pieces, payload[start:]]


class RecordWriter:
    """Write a RecordIO file, replacing what is there.

    As a context manager it closes the file::

        with RecordWriter("train.rec", "train.idx") as records:
            records.write(payload, key=0)

    Args:
        path: the `.rec` file.
        index_path: the `.idx` file; without one there is no index.
    """

    def __init__(self, path: Path_, index_path: Path_ | None = None) -> None:
        self._path = path
        self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115 - closed by `close`
        self._index: TextIO | None = None
        if index_path is not None:
            try:
                self._index = Path(index_path).open("w", encoding="ascii", newline="\n")  # noqa: SIM115 - as above
            except OSError:
                self._file.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Calling it again does nothing."""
        self._file.close()
        if self._index is not None:
            self._index.close()

    def write(self, payload: bytes | bytearray | memoryview, *, key: int | None = None) -> int:
        """Append a record and return its offset.

        Args:
            payload: less than 2^29 bytes.
            key: its number in the index. A writer with an index needs one, others take none.

        Raises:
            ConfigError: the payload is too long, or the key does not go with the index.
            ClosedError: the file is closed.
        """
        if self._file.closed:
            raise ClosedError(f"{self._path!s} is closed")
        if (key is None) != (self._index is None):
            expected = "no key, as there is no index" if self._index is None else "a key for the index"
            raise ConfigError(f"cannot write to {self._path!s} with key={key}: expected {expected}", got=key)
        data = bytes(payload)
        if len(data) > _LONGEST:
            raise ConfigError(
                f"a record of {len(data)} bytes is too long: expected at most {_LONGEST}",
                expected=_LONGEST,
                got=len(data),
            )
        offset = self._file.tell()
        pieces = _pieces(data)
        for number, piece in enumerate(pieces):
            self._file.write(_HEADER.pack(MAGIC, _flag(number, len(pieces)) << _LENGTH_BITS | len(piece)))
            self._file.write(piece)
            self._file.write(bytes(_padding(len(piece))))
        if self._index is not None:
            self._index.write(f"{key}\t{offset}\n")
        return offset


def _flag(number: int, pieces: int) -> int:
    """Return the flag of a record's piece."""
    if pieces == 1:
        return _WHOLE
    if number == 0:
        return _FIRST
    return _LAST if number == pieces - 1 else _MIDDLE


class _Piece(NamedTuple):
    """Where a piece's payload lies."""

    flag: int
    start: int
    stop: int

    @property
    def next(self) -> int:
        """Where the next piece begins."""
        return self.stop + _padding(self.stop - self.start)


class RecordReader:
    """Read a RecordIO file, whole or in parts, without an index.

    As a context manager it closes the file::

        with RecordReader("train.rec") as records:
            for payload in records.part(kv.rank, kv.num_workers):
                ...

    The file is mapped into memory, not read. Threads may share a reader, and processes that are forked may, too.

    Args:
        path: the `.rec` file.
    """

    def __init__(self, path: Path_) -> None:
        self._path = path
        with Path(path).open("rb") as file:
            self._size = file.seek(0, 2)
            # An empty file can't be mapped.
            self._data: mmap.mmap | bytes | None = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        if isinstance(self._data, mmap.mmap):
            self._data.close()
        self._data = None

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over all records in the order of the file."""
        return self.part(0, 1)

    def part(self, part_index: int, num_parts: int) -> Iterator[bytes]:
        """Iterate over the records that begin in one of `num_parts` equal ranges of the file's bytes.

        The parts cover every record once, but they may have different numbers of records: for synchronous training,
        which needs the same number everywhere, use an index and a sampler.

        Raises:
            ConfigError: there is no such part.
            DataError: the file is damaged within this part.
            ClosedError: the file is closed.
        """
        check_member(part_index, num_parts, members="parts", name="part_index")
        words = -(-self._size // _ALIGNMENT)
        start, stop = (bound * _ALIGNMENT for bound in split_range(words, num_parts)[part_index])
        return self._records(start, stop)

    def read_at(self, offset: int) -> bytes:
        """Return the record that begins at an offset.

        Raises:
            DataError: no record begins there, or it is damaged.
            ClosedError: the file is closed.
        """
        return self._read(offset)[0]

    def _records(self, start: int, stop: int) -> Iterator[bytes]:
        # The file has to begin with a record. Elsewhere a record of the part before may reach into this one.
        first = offset = self._find_record(start) if start else start
        while offset < min(stop, self._size):
            payload, offset = self._read(offset)
            yield payload
        if first < offset < self._size:
            # The next part skips what is no record, so this one looks whether another begins where its last one ends.
            self._piece(offset, _WHOLE, _FIRST)

    def _bytes(self) -> mmap.mmap | bytes:
        if self._data is None:
            raise ClosedError(f"{self._path!s} is closed")
        return self._data

    def _find_record(self, offset: int) -> int:
        """Return where the next record begins at or after an offset; the end of the file, where there is none."""
        data = self._bytes()
        found = data.find(MAGIC, offset)
        while 0 <= found <= self._size - _HEADER.size:
            flag = _HEADER.unpack_from(data, found)[1] >> _LENGTH_BITS
            if found % _ALIGNMENT == 0 and flag in {_WHOLE, _FIRST}:
                return found
            found = data.find(MAGIC, found + 1)
        return self._size

    def _read(self, offset: int) -> tuple[bytes, int]:
        """Return the record at an offset, and where the next one begins."""
        data = self._bytes()
        piece = self._piece(offset, _WHOLE, _FIRST)
        if piece.flag == _WHOLE:
            return data[piece.start : piece.stop], piece.next
        payloads = [data[piece.start : piece.stop]]
        while piece.flag != _LAST:
            piece = self._piece(piece.next, _MIDDLE, _LAST)
            payloads.append(data[piece.start : piece.stop])
        return MAGIC.join(payloads), piece.next

    def _piece(self, offset: int, *flags: int) -> _Piece:
        """Return the piece at an offset, which must have one of the flags."""
        data = self._bytes()
        if not 0 <= offset <= self._size - _HEADER.size:
            left = max(0, self._size - offset)
            raise damaged(self._path, offset, expected=f"a header of {_HEADER.size} bytes", got=f"{left} bytes")
        magic, word = _HEADER.unpack_from(data, offset)
        if magic != MAGIC:
            raise damaged(self._path, offset, expected=f"the magic {MAGIC.hex(' ')}", got=magic.hex(" "))
        flag, length = word >> _LENGTH_BITS, word & _LONGEST
        if flag not in flags:
            expected = " or ".join(_FLAG_NAMES[expected] for expected in flags)
            got = _FLAG_NAMES[flag] if flag < len(_FLAG_NAMES) else f"the unknown flag {flag}"
            raise damaged(self._path, offset + len(MAGIC), expected=expected, got=got)
        piece = _Piece(flag, offset + _HEADER.size, offset + _HEADER.size + length)
        if piece.next > self._size:
            raise damaged(
                self._path,
                piece.start,
                expected=f"{piece.next - piece.start} bytes of payload and padding",
                got=f"the end of the file after {self._size - piece.start}",
            )
        return piece


class IndexedRecordReader(RecordReader):
    """Read records of a RecordIO file in any order, by the index beside it: `len(records)`, `records[position]`.

    Positions count the records in the order of the index: they are what a `ShardedSampler` hands out.

    Args:
        path: the `.rec` file.
        index_path: the `.idx` file; by default of the same name.

    Raises:
        DataError: the index is damaged.
    """

    def __init__(self, path: Path_, index_path: Path_ | None = None) -> None:
        index = read_index(Path(path).with_suffix(".idx") if index_path is None else index_path)
        self.keys = list(index)
        """The records' numbers, in the order of the index."""
        self._offsets = index
        super().__init__(path)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, position: int) -> bytes:
        return self.read(self.keys[position])

    def read(self, key: int) -> bytes:
        """Return the record of a key.

        Raises:
            KeyError: the index has no such key.
            DataError: no record begins where the index says, or it is damaged.
            ClosedError: the file is closed.
        """
        return self.read_at(self._offsets[key])

    def part(self, part_index: int, num_parts: int) -> Iterator[bytes]:
        """Iterate over one of `num_parts` parts, in the order of the index; their lengths differ by at most one record.

        Raises:
            ConfigError: there is no such part.
            DataError: the file or the index is damaged.
            ClosedError: the file is closed.
        """
        check_member(part_index, num_parts, members="parts", name="part_index")
        bounds = split_range(len(self.keys), num_parts)[part_index]
        return (self.read(key) for key in self.keys[slice(*bounds)])


def read_index(path: Path_) -> dict[int, int]:
    """Return the offset of each key in an `.idx` file, in the order of the file.

    Raises:
        DataError: a line is no pair of numbers, or a key comes twice.
    """
    offsets: dict[int, int] = {}
    position = 0
    with Path(path).open("rb") as file:
        for line in file:
            fields = line.split()
            if len(fields) != 2 or not all(field.isdigit() for field in fields):  # noqa: PLR2004 - a key and an offset
                got = repr(line[:80].decode("ascii", "backslashreplace"))
                raise damaged(path, position, expected="a line 'key<tab>offset'", got=got)
            key, offset = map(int, fields)
            if key in offsets:
                raise damaged(path, position, expected="every key once", got=f"key {key} again")
            offsets[key] = offset
            position += len(line)
    return offsets
