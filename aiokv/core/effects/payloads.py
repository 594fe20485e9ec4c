"""Payloads of what is sent and received, by reference: the driver finds the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record

if TYPE_CHECKING:
    from aiokv.codec import Codec
    from aiokv.types import Key, Peer, Slot, Version


class CallMemory(Record, gc=False):
    """Bytes [start, stop) of tensor `tensor` of the user's call `call`."""

    call: int
    tensor: int
    start: int
    stop: int


class CallTensors(Record):
    """The whole tensors `tensors` of the user's call `call`, one after the other: `nbytes` together."""

    call: int
    tensors: tuple[int, ...]
    nbytes: int


class EncodedParts(Record):
    """Compressed parts of tensors of the user's call `call`, one after the other: for each, tensor and first element.

    An `Encode` effect has made them. They are the driver's own memory, until `Settle`.
    """

    call: int
    parts: tuple[tuple[int, int], ...]


class Replica(Record):
    """What a worker keeps of a chunk, to which compressed values are differences: `size` elements of `dtype`.

    An answer that is a difference has `codec`. When the replica is up to date it is copied to `target`, if there is
    still somebody who waits for it.
    """

    server: Peer
    key: Key
    start: int
    dtype: str
    size: int
    codec: Codec
    target: CallMemory | CallTensors | None


class StoredChunk(Record, gc=False):
    """The chunk's immutable value at `version`; `nbytes` long."""

    key: Key
    start: int
    version: Version
    nbytes: int


class StoredChunks(Record):
    """Several chunks, one after the other."""

    chunks: list[StoredChunk]


class StoredRows(Record):
    """Some rows of a row-sparse chunk at `version`: `rows` are their ids, int64 and increasing; `nbytes` long."""

    key: Key
    start: int
    version: Version
    rows: bytes
    nbytes: int


class StoredDifference(Record):
    """What the chunk's value at `version` differs by from the replica of a peer, compressed with `codec`.

    The replica is then what the peer will make of it. Without a codec it is the whole value, and so is the replica.
    """

    key: Key
    start: int
    version: Version
    nbytes: int
    peer: Peer
    codec: Codec | None


class StoredState(Record):
    """What the store has of a key in the chunk (chunk_key, chunk_start), at `version`: value, and state of the rule.

    Of a row-sparse key it has at most so many bytes as go in one message, of rows from `first` on. Without `arrays` it
    only says what there is and how many updates were made; `names` are the arrays that it has, all if empty.
    """

    chunk_key: Key
    chunk_start: int
    version: Version
    key: Key
    first: int
    arrays: bool
    names: tuple[str, ...] = ()


class StoredSum(Record):
    """What lies in a slot, in the precision that it has there; `nbytes` in the precision of its chunk."""

    slot: Slot
    nbytes: int


class StoredSlots(Record):
    """What lies in several slots, one after the other: `nbytes` together."""

    slots: list[Slot]
    nbytes: int


class StoredCopy(Record):
    """All that the store has of a chunk at `version`, whose value is `nbytes` long: that, and state of the rule.

    Unless `previous` is -1 with the value of that version, which is kept; of a table with the rows that have changed.
    """

    key: Key
    start: int
    version: Version
    nbytes: int
    previous: Version = -1


class CallBuffer(Record):
    """Memory of any length, which is made when an answer comes; number `number` of the user's call `call`."""

    call: int
    number: int


URGENT = 1 << 30
"""Priority of what is not the user's: no call's priority is as high."""


Payload = (
    CallMemory
    | CallTensors
    | EncodedParts
    | StoredChunk
    | StoredChunks
    | StoredCopy
    | StoredDifference
    | StoredRows
    | StoredSlots
    | StoredState
    | StoredSum
)
