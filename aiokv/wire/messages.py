"""The typed control part of every frame. No behaviour: fields, types and the table of frame types.

The same records are what the state machines of `aiokv.core` exchange, over TCP and in the simulator. They are encoded
as MessagePack arrays, so the order of the fields is the protocol: append only, and raise `PROTOCOL_VERSION` for
anything else. `timeout` is always the number of seconds that the receiver has to answer. Of the answers that wait,
those to requests of a higher `priority` leave first.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from aiokv.types import Role

PROTOCOL_VERSION: Final = 1


class Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all control messages."""


# --- handshake: the only frames before authentication ---


class Hello(Message):
    """First frame of the side that connected."""

    cluster: str
    nonce: bytes


class Challenge(Message):
    """The listener's nonce, and its proof that it knows the token."""

    nonce: bytes
    proof: bytes


class Proof(Message):
    """The connecting side's proof that it knows the token."""

    proof: bytes


class Welcome(Message):
    """The listener accepts; every other frame type is allowed from here on."""


class Goodbye(Message):
    """Why this side closes the connection: an error code of `aiokv.errors` and a sentence."""

    code: int
    reason: str


# --- shared memory, between two processes of one host; see `wire.shared` ---


class Share(Message):
    """The side that connected names memory that it has made: its process, its descriptor there, the bytes of each ring
    and what stands at the memory's start.
    """

    pid: int
    descriptor: int
    ring_bytes: int
    nonce: bytes


class Shared(Message):
    """The listener has opened the memory: here is what stands behind the nonce. Empty: it could not, or will not."""

    proof: bytes


class Freed(Message):
    """All payloads before this position of the receiver's own ring are copied: it may write there again."""

    position: int


# --- membership: between the scheduler and all others ---


class Register(Message):
    """A node asks for its place. Answered by a `View` when the cluster is complete, or by an `Error`.

    One that has its place already names its `number`, rank or index, and the `epoch` of the newest view that it knows:
    its connection has ended, or the scheduler was started again.

    Unless `standby` is -1 the node is to hold a copy of the server with that index, as `HostStandby` said.
    """

    role: Role
    name: str
    incarnation: int
    host: str
    port: int
    timeout: float
    number: int = -1
    epoch: int = 0
    standby: int = -1


class WorkerEntry(Message):
    """One worker of a view.

    `state` is "alive", "finished" (here, but without contributions from now on), "left" (in good order), "lost" (with
    the reason), "evicted" (the others go on without it), "away": its process is gone, its place is kept for the next
    one, and what waits for it waits on; or "joining": it is here, but the others do not wait for it yet.

    In rounds it counts from the first clock after `since` on: 0 for a worker of the beginning, and for one that is
    joining and of which that is not known yet.
    """

    rank: int
    name: str
    incarnation: int
    state: str = "alive"
    reason: str = ""
    since: int = 0


class StandbyEntry(Message):
    """The node that holds a copy of a server's parameters, and takes its place when it is lost.

    `state` is "expected" (it has not registered yet, so its address is not known), "filling" (the server copies what it
    has) or "ready". `process` is the name of the node whose process it is in.
    """

    name: str
    process: str
    incarnation: int = 0
    host: str = ""
    port: int = 0
    state: str = "expected"


class ServerEntry(Message):
    """One server of a view and the address under which workers reach it. `state` as in `WorkerEntry`.

    `process` is the name of the node whose process it is in; empty: it is in its own.
    """

    index: int
    name: str
    incarnation: int
    host: str
    port: int
    state: str = "alive"
    reason: str = ""
    standby: StandbyEntry | None = None
    process: str = ""


