"""The words that every part shares: identifiers and small frozen records. Standard library only."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

Key = str | int
"""Name of a parameter: a non-empty str, or an int with 0 <= key < 2**63. One cluster uses one kind."""

Rank = int
"""A worker's stable number, 0 <= rank < num_workers, given by name."""

Round = int
"""The sync step a push belongs to, counted per key from 1."""

Version = int
"""Number of a chunk's value: 0 after init, +1 per update, never reused."""

Epoch = int
"""Number of the membership view, +1 with every change."""

Incarnation = int
"""A process's life under its name; a later life has a larger number."""

Slot = int
"""Where a payload landed. Opaque outside the store that made it."""

Peer = int
"""A connection, numbered by the driver. `SCHEDULER` is the node's own link to the scheduler."""

SCHEDULER: Peer = -1


def peer_of_server(index: int) -> Peer:
    """Return the number of a server's own link to the server with an index."""
    return -2 - index


STANDBY: Peer = -(2**30)
"""Below it are a server's own links to the node that holds a copy of its part, one after the other."""


MAX_INT_KEY = 2**63 - 1

ITEM_SIZES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
"""Bytes per element of every dtype that can be stored, by NumPy's name."""


ROW_ID_BYTES = 8
"""Bytes per row id on the wire: int64."""


class Role(enum.StrEnum):
    """What a node does in the cluster."""

    SCHEDULER = "scheduler"
    SERVER = "server"
    WORKER = "worker"


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """Shape and dtype of a parameter, kept as the user gave them."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements; 1 for shape `()`."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEM_SIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * self.itemsize

    @property
    def row_size(self) -> int:
        """Elements of one row: of all axes but the first."""
        return max(1, math.prod(self.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(slots=True)
class Tally:
    """What became of one worker's contributions, counted for each chunk of each key.

    Attributes:
        applied: how many are in an update. In rounds of all workers nothing is counted.
        dropped: how many are in none, by reason: "late" (the round was closed without it), "stale" (too old),
            "evicted" (late too often: rounds do not wait for the worker).
        staleness: how many were applied after so many versions since the one that was read; from 1,024 on they are put
            together under powers of 2.
        waited: seconds for which the policy held reads back.
        duplicates: how many came more than once, because a connection was made again; they count once.
    """

    applied: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    waited: float = 0.0
    duplicates: int = 0

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of what was applied, in versions; 0 when nothing was."""
        return sum(behind * count for behind, count in self.staleness.items()) / max(1, self.applied)


@dataclass(slots=True, frozen=True)
class Piece:
    """What lies in a chunk of one key: `size` elements from `start` on, in rows of `row_size` elements."""

    key: Key
    start: int
    size: int
    row_size: int = 1
