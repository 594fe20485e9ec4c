"""Who is in which round, where that depends on who comes first: decided once for all keys, by one server.

A worker's step is a `Token`: its rank and its clock. Keys of one policy and one group are decided together, by the
server with index 0, which sees a step when the first push of it arrives anywhere: every other server asks it when a
step is new to it, and with the answer hears of all rounds that were closed meanwhile. So all chunks of all servers put
the same steps into the same rounds, in the same order. Policies that need no decision (`ChunkPolicy`) cost nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Send
from aiokv.core.records import Record, field
from aiokv.policy import Token, get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.core.roster import Roster
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.errors import AiokvError
    from aiokv.policy import Decider
    from aiokv.types import Key, Peer, Rank, Round

REMEMBERED = 50_000
"""How many steps are kept, with the rounds that are made of them, for those that come late to a chunk or a server.

All of them have to fit in the control part of one message; a round of one step takes 16 bytes.
"""

Verdict = int | str
"""The round that a step is in, or why it is in none."""

Group = tuple[str, tuple["Rank", ...]]
"""A policy's text, and the ranks that keys with it belong to; empty: all."""


class Question(Record, eq=False):
    """A step that another server was asked about; without a `token` only what rounds were closed."""

    decisions: Decisions
    token: Token | None
    read: Round


class Held(Record, eq=False):
    """What has to be looked at again: these chunks have a step of which more is known now.

    Without a verdict nothing more is known than that the step will be in a round; with an `error`, that it can't be
    decided for now.
    """

    chunks: list[Chunk]
    token: Token
    verdict: Verdict | None
    error: AiokvError | None = None


class Decided(Record, eq=False):
    """What came of a step: effects, and what is to be looked at again."""

    effects: list[Effect] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def add(self, other: Decided) -> None:
        """Put what came of another step behind."""
        self.effects += other.effects
        self.held += other.held


