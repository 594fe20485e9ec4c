"""Pushes to chunks whose rounds are decided for all keys at once: they wait for the decision, then for their round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Free, freed
from aiokv.core.server.rounds.open_rounds import Dropped, OpenRounds, Undecided
from aiokv.core.server.rounds.updates import Update
from aiokv.errors import ProtocolError
from aiokv.policy import Token

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.server.answers import Answers
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.decisions import Decided, Verdict
    from aiokv.core.server.rounds.making import Making
    from aiokv.core.server.rounds.tallies import Tallies
    from aiokv.core.server.rounds.updates import Contribution, Waiter
    from aiokv.errors import AiokvError
    from aiokv.types import Rank


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
        self.on_drop: Callable[[Chunk, Dropped], None] | None = None
        """Is told of what is in no round, before its worker is; then workers hear of their pushes in their order."""
        self.on_keep: Callable[[Chunk, Contribution], None] | None = None
        """Is told of what is in no value yet where workers go on all the same, before they do."""
        self.is_kept: Callable[[Chunk, Update], bool] | None = None
        """Tells whether all that it was told of an update is where it is to be; if not, the chunk is to be advanced
        when it is."""

    def check(self, chunk: Chunk, rank: Rank, clock: int) -> None:
        """Refuse a push that is no new step.

        Raises:
            ProtocolError: it is one.
        """
        last = self._rounds_of(chunk).clocks.get(rank, 0)
        if clock <= last:
            raise ProtocolError(f"{chunk.label}: expected a step of rank {rank} after its step {last}, got {clock}")

    def begin(self, chunk: Chunk) -> None:
        """Let a chunk take part in rounds from the next one on, if it does not yet."""
        if chunk.rounds is None:
            decisions = self._deciding.of((str(chunk.policy), chunk.group))
            chunk.rounds = OpenRounds(decisions, decisions.newest + 1)
            if chunk.since:
                # The group may have had rounds before; what was read under another policy is none of them behind.
                chunk.rounds.until[chunk.since - 1] = decisions.newest

    def _rounds_of(self, chunk: Chunk) -> OpenRounds:
        assert chunk.rounds is not None, "it takes part since it was made"
        return chunk.rounds

    def push(self, chunk: Chunk, contribution: Contribution, waiter: Waiter, now: float) -> list[Effect]:
        """Take in a contribution."""
        rounds, roster = self._rounds_of(chunk), self._answers.roster
        token = Token(contribution.rank, contribution.clock)
        rounds.enter(contribution.rank, contribution.clock, contribution.sequence)
        unblocked = list(rounds.decisions.come(token))
        verdict = rounds.decisions.verdicts.get(token)
        if verdict is not None:
            effects = self._judge(chunk, contribution, waiter, verdict, now)
        else:
            rounds.undecided[token] = Undecided(contribution, waiter)
            read = rounds.read(contribution.rank, contribution.read_version, chunk.version)
            arrived = self._deciding.arrived(rounds.decisions, chunk, token, read, roster, now)
            effects = self.decided(arrived, now)
        for each in dict.fromkeys([*unblocked, chunk]):
            effects += self.advance(each, now)
        if self.on_keep is not None and not chunk.policy.waits and rounds.has_open(contribution):
            self.on_keep(chunk, contribution)
        return effects + self.read_on(now)

    def rejoin(self, chunk: Chunk, waiter: Waiter, sequence: int, clock: int, now: float) -> list[Effect]:
        """Let a push that has come before, and is in no open update, be answered as the first one is."""
        rounds = chunk.rounds
        before = None if rounds is None else rounds.held(waiter.rank, sequence)
        if rounds is None or before is None:
            decided = None if rounds is None else rounds.decisions
            if sequence <= chunk.before.get(waiter.rank, 0):
                # Its step may be another key's under the policy that this one has left.
                decided = chunk.former
            verdict = None if decided is None else decided.verdicts.get(Token(waiter.rank, clock))
            waiter.dropped = verdict if isinstance(verdict, str) else ""
            return self._answers.advance([waiter], now)
        if isinstance(before, Update):
            before.waiters[waiter] = None
            waiter.updates = (*waiter.updates, before)
            return self._refuse_lost(chunk, rounds)
        if self._answers.is_parked(before.waiter):
            text = f"{chunk.label}: push {sequence} of rank {waiter.rank} is sent twice at the same time"
            return [self._answers.refuse(waiter, ProtocolError(text))]
        waiter.dropped, before.waiter = before.waiter.dropped, waiter
        if isinstance(before, Dropped):
            return self._tell_dropped(before, now)
        if not chunk.policy.waits and Token(waiter.rank, clock) in rounds.decisions.accepted:
            return self._answers.advance([waiter], now)
        error = self._deciding.stuck(rounds.decisions, self._answers.roster)
        return [] if error is None else [self._answers.refuse(waiter, error)]

    def decided(self, decided: Decided, now: float) -> list[Effect]:
        """Go on with contributions of whose steps more is known now."""
        effects = decided.effects
        touched: dict[Chunk, None] = {}
        for held in decided.held:
            for chunk in held.chunks:
                undecided = self._rounds_of(chunk).undecided
                if held.verdict is None:
                    effects += self._wait(chunk, undecided[held.token], held.error, now)
                    continue
                one = undecided.pop(held.token)
                effects += self._judge(chunk, one.contribution, one.waiter, held.verdict, now)
                touched[chunk] = None
        for chunk in touched:
            effects += self.advance(chunk, now)
        return effects + self.read_on(now)

    # --- reads that wait for a round ---

    def skip_rounds(self, chunk: Chunk, now: float) -> list[Effect]:
        """Take note of the rounds to which nothing comes here, before a chunk is read that is seldom pushed."""
        rounds = self._rounds_of(chunk)
        return self.advance(chunk, now) if rounds.first <= rounds.decisions.newest else []

    def await_round(self, chunk: Chunk, waiter: Waiter, now: float) -> list[Effect]:
        """Find out what is known elsewhere about the round that a read waits for, if it does."""
        decisions = self._rounds_of(chunk).decisions
        if waiter not in chunk.awaiting:
            return []
        if waiter.at_least_round <= decisions.newest:
            return self.read_on(now)
        return self._deciding.inquire(decisions, now)

    def read_on(self, now: float) -> list[Effect]:
        """Look at the reads that wait for a round again: one may be made now, or not to come."""
        effects: list[Effect] = []
        for chunk in self._answers.awaited():
            effects += self._answers.reached(chunk, now)
            error = self._loss(chunk, self._rounds_of(chunk)) if chunk.awaiting else None
            if error is not None:
                effects += [self._answers.give_up(waiter, error, now) for waiter in list(chunk.awaiting)]
        return effects

    def _wait(self, chunk: Chunk, undecided: Undecided, error: AiokvError | None, now: float) -> list[Effect]:
        """Tell who waits that the step can't be decided, or, if that is enough, that it will be in a round."""
        waiter = undecided.waiter
        if error is not None:
            waiting = [waiter, *chunk.pulls.get(waiter.rank, ())]
            return [self._answers.refuse(one, error) for one in waiting if self._answers.is_parked(one)]
        if chunk.policy.waits or not self._answers.is_parked(waiter):
            return []
        return self._answers.advance([waiter], now)

    def _judge(
        self, chunk: Chunk, contribution: Contribution, waiter: Waiter, verdict: Verdict, now: float
    ) -> list[Effect]:
        """Put a contribution into its round, or drop it."""
        rounds = self._rounds_of(chunk)
        is_parked = self._answers.is_parked(waiter)
        if isinstance(verdict, int):
            update = rounds.add(verdict, contribution)
            if is_parked:
                # Also where others were answered when they had arrived: who closes a round reads what it makes.
                update.waiters[waiter] = None
                waiter.updates = (*waiter.updates, update)
            return []
        self._tallies.dropped(contribution.rank, verdict)
        effects: list[Effect] = freed(contribution.slot)
        waiter.dropped = verdict
        # Its worker is to go on from the round that it was too late for, so a read waits until that is made.
        dropped = Dropped(rounds.decisions.newest, contribution, waiter)
        rounds.dropped.append(dropped)
        return effects + self._tell_dropped(dropped, now) if is_parked else effects

    def _tell_dropped(self, dropped: Dropped, now: float) -> list[Effect]:
        """Tell a worker at once that its push is in no round, if it wants no value."""
        if dropped.waiter.want_value or self.on_drop is not None:
            return []
        dropped.told = True
        return self._answers.advance([dropped.waiter], now)

    def advance(self, chunk: Chunk, now: float) -> list[Effect]:
        """Make the next round of a chunk, if all that comes for it is there."""
        rounds, roster = self._rounds_of(chunk), self._answers.roster
        effects: list[Effect] = []
        while not chunk.applying:
            # Before the next one is begun: then the value is no more that they get.
            if rounds.dropped:
                effects += self._answer_dropped(chunk, rounds, now)
            if chunk.awaiting:
                effects += self._answers.reached(chunk, now)
            if rounds.first > rounds.decisions.newest:
                break
            blocker = rounds.blocker(roster)
            if blocker is not None:
                rounds.decisions.blocked.setdefault(blocker, {})[chunk] = None
                effects += self._refuse_lost(chunk, rounds)
                break
            if not self._may_begin(chunk, rounds):
                break
            update = rounds.begin(chunk.version)
            if update is None:
                continue
            chunk.updates[update.version] = update
            chunk.newest = update.version
            effects += self._making.sum_up(chunk, update, None)
            effects += self._making.begin(chunk, update, roster)
        return effects

    def _may_begin(self, chunk: Chunk, rounds: OpenRounds) -> bool:
        """Tell whether nobody has to be told of the first round before it is summed up, and waits for others."""
        update = rounds.updates.get(rounds.first)
        if update is None or self.is_kept is None or chunk.policy.waits:
            return True
        return not self._making.needs_others(chunk, update) or self.is_kept(chunk, update)

    def _answer_dropped(self, chunk: Chunk, rounds: OpenRounds, now: float) -> list[Effect]:
        """Let those go on whose contributions were dropped, if the rounds are made that were closed by then."""
        ready = rounds.take_dropped(chunk, in_order=self.on_drop is not None)
        effects: list[Effect] = []
        for one in ready:
            if self.on_drop is not None:
                self.on_drop(chunk, one)
            if self._answers.is_parked(one.waiter):
                effects += self._answers.advance([one.waiter], now)
        return effects + self._answers.read_on(chunk, [one.contribution.rank for one in ready], now)

    # --- waits that can't end ---

    def _loss(self, chunk: Chunk, rounds: OpenRounds) -> AiokvError | None:
        """Return why the first round can't be made: the contribution of a lost worker is missing here."""
        roster = self._answers.roster
        if not roster.lost or chunk.applying:
            return None
        lost = [rank for rank in rounds.missing(roster) if rank in roster.lost]
        if not lost:
            return None
        return roster.loss(lost, f"{chunk.label}, round {rounds.first}", chunk.key, chunk.version + 1)

    def _refuse_lost(self, chunk: Chunk, rounds: OpenRounds) -> list[Effect]:
        error = self._loss(chunk, rounds)
        if error is None:
            return []
        stuck = [*rounds.waiters, *chunk.reading()]
        return [self._answers.refuse(waiter, error) for waiter in stuck if self._answers.is_parked(waiter)]

    def pulled(self, chunk: Chunk, waiter: Waiter) -> list[Effect]:
        """Refuse a pull that waits for what this server knows can't be made."""
        rounds = self._rounds_of(chunk)
        error = self._loss(chunk, rounds)
        if error is None and self._is_undecided(rounds, waiter):
            error = self._deciding.stuck(rounds.decisions, self._answers.roster)
        return [] if error is None else [self._answers.refuse(waiter, error)]

    def _is_undecided(self, rounds: OpenRounds, waiter: Waiter) -> bool:
        pushes = [one.contribution for one in rounds.undecided.values() if one.contribution.rank == waiter.rank]
        return any(not waiter.at_least or push.sequence <= waiter.at_least for push in pushes)

    def why(self, chunk: Chunk, waiter: Waiter) -> tuple[list[Rank], str]:
        """Return for whom a request waits, and that in words; empty: for its round to be made."""
        rounds, roster = self._rounds_of(chunk), self._answers.roster
        if chunk.applying:
            return [], ""
        missing = rounds.missing(roster)
        if missing:
            return missing, f"no contribution from rank {roster.labels(missing)}"
        if self._is_undecided(rounds, waiter):
            return self._deciding.missing(rounds.decisions, roster)
        return [], ""

    def remove(self, chunk: Chunk) -> tuple[list[Waiter], list[Effect]]:
        """Forget the rounds of a chunk that is no more; return who waits, and what frees the contributions."""
        rounds, chunk.rounds = chunk.rounds, None
        if rounds is None:
            return [], []
        self._deciding.remove(rounds.decisions, chunk)
        waiters = [*rounds.waiters, *(one.waiter for one in rounds.undecided.values())]
        return waiters, [Free(slot) for slot in rounds.slots]

    # --- for tests ---

    def validate(self, chunk: Chunk) -> None:
        """Check what must hold of a chunk between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        rounds = self._rounds_of(chunk)
        decisions = rounds.decisions
        assert all(number >= rounds.first for number in rounds.updates)
        assert all(token not in decisions.verdicts for token in (*rounds.undecided, *decisions.accepted))
        assert all(chunk in decisions.holders[token] for token in rounds.undecided)
        assert all(token in decisions.holders for token in decisions.unasked)
        parts = [one.contribution for one in rounds.undecided.values()]
        parts += [one.contribution for one in rounds.dropped]
        updates = [*rounds.updates.values(), *chunk.updates.values()]
        parts += [part for update in updates for part in update.contributions.values()]
        unsettled = [(rank, number) for rank, numbers in rounds.unsettled.items() for number in numbers]
        assert sorted(unsettled) == sorted((part.rank, part.sequence) for part in parts)