class View(Message):
    """Who belongs to the cluster, and the settings that all members share.

    `on_worker_loss` is what becomes of the others when a worker is lost: "fail", "shrink" or "respawn".

    Unless `checkpoint_every` is 0 there is a cluster checkpoint after every so many rounds; they are in the folder
    `checkpoints`, and `run` is in their names. `resume` is the folder of the one with which the servers begin.

    `replication` is on how many servers every parameter is: with 2 each has a standby.

    `declared` is how many workers the cluster has begun with; 0: as many as there are in `workers`.
    """

    epoch: int
    workers: tuple[WorkerEntry, ...]
    servers: tuple[ServerEntry, ...]
    heartbeat: float
    chunk_bytes: int
    split_bytes: int
    death_timeout: float
    on_worker_loss: str = "fail"
    checkpoint_every: int = 0
    checkpoints: str = ""
    run: int = 0
    resume: str = ""
    replication: int = 1
    declared: int = 0


class GetView(Message):
    """The scheduler was started again and asks a node for the newest view that it knows. Answered by that `View`."""


class Heartbeat(Message):
    """I am alive. The scheduler answers each with one of its own."""


class Barrier(Message):
    """Answer when every worker of the group has sent this name; an empty group is all of them.

    The answer is `Done`, or `Met` if one of them has `said` something.
    """

    name: str
    timeout: float
    group: tuple[int, ...] = ()
    said: dict[str, Any] | None = None


class Finish(Message):
    """I contribute no more, but stay: no round and no barrier waits for me. Answered `Done`."""


class Leave(Message):
    """I leave in good order. Answered `Done`; the others do not wait for me.

    If it is `early`, my work is not done: where too few are left they wait for somebody in my place.
    """

    early: bool = False


class Stop(Message):
    """The scheduler tells a server that the job is over."""

    reason: str


# --- data: between workers and servers ---


class Attach(Message):
    """A worker says who it is. Answered `Done` once the server has a view in which it is that."""

    rank: int
    name: str
    incarnation: int
    epoch: int
    timeout: float


class Init(Message):
    """Elements [start, stop) of a new key. Its root sends them as payload; the others send none and wait for them.

    `group` are the ranks whose contributions make a round, all of them if it is empty; the first of them is the root.
    `digest` is the root's, of the whole tensor: a second init of the same value is no error.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    policy: str
    timeout: float
    group: tuple[int, ...] = ()
    digest: bytes = b""


class Whole(Message):
    """The call that a push is a part of: it counts when all of it is on its servers, or not at all.

    `call` counts the worker's calls that push, from 1. `parts` of its pushes go to this server, and it goes to so many
    `servers`.
    """

    call: int
    parts: int
    servers: int


class Push(Message):
    """Payload: elements [start, stop) of a contribution, compressed by the codec with number `codec` unless that is 0.

    `sequence` counts this worker's pushes of the key from 1. `read_version` is the version of the chunk that the
    contribution was computed at. With `want_value` the answer is the new value instead of `Done`; it may be compressed
    by the codec with number `value_codec`, as in `Pull`. `clock` is the most pushes that this worker has made of any
    key, this one included. `whole` is there when all pushes of a call are to count together.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    sequence: int
    read_version: int
    want_value: bool
    timeout: float
    priority: int = 0
    clock: int = 0
    codec: int = 0
    value_codec: int = 0
    whole: Whole | None = None


