"""What can happen to a state machine. Drivers make these; `handle` takes them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from aiokv.core.merging import Merging
from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.core.effects import Sums
    from aiokv.core.saved_state import ChunkState, RoundsState
    from aiokv.errors import AiokvError
    from aiokv.types import Key, Peer, Rank, Slot, TensorSpec, Version
    from aiokv.wire.messages import CheckpointFile, Message, RulesState

# --- for every machine ---


class Received(Record, gc=False):
    """A whole frame arrived: its control message, and the slot where its payload landed, if it had one.

    `span` are the lowest and the highest row id that came with it, None if they are not increasing or there are none.
    """

    peer: Peer
    request: int
    message: Message
    slot: Slot | None = None
    nbytes: int = 0
    span: tuple[int, int] | None = None


class Connected(Record):
    """A connection that a `Connect` effect asked for is open and authenticated."""

    peer: Peer


class ConnectFailed(Record):
    """A connection that a `Connect` effect asked for did not come about.

    `error` says why when the other side refused it, rather than not being there.
    """

    peer: Peer
    reason: str
    error: AiokvError | None = None


class PeerLost(Record):
    """An open connection ended, whatever the cause; `error` says why when one of the sides refused to go on."""

    peer: Peer
    reason: str
    error: AiokvError | None = None


class Tick(Record):
    """The machine's `deadline()` has come."""


# --- for a server ---


class Applied(Record, gc=False):
    """The update that an `Apply` effect asked for is done: the chunk is at `version` now.

    With an `error` the value could not be computed, and is still the one before.
    """

    key: Key
    start: int
    version: Version
    error: AiokvError | None = None


class Decoded(Record):
    """What a `Decode` effect asked for is done: the values are in slot `target`.

    With an `error` the payload was malformed, and there is no such slot.
    """

    target: Slot
    error: AiokvError | None = None


class Normed(Record):
    """The sums of squares that a `Norms` effect asked for, for each key in the chunk; none with an `error`."""

    key: Key
    start: int
    version: Version
    phase: int
    sums: Sums
    error: AiokvError | None = None


class Executed(Record):
    """The command that an `Execute` effect asked for is over, with its answer or an error."""

    peer: Peer
    request: int
    outcome: dict[str, Any] | AiokvError


class NodeEnded(Record):
    """The node that a `StartNode` effect asked for is no more, or could not be started."""

    name: str


class Restored(Record):
    """What a `Restore` effect asked for is done; with an `error` all is as it was."""

    peer: Peer
    request: int
    error: AiokvError | None = None


class PartWritten(Record):
    """What a node has to write for the checkpoint of a clock is written, or it says why it could not be."""

    clock: int
    file: CheckpointFile | None = None
    reason: str = ""


class CheckpointRead(Record):
    """What a checkpoint has, or why it can't be used: its clock, the update rule, all parts of keys, how many workers
    there were, and the rounds that were decided for all keys at once.
    """

    clock: int
    rules: RulesState | None
    states: list[ChunkState]
    workers: int
    error: AiokvError | None = None
    rounds: list[RoundsState] = field(default_factory=list)


class SnapshotsLoaded(Record):
    """What a `LoadSnapshots` effect asked for is done, unless there is an error."""

    error: AiokvError | None = None


# --- for the scheduler ---


class ManifestWritten(Record):
    """What a `WriteManifest` effect asked for is done, so that the checkpoint is complete, or it says why not."""

    clock: int
    reason: str = ""


# --- for a node that joins: worker and server ---


class Join(Record):
    """Connect to the scheduler and take a place. `call` is completed when the view is there and all links are up."""

    call: int
    timeout: float


# --- for a worker: calls of its user, numbered by the driver ---


class Operation(enum.StrEnum):
    """What a transfer does with its tensors."""

    INIT = "init"
    PUSH = "push"
    PULL = "pull"
    PUSHPULL = "pushpull"


class KeyOptions(Record):
    """What an init says of its keys, besides their specs.

    `group` are the ranks whose contributions make a round, all of them if it is empty; an empty `policy` is the
    worker's own. `digests` are those of the tensors, where this worker sends them; without them no value is the same as
    one that is there. `lazy` and `initializer` are for row-sparse keys; see `messages.InitRows`.
    """

    policy: str = ""
    group: tuple[Rank, ...] = ()
    digests: tuple[bytes, ...] = ()
    lazy: bool = True
    initializer: Mapping[str, Any] = field(default_factory=dict)


class AwaitRound(Record):
    """Wait until there is something of a key that is newer than a round, or than what this worker has read."""

    call: int
    key: Key
    newer_than: int | None
    timeout: float


class Rows(Record):
    """Which rows of a row-sparse key a call is about: how many lie in each of the key's parts, in their order.

    A tensor that is sent has, for each part, the row ids and then the values. For a pull, `ids` are the row ids, int64
    and increasing, and the tensor that is received into has their values.
    """

    counts: list[int]
    ids: bytes = b""


class Transfer(Record, gc=False):
    """One call with one or more tensors. Tensor i of the call is what `CallMemory(call, i, ...)` refers to.

    `options` are for an init. The last `len(rows)` of the tensors are row-sparse.
    """

    call: int
    operation: Operation
    tensors: list[tuple[Key, TensorSpec]]
    timeout: float
    priority: int = 0
    options: KeyOptions = field(default_factory=KeyOptions)
    rows: list[Rows] = field(default_factory=list)


class EnterBarrier(Record):
    """Wait until every worker of the group is here; an empty one is all of them.

    If one of them has `said` something, the call's result is what was said, by rank. A worker that `leaves` is there
    and has said it, but does not wait for the others. What it has said before at this barrier does not count any more.
    """

    call: int
    name: str
    timeout: float
    group: tuple[Rank, ...] = ()
    said: dict[str, Any] | None = None
    leaves: bool = False


