"""What is saved: weights and optimizer state of all keys in one safetensors file, and residuals of workers beside it.

The tensor of array `name` of key `key` is called `name/s:key`, or `name/i:key` of an int key: "value", for row-sparse
keys "ids" (the rows, increasing), and the arrays that the rule keeps; "residual" in the file of a worker. The last
tensor is "checksum": the BLAKE2b of all bytes of the file before it. The metadata have "format" and "version", and as
"content" all else in JSON: `Content`, or `ResidualContent`.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aiokv.checkpoint.files import CHECKSUM_BYTES, Reader
from aiokv.checkpoint.tensorfile import Array, Shapes, bytes_of, head, in_order, open_tensors, unpack
from aiokv.core.stimuli import KeyOptions, KeyRecord
from aiokv.errors import DataError
from aiokv.types import Key, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.checkpoint.file_arrays import AnyArray, FileArray

T = TypeVar("T", bound=msgspec.Struct)

FORMAT = "aiokv"
RESIDUALS = "aiokv residuals"
VERSION = "2"

STEPS = "steps"
"""Of the number of updates that a key's state has seen, in what a server sends."""

LEFT = "left"
"""Of the first row that is not in it, -1 if all are."""

ARRAYS = "arrays"
"""Of dtype and number of elements of each array, in JSON, where the arrays themselves are not sent."""

CHECKSUM = "checksum"


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A key and what it was made with; see `aiokv.core.stimuli.KeyOptions`."""

    key: Key
    shape: tuple[int, ...]
    dtype: str
    sparse: bool
    policy: str
    group: tuple[int, ...] = ()
    lazy: bool = True
    initializer: dict[str, Any] = {}

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""
        return TensorSpec(self.shape, self.dtype)

    @property
    def record(self) -> KeyRecord:
        """What the state machines know of a key."""
        options = KeyOptions(self.policy, self.group, (), self.lazy, self.initializer)
        return KeyRecord(self.key, self.spec, self.sparse, options)


class SavedKey(KeyEntry):
    """What a file has of one key; `names` are those of its arrays.

    `updates` counts those of the state that is kept. Dense arrays have the shape of the key, or its rows; those of a
    row-sparse key have a row for each of the ids.
    """

    updates: int = 0
    names: tuple[str, ...] = ()


class SavedRule(msgspec.Struct, forbid_unknown_fields=True):
    """The update rule and what became of it, as in `aiokv.wire.messages.RulesState`."""

    name: str
    params: dict[str, Any]
    reduction: str
    changes: tuple[tuple[int, dict[str, Any]], ...]
    clock: int
    staleness_rate: str = "1"


class Content(msgspec.Struct, forbid_unknown_fields=True):
    """What a file has besides arrays.

    `id` is that of the save, the same in all of its files. `residuals` are the ranks, of so many `workers`, that have
    written a file of their own. `facts` are the user's.
    """

    id: str
    workers: int
    residuals: tuple[int, ...]
    facts: dict[str, Any]
    rule: SavedRule
    keys: list[SavedKey]


class SavedResidual(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker's compression has of one key besides its residual; see `aiokv.compressing.Compressor.state`."""

    key: Key
    dtype: str
    codec: str | None = None
    params: dict[str, Any] = {}
    step: int = 0


class ResidualContent(msgspec.Struct, forbid_unknown_fields=True):
    """What the file of a worker has besides arrays."""

    id: str
    rank: int
    keys: list[SavedResidual]


@dataclass(slots=True, eq=False)
class Saved:
    """All that a file has. `arrays` are those of each key, by name; they may still lie in the file."""

    content: Content
    arrays: dict[Key, dict[str, AnyArray]]


def entry_of(record: KeyRecord) -> KeyEntry:
    """Return what is saved of a key that is there."""
    spec, options = record.spec, record.options
    plain = dict(options.initializer)
    return KeyEntry(
        record.key, spec.shape, spec.dtype, record.is_sparse, options.policy, options.group, options.lazy, plain
    )


