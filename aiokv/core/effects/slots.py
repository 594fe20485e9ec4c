"""What a server wants done with payloads that have landed, and with sums of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record

if TYPE_CHECKING:
    from aiokv.codec import Codec
    from aiokv.core.effects import Effect
    from aiokv.types import Key, Slot, Version


class Free(Record):
    """The slot's content is not needed."""

    slot: Slot


class Widen(Record):
    """The slot has a sum in float32, of a chunk whose elements are of the lower precision `dtype`."""

    slot: Slot
    dtype: str


class Fold(Record, gc=False):
    """Add `source` to `target`, elementwise, as `dtype`; free `source`."""

    target: Slot
    source: Slot
    dtype: str


class Weigh(Record):
    """Multiply what lies in `slot`, as `dtype`, by `factor`."""

    slot: Slot
    dtype: str
    factor: float


class Compensate(Record):
    """Make of the gradient in `slot`, computed where a chunk's value had version `read`, about that where it is now.

    See `aiokv.kernels.Backend.compensate`. Nothing comes between it and the chunk's next update.
    """

    slot: Slot
    dtype: str
    key: Key
    start: int
    read: Version
    lamda: float


class Combine(Record):
    """Put what `reduction` makes of `target` and `sources`, as `dtype`, into `target`; free the others."""

    target: Slot
    sources: list[Slot]
    dtype: str
    reduction: str


class JoinRows(Record):
    """Make a new `slot` of the rows in `parts`, each `row_bytes` long without its id; free them."""

    slot: Slot
    parts: list[Slot]
    row_bytes: int


class Split(Record):
    """Cut the slot's content into `parts`, new slots and the bytes of each, in order; free the slot."""

    slot: Slot
    parts: list[tuple[Slot, int]]


class Decode(Record):
    """Decode the payload in `slot` into `target`, a new slot; free `slot`; ends in `Decoded`.

    It says `dtype` values of tensors with these `sizes`, one after the other; of a single one it may be a part. `slot`
    is None for a payload without bytes.
    """

    slot: Slot | None
    target: Slot
    codec: Codec
    dtype: str
    sizes: list[int]


def freed(slot: Slot | None) -> list[Effect]:
    """Return what gives a slot back, if there is one."""
    return [] if slot is None else [Free(slot)]