class Finish(Record):
    """Contribute no more, and let nobody wait for this worker."""

    call: int
    timeout: float


class DeleteKeys(Record):
    """Forget the keys; their root also lets the servers forget them. All workers of the keys' groups stand still."""

    call: int
    keys: list[Key]
    timeout: float


class ConfigureOptimizer(Record):
    """Set the servers' update rule, and what becomes of contributions."""

    call: int
    name: str
    params: Mapping[str, Any]
    timeout: float
    merging: Merging = Merging()


class AdjustOptimizer(Record):
    """Change parameters of the servers' update rule from round `since` on; None: from the next one that is pushed."""

    call: int
    params: Mapping[str, Any]
    since: int | None
    timeout: float


class SendCommand(Record):
    """Let every server run a command. The result is a dict of their answers, by the servers' numbers."""

    call: int
    name: str
    params: Mapping[str, Any]
    timeout: float


class ReadTallies(Record):
    """Ask every server what became of contributions. The result is a list of `messages.Tally`."""

    call: int
    timeout: float


class ReportLoss(Record):
    """Tell the server that decides rounds which loss this worker has measured."""

    call: int
    loss: float
    timeout: float


class ChangePolicy(Record):
    """Let keys have another policy, with all workers of their groups; no keys: all but those of policy "sum"."""

    call: int
    policy: str
    keys: list[Key]
    timeout: float


class ConfigureCompression(Record):
    """Compress what is pushed from now on, and what is received, with codecs; an empty name is none."""

    call: int
    name: str
    params: Mapping[str, Any]
    pull_name: str
    pull_params: Mapping[str, Any]
    timeout: float


class RestoreResiduals(Record):
    """The driver has put residuals of these keys in the place of those that it had."""

    call: int
    keys: list[Key]
    timeout: float


class Encoded(Record):
    """What an `Encode` effect asked for is done; with an `error` nothing has become of it, and nothing has changed."""

    call: int
    error: AiokvError | None = None


class KeyRecord(Record):
    """A key and what it was made with, but for its values."""

    key: Key
    spec: TensorSpec
    is_sparse: bool
    options: KeyOptions


class StatePart(Record):
    """Elements, or rows, [start, stop) of a key: all of a chunk, or what a row-sparse one has from row `start` on.

    What is read are the arrays of these `names`, all if empty. What is written makes the chunk if that is not there and
    `creates` is set.
    """

    record: KeyRecord
    start: int
    stop: int
    names: tuple[str, ...] = ()
    creates: bool = False


class ReadState(Record):
    """Fetch what the servers have of some parts; that of part i is received into `CallBuffer(call, i)`.

    The call's result is the version of each part, by its number.
    """

    call: int
    parts: list[StatePart]
    timeout: float
    arrays: bool = True


class WriteState(Record):
    """Replace what the servers have of some parts by tensors of the call, one for each."""

    call: int
    parts: list[StatePart]
    nbytes: list[int]
    timeout: float


class ReadRules(Record):
    """Ask all servers for their update rule; the call's result is a list of `messages.RulesState`."""

    call: int
    timeout: float


class WriteRules(Record):
    """Let all servers go on with an update rule and a clock."""

    call: int
    rules: RulesState
    timeout: float


class Adopt(Record):
    """The servers have these keys, which a load has made: use them as if this worker had initialised them."""

    call: int
    records: list[KeyRecord]


class Resume(Record):
    """Count this worker's next pushes from a clock on; `updates` says how many each key has seen."""

    call: int
    clock: int
    updates: Mapping[Key, int]


class AskMembers(Record):
    """The user wants to know which ranks push in a step, counted from 0."""

    call: int
    step: int
    timeout: float


class PlanLeave(Record):
    """Leave behind one of the next steps; the call is over at once, and `AskMembers` tells which step it is."""

    call: int


class GoOn(Record):
    """Go on where the process was that had this worker's place before; the result is the number of its complete steps.

    To be asked when all keys are initialised, and before the first push.
    """

    call: int
    timeout: float


class Cancel(Record):
    """The caller stopped waiting. What was pushed is still delivered; what was to be received is dropped."""

    call: int


class Depart(Record):
    """Leave the cluster in good order; with `drains` when all that was pushed is answered.

    With `moves_on` it leaves for the next cluster at the same address: a scheduler that is there in place of the one
    that it knows may be that of the next one, and is told nothing of this one.
    """

    call: int
    timeout: float
    drains: bool = False
    moves_on: bool = False


SavingCall = ReadState | WriteState | ReadRules | WriteRules | Adopt | Resume
"""The calls that save and load are made of."""

Stimulus = (
    Received
    | Connected
    | ConnectFailed
    | PeerLost
    | Tick
    | Applied
    | Normed
    | Restored
    | PartWritten
    | CheckpointRead
    | SnapshotsLoaded
    | ManifestWritten
    | Executed
    | NodeEnded
    | Decoded
    | Join
    | AwaitRound
    | Transfer
    | EnterBarrier
    | Finish
    | DeleteKeys
    | ConfigureOptimizer
    | AdjustOptimizer
    | ReadState
    | WriteState
    | ReadRules
    | WriteRules
    | Adopt
    | Resume
    | SendCommand
    | ReadTallies
    | ReportLoss
    | ChangePolicy
    | ConfigureCompression
    | RestoreResiduals
    | Encoded
    | GoOn
    | AskMembers
    | PlanLeave
    | Cancel
    | Depart
)
