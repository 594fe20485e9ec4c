"""Between servers: sums over whole tensors, and what is decided once for all keys."""

from __future__ import annotations

from aiokv.wire.messages.base import Message

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


# --- calls that count as a whole, between servers; see `core.server.rounds.whole_calls` ---


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


# --- rounds that are decided once for all keys, between servers; see `core.server.rounds.decisions` ---


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
