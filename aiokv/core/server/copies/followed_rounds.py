"""What a standby hears of rounds that one server decides, until it takes the place of its own server.

A server tells its standby of every decision that it makes or hears of before it does anything with it, so a round that
was announced once never changes. Steps of which nothing is decided are told only where workers go on nevertheless. Who
takes a place is asked about the others again, and pushed them again.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from aiokv.core.server.rounds.decisions import Decisions
from aiokv.core.server.rounds.open_rounds import OpenRounds
from aiokv.errors import ProtocolError
from aiokv.policy import Token
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.decisions import Group
    from aiokv.types import Key, Rank

STEPS = 4096
"""How many decided steps are told in one message."""


def decided(decisions: Decisions, tokens: Iterable[Token]) -> m.CopyDecisions:
    """Return what a standby has to hear of steps that are decided, or on which workers go on; without its number."""
    verdicts = [(token, decisions.verdicts.get(token, "")) for token in tokens]
    steps = [(*token, 0, verdict) if isinstance(verdict, str) else (*token, verdict, "") for token, verdict in verdicts]
    known = tuple(decisions.known.items())
    leaving = tuple((keys, tuple(ranks)) for keys, ranks in decisions.leaving.items())
    return m.CopyDecisions(0, *decisions.group, tuple(steps), known, leaving)


def all_decided(deciding: Deciding) -> Iterator[m.CopyDecisions]:
    """Yield all that is known of such steps, in messages that are not too long."""
    for decisions in deciding.groups:
        tokens = chain(decisions.verdicts, decisions.accepted if decisions.goes_on else ())
        while some := list(islice(tokens, STEPS)):
            yield decided(decisions, some)


class FollowedRounds:
    """The decisions that a standby knows, and how far each chunk is in their rounds."""

    def __init__(self) -> None:
        self._groups: dict[Group, Decisions] = {}
        self._known: dict[Group, dict[Rank, int]] = {}
        """What each decider knows of ranks besides."""
        self._rounds: dict[tuple[Key, int], OpenRounds] = {}

    def _of(self, group: Group) -> Decisions:
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = Decisions(group, None)
        return found

    def decided(self, message: m.CopyDecisions) -> None:
        """Take in what was decided; it may come twice."""
        decisions = self._of((message.policy, message.group))
        newest = decisions.newest
        for rank, clock, number, reason in message.steps:
            token = Token(rank, clock)
            if token in decisions.verdicts:
                continue
            if not number and not reason:
                decisions.accepted[token] = None
                continue
            if number:
                decisions.close(number, [token])
            else:
                decisions.settle(token, reason)
        if decisions.newest < newest:
            # To a standby's own one news are handed on before it gets all that there was.
            decisions.put_in_order()
        self._known[decisions.group] = dict(message.known)
        decisions.leaving = {keys: dict.fromkeys(ranks) for keys, ranks in message.leaving}

    def copied(self, chunk: Chunk, message: m.Copy) -> None:
        """Take in how far a chunk is that has come as a whole."""
        chunk.former = self._of((message.former, message.group)) if message.former else None
        if not message.first:
            self._rounds.pop((chunk.key, chunk.start), None)
            return
        rounds = OpenRounds(self._of((message.policy, message.group)), message.first)
        rounds.clocks = {each.rank: each.clock for each in message.counts if each.clock}
        rounds.passed = dict(rounds.clocks)
        rounds.made = {each.rank: each.made for each in message.counts if each.made}
        rounds.until = dict(enumerate(message.before, message.version - len(message.before)))
        self._rounds[chunk.key, chunk.start] = rounds

    def made(self, chunk: Chunk, message: m.Replicate) -> None:
        """Take in that a round is being made of a chunk.

        Raises:
            ProtocolError: a worker's push before one of it is missing, and would be taken for one that is made.
        """
        rounds = self._rounds[chunk.key, chunk.start]
        for rank, sequence, _, clock in message.parts:
            self._pass(chunk, rounds, rank, sequence, clock)
            rounds.made[rank] = sequence
        rounds.skip_to(message.round, chunk.version)

    def dropped(self, chunk: Chunk, message: m.CopyDropped) -> None:
        """Take in that a push to a chunk is in no round.

        Raises:
            ProtocolError: as above.
        """
        self._pass(chunk, self._rounds[chunk.key, chunk.start], message.rank, message.sequence, message.clock)
        chunk.pushed[message.rank] = chunk.reflected[message.rank] = message.sequence

    def _pass(self, chunk: Chunk, rounds: OpenRounds, rank: Rank, sequence: int, clock: int) -> None:
        before = chunk.pushed.get(rank, 0)
        if sequence != before + 1:
            raise ProtocolError(f"{chunk.label}: push {sequence} of rank {rank} is made or dropped after {before}")
        chunk.pushed[rank] = sequence
        rounds.clocks[rank] = rounds.passed[rank] = clock

    def forget(self, key: Key) -> None:
        """Take note that a key is no more."""
        for place in [place for place in self._rounds if place[0] == key]:
            del self._rounds[place]

    def take_over(self, deciding: Deciding, chunks: Iterable[Chunk]) -> None:
        """Let all go on from here, on the server that this node is now."""
        for group, decisions in self._groups.items():
            deciding.resume(decisions, self._known.get(group, {}))
        for chunk in chunks:
            chunk.rounds = self._rounds.get((chunk.key, chunk.start))