class Pull(Message):
    """Answer with elements [start, stop), at a version that holds this worker's push number `at_least`.

    Unless `value_codec` is 0 the answer may be a compressed difference; see `Value`. Unless `at_least_round` is 0 the
    value is to have all rounds up to that; if it does not by `timeout`, the answer is what is there. Unless `before` is
    0 it is to be the value from which this worker's push of that number is computed, in a round of all workers.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    at_least: int
    timeout: float
    priority: int = 0
    value_codec: int = 0
    at_least_round: int = 0
    before: int = 0


class InitBundle(Message):
    """New small keys of one dtype that are to be decided and sent together. Answered `Bundled`.

    The root sends their elements as payload, one key after the other; the others send none and wait. The rest is as in
    `Init`.
    """

    keys: tuple[str | int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    policy: str
    timeout: float
    group: tuple[int, ...] = ()
    digests: tuple[bytes, ...] = ()


class Delete(Message):
    """The keys are no more. Answered `Done`; who waits for one of them is refused."""

    keys: tuple[str | int, ...]
    timeout: float


class PushBundle(Message):
    """Payload: a contribution to every key of a bundle, one after the other, each compressed alone. The rest is as in
    `Push`.
    """

    bundle: int
    sequence: int
    read_version: int
    want_value: bool
    timeout: float
    priority: int = 0
    clock: int = 0
    codec: int = 0
    value_codec: int = 0
    whole: Whole | None = None


class PullBundle(Message):
    """Answer with all keys of a bundle, one after the other. The rest is as in `Pull`."""

    bundle: int
    at_least: int
    timeout: float
    priority: int = 0
    value_codec: int = 0
    before: int = 0

    at_least_round: ClassVar[int] = 0


class SetOptimizer(Message):
    """The update rule for all keys, as data, and what becomes of contributions. Answered `Done`."""

    name: str
    params: dict[str, Any]
    reduction: str
    timeout: float
    staleness_rate: str = "1"


class ChangeOptimizer(Message):
    """New values of the rule's parameters for updates whose clock is at least `since`. Answered `Done`."""

    since: int
    params: dict[str, Any]
    timeout: float


class InitRows(Message):
    """Rows [start, stop) of a new row-sparse key. The rest is as in `Init`.

    The root sends rows that have values as payload: their ids, as in `PushRows`, then the values. All other rows are
    made by `initializer` when they are used first. With `lazy`, an update changes only rows that got a gradient.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    first: int
    count: int
    total: int
    policy: str
    timeout: float
    group: tuple[int, ...]
    digest: bytes
    lazy: bool
    initializer: dict[str, Any]


class PushRows(Message):
    """Payload: a contribution to some of the rows [start, stop) of a key. The rest is as in `Push`.

    The payload is `count` row ids, int64 and increasing, then the values of these rows. A contribution of `total` rows
    may come in several messages: `first` is how many rows came before. All are answered when the last one, which makes
    the push, has come.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    first: int
    count: int
    total: int
    sequence: int
    read_version: int
    timeout: float
    priority: int
    clock: int
    whole: Whole | None = None

    want_value: ClassVar[bool] = False
    value_codec: ClassVar[int] = 0


class PullRows(Message):
    """Answer with the values of some of the rows [start, stop) of a key. The rest is as in `Pull`.

    `rows` are the row ids, int64 and increasing; the values come in their order.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    rows: bytes
    at_least: int
    timeout: float
    priority: int
    at_least_round: int = 0
    before: int = 0

    value_codec: ClassVar[int] = 0


class AwaitRound(Message):
    """Answer `Reached` when the first chunk of a key is newer than round `newer_than`.

    That is a version of the chunk where rounds are not decided for all keys at once.
    """

    key: str | int
    newer_than: int
    timeout: float


class SetCompression(Message):
    """This worker compresses gradients so from now on, and wants values so. Answered `Done`; empty names: not at all.

    `change` counts this worker's changes from 1: every worker's change of that number must be the same.
    """

    change: int
    name: str
    params: dict[str, Any]
    pull_name: str
    pull_params: dict[str, Any]
    timeout: float


class Command(Message):
    """Run a registered command. Answered `CommandResult`."""

    name: str
    params: dict[str, Any]
    timeout: float


# --- answers, under the request id they answer ---


class Done(Message):
    """The request was carried out; `version` is the chunk's version where there is one.

    `dropped` says why a contribution is in no update, and will be in none; see `aiokv.policy`.
    """

    version: int = 0
    dropped: str = ""


class Bundled(Message):
    """The keys are there; `bundle` is the server's number for them in this order."""

    bundle: int


