"""What the schedule hears, and what it wants done. Buffers, events and slots are numbers; `work` is opaque."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.errors import AiokvError
    from aiokv.types import Key, Slot, Version

Buffer = int
"""A piece of memory, on a device or the host."""

Event = int
"""What is reported when a copy or a launch is done."""

Ticket = int
"""Names who waits for something, by a number of the driver's choice."""

Address = tuple["Key", int]
"""A chunk: its key and its first element."""


class Kind(enum.StrEnum):
    """What a stream is for. All three run at the same time; what is in one of them happens in its order."""

    IN = "in"
    COMPUTE = "compute"
    OUT = "out"


class Stream(NamedTuple):
    """One of the streams of a device."""

    device: int
    kind: Kind


class Fresh(NamedTuple):
    """An array that a rule keeps, as it is before the first update; `work` takes it, and then the chunk's value."""

    nbytes: int
    work: Any


# --- stimuli ---


@dataclass(slots=True)
class Landed:
    """A payload for a chunk on `device` lies whole in the slot, in the host's memory."""

    slot: Slot
    nbytes: int
    device: int


@dataclass(slots=True)
class Unpack:
    """A payload for a chunk on `device` lies whole in the slot, in the host's memory, and is to be decoded.

    `work` takes the `target`, a new slot of `size` bytes, and `nbytes` of the payload from byte `first` on.
    """

    slot: Slot
    target: Slot
    device: int
    first: int
    nbytes: int
    work: Any
    size: int


@dataclass(slots=True)
class Fold:
    """Add slots to another one, in their order; they are free then.

    `work` takes the sum and the sources, all in place. Where the sum has other `nbytes` than the target, it goes to
    another buffer, which `work` takes first. With `joins` it may be done together with others that follow:
    `work.joined(other)` does both, one after the other, or is None.
    """

    target: Slot
    sources: list[Slot]
    work: Any
    nbytes: int
    joins: bool = False


@dataclass(slots=True)
class Compare:
    """Make something else of a slot, which has `nbytes` then, by comparing two versions of a chunk.

    `work` takes the slot in place, or another buffer first if it has other bytes, then the chunk's value and that which
    was `read`.
    """

    slot: Slot
    chunk: Address
    read: Version
    work: Any
    nbytes: int


@dataclass(slots=True)
class Cut:
    """Copy parts of a slot, with their first byte and their number of bytes, into new slots; it is free then."""

    slot: Slot
    parts: list[tuple[Slot, int, int]]


@dataclass(slots=True)
class Freed:
    """A slot is not needed any longer."""

    slot: Slot


@dataclass(slots=True)
class Install:
    """The slot's content is version 0 of a new chunk. Without a slot `zero` makes it."""

    chunk: Address
    nbytes: int
    slot: Slot | None
    zero: Any


@dataclass(slots=True)
class Measure:
    """Compute `nbytes` of results of a chunk and a sum, which stays, and copy them to the host; ends in `Ready`.

    `work` takes the results, the value, the sum, and the state by `names`. `fresh` is the state of a chunk without one.
    """

    ticket: Ticket
    chunk: Address
    slot: Slot
    work: Any
    nbytes: int
    names: tuple[str, ...] = ()
    fresh: Mapping[str, Fresh] = field(default_factory=dict)


@dataclass(slots=True)
class Update:
    """Make a version of a chunk out of its value and the sum in the slot, which is free then; ends in `Published`.

    `work` takes the value, the sum, the state by `names`, then `out` if the new value does not go where the sum is,
    then the version `read`, if there is one. Without `work` the sum is the new value. `out` are its bytes, 0 for the
    place of the sum. With `keeps` the value that is replaced stays until it is retired.
    """

    chunk: Address
    version: Version
    slot: Slot
    work: Any
    out: int = 0
    names: tuple[str, ...] = ()
    fresh: Mapping[str, Fresh] = field(default_factory=dict)
    keeps: bool = False
    read: Version | None = None


@dataclass(slots=True)
class Renumbered:
    """The chunk's value is another version, too."""

    chunk: Address
    version: Version


