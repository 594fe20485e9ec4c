"""What a state machine wants done. Drivers perform these, in order; none of them decides anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiokv.codec import Codec
    from aiokv.commands import Command
    from aiokv.errors import AiokvError
    from aiokv.initializers import Initializer
    from aiokv.optim import Optimizer
    from aiokv.types import Key, Peer, Piece, Rank, Slot, TensorSpec, Version
    from aiokv.wire.messages import Message

# --- payloads, by reference: the driver finds the bytes ---


@dataclass(slots=True)
class CallMemory:
    """Bytes [start, stop) of tensor `tensor` of the user's call `call`."""

    call: int
    tensor: int
    start: int
    stop: int


@dataclass(slots=True)
class CallTensors:
    """The whole tensors `tensors` of the user's call `call`, one after the other: `nbytes` together."""

    call: int
    tensors: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class EncodedParts:
    """Compressed parts of tensors of the user's call `call`, one after the other: for each, tensor and first element.

    An `Encode` effect has made them. They are the driver's own memory, until `Settle`.
    """

    call: int
    parts: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Replica:
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


@dataclass(slots=True)
class StoredChunk:
    """The chunk's immutable value at `version`; `nbytes` long."""

    key: Key
    start: int
    version: Version
    nbytes: int


@dataclass(slots=True)
class StoredChunks:
    """Several chunks, one after the other."""

    chunks: list[StoredChunk]


@dataclass(slots=True)
class StoredRows:
    """Some rows of a row-sparse chunk at `version`: `rows` are their ids, int64 and increasing; `nbytes` long."""

    key: Key
    start: int
    version: Version
    rows: bytes
    nbytes: int


@dataclass(slots=True)
class StoredDifference:
    """What the chunk's value at `version` differs by from the replica of a peer, compressed with `codec`.

    The replica is then what the peer will make of it. Without a codec it is the whole value, and so is the replica.
    """

    key: Key
    start: int
    version: Version
    nbytes: int
    peer: Peer
    codec: Codec | None


@dataclass(slots=True)
class StoredState:
    """What the store has of a key in the chunk (chunk_key, chunk_start), at `version`: value, and state of the rule.

    Of a row-sparse key it has at most so many bytes as go in one message, of rows from `first` on. Without `arrays` it
    only says how many updates were made.
    """

    chunk_key: Key
    chunk_start: int
    version: Version
    key: Key
    first: int
    arrays: bool


@dataclass(slots=True)
class CallBuffer:
    """Memory of any length, which is made when an answer comes; number `number` of the user's call `call`."""

    call: int
    number: int


URGENT = 1 << 30
"""Priority of what is not the user's: no call's priority is as high."""

Payload = (
    CallMemory | CallTensors | EncodedParts | StoredChunk | StoredChunks | StoredDifference | StoredRows | StoredState
)

# --- effects of every machine ---


@dataclass(slots=True)
class Connect:
    """Open a connection to `host:port` after `delay` seconds; ends in `Connected` or `ConnectFailed`."""

    peer: Peer
    host: str
    port: int
    delay: float = 0.0


@dataclass(slots=True)
class Send:
    """Send a message under a request id, followed by the payload; of what waits, the highest priority leaves first."""

    peer: Peer
    request: int
    message: Message
    payload: Payload | None = None
    priority: int = URGENT


@dataclass(slots=True)
class Refuse:
    """Answer a request with an error. The peer lives on."""

    peer: Peer
    request: int
    error: AiokvError


@dataclass(slots=True)
class Disconnect:
    """Close a connection; no `PeerLost` follows."""

    peer: Peer
    reason: str


@dataclass(slots=True)
class Log:
    """One line for the operator; `level` as in `logging` ("info", "warning", "error")."""

    level: str
    text: str


@dataclass(slots=True)
class Stop:
    """This node's work is over. `failed` when it did not end as it should."""

    reason: str
    failed: bool = False


# --- effects of a node with callers: worker and server ---


@dataclass(slots=True)
class Complete:
    """A call succeeded; `result` is what it returns to its user."""

    call: int
    result: Any = None


@dataclass(slots=True)
class Fail:
    """A call failed."""

    call: int
    error: AiokvError


@dataclass(slots=True)
class Release:
    """The caller of a worker's call gets its memory back, although frames are still under way.

    Nothing more may be received into it (`receiving`: the peers and request ids concerned), and what is still to be
    sent from it must be copied first.
    """

    call: int
    receiving: list[tuple[Peer, int]]


# --- effects of a worker on what it compresses ---


@dataclass(slots=True)
class Encode:
    """Compress tensors of the user's call `call`: for each, its number, key and the cuts; ends in `Encoded`.

    What the tensors' earlier payloads did not say goes into these. Without a codec that is all: they are sent as they
    are.
    """

    call: int
    codec: Codec | None
    tensors: list[tuple[int, Key, list[tuple[int, int]]]]


@dataclass(slots=True)
class Settle:
    """The parts were answered, and are not needed any longer. Unless they are `counted`, what they say is due again."""

    parts: EncodedParts
    counted: bool


@dataclass(slots=True)
class ForgetResiduals:
    """The keys are no more."""

    keys: list[Key]