class Decisions(Record, eq=False):
    """What is known about the steps and rounds of one group of keys.

    Attributes:
        group: the group.
        decider: what decides, on the server that does.
        newest: the last round that is closed.
        rounds: the steps of the newest closed rounds.
        verdicts: what was decided about the newest steps.
        seen: the last step of each rank of which something has come to this server.
        before: the one before that.
        counts: how many steps of each rank are decided.
        blocked: chunks whose next round waits for more of a rank.
        settled: the last round that was closed when a rank's last step was decided.
        accepted: the steps that will be in a round.
        holders: the chunks that have contributions of a step that is not decided.
        askers: the requests of other servers about such a step.
        told: the last round that the server at the other end of a connection was told.
        before_end: the last one that a server was told over its connection before, by its index; it may not have come.
        unasked: steps about which the deciding server could not be asked, and what they have read.
        resumed: the last round that was closed when this server took the place of another one, which may have told it.
        passed: the clock of each rank's last step that is decided.
        high: the newest clock of all steps in rounds.
        highs: what that was when each of the newest rounds was closed.
        known: what the decider knew of ranks behind the last round; see `Decider.known`.
        leaving: by the keys that are to leave the group, the ranks that have asked for that; on the deciding server.
        early: ranks that have joined, and push before the view that lets rounds wait for them is here; also there.
    """

    group: Group
    decider: Decider | None
    newest: Round = 0
    rounds: dict[Round, list[Token]] = field(default_factory=dict)
    verdicts: OrderedDict[Token, Verdict] = field(default_factory=OrderedDict)
    seen: dict[Rank, int] = field(default_factory=dict)
    before: dict[Rank, int] = field(default_factory=dict)
    counts: dict[Rank, int] = field(default_factory=dict)
    blocked: dict[Rank, dict[Chunk, None]] = field(default_factory=dict)
    settled: dict[Rank, Round] = field(default_factory=dict)
    accepted: dict[Token, None] = field(default_factory=dict)
    holders: dict[Token, list[Chunk]] = field(default_factory=dict)
    askers: dict[Token, list[RequestName]] = field(default_factory=dict)
    told: dict[Peer, Round] = field(default_factory=dict)
    before_end: dict[int | None, Round] = field(default_factory=dict)
    unasked: dict[Token, Round] = field(default_factory=dict)
    resumed: Round = 0
    passed: dict[Rank, int] = field(default_factory=dict)
    high: int = 0
    highs: dict[Round, int] = field(default_factory=dict)
    known: dict[Rank, int] = field(default_factory=dict)
    leaving: dict[tuple[Key, ...], dict[Rank, None]] = field(default_factory=dict)
    early: dict[Rank, None] = field(default_factory=dict)

    @property
    def per_step(self) -> bool:
        """Whether nobody waits for others under the policy of the group."""
        return get_policy(self.group[0]).per_step

    @property
    def goes_on(self) -> bool:
        """Whether workers go on when their step will be in a round; only what decides knows that it will."""
        return self.decider is not None and not get_policy(self.group[0]).waits

    def come(self, token: Token) -> Iterable[Chunk]:
        """Take note that something of a step has come; return the chunks that no longer wait for earlier ones."""
        if token.clock <= self.seen.get(token.rank, 0):
            return ()
        self.before[token.rank] = self.seen.get(token.rank, 0)
        self.seen[token.rank] = token.clock
        return self.blocked.pop(token.rank, ())

    def step_before(self, token: Token) -> int:
        """Return the last step of a rank before this one of which something has come to this server; 0: none."""
        seen = self.seen.get(token.rank, 0)
        return self.before.get(token.rank, 0) if seen == token.clock else seen

    def settle(self, token: Token, verdict: Verdict) -> None:
        """Remember what was decided about a step; the oldest is forgotten, and the round that it is in."""
        self.accepted.pop(token, None)
        self.unasked.pop(token, None)
        self.settled[token.rank] = self.newest
        self.counts[token.rank] = self.counts.get(token.rank, 0) + 1
        self.passed[token.rank] = max(token.clock, self.passed.get(token.rank, 0))
        self.verdicts[token] = verdict
        if len(self.verdicts) > REMEMBERED:
            _, oldest = self.verdicts.popitem(last=False)
            if isinstance(oldest, int):
                self.rounds.pop(oldest, None)
                self.highs.pop(oldest, None)

    def close(self, number: Round, tokens: Sequence[Token]) -> None:
        """Remember a round, or more steps of it."""
        self.newest = number
        self.rounds.setdefault(number, []).extend(tokens)
        self.high = self.highs[number] = max([self.high, *[token.clock for token in tokens]])
        for token in tokens:
            self.settle(token, number)

    def put_in_order(self) -> None:
        """Put rounds in their order of which older ones were heard of after newer ones."""
        self.rounds = dict(sorted(self.rounds.items()))
        high, self.highs = 0, {}
        for number, tokens in self.rounds.items():
            high = self.highs[number] = max([high, *[token.clock for token in tokens]])
            self.settled.update((token.rank, number) for token in tokens)
        self.newest = max(self.rounds)

    def members(self, roster: Roster) -> list[Rank]:
        """Return the ranks that count."""
        members = roster.members_of(self.group[1])
        coming = roster.newcomers if roster.newcomers and get_policy(self.group[0]).in_turn else {}
        if not (self.leaving or roster.leavers or self.early or coming):
            return members
        leaving = {rank for ranks in self.leaving.values() for rank in ranks}
        leaving.update(rank for rank, until in roster.leavers.items() if self.passed.get(rank, 0) >= until)
        early = [rank for rank in self.early if roster.is_pushing(rank)]
        # They have a turn as soon as all others are at the step with which they begin, so that all are at the same one.
        reached = min([self.passed.get(rank, 0) for rank in members], default=math.inf) if coming else 0
        entered = [
            rank for rank, since in coming.items() if since <= reached and (rank in self.group[1] or not self.group[1])
        ]
        return [rank for rank in sorted({*members, *early, *entered}) if rank not in leaving]

    def catch_up(self, ranks: Iterable[Rank], clock: int) -> None:
        """Count what ranks have of keys that come to the group behind a clock as the value of all rounds so far."""
        for rank in ranks:
            self.settled[rank], self.passed[rank] = self.newest, max(clock, self.passed.get(rank, 0))

    def reported(self, rank: Rank, loss: float) -> None:
        """Take note of the loss that a worker has measured, where rounds are decided."""
        if self.decider is not None:
            self.decider.reported(rank, loss)

    def hold(self, token: Token, error: AiokvError | None = None) -> Held:
        """Return who holds a step that is not decided, to be told that it will be in a round, or can't be for now."""
        # They stay where they are: what was pushed counts if the round is closed after all.
        return Held(list(self.holders.get(token, [])), token, None, error)

    def release(self, token: Token, verdict: Verdict) -> list[Held]:
        """Return who holds a step that is decided now."""
        chunks = self.holders.pop(token, [])
        return [Held(chunks, token, verdict)] if chunks else []

    def answer(self, name: RequestName, verdict: Verdict) -> Effect:
        """Tell another server what was decided about a step, and the rounds that it has not heard of yet."""
        peer, request = name
        since = max(self.told[peer] + 1, next(iter(self.rounds), self.newest + 1))
        news = [(one, tuple(self.rounds[one])) for one in range(since, self.newest + 1)]
        self.told[peer] = self.newest
        if isinstance(verdict, str):
            return Send(peer, request, m.Verdict(0, verdict, tuple(news)))
        return Send(peer, request, m.Verdict(verdict, "", tuple(news)))
