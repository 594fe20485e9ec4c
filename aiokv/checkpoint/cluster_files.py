"""The files of a checkpoint of the cluster: a part for each server, residuals of workers, and what they belong to.

A checkpoint is a folder. Every server writes `part-N.safetensors`; the tensor of array `name` of the elements from
`start` on of key `key` is called `name/s:key@start`, or `name/i:key@start` of an int key. Workers that compress write
`residuals-RANK.safetensors` (see `aiokv.checkpoint.residuals`). At last the scheduler writes `manifest.json`, which
names them all, with their lengths and checksums: without it there is no checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aiokv.checkpoint import files
from aiokv.checkpoint.saving import SavedRule, file_head, tensor_name
from aiokv.checkpoint.tensorfile import DTYPES, Array, Shapes, bytes_of, in_order, read_head
from aiokv.core.saved_state import ChunkState, RoundsState
from aiokv.errors import AiokvError, DataError
from aiokv.wire.messages import CheckpointFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from aiokv.types import Rank

logger = logging.getLogger("aiokv")

FORMAT = "aiokv part"
MANIFEST = "manifest.json"
MANIFEST_FORMAT = "aiokv checkpoint"
VERSION = 1
NAME = re.compile(r"run-(\d+)-clock-(\d+)")
CHECKSUM_BYTES = 32


class SavedChunk(ChunkState, kw_only=True):
    """A part of a key in a file.

    `updates` is how many its state has seen, `arrays` are the checksums of its arrays by their names.
    """

    updates: int
    arrays: dict[str, str]


class PartContent(msgspec.Struct):
    """What a server's file has besides arrays."""

    clock: int
    rule: SavedRule
    chunks: list[SavedChunk]
    rounds: list[RoundsState] = []


class ManifestFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file; see `CheckpointFile`."""

    name: str
    nbytes: int
    checksum: str
    head_nbytes: int
    head_checksum: str


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """What a checkpoint is made of.

    `time` is when it was completed, in ISO 8601. `parts` are those of the servers, `residuals` those of the ranks that
    have one, of so many `workers`. `checksum` is the BLAKE2b of the manifest when that field is empty.
    """

    clock: int
    time: str
    workers: int
    parts: list[ManifestFile]
    residuals: dict[int, ManifestFile]
    format: str = MANIFEST_FORMAT
    version: int = VERSION
    checksum: str = ""

    @property
    def files(self) -> list[ManifestFile]:
        """All files."""
        return [*self.parts, *self.residuals.values()]

    @property
    def nbytes(self) -> int:
        """How long they are together."""
        return sum(file.nbytes for file in self.files)


def part_name(index: int) -> str:
    """Return the name of a server's file."""
    return f"part-{index}.safetensors"


def residuals_name(rank: Rank) -> str:
    """Return the name of a worker's file."""
    return f"residuals-{rank}.safetensors"


def _hex(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).hexdigest()


# --- writing ---


def write_file(place: str, name: str, pieces: Iterable[bytes | memoryview], folder: str = "") -> CheckpointFile:
    """Write a file of a checkpoint; the first piece is its head.

    Raises:
        DataError: it can't be written.
    """
    url = f"{place}/{name}"
    file = files.Aside(url, folder)
    nbytes, head = 0, b""

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal nbytes, head
        for piece in pieces:
            head = head or bytes(piece)
            nbytes += len(piece)
            yield piece

    try:
        _make_folder(url, folder)
        file.write(counted())
        file.seal()
        file.publish()
    finally:
        file.drop()
    return CheckpointFile(name, nbytes + CHECKSUM_BYTES, file.checksum.hex(), len(head), _hex(head))


def write_own(
    place: str, name: str, pieces: Iterable[bytes | memoryview], folder: str
) -> tuple[CheckpointFile | None, str]:
    """Write a node's file where the scheduler says, if that is in the node's own folder; return it, or why not."""
    if not folder:
        return None, "checkpoint_folder is not set for it, and it writes nowhere else"
    try:
        return write_file(place, name, pieces, folder), ""
    except AiokvError as error:
        return None, error.message
    except Exception as error:  # whatever it is, others wait for this part
        logger.exception("%s/%s can't be written", place, name)
        return None, f"{type(error).__name__}: {error}"


def _make_folder(url: str, folder: str) -> None:
    try:
        system, path = files.find(url, folder)
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: can't be written: {error}", path=url) from error