class Value(Message):
    """Payload: the elements at `version`; at that version or newer where keys of a bundle differ.

    A worker that asks for compressed values keeps a replica of each chunk. The first answer is the elements as they
    are, and so becomes the replica; those with a `codec`, which is then not 0, say by what the elements differ from it.
    `dropped` as in `Done`. `round` is the last round that the value has, where rounds are decided for all keys at once.
    """

    version: int
    codec: int = 0
    dropped: str = ""
    round: int = 0


class CommandResult(Message):
    """What a command has returned."""

    result: dict[str, Any]


class Error(Message):
    """The request was refused: a code of `aiokv.errors`, the text and the details for the caller."""

    code: int
    message: str
    details: dict[str, Any]


class Reached(Message):
    """The first chunk of a key is at this round, or version; see `AwaitRound`."""

    round: int


class Met(Message):
    """Every worker of a barrier's group is there; what each of them has said, by rank."""

    said: tuple[tuple[int, dict[str, Any]], ...]


# --- between servers ---


class AttachServer(Message):
    """A server says who it is. Answered `Done` once the other one has a view in which it is that."""

    index: int
    name: str
    incarnation: int
    epoch: int
    timeout: float


class Sums(Message):
    """Sums of squares of the chunk of a key that begins at `start`, to the key's home: the server of its element 0.

    They are those of `phase` before the update that makes `version`; none: they could not be computed. Answered
    `Totals` when the sums of all chunks are there.
    """

    key: str | int
    start: int
    version: int
    phase: int
    sums: tuple[float, ...]


class Totals(Message):
    """The sums of all chunks of a key, added in the order of the chunks."""

    totals: tuple[float, ...]


# --- saving: what one worker reads from the servers, and gives to those of another cluster ---