def tensor_name(key: Key, name: str) -> str:
    """Return the name of a tensor; that of an array has no slash in it."""
    return f"{name}/{'i' if isinstance(key, int) else 's'}:{key}"


def file_head(kind: str, content: msgspec.Struct, shapes: Shapes) -> bytes:
    """Return the beginning of a file; what has these shapes follows `in_order`, and then the checksum.

    Args:
        kind: `FORMAT` or `RESIDUALS`.
        content: what it has besides arrays.
        shapes: of its tensors, by name.
    """
    metadata = {"format": kind, "version": VERSION, "content": msgspec.json.encode(content).decode()}
    return head(shapes | {CHECKSUM: ("uint8", (CHECKSUM_BYTES,))}, metadata)


def open_file(data: bytes, path: str, kind: str, content: type[T]) -> tuple[T, dict[str, Array]]:
    """Return what a file has, and its tensors, which lie in `data`.

    Raises:
        DataError: it is torn, changed, or of another format.
    """
    reader = Reader(io.BytesIO(data), path)
    found, _ = _open(reader, path, kind, content)
    return found, unpack(data, path)[0]


def _open(reader: Reader, path: str, kind: str, content: type[T]) -> tuple[T, dict[str, FileArray]]:
    tensors, metadata = open_tensors(reader, path)
    for name, expected in (("format", kind), ("version", VERSION)):
        if metadata.get(name) != expected:
            got = metadata.get(name)
            text = f"{path}: expected {name} {expected!r}, got {got!r}: it was not written by save"
            raise DataError(text, path=path, expected=expected, got=got)
    before = reader.nbytes - CHECKSUM_BYTES
    computed, end = reader.checksum(before), reader.read(before, reader.nbytes)
    if computed != end:
        text = f"{path}: its content is damaged: expected checksum {end.hex()}, got {computed.hex()}"
        raise DataError(text, path=path, expected=end.hex(), got=computed.hex())
    try:
        return msgspec.json.decode(metadata.get("content", ""), type=content), tensors
    except msgspec.MsgspecError as error:
        raise _senseless(path, str(error)) from None


def open_saved(reader: Reader, path: str) -> Saved:
    """Return what a file of `save` has. All of it is read once to check it, and arrays once more when they are used.

    Raises:
        DataError: it is torn, changed, or of another format.
    """
    content, tensors = _open(reader, path, FORMAT, Content)
    try:
        arrays: dict[Key, dict[str, AnyArray]] = {
            key.key: {name: tensors[tensor_name(key.key, name)] for name in key.names} for key in content.keys
        }
    except KeyError as error:
        raise _senseless(path, f"there is no tensor {error}") from None
    return Saved(content, arrays)


def encode_residuals(content: ResidualContent, residuals: Mapping[Key, Array]) -> list[bytes | memoryview]:
    """Return the bytes of a worker's file, but for the checksum."""

    arrays = {tensor_name(key, "residual"): array for key, array in residuals.items()}
    shapes: Shapes = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    return [file_head(RESIDUALS, content, shapes), *(bytes_of(arrays[name]) for name in in_order(shapes))]


def decode_residuals(data: bytes, path: str) -> tuple[ResidualContent, dict[Key, Array]]:
    """Return what the file of a worker has.

    Raises:
        DataError: it is torn, changed, or of another format.
    """
    content, tensors = open_file(data, path, RESIDUALS, ResidualContent)
    try:
        return content, {saved.key: tensors[tensor_name(saved.key, "residual")] for saved in content.keys}
    except KeyError as error:
        raise _senseless(path, f"there is no tensor {error}") from None


def _senseless(path: str, why: str) -> DataError:
    text = f"{path}: what it says of its tensors can't be understood: {why}"
    return DataError(text, path=path, expected="keys, their arrays and a rule", got=why)
