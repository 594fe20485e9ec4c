"""Weights and optimizer state in one safetensors file: arrays and facts to bytes and back, and to any fsspec URL.

The tensor of array `name` of key `key` is called `name/s:key`, or `name/i:key` of an int key: "value", for row-sparse
keys "ids" (the rows, increasing), and the arrays that the rule keeps. What else is known stands in the metadata:

| Name | What |
| --- | --- |
| format, version | "aiokv" and "1" |
| keys | JSON: for each key its shape, dtype, storage, number of updates, and names of arrays |
| rule | JSON: name, parameters, reduction, changes of parameters by clock, and the clock |
| checksum | BLAKE2b of all of this and of every tensor, in hexadecimal |
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import msgspec
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from aiokv.errors import DataError
from aiokv.types import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = NDArray[Any]

FORMAT = "aiokv"
VERSION = "1"
STEPS = "steps"
"""Of the number of updates that a key's state has seen, in what a server sends."""

LEFT = "left"
"""Of the first row that is not in it, -1 if all are."""

METADATA = "__metadata__"
LENGTH_BYTES = 8

DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}
"""NumPy's name of each of the format's dtypes that can be a parameter's."""


class SavedKey(msgspec.Struct, forbid_unknown_fields=True):
    """What a file has of one key; `names` are those of its arrays.

    `updates` counts those of the state that is kept. Dense arrays have the shape of the key, or its rows; those of a
    row-sparse key have a row for each of the ids.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    sparse: bool
    updates: int
    names: tuple[str, ...]


class SavedRule(msgspec.Struct, forbid_unknown_fields=True):
    """The update rule and what became of it, as in `aiokv.wire.messages.RulesState`."""

    name: str
    params: dict[str, Any]
    reduction: str
    changes: tuple[tuple[int, dict[str, Any]], ...]
    clock: int


class Saved(msgspec.Struct):
    """All that a file has. `arrays` are those of each key, by name."""

    rule: SavedRule
    keys: list[SavedKey]
    arrays: dict[Key, dict[str, Array]]


# --- bytes ---


def pack(arrays: Mapping[str, Array], metadata: dict[str, str]) -> bytes:
    """Return arrays by name, and text, in the safetensors format."""
    return safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in arrays.items()}, metadata)


def unpack(content: bytes, path: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays and the text that `pack` was given; the arrays can't be written to.

    Args:
        content: what `pack` has made.
        path: where it comes from, for errors.

    Raises:
        DataError: it is no safetensors file, or has tensors of a dtype that no parameter has.
    """
    try:
        tensors = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        head = msgspec.json.decode(
            content[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")]
        )
        arrays = {
            name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
            for name, tensor in tensors
        }
    except (safetensors.SafetensorError, msgspec.DecodeError, KeyError, ValueError) as error:
        text = f"{path}: expected a whole safetensors file, got {len(content)} bytes that are none: {error}"
        raise DataError(text, path=path, expected="safetensors", got=f"{len(content)} bytes") from None
    return arrays, head.get(METADATA) or {}


def encode(saved: Saved) -> bytes:
    """Return the content of a file."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "keys": msgspec.json.encode(saved.keys).decode(),
        "rule": msgspec.json.encode(saved.rule).decode(),
    }
    tensors = {_tensor(entry.key, name): saved.arrays[entry.key][name] for entry in saved.keys for name in entry.names}
    return pack(tensors, metadata | {"checksum": _checksum(tensors, metadata)})


def decode(content: bytes, path: str) -> Saved:
    """Return what a file has.

    Raises:
        DataError: it is torn, changed, or of another format.
    """
    tensors, metadata = unpack(content, path)
    for name, expected in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(name) != expected:
            got = metadata.get(name)
            text = f"{path}: expected {name} {expected!r}, got {got!r}: it was not written by save"
            raise DataError(text, path=path, expected=expected, got=got)
    given = metadata.pop("checksum", None)
    computed = _checksum(tensors, metadata)
    if given != computed:
        text = f"{path}: its content is damaged: expected checksum {given}, got {computed}"
        raise DataError(text, path=path, expected=given, got=computed)
    try:
        keys = msgspec.json.decode(metadata["keys"], type=list[SavedKey])
        rule = msgspec.json.decode(metadata["rule"], type=SavedRule)
        arrays = {entry.key: {name: tensors[_tensor(entry.key, name)] for name in entry.names} for entry in keys}
    except (KeyError, msgspec.DecodeError) as error:
        text = f"{path}: what it says of its tensors can't be understood: {error}"
        raise DataError(text, path=path, expected="keys, their arrays and a rule", got=str(error)) from None
    return Saved(rule, keys, arrays)


def _tensor(key: Key, name: str) -> str:
    """Return the name of a tensor; that of an array has no slash in it."""
    return f"{name}/{'i' if isinstance(key, int) else 's'}:{key}"


def _checksum(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for name, text in sorted(metadata.items()):
        digest.update(msgspec.json.encode((name, text)))
    for name, array in sorted(tensors.items()):
        digest.update(msgspec.json.encode((name, array.dtype.name, array.shape)))
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


# --- files ---


def write(url: str, content: bytes) -> None:
    """Write a file aside, then give it its name: who reads it finds the old content or the new one.

    Args:
        url: a path, or an address that fsspec knows.
        content: all of it.

    Raises:
        DataError: it can't be written.
    """
    import fsspec  # noqa: PLC0415 - importing it reads what all installed packages say of themselves
    from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

    try:
        files, path = fsspec.url_to_fs(url)
        aside = f"{path}.tmp-{secrets.token_hex(8)}"
        try:
            with files.open(aside, "wb") as file:
                file.write(content)
                if isinstance(files, LocalFileSystem):
                    file.flush()
                    os.fsync(file.fileno())
            if isinstance(files, LocalFileSystem):
                os.replace(aside, path)
            else:
                files.mv(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                files.rm(aside)
            raise
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: can't be written: {error}", path=url) from error


def read(url: str) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: it can't be read.
    """
    import fsspec  # noqa: PLC0415 - importing it reads what all installed packages say of themselves

    try:
        with fsspec.open(url, "rb") as file:
            return bytes(file.read())
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: can't be read: {error}", path=url) from error