class GetState(Message):
    """Answer `State`: elements, or rows, [start, stop) of a key, which are a chunk, and what the rule keeps for them.

    Without `arrays` the payload has no arrays, only what is said of them; `names` are those that it has, all if empty.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    arrays: bool
    timeout: float
    names: tuple[str, ...] = ()


class State(Message):
    """Payload: arrays by name in the safetensors format (see `aiokv.saving`), at `version`."""

    version: int


class PutState(Message):
    """Payload: what a `State` had. It takes the place of what is there; versions and sequences go on. Answered `Done`.

    What is not in the payload stays: without values only the state of the rule changes. A key that is not there is
    made if there is a `policy`; what follows is as in `Init` and, of a `sparse` one, in `InitRows`. `first` is where
    the chunk begins whose rows from `start` on these are.
    """

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    timeout: float
    policy: str = ""
    group: tuple[int, ...] = ()
    sparse: bool = False
    first: int = 0
    lazy: bool = True
    initializer: dict[str, Any] = {}


class GetRules(Message):
    """Answer `RulesState`."""

    timeout: float


class RulesState(Message):
    """The update rule and what became of it; `name` is empty when none is set.

    `changes` are, by the first clock that they are for, the parameters that have changed. `clock` is that of the newest
    update.
    """

    name: str
    params: dict[str, Any]
    reduction: str
    changes: tuple[tuple[int, dict[str, Any]], ...]
    clock: int
    staleness_rate: str = "1"


class PutRules(Message):
    """Go on with a rule, its changes and a clock, as `RulesState` had them. Answered `Done`."""

    name: str
    params: dict[str, Any]
    reduction: str
    changes: tuple[tuple[int, dict[str, Any]], ...]
    clock: int
    timeout: float
    staleness_rate: str = "1"


# --- calls that count as a whole, between servers; see `core.whole_calls` ---


class Gathered(Message):
    """All that goes to this server of a worker's call is here; with 0 `servers`, it will never be. Does it count?

    `after` are calls that the worker has made before it of the same keys. Answered by a `Settled`.
    """

    rank: int
    incarnation: int
    call: int
    servers: int
    after: tuple[int, ...] = ()


class Settled(Message):
    """The call counts, on all servers; or, with a reason, on none."""

    reason: str


# --- rounds that are decided once for all keys, between servers; see `core.decisions` ---


class Arrived(Message):
    """This server has seen a step of a worker, for keys of a policy and a group: which round is it in?

    `read` is the last round in the values that it was computed from, `known` the last one that this server has heard
    of. Answered by `Accepted`, if it has to wait, and by a `Verdict`.
    """

    policy: str
    group: tuple[int, ...]
    rank: int
    clock: int
    read: int
    known: int


class Accepted(Message):
    """The step will be in a round; the `Verdict` follows."""


class Verdict(Message):
    """The step is in a round, or, with a reason, in none.

    `rounds` are those that were closed since the last known one: each with the ranks and clocks of its steps.
    """

    round: int
    reason: str
    rounds: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class GetRounds(Message):
    """Answer a `Verdict` about no step, with the rounds that were closed since the last `known` one."""

    policy: str
    group: tuple[int, ...]
    known: int


class GetTally(Message):
    """Answer `Tally`."""

    timeout: float


class RankTally(Message):
    """What became of one worker's contributions to the chunks of a server.

    `dropped` are counted by reason, `staleness` by the number of versions between the one that was read and the one
    that was changed. `waited` is how long its reads were held back, in seconds; `duplicates` came more than once.
    """

    applied: int = 0
    dropped: dict[str, int] = {}
    staleness: dict[int, int] = {}
    waited: float = 0.0
    duplicates: int = 0


class Tally(Message):
    """The tallies of all workers, by rank."""

    ranks: dict[int, RankTally]


# --- another policy for keys that are there; see `core.policy_changes` ---


class SetPolicy(Message):
    """Keys of one policy and one group, which this rank pushes no longer under that, are to follow another policy.

    Answered `Done` when all ranks of the group have asked and this server follows it with those of the keys that it
    has.
    """

    policy: str
    keys: tuple[str | int, ...]
    old: str
    group: tuple[int, ...]
    timeout: float


class Switched(Message):
    """All servers follow the new policy with these keys, so rounds of the old one may wait for all ranks again.

    To the server that decides the old one's rounds. Answered `Done`.
    """

    keys: tuple[str | int, ...]
    old: str
    group: tuple[int, ...]
    timeout: float


# --- who looks on ---


class GetWaiting(Message):
    """For what does each request wait that you have not answered? From anybody who knows the token."""


class WaitingCall(Message):
    """A request that waits: whose it is (empty: not known), what it is about, why it is not answered, and since when.

    `ranks` are those that it waits for. `seconds` is how long it has waited.
    """

    who: str
    what: str
    reason: str
    seconds: float
    ranks: tuple[int, ...] = ()
    key: str | int | None = None
    round: int | None = None


class MemberState(Message):
    """A member as the scheduler knows it. `number` is its rank or index, -1 before it has one.

    `seconds` is how long ago it was last heard.
    """

    role: Role
    number: int
    name: str
    state: str
    reason: str
    host: str
    port: int
    seconds: float


class Waiting(Message):
    """The answer to `GetWaiting`; only a scheduler knows the members."""

    epoch: int
    calls: tuple[WaitingCall, ...]
    members: tuple[MemberState, ...] = ()


# --- checkpoints of the whole cluster, between the scheduler and all others; see `core.cluster_checkpoints` ---


class CheckpointAt(Message):
    """The scheduler wants a checkpoint of all updates up to a clock, besides the regular ones. Answered by
    `CheckpointClock`.
    """

    clock: int


class CheckpointClock(Message):
    """It will be made, if the newest clock so far is not past that one; otherwise it can't be any longer."""

    clock: int
    newest: int


class CheckpointFile(Message):
    """A file of a checkpoint: its name, its length, and the BLAKE2b of it and of its first `head_nbytes`, in hex."""

    name: str
    nbytes: int
    checksum: str
    head_nbytes: int
    head_checksum: str


