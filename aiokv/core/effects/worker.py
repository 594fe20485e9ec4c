"""What a worker wants done for the calls of its user, and with what it compresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from aiokv.codec import Codec
    from aiokv.core.effects.payloads import EncodedParts
    from aiokv.errors import AiokvError
    from aiokv.types import Key, Peer, TensorSpec


class Complete(Record, gc=False):
    """A call succeeded; `result` is what it returns to its user."""

    call: int
    result: Any = None


class Fail(Record):
    """A call failed."""

    call: int
    error: AiokvError


class Release(Record):
    """The caller of a worker's call gets its memory back, although frames are still under way.

    Nothing more may be received into it (`receiving`: the peers and request ids concerned), and what is still to be
    sent from it must be copied first. The tensors that it `keeps` may have to be sent again, until `Discard`.
    """

    call: int
    receiving: list[tuple[Peer, int]]
    keeps: list[int] = field(default_factory=list)


class Discard(Record):
    """The tensors that a call has kept when it ended are not needed any longer."""

    call: int


class Allocate(Record):
    """Make memory for a value that is read ahead: it is tensor 0 of a call that no user has made."""

    call: int
    spec: TensorSpec


class Deliver(Record):
    """Give some tensors of the user's call `call`, which is about to succeed, the value that call `ahead` has read.

    The memory of that call is not needed afterwards.
    """

    call: int
    ahead: int
    tensors: list[int]


class Deallocate(Record):
    """Let go of the memory of a call that was to read ahead."""

    call: int


class Encode(Record):
    """Compress tensors of the user's call `call`: for each, its number, key and the cuts; ends in `Encoded`.

    What the tensors' earlier payloads did not say goes into these. Without a codec that is all: they are sent as they
    are.
    """

    call: int
    codec: Codec | None
    tensors: list[tuple[int, Key, list[tuple[int, int]]]]


class Settle(Record):
    """The parts were answered, and are not needed any longer. Unless they are `counted`, what they say is due again."""

    parts: EncodedParts
    counted: bool


class ForgetResiduals(Record):
    """The keys are no more."""

    keys: list[Key]


class KeepResiduals(Record):
    """Keep what is left of keys as it is now, for the checkpoint of a clock; it may have been kept already."""

    clock: int
    keys: list[Key]


class WriteResiduals(Record):
    """Write what was kept for the checkpoint of a clock, and what is left of all other keys; ends in `PartWritten`."""

    clock: int
    place: str
