"""Who is in which round, where that depends on who comes first: decided once for all keys, by one server.

A worker's step is a `Token`: its rank and its clock. Keys of one policy and one group are decided together, by the
server with index 0, which sees a step when the first push of it arrives anywhere: every other server asks it when a
step is new to it, and with the answer hears of all rounds that were closed meanwhile. So all chunks of all servers put
the same steps into the same rounds, in the same order. Policies that need no decision (`ChunkPolicy`) cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import earliest
from aiokv.core.effects import Effect, Refuse, Send
from aiokv.core.records import Record, field
from aiokv.errors import AiokvError, ProtocolError, from_code
from aiokv.policy import Closed, RoundPolicy, Token, get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.core.chunk import Chunk
    from aiokv.core.neighbours import Neighbours
    from aiokv.core.roster import Roster
    from aiokv.policy import Decider, Decision
    from aiokv.types import Peer, Rank, Round

LEADER = 0
"""Index of the server that decides."""

REMEMBERED = 4096
"""How many closed rounds, and how many steps of a worker, are kept for those that come late to a chunk."""

Verdict = int | str
"""The round that a step is in, or why it is in none."""

Group = tuple[str, tuple["Rank", ...]]
"""A policy's text, and the ranks that keys with it belong to; empty: all."""


class Question(Record, eq=False):
    """A step that another server was asked about."""

    group: Group
    token: Token


class Asker(Record, eq=False):
    """Another server that waits for a verdict, and the last round that it had heard of."""

    peer: Peer
    request: int
    known: Round