class CheckpointPart(Message):
    """To the scheduler: a server has written its part of the checkpoint of a clock, or a worker is past that clock.

    A worker has a file only if it compresses. With a `reason` there will be no such part.
    """

    clock: int
    file: CheckpointFile | None = None
    reason: str = ""


class CheckpointRest(Message):
    """To the servers: all workers are past the clock, so what has not changed since then will not change any more."""

    clock: int


class CheckpointDropped(Message):
    """From the scheduler: there will be no checkpoint of this clock."""

    clock: int


# --- a process that takes the place of another one; see `core.going_on` ---


class GetPushes(Message):
    """Answer `Pushes`: how often this worker has pushed elements, or rows, [start, stop) of a key, a chunk."""

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    timeout: float


class Pushes(Message):
    """How many pushes of a chunk have come from this worker, and the clock of the last one."""

    count: int
    clock: int


# --- standbys, between the scheduler and the servers; see `core.standbys` ---


class HostStandby(Message):
    """From the scheduler: start a node with this name in your process, which registers as the standby of an index."""

    index: int
    name: str


class StandbyReady(Message):
    """To the scheduler: the standby with this name has all that this server has, and every answer waits for it."""

    index: int
    name: str


class DropStandby(Message):
    """To the scheduler: the standby with this name can't be reached. A view without it says that it counts no more."""

    index: int
    name: str


class LeaveServer(Message):
    """This process of servers wants to end. Answered `Done` when others serve all that it had."""


# --- copies, from a server to its standby; see `core.copying` and `core.standby` ---


class AttachStandby(Message):
    """A server says to its standby who it is. Answered by a `Replicated`: what has come from this process so far.

    It is answered when the standby has a view in which it is that.
    """

    index: int
    name: str
    incarnation: int
    epoch: int
    timeout: float


class RankCount(Message):
    """What a chunk knows of a rank: how many of its pushes are in the value, how many were when its policy began, and
    the clock of the last one.
    """

    rank: int
    count: int
    before: int
    clock: int


class Copy(Message):
    """All that a server has of a chunk. Payload: value and state of the rule, in the safetensors format.

    The chunk is elements [start, stop) of one key; of several `keys` it is all of each, and `start` is -1. With the
    version `since` its policy began. `number` counts what is sent to a standby, here and in the messages below. Of a
    `sparse` key, start and stop are rows, and what follows is as in `InitRows`.
    """

    number: int
    keys: tuple[str | int, ...]
    shapes: tuple[tuple[int, ...], ...]
    digests: tuple[bytes, ...]
    dtype: str
    start: int
    stop: int
    policy: str
    group: tuple[int, ...]
    version: int
    since: int
    counts: tuple[RankCount, ...]
    sparse: bool = False
    lazy: bool = True
    initializer: dict[str, Any] = {}


class Replicate(Message):
    """The update that makes `version` of a chunk. Payload: the sum of the contributions, as the server has it.

    `parts` are the contributions in the order of the sum: rank, sequence, version read, and clock. The sum is to be
    divided by `divisor`; `clock`, `norms` and `keep` as in `core.effects.Apply`. Of a row-sparse chunk the payload are
    the contributions themselves, one after the other, which have these `lengths`, and `factors` as in `ApplyRows`.
    """

    number: int
    key: str | int
    start: int
    version: int
    parts: tuple[tuple[int, int, int, int], ...]
    clock: int
    divisor: int
    norms: tuple[tuple[tuple[float, ...], ...], ...] = ()
    keep: bool = False
    lengths: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()


class CopySettings(Message):
    """All that a server knows besides its chunks: the update rule, the changes of compression in their order, each with
    the rank that was the first to ask for it, and the numbers of its bundles. The next one gets number `next_bundle`.
    """

    number: int
    rules: RulesState
    compressions: tuple[tuple[int, SetCompression], ...]
    bundles: tuple[tuple[int, tuple[str | int, ...]], ...]
    next_bundle: int


