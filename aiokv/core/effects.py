"""What a state machine wants done. Drivers perform these, in order; none of them decides anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from aiokv.codec import Codec
    from aiokv.commands import Command
    from aiokv.core.saved_chunks import ChunkState
    from aiokv.errors import AiokvError
    from aiokv.initializers import Initializer
    from aiokv.optim import Optimizer
    from aiokv.types import Key, Peer, Piece, Rank, Slot, TensorSpec, Version
    from aiokv.wire.messages import CheckpointFile, Message, RulesState

# --- payloads, by reference: the driver finds the bytes ---


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
    """All that the store has of a chunk at `version`, whose value is `nbytes` long: that, and state of the rule."""

    key: Key
    start: int
    version: Version
    nbytes: int


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

# --- effects of every machine ---


class Connect(Record):
    """Open a connection to `host:port` after `delay` seconds; ends in `Connected` or `ConnectFailed`.

    One that is being opened under the same number is given up, and nothing is heard of it.
    """

    peer: Peer
    host: str
    port: int
    delay: float = 0.0


class Send(Record, gc=False):
    """Send a message under a request id, followed by the payload; of what waits, the highest priority leaves first."""

    peer: Peer
    request: int
    message: Message
    payload: Payload | None = None
    priority: int = URGENT


class Report(Send, gc=False):
    """Send `Waiting`, and in it this node's counters, which its driver keeps."""


class Refuse(Record):
    """Answer a request with an error. The peer lives on."""

    peer: Peer
    request: int
    error: AiokvError


class Disconnect(Record):
    """Close a connection, or give up one that is being opened; nothing follows."""

    peer: Peer
    reason: str


class Log(Record):
    """One line for the operator; `level` as in `logging` ("info", "warning", "error").

    What went wrong has a name besides, an `event`, by which it is counted, with `facts` for programs.
    """

    level: str
    text: str
    event: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


class Stop(Record):
    """This node's work is over. `failed` when it did not end as it should."""

    reason: str
    failed: bool = False


# --- effects of a node with callers: worker and server ---


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


# --- effects of a worker on what it compresses ---


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


# --- effects of a server on its store ---


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


class Prepare(Record):
    """Payloads of this codec are to be expected."""

    codec: Codec


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


class ForgetReplicas(Record):
    """The peer is gone, and what it keeps with it."""

    peer: Peer


class Fold(Record, gc=False):
    """Add `source` to `target`, elementwise, as `dtype`; free `source`."""

    target: Slot
    source: Slot
    dtype: str


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


class Weigh(Record):
    """Multiply what lies in `slot`, as `dtype`, by `factor`."""

    slot: Slot
    dtype: str
    factor: float


class Combine(Record):
    """Put what `reduction` makes of `target` and `sources`, as `dtype`, into `target`; free the others."""

    target: Slot
    sources: list[Slot]
    dtype: str
    reduction: str


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


class InstallRows(Record):
    """Make version 0 of a row-sparse chunk, rows [start, stop): `slot` holds rows and values, or is None for none."""

    key: Key
    start: int
    stop: int
    spec: TensorSpec
    initializer: Initializer
    lazy: bool
    slot: Slot | None


class ApplyRows(Record):
    """As `update`, which has no slot, of a row-sparse chunk: sum the rows in `slots`, in this order, and free them.

    Each slot's values are multiplied by one of `factors`, if there are any, before they are added. `nbytes` are the
    lengths of the slots.
    """

    update: Apply
    slots: list[Slot]
    factors: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


class JoinRows(Record):
    """Make a new `slot` of the rows in `parts`, each `row_bytes` long without its id; free them."""

    slot: Slot
    parts: list[Slot]
    row_bytes: int


class Split(Record):
    """Cut the slot's content into `parts`, new slots and the bytes of each, in order; free the slot."""

    slot: Slot
    parts: list[tuple[Slot, int]]


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
    slot has some, is the chunk's first one; otherwise it keeps them. Ends in `Restored`, for the peer and its request.
    """

    peer: Peer
    request: int
    key: Key
    start: int
    first: int
    rule: Optimizer
    slot: Slot


class Snapshot(Record):
    """Hold on to the chunk's value and to a copy of its state as they are now, for the checkpoint of `clock`.

    `states` are, for each key that lies in it, what else is to be saved.
    """

    clock: int
    key: Key
    start: int
    version: Version
    states: list[ChunkState]


class DropSnapshots(Record):
    """Let go of all that is held for the checkpoint of a clock."""

    clock: int


class WriteSnapshots(Record):
    """Write all that is held for the checkpoint of a clock to the folder `place`, and let go; ends in `PartWritten`.

    It is the part of server number `index`. Nothing else waits for that.
    """

    clock: int
    place: str
    index: int
    rules: RulesState


class ReadCheckpoint(Record):
    """Read what the checkpoint in the folder `place` has, without the arrays; ends in `CheckpointRead`."""

    place: str


class WantedChunk(Record):
    """Elements, or rows, [start, stop) of a key whose value is to be made of parts of others.

    Or, of keys that are one chunk, all of each, one after the other. `sources` are numbers of those that were read. The
    value gets this `version`; it has about so many bytes.
    """

    key: Key
    start: int
    stop: int
    version: Version
    rule: Optimizer
    sources: list[int]
    nbytes: int


class LoadSnapshots(Record):
    """Put what was read of a checkpoint into chunks that are there; ends in `SnapshotsLoaded`."""

    place: str
    chunks: list[WantedChunk]


class Hold(Record):
    """Make an answer as it is to be now, but let it wait until `LetGo`."""

    answer: Send | Refuse


class LetGo(Record):
    """Send the oldest answers that wait, so many of them."""

    count: int


class Widen(Record):
    """The slot has a sum in float32, of a chunk whose elements are of the lower precision `dtype`."""

    slot: Slot
    dtype: str


class Free(Record):
    """The slot's content is not needed."""

    slot: Slot


class Configure(Record):
    """A first update rule is set: begin with a new optimizer state, and prepare what the rule needs."""

    optimizer: Optimizer


class Execute(Record):
    """Run a command, which may take its time, as server number `index`; ends in `Executed`."""

    peer: Peer
    request: int
    command: Command
    index: int


class StartNode(Record):
    """Start another node of servers in this process, with a name, as the standby of an index; ends in `NodeEnded`."""

    index: int
    name: str


# --- effects of the scheduler on files ---


class WriteManifest(Record):
    """Complete a checkpoint whose parts are written, by writing what it is made of; ends in `ManifestWritten`.

    `parts` are those of the servers, in their order, `residuals` those of workers, with their ranks.
    """

    clock: int
    place: str
    workers: int
    parts: list[CheckpointFile]
    residuals: list[tuple[Rank, CheckpointFile]]


class RemoveCheckpoints(Record):
    """Delete checkpoints, complete or not, in these folders."""

    places: list[str]


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
    | Discard
    | Encode
    | Settle
    | ForgetResiduals
    | KeepResiduals
    | WriteResiduals
    | Install
    | Prepare
    | Decode
    | ForgetReplicas
    | Fold
    | Weigh
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
    | Snapshot
    | DropSnapshots
    | WriteSnapshots
    | ReadCheckpoint
    | LoadSnapshots
    | WriteManifest
    | RemoveCheckpoints
    | Forget
    | Hold
    | LetGo
    | Widen
    | Free
    | Configure
    | Execute
    | StartNode
)


def freed(slot: Slot | None) -> list[Effect]:
    """Return what gives a slot back, if there is one."""
    return [] if slot is None else [Free(slot)]