@dataclass(slots=True)
class Retired:
    """Nobody refers to these versions any longer."""

    chunk: Address
    versions: list[Version]


@dataclass(slots=True)
class Divide:
    """Make chunks of parts of one that is not being updated.

    For each part: its address, and first byte and number of bytes in the value and in the state, by name.
    """

    chunk: Address
    parts: Sequence[tuple[Address, tuple[int, int], Mapping[str, tuple[int, int]]]]


@dataclass(slots=True)
class Restore:
    """Put what lies in slots, in the host's memory, in the place of the value, if there is one, and of the state.

    For each array of the state: its slot and its bytes.
    """

    chunk: Address
    value: Slot | None
    state: Mapping[str, tuple[Slot, int]]


@dataclass(slots=True)
class Reset:
    """A chunk's state is not needed any longer."""

    chunk: Address


@dataclass(slots=True)
class Forgotten:
    """A chunk is no more."""

    chunk: Address


@dataclass(slots=True)
class Requested:
    """Somebody wants a version of a chunk in the host's memory: the current one, or one that is kept; ends in `Ready`.

    With `state` all that its rule keeps now as well.
    """

    ticket: Ticket
    chunk: Address
    version: Version
    state: bool = False


@dataclass(slots=True)
class Borrowed:
    """Somebody wants what lies in slots, as it is now, in the host's memory; ends in `Ready`, with the given names."""

    ticket: Ticket
    slots: Mapping[str, Slot]


@dataclass(slots=True)
class Sent:
    """Who wanted something has it."""

    ticket: Ticket


@dataclass(slots=True)
class Completed:
    """A copy or a launch is done, or could not be."""

    event: Event
    error: AiokvError | None = None


Stimulus = (
    Landed
    | Unpack
    | Fold
    | Compare
    | Cut
    | Freed
    | Install
    | Measure
    | Update
    | Renumbered
    | Retired
    | Divide
    | Restore
    | Reset
    | Forgotten
    | Requested
    | Borrowed
    | Sent
    | Completed
)

# --- effects ---


@dataclass(slots=True)
class Allocate:
    """Make a buffer of `nbytes` on a device."""

    buffer: Buffer
    device: int
    nbytes: int


@dataclass(slots=True)
class Deallocate:
    """Give a buffer on a device back to the system."""

    buffer: Buffer


@dataclass(slots=True)
class Take:
    """The memory in which the slot has landed is a buffer from now on, until `Release`."""

    buffer: Buffer
    slot: Slot


@dataclass(slots=True)
class Reserve:
    """Make a buffer of `nbytes` in the host's memory, until `Release`."""

    buffer: Buffer
    nbytes: int


@dataclass(slots=True)
class Release:
    """A buffer in the host's memory is not used any longer."""

    buffer: Buffer


@dataclass(slots=True)
class Copy:
    """When the events that it waits for are there, copy `nbytes`, from byte `first` of the source on; then report."""

    stream: Stream
    waits: list[Event]
    event: Event
    target: Buffer
    source: Buffer
    nbytes: int
    first: int = 0


@dataclass(slots=True)
class Part:
    """Work on buffers, and what is reported when it is done.

    It can't be done when something is wrong with those that are `needed`. Then `lost` have no meaning; the others are
    as they were.
    """

    event: Event
    work: Any
    buffers: list[Buffer]
    needed: list[Buffer]
    lost: list[Buffer]


@dataclass(slots=True)
class Launch:
    """When the events that it waits for are there, do works of one kind, in one go if it can be; then report each.

    None of them needs another one.
    """

    stream: Stream
    waits: list[Event]
    parts: list[Part]


@dataclass(slots=True)
class Published:
    """A version is made, and is the chunk's value; or the value before has its number, because of an error."""

    chunk: Address
    version: Version
    error: AiokvError | None


@dataclass(slots=True)
class Ready:
    """What was asked for lies in buffers in the host's memory, by name, "" for the value or the results."""

    ticket: Ticket
    buffers: dict[str, Buffer]
    error: AiokvError | None


Effect = Allocate | Deallocate | Take | Reserve | Release | Copy | Launch | Published | Ready
