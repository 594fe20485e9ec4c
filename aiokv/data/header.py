"""What MXNet puts before a record's payload: a label, or several, and an id."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aiokv.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LAYOUT = struct.Struct("<IfQQ")
_LABEL = np.dtype("<f4")


class IRHeader(NamedTuple):
    """The header of a record, as in MXNet's `recordio.IRHeader`."""

    flag: int
    """How many labels there are when they are an array; 0 when the label is a number."""
    label: float | NDArray[np.float32]
    """A number, or an array of them."""
    id: int
    """The record's number, below 2^64."""
    id2: int
    """Another one, which MXNet does not use."""


def pack_record(header: IRHeader, payload: bytes | bytearray | memoryview) -> bytes:
    """Return a record's bytes: the header, its labels if they are an array, the payload.

    Args:
        header: its label is a number or a non-empty array, stored as float32 and flattened; its flag is not read.
        payload: what follows, e.g. an encoded image.

    Raises:
        ConfigError: there are no labels, or an id is out of its range.
    """
    labels = np.asarray(header.label, dtype=_LABEL)
    if not labels.size:
        raise ConfigError("cannot store an empty array of labels: expected a number, or one or more", got=0)
    for name, number in (("id", header.id), ("id2", header.id2)):
        if not 0 <= number < 1 << 64:
            raise ConfigError(f"{name}={number} is out of range: expected 0 <= {name} < 2^64", got=str(number))
    if labels.ndim == 0:
        return _LAYOUT.pack(0, float(labels), header.id, header.id2) + bytes(payload)
    return _LAYOUT.pack(labels.size, 0.0, header.id, header.id2) + labels.tobytes() + bytes(payload)


def unpack_record(record: bytes) -> tuple[IRHeader, bytes]:
    """Return the header and the payload of a record that `pack_record` or MXNet made.

    Raises:
        DataError: the record is shorter than its header says.
    """
    if len(record) < _LAYOUT.size:
        raise _too_short(record, f"a header of {_LAYOUT.size} bytes", _LAYOUT.size)
    flag, label, id_, id2 = _LAYOUT.unpack_from(record)
    if not flag:
        return IRHeader(0, label, id_, id2), record[_LAYOUT.size :]
    end = _LAYOUT.size + _LABEL.itemsize * flag
    if len(record) < end:
        raise _too_short(record, f"{flag} labels in the first {end} bytes", end)
    labels = np.frombuffer(record, _LABEL, flag, _LAYOUT.size).astype(np.float32)
    return IRHeader(flag, labels, id_, id2), record[end:]


def _too_short(record: bytes, expected: str, size: int) -> DataError:
    return DataError(
        f"a record of {len(record)} bytes is too short: expected {expected}", expected=size, got=len(record)
    )
