"""From a server to its standby; see `core.server.copies.copying` and `core.server.copies.standby`."""

from __future__ import annotations

from typing import Any

from aiokv.wire.messages.base import Message
from aiokv.wire.messages.data import SetCompression
from aiokv.wire.messages.saving import RulesState


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
    the clock of the last one. Where pushes may be dropped, which count all the same, the last one that is `made`.

    `joined` is how many are in the value of one that has joined and pushed nothing since; `count` is only the number
    with which it begins then. -1: it has not.
    """

    rank: int
    count: int
    before: int
    clock: int
    made: int = 0
    joined: int = -1


class Copy(Message):
    """All that a server has of a chunk. Payload: value and state of the rule, in the safetensors format.

    The chunk is elements [start, stop) of one key; of several `keys` it is all of each, and `start` is -1. With the
    version `since` its policy began. `number` counts what is sent to a standby, here and in the messages below. Of a
    `sparse` key, start and stop are rows, and what follows is as in `InitRows`.

    Where one server decides the rounds, `first` is the first that is not made of it, and `before` the last one in each
    of the versions before, as far as that is known; `former` is such a policy that it had before.

    `previous` is the version before that a process may need which takes the place of a lost worker; -1: none is kept.
    Unless it is `version` itself the payload has the value of it too; of a table the rows that are others in it.
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
    first: int = 0
    before: tuple[int, ...] = ()
    former: str = ""
    previous: int = -1


class Replicate(Message):
    """The update that makes `version` of a chunk. Payload: the sum of the contributions, as the server has it.

    `parts` are the contributions in the order of the sum: rank, sequence, version read, and clock. The sum is to be
    divided by `divisor`; `clock`, `norms` and `keep` as in `core.effects.Apply`. Of a row-sparse chunk the payload are
    the contributions themselves, one after the other, which have these `lengths`, and `factors` as in `ApplyRows`.
    `round` is the round that it is made of, where one server decides these.
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
    round: int = 0


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


class CopyDecisions(Message):
    """What was decided about steps of workers, in its order, for all keys of a policy and a group of ranks; nobody has
    heard of it before.

    Each of the `steps` is a rank, a clock, the round that it is in, or 0, and why it is in none; without a reason it
    will be in a later one, and its worker may have been told so. `known` is what the decider knows of ranks besides,
    and `leaving` the ranks that have asked for another policy, by the keys.
    """

    number: int
    policy: str
    group: tuple[int, ...]
    steps: tuple[tuple[int, int, int, str], ...]
    known: tuple[tuple[int, int], ...]
    leaving: tuple[tuple[tuple[str | int, ...], tuple[int, ...]], ...]


class CopyDropped(Message):
    """A push to a chunk is in no update, and its worker will be told so."""

    number: int
    key: str | int
    start: int
    rank: int
    sequence: int
    clock: int
    reason: str


class CopyContribution(Message):
    """A push to a chunk whose worker is answered before it is in a value. Payload: as it had.

    `read` is the version that the worker had read. It had so many bytes, unless it was decoded to a higher precision.
    """

    number: int
    key: str | int
    start: int
    rank: int
    sequence: int
    read: int
    clock: int
    nbytes: int


class CopyPush(Message):
    """A push of a `call` that counts as a whole, of a worker's process; see `core.server.rounds.whole_calls`.

    Payload: as it had. `after` are calls that have to be decided before, as in `Gathered`. `kind` says what `push` is
    in MessagePack: 0 for a `Push`, 1 for a `PushBundle`, 2 for a `PushRows`. It is for `keys`, whose elements are of
    `dtype`, and has so many bytes, unless it was decoded to a higher precision. `span` are the lowest and the highest
    of its row ids.
    """

    number: int
    rank: int
    incarnation: int
    call: int
    after: tuple[int, ...]
    kind: int
    push: bytes
    keys: tuple[str | int, ...]
    dtype: str
    nbytes: int
    span: tuple[int, int] | None = None


class CopySettled(Message):
    """What was decided about calls, each by rank, incarnation and number: why it does not count, or nothing."""

    number: int
    calls: tuple[tuple[int, int, int, str], ...]


class Replicated(Message):
    """All is here up to this number."""

    number: int


class FillAgain(Message):
    """From a standby: all that comes goes on to its own standby, with this name; send it all that there is, too."""

    name: str