# --- effects of a server on its store ---


@dataclass(slots=True)
class Install:
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


@dataclass(slots=True)
class Prepare:
    """Payloads of this codec are to be expected."""

    codec: Codec


@dataclass(slots=True)
class Decode:
    """Decode the payload in `slot` into `target`, a new slot; free `slot`; ends in `Decoded`.

    It says `dtype` values of tensors with these `sizes`, one after the other; of a single one it may be a part. `slot`
    is None for a payload without bytes.
    """

    slot: Slot | None
    target: Slot
    codec: Codec
    dtype: str
    sizes: list[int]


@dataclass(slots=True)
class ForgetReplicas:
    """The peer is gone, and what it keeps with it."""

    peer: Peer


@dataclass(slots=True)
class Fold:
    """Add `source` to `target`, elementwise, as `dtype`; free `source`."""

    target: Slot
    source: Slot
    dtype: str


Sums = list[tuple[float, ...]]
"""For each key in a chunk, sums of squares of its elements."""


@dataclass(slots=True)
class Norms:
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


@dataclass(slots=True)
class Combine:
    """Put what `reduction` makes of `target` and `sources`, as `dtype`, into `target`; free the others."""

    target: Slot
    sources: list[Slot]
    dtype: str
    reduction: str


@dataclass(slots=True)
class Apply:
    """Update the chunk with the sum in `slot`, giving `version`; free the slot; ends in `Applied`.

    `ranks` are the contributors in the order of the sum, `staleness` is, for each of them, the number of versions
    between the one it computed at and the one it is applied to. The sum is divided by `divisor`, then `rule` is
    followed; its schedule looks at `clock`, and its `norms` are the sums over whole tensors of each phase.

    `read` is the version that the contributor had read; then the value that is replaced stays, until `Retire`.
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


@dataclass(slots=True)
class Skip:
    """Make no update: the value stays, and is `version` too; free the slot."""

    key: Key
    start: int
    version: Version
    slot: Slot | None


@dataclass(slots=True)
class Retire:
    """Nobody refers to these earlier versions of the chunk any longer."""

    key: Key
    start: int
    versions: list[Version]


@dataclass(slots=True)
class InstallRows:
    """Make version 0 of a row-sparse chunk, rows [start, stop): `slot` holds rows and values, or is None for none."""

    key: Key
    start: int
    stop: int
    spec: TensorSpec
    initializer: Initializer
    lazy: bool
    slot: Slot | None


@dataclass(slots=True)
class ApplyRows:
    """As `update`, which has no slot, of a row-sparse chunk: sum the rows in `slots`, in this order, and free them."""

    update: Apply
    slots: list[Slot]


@dataclass(slots=True)
class JoinRows:
    """Make a new `slot` of the rows in `parts`, each `row_bytes` long without its id; free them."""

    slot: Slot
    parts: list[Slot]
    row_bytes: int


@dataclass(slots=True)
class Split:
    """Cut the slot's content into `parts`, new slots and the bytes of each, in order; free the slot."""

    slot: Slot
    parts: list[tuple[Slot, int]]


@dataclass(slots=True)
class Divide:
    """Make a chunk of its own, with value and optimizer state, of each of `parts`: a key and its number of elements.

    They lie in the chunk (key, start) one after the other; that one is no more. The new ones start at 0.
    """

    key: Key
    start: int
    parts: list[tuple[Key, int]]


@dataclass(slots=True)
class Forget:
    """The chunk is no more."""

    key: Key
    start: int


@dataclass(slots=True)
class Restore:
    """Put what the slot has, as of a `StoredState`, in the place of the chunk's value and state; free the slot.

    `rule` says what state there can be. A row-sparse chunk forgets the rows that it has if `first`, from which on the
    slot has some, is the chunk's first one; otherwise it keeps them. Ends in `Restored`, for the peer and its request.
    """

    peer: Peer
    request: int
    key: Key
    start: int
    first: int
    rule: Optimizer
    slot: Slot


@dataclass(slots=True)
class Free:
    """The slot's content is not needed."""

    slot: Slot


@dataclass(slots=True)
class Configure:
    """A first update rule is set: begin with a new optimizer state, and prepare what the rule needs."""

    optimizer: Optimizer


@dataclass(slots=True)
class Execute:
    """Run a command, which may take its time, as server number `index`; ends in `Executed`."""

    peer: Peer
    request: int
    command: Command
    index: int


Effect = (
    Connect
    | Send
    | Refuse
    | Disconnect
    | Log
    | Stop
    | Complete
    | Fail
    | Release
    | Encode
    | Settle
    | ForgetResiduals
    | Install
    | Prepare
    | Decode
    | ForgetReplicas
    | Fold
    | Combine
    | Norms
    | Apply
    | Skip
    | Retire
    | InstallRows
    | ApplyRows
    | JoinRows
    | Split
    | Divide
    | Restore
    | Forget
    | Free
    | Configure
    | Execute
)


def freed(slot: Slot | None) -> list[Effect]:
    """Return what gives a slot back, if there is one."""
    return [] if slot is None else [Free(slot)]
