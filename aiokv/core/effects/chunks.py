"""What a server wants done with the values of its chunks, and with the state of the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from aiokv.initializers import Initializer
    from aiokv.optim import Optimizer
    from aiokv.types import Key, Peer, Piece, Rank, Slot, TensorSpec, Version


class Install(Record):
    """The slot's content becomes version 0 of a new chunk of `size` elements; the store takes the slot over.

    `slot` is None for a chunk without elements, here and in `Apply`. `pieces` are the keys that lie in it, one after
    the other.
    """

    key: Key
    start: int
    dtype: str
    size: int
    slot: Slot | None
    pieces: list[Piece]


class InstallRows(Record):
    """Make version 0 of a row-sparse chunk, rows [start, stop): `slot` holds rows and values, or is None for none."""

    key: Key
    start: int
    stop: int
    spec: TensorSpec
    initializer: Initializer
    lazy: bool
    slot: Slot | None


Sums = list[tuple[float, ...]]
"""For each key in a chunk, sums of squares of its elements."""


class Norms(Record):
    """Compute the sums of squares that `phase` before an update needs; the slot stays; ends in `Normed`.

    `gathered` are, for each phase before, the sums over whole tensors. The rest is as in `Apply`.
    """

    key: Key
    start: int
    version: Version
    slot: Slot | None
    phase: int
    gathered: list[Sums]
    clock: int
    rule: Optimizer
    divisor: int


class Apply(Record):
    """Update the chunk with the sum in `slot`, giving `version`; free the slot; ends in `Applied`.

    `ranks` are the contributors in the order of the sum, `staleness` is, for each of them, the number of versions
    between the one it computed at and the one it is applied to. The sum is divided by `divisor`, then `rule` is
    followed; its schedule looks at `clock`, and its `norms` are the sums over whole tensors of each phase.

    `read` is the version that the contributor had read; then the value that is replaced stays, until `Retire`. With
    `keep` it stays in any case.
    """

    key: Key
    start: int
    version: Version
    slot: Slot | None
    ranks: list[Rank]
    staleness: list[int]
    clock: int
    rule: Optimizer
    divisor: int
    norms: list[Sums] = field(default_factory=list)
    read: Version | None = None
    keep: bool = False


class ApplyRows(Record):
    """As `update`, which has no slot, of a row-sparse chunk: sum the rows in `slots`, in this order, and free them.

    Each slot's values are multiplied by one of `factors`, if there are any, before they are added. `nbytes` are the
    lengths of the slots.
    """

    update: Apply
    slots: list[Slot]
    factors: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class Skip(Record):
    """Make no update: the value stays, and is `version` too; free the slot."""

    key: Key
    start: int
    version: Version
    slot: Slot | None


class Retire(Record):
    """Nobody refers to these earlier versions of the chunk any longer."""

    key: Key
    start: int
    versions: list[Version]


class Divide(Record):
    """Make a chunk of its own, with value and optimizer state, of each of `parts`: a key and its number of elements.

    They lie in the chunk (key, start) one after the other; that one is no more. The new ones start at 0.
    """

    key: Key
    start: int
    parts: list[tuple[Key, int]]


class Forget(Record):
    """The chunk is no more."""

    key: Key
    start: int


class Restore(Record):
    """Put what the slot has, as of a `StoredState`, in the place of the chunk's value and state; free the slot.

    `rule` says what state there can be. A row-sparse chunk forgets the rows that it has if `first`, from which on the
    slot has some, is the chunk's first one; otherwise it keeps them. Unless `previous` is -1 the slot also has, as of a
    `StoredCopy`, the value of that version, which is kept. Ends in `Restored`, for the peer and its request.
    """

    peer: Peer
    request: int
    key: Key
    start: int
    first: int
    rule: Optimizer
    slot: Slot
    previous: Version = -1