class Held(Record, eq=False):
    """What has to be looked at again: these chunks have steps of which more is known now.

    `accepted` says that nothing more is known than that the step will be in a round. With an `error` the steps can't be
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


class Decisions(Record, eq=False):
    """What is known about the steps and rounds of one group of keys.

    Attributes:
        decider: what decides, on the server that does.
        rounds: the steps of the newest closed rounds.
        newest: the last round that is closed.
        accepted: the steps that will be in a round.
    """

    decider: Decider | None
    rounds: dict[Round, list[Token]] = field(default_factory=dict)
    newest: Round = 0
    accepted: dict[Token, None] = field(default_factory=dict)
    verdicts: dict[Rank, dict[int, Verdict]] = field(default_factory=dict)
    holders: dict[Token, list[Chunk]] = field(default_factory=dict)
    askers: dict[Token, list[Asker]] = field(default_factory=dict)

    def verdict(self, token: Token) -> Verdict | None:
        """Return what was decided about a step."""
        return self.verdicts.get(token.rank, {}).get(token.clock)

    def settle(self, token: Token, verdict: Verdict) -> None:
        """Remember what was decided about a step."""
        self.accepted.pop(token, None)
        known = self.verdicts.setdefault(token.rank, {})
        known[token.clock] = verdict
        if len(known) > REMEMBERED:
            del known[next(iter(known))]

    def close(self, number: Round, tokens: list[Token]) -> None:
        """Remember a round."""
        self.newest = max(self.newest, number)
        self.rounds[number] = tokens
        if len(self.rounds) > REMEMBERED:
            del self.rounds[next(iter(self.rounds))]
        for token in tokens:
            self.settle(token, number)


class Deciding:
    """The part of a `Coordinator` that knows, or decides, which step is in which round.

    Args:
        neighbours: the other servers.
    """

    def __init__(self, neighbours: Neighbours[Chunk | Question]) -> None:
        self._neighbours = neighbours
        self._groups: dict[Group, Decisions] = {}

    def of(self, chunk: Chunk) -> Decisions:
        """Return what is known about the rounds of a chunk.

        Raises:
            ProtocolError: its policy decides no rounds.
        """
        return self._group(group_of(chunk))

    def _group(self, group: Group) -> Decisions:
        found = self._groups.get(group)
        if found is None:
            policy = get_policy(group[0])
            if not isinstance(policy, RoundPolicy):
                raise ProtocolError(f"policy {group[0]} decides each chunk by itself")
            found = Decisions(policy.decider() if self._neighbours.index == LEADER else None)
            self._groups[group] = found
        return found

    # --- steps that come to this server ---

    def arrived(self, chunk: Chunk, token: Token, read: Round, roster: Roster, now: float) -> Decided:
        """Take in that a chunk holds a contribution of a step about which nothing is known."""
        group = group_of(chunk)
        decisions = self._group(group)
        holders = decisions.holders.setdefault(token, [])
        holders.append(chunk)
        if token in decisions.accepted:
            return Decided(held=[Held([chunk], token, None)])
        if len(holders) > 1:
            return Decided()
        if decisions.decider is not None:
            return self._decide(group, token, read, roster, now)
        error = self._neighbours.first_lost([LEADER])
        if error is not None:
            return Decided(held=self._failed(decisions, token, error))
        question = m.Arrived(group[0], group[1], token.rank, token.clock, read, decisions.newest)
        return Decided(self._neighbours.ask(LEADER, question, Question(group, token), now))

    def asked(self, peer: Peer, request: int, message: m.Arrived, roster: Roster, now: float) -> Decided:
        """Take in that another server has seen a step.

        Raises:
            PolicyError, ProtocolError: there is no such policy, or this server does not decide.
        """
        group, token = (message.policy, message.group), Token(message.rank, message.clock)
        decisions = self._group(group)
        if decisions.decider is None:
            raise ProtocolError(f"server {self._neighbours.index} does not decide rounds; server {LEADER} does")
        asker = Asker(peer, request, message.known)
        verdict = decisions.verdict(token)
        if verdict is not None:
            return Decided([_answer(decisions, asker, verdict)])
        decisions.askers.setdefault(token, []).append(asker)
        if token in decisions.accepted:
            return Decided([Send(peer, request, m.Accepted())])
        return self._decide(group, token, message.read, roster, now)

    # --- deciding ---

    def _decide(self, group: Group, token: Token, read: Round, roster: Roster, now: float) -> Decided:
        decisions = self._groups[group]
        assert decisions.decider is not None, "it is asked on the server that decides"
        made = decisions.decider.arrived(token, read, roster.members_of(group[1]), now)
        decided = self._made(group, made)
        if decisions.verdict(token) is None:
            decisions.accepted[token] = None
            decided.held.append(Held(list(decisions.holders.get(token, [])), token, None))
            asking = decisions.askers.get(token, [])
            decided.effects += [Send(asker.peer, asker.request, m.Accepted()) for asker in asking]
            decided = _joined(decided, self._stuck(group, roster))
        return decided

    def _made(self, group: Group, made: Sequence[Decision]) -> Decided:
        decided = Decided()
        decisions = self._groups[group]
        for decision in made:
            if isinstance(decision, Closed):
                decisions.close(decision.round, decision.tokens)
                settled: list[tuple[Token, Verdict]] = [(token, decision.round) for token in decision.tokens]
            else:
                decisions.settle(decision.token, decision.reason)
                settled = [(decision.token, decision.reason)]
            for token, verdict in settled:
                decided.held += self._released(decisions, token, verdict)
                asking = decisions.askers.pop(token, [])
                decided.effects += [_answer(decisions, asker, verdict) for asker in asking]
        return decided

    def _released(self, decisions: Decisions, token: Token, verdict: Verdict) -> list[Held]:
        chunks = decisions.holders.pop(token, [])
        return [Held(chunks, token, verdict)] if chunks else []

    def changed(self, roster: Roster, now: float) -> Decided:
        """Look again at all open rounds, because the members are others."""
        decided = Decided()
        for group, decisions in self._groups.items():
            if decisions.decider is None:
                continue
            made = decisions.decider.changed(roster.members_of(group[1]), now)
            decided = _joined(decided, self._made(group, made))
            decided = _joined(decided, self._stuck(group, roster))
        return decided

    def _stuck(self, group: Group, roster: Roster) -> Decided:
        """Tell those who wait for a round that can't be closed any longer, because too many workers are lost."""
        decisions = self._groups[group]
        lost = self._lost(group, roster)
        if not lost:
            return Decided()
        error = roster.loss(lost, f"round {decisions.newest + 1} of policy {group[0]}")
        decided = Decided()
        for token in decisions.accepted:
            decided.held += self._failed(decisions, token, error)
            asking = decisions.askers.pop(token, [])
            decided.effects += [Refuse(asker.peer, asker.request, error) for asker in asking]
        return decided

    def _lost(self, group: Group, roster: Roster) -> list[Rank]:
        decider = self._groups[group].decider
        if not roster.lost or decider is None:
            return []
        members = roster.members_of(group[1])
        missing = decider.missing(members)
        lost = [rank for rank in missing if rank in roster.lost]
        return lost if len(missing) - len(lost) < decider.needed(members) else []

    def _failed(self, decisions: Decisions, token: Token, error: AiokvError) -> list[Held]:
        # They stay where they are: what was pushed counts if the round is closed after all.
        return [Held(list(decisions.holders.get(token, [])), token, None, error)]

    def missing(self, chunk: Chunk, roster: Roster) -> str:
        """Return for whom the open round waits, for messages."""
        decisions = self.of(chunk)
        if decisions.decider is None:
            return f"server {LEADER} has not closed the round"
        members = roster.members_of(chunk.group)
        needed = decisions.decider.needed(members)
        return f"the round needs {needed} more of rank {roster.labels(decisions.decider.missing(members))}"

    # --- what the deciding server says ---

    def answered(self, question: Question, message: m.Message) -> Decided:
        """Take in what was decided about a step."""
        decisions = self._groups[question.group]
        token = question.token
        match message:
            case m.Accepted():
                decisions.accepted[token] = None
                return Decided(held=[Held(list(decisions.holders.get(token, [])), token, None)])
            case m.Verdict():
                return self._told(question, message)
            case m.Error(code, text, details):
                return Decided(held=self._failed(decisions, token, from_code(code, text, details)))
            case _:
                error = ProtocolError(f"unexpected {type(message).__name__} from server {LEADER}")
                return Decided(held=self._failed(decisions, token, error))

    def _told(self, question: Question, message: m.Verdict) -> Decided:
        group, token = question.group, question.token
        decisions = self._groups[group]
        decided = Decided()
        for number, steps in message.rounds:
            if number <= decisions.newest:
                continue
            tokens = [Token(rank, clock) for rank, clock in steps]
            decisions.close(number, tokens)
            for one in tokens:
                decided.held += self._released(decisions, one, number)
        verdict: Verdict = message.reason or message.round
        if decisions.verdict(token) is None:
            decisions.settle(token, verdict)
            decided.held += self._released(decisions, token, verdict)
        return decided

    def refused(self, question: Question, error: AiokvError) -> Decided:
        """Take in that the deciding server can't be asked."""
        return Decided(held=self._failed(self._groups[question.group], question.token, error))

    # --- ends ---

    def forget_peer(self, peer: Peer) -> None:
        """Forget what a server has asked whose connection is over."""
        for decisions in self._groups.values():
            for token, askers in list(decisions.askers.items()):
                askers[:] = [asker for asker in askers if asker.peer != peer]
                if not askers:
                    del decisions.askers[token]

    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk that is no more."""
        decisions = self._groups.get(group_of(chunk))
        if decisions is None:
            return
        for token, chunks in list(decisions.holders.items()):
            chunks[:] = [other for other in chunks if other is not chunk]
            if not chunks:
                del decisions.holders[token]

    # --- time ---

    def deadline(self) -> float | None:
        """Return the time at which `due` wants to be called."""
        if not self._groups:
            return None
        return earliest(*[one.decider.deadline() for one in self._groups.values() if one.decider is not None])

    def due(self, roster: Roster, now: float) -> Decided:
        """Look again at the rounds whose time has come."""
        decided = Decided()
        for group, decisions in self._groups.items():
            when = decisions.decider.deadline() if decisions.decider is not None else None
            if decisions.decider is not None and when is not None and when <= now:
                decided = _joined(decided, self._made(group, decisions.decider.due(roster.members_of(group[1]), now)))
        return decided


def group_of(chunk: Chunk) -> Group:
    """Return what a chunk is decided together with."""
    return str(chunk.policy), chunk.group


def _answer(decisions: Decisions, asker: Asker, verdict: Verdict) -> Effect:
    since = max(asker.known, decisions.newest - REMEMBERED) + 1
    news = [(one, tuple(decisions.rounds[one])) for one in range(since, decisions.newest + 1)]
    if isinstance(verdict, str):
        return Send(asker.peer, asker.request, m.Verdict(0, verdict, tuple(news)))
    return Send(asker.peer, asker.request, m.Verdict(verdict, "", tuple(news)))


def _joined(first: Decided, second: Decided) -> Decided:
    return Decided(first.effects + second.effects, first.held + second.held)
