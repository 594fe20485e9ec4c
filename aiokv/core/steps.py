"""Pushes to chunks whose rounds are decided for all keys at once: they wait for the decision, then for their round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Free
from aiokv.core.open_rounds import OpenRounds, Undecided
from aiokv.errors import ProtocolError
from aiokv.policy import Token

if TYPE_CHECKING:
    from aiokv.core.answers import Answers
    from aiokv.core.chunk import Chunk, Contribution, Waiter
    from aiokv.core.decisions import Decided, Deciding, Verdict
    from aiokv.core.making import Making
    from aiokv.core.tallies import Tallies
    from aiokv.errors import AiokvError

MAX_WAITING_ROUNDS = 1024
"""How many closed rounds may wait for a contribution to a chunk."""


class Steps:
    """The part of a `Coordinator` that puts contributions into decided rounds, and makes these in their order.

    Args:
        deciding: who knows which step is in which round.
        answers: who keeps requests waiting.
        making: how updates are made.
        tallies: where dropped contributions are counted.
    """

    def __init__(self, deciding: Deciding, answers: Answers, making: Making, tallies: Tallies) -> None:
        self._deciding = deciding
        self._answers = answers
        self._making = making
        self._tallies = tallies

    def check(self, chunk: Chunk) -> None:
        """Refuse a push while too many rounds wait.

        Raises:
            ProtocolError: they do.
        """
        rounds = self._rounds_of(chunk)
        if len(rounds.updates) >= MAX_WAITING_ROUNDS:
            text = f"{chunk.label}: {MAX_WAITING_ROUNDS} rounds that are closed wait for a contribution to this key"
            raise ProtocolError(text)

    def _rounds_of(self, chunk: Chunk) -> OpenRounds:
        if chunk.rounds is None:
            decisions = self._deciding.of(chunk)
            chunk.rounds = OpenRounds(decisions, decisions.newest + 1, {chunk.version: decisions.newest})
        return chunk.rounds

    def push(self, chunk: Chunk, contribution: Contribution, waiter: Waiter, now: float) -> list[Effect]:
        """Take in a contribution."""
        rounds = self._rounds_of(chunk)
        token = Token(contribution.rank, contribution.clock)
        rounds.enter(contribution.rank, contribution.clock, contribution.sequence)
        verdict = rounds.decisions.verdict(token)
        if verdict is not None:
            effects = self._judge(chunk, contribution, waiter, verdict, now)
        else:
            rounds.undecided[token] = Undecided(contribution, waiter)
            read = rounds.read(contribution.read_version)
            effects = self.decided(self._deciding.arrived(chunk, token, read, self._answers.roster, now), now)
        return effects + self.advance(chunk)

    def decided(self, decided: Decided, now: float) -> list[Effect]:
        """Go on with contributions of whose steps more is known now."""
        effects = decided.effects
        touched: dict[Chunk, None] = {}
        for held in decided.held:
            for chunk in held.chunks:
                assert chunk.rounds is not None, "it has such steps"
                if held.verdict is None:
                    undecided = chunk.rounds.undecided[held.token]
                    effects += self._wait(chunk, undecided, held.error, now)
                    continue
                undecided = chunk.rounds.undecided.pop(held.token)
                effects += self._judge(chunk, undecided.contribution, undecided.waiter, held.verdict, now)
                touched[chunk] = None
        for chunk in touched:
            effects += self.advance(chunk)
        return effects

    def _wait(self, chunk: Chunk, undecided: Undecided, error: AiokvError | None, now: float) -> list[Effect]:
        """Tell who waits that the step can't be decided, or, if that is enough, that it will be in a round."""
        if not self._answers.is_parked(undecided.waiter):
            return []
        if error is not None:
            rank = undecided.waiter.rank
            pulls = [pull for pull in chunk.pulls if pull.rank == rank]
            return [self._answers.refuse(waiter, error) for waiter in [undecided.waiter, *pulls]]
        return [] if chunk.policy.waits else self._answers.advance(undecided.waiter, now)

    def _judge(
        self, chunk: Chunk, contribution: Contribution, waiter: Waiter, verdict: Verdict, now: float
    ) -> list[Effect]:
        """Put a contribution into its round, or drop it."""
        rounds = chunk.rounds
        assert rounds is not None, "it has been pushed"
        waits = self._answers.is_parked(waiter)
        if isinstance(verdict, int):
            if not chunk.version and not chunk.applying:
                # Nothing is made yet, so no round can be over here.
                rounds.first = min(rounds.first, verdict)
            update = rounds.add(verdict, contribution)
            if waits:
                # Also where others were answered when they had arrived: who closes a round reads what it makes.
                update.waiters[waiter] = None
                waiter.updates.append(update)
            return []
        rounds.settle(chunk, contribution)
        self._tallies.dropped(contribution.rank, verdict)
        effects: list[Effect] = [] if contribution.slot is None else [Free(contribution.slot)]
        if waits:
            waiter.dropped = verdict
            effects += self._answers.advance(waiter, now)
        return effects + self._answers.read_on(chunk, now)

    def advance(self, chunk: Chunk) -> list[Effect]:
        """Make the next round of a chunk, if all that comes for it is there."""
        rounds, roster = chunk.rounds, self._answers.roster
        if rounds is None:
            return []
        effects: list[Effect] = []
        while not chunk.applying and rounds.first <= rounds.decisions.newest:
            missing = rounds.missing(rounds.first, roster, chunk.group)
            if missing:
                return effects + self._refuse_lost(chunk, rounds)
            update = rounds.begin(rounds.first, chunk.version + 1)
            if update is None:
                continue
            chunk.updates[update.version] = update
            chunk.newest = update.version
            effects += self._making.sum_up(chunk, update, None)
            effects.append(self._making.begin(chunk, update, roster))
        return effects

    def _refuse_lost(self, chunk: Chunk, rounds: OpenRounds) -> list[Effect]:
        """Refuse who waits for a round in which the contribution of a lost worker is missing here."""
        roster, number = self._answers.roster, rounds.first
        lost = [rank for rank in rounds.missing(number, roster, chunk.group) if rank in roster.lost]
        if not lost:
            return []
        error = roster.loss(lost, f"{chunk.label}, round {number}", chunk.key, chunk.version + 1)
        stuck = [waiter for update in rounds.updates.values() for waiter in update.waiters] + list(chunk.pulls)
        return [self._answers.refuse(waiter, error) for waiter in dict.fromkeys(stuck)]

    def why(self, chunk: Chunk, waiter: Waiter) -> str:
        """Return what a request waits for, for messages; empty: for its round to be made."""
        rounds, roster = chunk.rounds, self._answers.roster
        if rounds is None:
            return ""
        if any(one.waiter is waiter for one in rounds.undecided.values()):
            return self._deciding.missing(chunk, roster)
        missing = rounds.missing(rounds.first, roster, chunk.group)
        return f"no contribution from rank {roster.labels(missing)}" if missing else ""

    def remove(self, chunk: Chunk) -> tuple[list[Waiter], list[Effect]]:
        """Forget the rounds of a chunk that is no more; return who waits, and what frees the contributions."""
        rounds, chunk.rounds = chunk.rounds, None
        if rounds is None:
            return [], []
        self._deciding.remove(chunk)
        parts = [one.contribution for one in rounds.undecided.values()]
        parts += [part for update in rounds.updates.values() for part in update.contributions.values()]
        waiters = [one.waiter for one in rounds.undecided.values()]
        waiters += [waiter for update in rounds.updates.values() for waiter in update.waiters]
        return waiters, [Free(part.slot) for part in parts if part.slot is not None]