class ForgetKey(Message):
    """A key is no more."""

    number: int
    key: str | int


class CopyTotals(Message):
    """The newest totals of a key whose home the server is, by version and phase; nobody has heard of them before."""

    number: int
    key: str | int
    totals: tuple[tuple[int, int, tuple[float, ...]], ...]


class Replicated(Message):
    """All is here up to this number."""

    number: int


# --- workers that join while training goes on; see `core.admission` ---


class Enter(Message):
    """Let me count, from a boundary between rounds on. Answered `Entered` when all others are past that."""

    timeout: float


class Entered(Message):
    """You count in all rounds after a clock."""

    clock: int


class Boundary(Message):
    """The scheduler asks servers and workers whether a rank may count in all rounds after a clock. Answered
    `BoundaryClock`.

    Who says so does nothing beyond that clock before there is another view, or another boundary. One whose clock is 0
    says that nobody is to join.
    """

    clock: int
    rank: int


class BoundaryClock(Message):
    """The newest clock that this node has gone to; it is beyond the one that was asked for if that is too early.

    A `reason` says why nobody can join at all. A server says whether with any of its keys a worker `waits` for others.
    """

    clock: int
    newest: int
    reason: str = ""
    waits: bool = False


class Passed(Message):
    """A worker has begun with what comes after a boundary, and has answers to all that it had pushed before it."""

    clock: int


FRAME_TYPES: Final[dict[int, type[Message]]] = {
    1: Hello,
    2: Challenge,
    3: Proof,
    4: Welcome,
    5: Goodbye,
    6: Share,
    7: Shared,
    8: Freed,
    16: Register,
    17: View,
    18: Heartbeat,
    19: Barrier,
    20: Leave,
    21: Stop,
    22: Finish,
    32: Attach,
    33: Init,
    34: Push,
    35: Pull,
    36: SetOptimizer,
    37: InitBundle,
    38: PushBundle,
    39: PullBundle,
    40: ChangeOptimizer,
    41: Delete,
    42: InitRows,
    43: PushRows,
    44: PullRows,
    45: AwaitRound,
    48: Done,
    49: Value,
    50: Error,
    51: Bundled,
    52: Reached,
    64: AttachServer,
    65: Sums,
    66: Totals,
    70: SetCompression,
    72: GetState,
    73: State,
    74: PutState,
    75: GetRules,
    76: Command,
    77: CommandResult,
    78: RulesState,
    79: PutRules,
    80: Met,
    81: GetRounds,
    82: Arrived,
    83: Accepted,
    84: Verdict,
    85: GetTally,
    86: Tally,
    87: SetPolicy,
    88: Switched,
    89: GetPushes,
    90: Pushes,
    91: Enter,
    92: Entered,
    93: Boundary,
    94: BoundaryClock,
    95: Gathered,
    96: Settled,
    97: GetView,
    98: Passed,
    100: CheckpointAt,
    101: CheckpointClock,
    102: CheckpointPart,
    103: CheckpointRest,
    104: CheckpointDropped,
    106: GetWaiting,
    107: Waiting,
    110: HostStandby,
    111: StandbyReady,
    112: DropStandby,
    113: LeaveServer,
    114: AttachStandby,
    115: Copy,
    116: Replicate,
    117: CopySettings,
    118: ForgetKey,
    119: Replicated,
    120: CopyTotals,
}
"""Frame type number -> the class of its control message."""

TYPE_OF: Final[dict[type[Message], int]] = {cls: number for number, cls in FRAME_TYPES.items()}

WITH_PAYLOAD: Final[frozenset[type[Message]]] = frozenset(
    {Init, InitBundle, InitRows, Push, PushBundle, PushRows, Value, State, PutState, Copy, Replicate}
)
"""The only messages that array bytes may follow."""
