"""Between workers and servers: keys, pushes, pulls, rules, policies, and the answers."""

from __future__ import annotations

from typing import Any, ClassVar

from aiokv.wire.messages.base import Message

# --- keys, pushes and pulls ---


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
    `digest` is the root's, of the whole tensor: a second init of the same value is no error. `clock` is that of the
    worker's last push before.
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
    clock: int = 0


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
    clock: int = 0


class Delete(Message):
    """The keys are no more. Answered `Done`; who waits for one of them is refused. `clock` is as in `Init`."""

    keys: tuple[str | int, ...]
    timeout: float
    clock: int = 0


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
    """The update rule for all keys, as data, and what becomes of contributions. Answered `Done`.

    A `trial` only asks whether it can be.
    """

    name: str
    params: dict[str, Any]
    reduction: str
    timeout: float
    staleness_rate: str = "1"
    trial: bool = False


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
    clock: int = 0


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


class ReportLoss(Message):
    """This worker has measured a loss, which policies may go by. Answered `Done`."""

    loss: float
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
    """Every worker of a barrier's group is there; what each of them has said, by rank.

    The scheduler gives each opening of any barrier the next number.
    """

    said: tuple[tuple[int, dict[str, Any]], ...]
    number: int = 0


# --- another policy for keys that are there; see `core.server.policy_changes` ---


class SetPolicy(Message):
    """Keys of one policy and one group, which this rank pushes no longer under that, are to follow another policy.

    Answered `Done` when all ranks of the group have asked and this server follows it with those of the keys that it
    has. `clock` is that of the rank's last push of any key: who joins behind it need not ask. A `trial` only asks
    whether it can be.
    """

    policy: str
    keys: tuple[str | int, ...]
    old: str
    group: tuple[int, ...]
    timeout: float
    clock: int
    trial: bool = False


class Switched(Message):
    """All servers follow the new policy with these keys, so rounds of the old one may wait for all ranks again.

    To the server that decides the old one's rounds. Answered `Done`.
    """

    keys: tuple[str | int, ...]
    old: str
    group: tuple[int, ...]
    timeout: float


# --- a process that takes the place of another one; see `core.worker.going_on` ---


class GetPushes(Message):
    """Answer `Pushes`: how often this worker has pushed elements, or rows, [start, stop) of a key, a chunk."""

    key: str | int
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    timeout: float


class Pushes(Message):
    """How many pushes of a chunk by this worker need not be made again, the clock of the last one, and the policy."""

    count: int
    clock: int
    policy: str


# --- what became of contributions ---


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