def part_pieces(
    clock: int,
    rule: SavedRule,
    chunks: Iterable[tuple[ChunkState, int, Mapping[str, Array]]],
    rounds: Sequence[RoundsState] = (),
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a server's file, but for its checksum.

    Args:
        clock: of the checkpoint.
        rule: the update rule.
        chunks: what is known of each part of a key, how many updates its state has seen, and its arrays by name.
        rounds: those that the server decides.
    """
    arrays: dict[str, Array] = {}
    saved: list[SavedChunk] = []
    for state, updates, own in chunks:
        arrays |= {_tensor(state, name): array for name, array in own.items()}
        checksums = {name: _hex(bytes_of(array)) for name, array in own.items()}
        saved.append(SavedChunk(**msgspec.structs.asdict(state), updates=updates, arrays=checksums))
    shapes: Shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    yield file_head(FORMAT, PartContent(clock, rule, saved, list(rounds)), shapes)
    for name in in_order(shapes):
        yield bytes_of(arrays[name])


def _tensor(state: ChunkState, name: str) -> str:
    return f"{tensor_name(state.key, name)}@{state.start}"


def write_manifest(place: str, manifest: Manifest, folder: str = "") -> None:
    """Complete a checkpoint whose files are written.

    Raises:
        DataError: it can't be.
    """
    manifest.checksum = ""
    manifest.checksum = _hex(msgspec.json.encode(manifest))
    url = f"{place}/{MANIFEST}"
    file = files.Aside(url, folder, ends_with_checksum=False)
    try:
        file.write([msgspec.json.format(msgspec.json.encode(manifest))])
        file.seal()
        file.publish()
    finally:
        file.drop()


# --- reading ---


def read_manifest(place: str, folder: str = "") -> Manifest:
    """Return what a checkpoint is made of.

    Raises:
        DataError: there is no such checkpoint, or what it says of itself is damaged.
    """
    url = f"{place}/{MANIFEST}"
    data = files.read(url, folder)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{url}: is no manifest of a checkpoint: {error}", path=url) from None
    stated, manifest.checksum = manifest.checksum, ""
    computed = _hex(msgspec.json.encode(manifest))
    if (manifest.format, manifest.version, stated) != (MANIFEST_FORMAT, VERSION, computed):
        raise DataError(f"{url}: is damaged, or of another format", path=url, expected=computed, got=stated)
    if any("/" in file.name or "\\" in file.name or ".." in file.name for file in manifest.files):
        raise DataError(f"{url}: names files outside of its folder", path=url)
    return manifest


def check_files(place: str, manifest: Manifest, folder: str = "") -> None:
    """Read all files of a checkpoint and compare them with what the manifest says.

    Raises:
        DataError: one is not there, torn or changed.
    """
    for file in manifest.files:
        url = f"{place}/{file.name}"
        digest, nbytes, end = hashlib.blake2b(digest_size=CHECKSUM_BYTES), 0, b""
        try:
            system, path = files.find(url, folder)
            with system.open(path, "rb") as opened:
                while block := opened.read(files.BLOCK_BYTES):
                    nbytes += len(block)
                    # What the file ends with is no part of what it is the checksum of.
                    joined = end + block
                    digest.update(memoryview(joined)[:-CHECKSUM_BYTES])
                    end = joined[-CHECKSUM_BYTES:]
        except (OSError, ValueError, ImportError) as error:
            raise DataError(f"{url}: can't be read: {error}", path=url) from error
        if nbytes != file.nbytes:
            text = f"{url}: is torn: expected {file.nbytes} bytes, got {nbytes}"
            raise DataError(text, path=url, expected=f"{file.nbytes} bytes", got=f"{nbytes} bytes")
        if not digest.hexdigest() == end.hex() == file.checksum:
            text = f"{url}: is damaged: expected checksum {file.checksum}, got {digest.hexdigest()}"
            raise DataError(text, path=url, expected=file.checksum, got=digest.hexdigest())


@dataclass(slots=True)
class OpenPart:
    """A server's file of which the head is read: where its tensors are, by name, with dtype and shape."""

    url: str
    folder: str
    content: PartContent
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]

    def read(self, chunk: SavedChunk, name: str) -> Array:
        """Return an array of a part of a key.

        Raises:
            DataError: it is not what was written.
        """
        dtype, shape, start, stop = self.tensors[_tensor(chunk, name)]
        data = _read_range(self.url, start, stop, self.folder)
        if _hex(data) != chunk.arrays[name]:
            text = f"{self.url}: array {name!r} of key {chunk.key!r} is damaged"
            raise DataError(text, path=self.url, key=chunk.key, expected=chunk.arrays[name], got=_hex(data))
        return np.frombuffer(data, dtype).reshape(shape)


def open_part(place: str, file: ManifestFile, folder: str = "") -> OpenPart:
    """Read the head of a server's file.

    Raises:
        DataError: it is not what was written.
    """
    url = f"{place}/{file.name}"
    head = _read_range(url, 0, file.head_nbytes, folder)
    if _hex(head) != file.head_checksum:
        raise DataError(f"{url}: its head is damaged", path=url, expected=file.head_checksum, got=_hex(head))
    tensors: dict[str, Any] = {}
    try:
        begin, described, metadata = read_head(memoryview(head))
        content = msgspec.json.decode(metadata["content"], type=PartContent)
        for name, tensor in described.items():
            start, stop = tensor.data_offsets
            tensors[name] = (DTYPES[tensor.dtype], tensor.shape, begin + start, begin + stop)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError) as error:
        raise DataError(f"{url}: what it says of its tensors can't be understood: {error}", path=url) from None
    return OpenPart(url, folder, content, tensors)


def _read_range(url: str, start: int, stop: int, folder: str) -> bytes:
    try:
        system, path = files.find(url, folder)
        with system.open(path, "rb") as opened:
            opened.seek(start)
            return bytes(opened.read(stop - start))
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: can't be read: {error}", path=url) from error
