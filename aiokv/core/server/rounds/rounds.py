"""The open updates of a server: contributions come in, are folded, applied and answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Free, freed
from aiokv.core.server.answers import AnyPull, AnyPush, Asker
from aiokv.core.server.rounds.bundle import split_slot
from aiokv.core.server.rounds.updates import Contribution, Update, Waiter
from aiokv.core.waiting import Wait
from aiokv.errors import AiokvError, MembershipError, PolicyError, ProtocolError, RoundTimeoutError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.core.roster import Roster
    from aiokv.core.server.answers import Answers
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.making import Making
    from aiokv.core.server.rounds.norms import Norms
    from aiokv.core.server.rounds.steps import Steps
    from aiokv.core.server.rounds.tallies import Tallies
    from aiokv.core.stimuli import Received
    from aiokv.types import Rank, Slot, Version

MAX_OPEN_PUSHES = 1024
"""How many pushes of a worker to one chunk may be open."""

DUPLICATE = -1
"""In the place of the version that a push helps to make: the push has come before."""


class Rounds:
    """The part of a `Coordinator` that deals with pushes and pulls of chunks that it has found.

    Args:
        answers: who keeps requests waiting, and answers them.
        making: how updates are made.
        steps: who puts contributions into rounds that are decided for all keys at once.
        norms: who gathers sums over whole tensors, for rules that need them.
        tallies: where contributions are counted that come again.
    """

    def __init__(self, answers: Answers, making: Making, steps: Steps, norms: Norms, tallies: Tallies) -> None:
        self._answers = answers
        self._making = making
        self._steps = steps
        self._norms = norms
        self._tallies = tallies
        self._last_slot: Slot = 0

    @property
    def _roster(self) -> Roster:
        return self._answers.roster

    def new_slot(self) -> Slot:
        """Return a number for a slot that is made by cutting another; the store counts its own upwards from 0."""
        self._last_slot -= 1
        return self._last_slot

    def begin(self, chunk: Chunk) -> None:
        """Take note of a chunk that is here."""
        if chunk.policy.decides:
            self._steps.begin(chunk)

    # --- requests ---

    def push(  # noqa: C901 - for every push, so that it calls little else
        self, received: Received, message: AnyPush, rank: Rank, chunks: list[Chunk], now: float
    ) -> list[Effect]:
        """Take a rank's contribution to each of the chunks that do not have it; answer it when it is in all of them.

        Raises:
            ProtocolError: a wrong length, sequence or version; nothing is taken.
            MembershipError: the round has gone on without the rank.
            PolicyError: the rank has asked for another policy, and others have not yet.
            CodecError: the value is wanted in an unknown codec.
        """
        if message.value_codec:
            self._answers.check_codec(message)
        nbytes = 0
        for chunk in chunks:
            nbytes += chunk.nbytes_of(message)
        if received.nbytes != nbytes:
            raise ProtocolError(f"{chunks[0].label}: expected {nbytes} bytes, got {received.nbytes}")
        versions = []
        for chunk in chunks:
            versions.append(self._check_push(chunk, message, rank))  # noqa: PERF401 - a loop takes less for one
        slots: list[Slot | None] = [received.slot]
        effects: list[Effect] = []
        if len(chunks) > 1:
            slots, effects = split_slot(received.slot, chunks, self.new_slot)
        waiter = self._answers.park(received, rank, message, chunks, now)
        waiter.want_value = message.want_value
        again: list[Chunk] = []
        respawns = self._answers.roster.respawns
        if DUPLICATE in versions:
            again = [chunk for chunk, version in zip(chunks, versions, strict=True) if version == DUPLICATE]
            chunks, versions, slots, freeing = _fresh(chunks, versions, slots)
            effects += freeing
        opened: list[Update] = []
        for place, chunk in enumerate(chunks):
            head = message.sequence, message.read_version, message.clock
            contribution = Contribution(rank, *head, slots[place], rank, received.nbytes)
            chunk.pushed[rank] = message.sequence
            if respawns:
                chunk.clocks[rank] = (message.sequence, message.clock)
            if not chunk.policy.in_step:
                contribution.read = self._making.read(chunk, rank, message.read_version)
            if chunk.policy.decides:
                return effects + self._steps.push(chunk, contribution, waiter, now)
            opened.append(chunk.open(versions[place], contribution, waiter))
        waiter.updates = tuple(opened)
        for place, update in enumerate(opened):
            effects += self._settle(chunks[place], update)
        for chunk in again:
            effects += self._rejoin(chunk, waiter, message, now)
        return effects

    def take_in(self, chunk: Chunk, contribution: Contribution, now: float) -> list[Effect]:
        """Let count what the server had in whose place this one is, where its worker may have gone on."""
        rank = contribution.rank
        chunk.pushed[rank] = contribution.sequence
        if self._roster.respawns:
            chunk.clocks[rank] = (contribution.sequence, contribution.clock)
        contribution.read = self._making.read(chunk, rank, contribution.read_version)
        # If it has not, it sends the push again.
        nobody = Waiter(0, 0, rank, 0.0, [chunk], 0)
        return self._steps.push(chunk, contribution, nobody, now)

    def _rejoin(self, chunk: Chunk, waiter: Waiter, message: AnyPush, now: float) -> list[Effect]:
        """Let a push that has come to a chunk before be answered as the first one is."""
        self._tallies.repeated(waiter.rank)
        if not self._answers.is_parked(waiter):
            return []
        error = chunk.refused.get((waiter.rank, message.sequence))
        if error is not None:
            return [self._answers.refuse(waiter, error)]
        update = chunk.update_with(waiter.rank, message.sequence)
        if update is not None:
            update.waiters[waiter] = None
            waiter.updates = (*waiter.updates, update)
            return self._refuse_lost(chunk, update) if self._roster.lost else []
        return self._steps.rejoin(chunk, waiter, message.sequence, message.clock, now)

    def _check_push(self, chunk: Chunk, message: AnyPush, rank: Rank) -> Version:
        """Return the version that the push helps to make, as far as that is known; or that it has come before."""
        if chunk.group and rank not in chunk.group:
            who = self._roster.label(rank)
            text = f"{chunk.label} belongs to ranks {list(chunk.group)}; rank {who} is none of them"
            raise MembershipError(text, ranks=[rank], key=chunk.key)
        expected = chunk.pushed.get(rank, 0) + 1
        if message.sequence != expected:
            if chunk.has(rank, message.sequence):
                return DUPLICATE
            raise ProtocolError(f"{chunk.label}: expected push {expected} of rank {rank}, got {message.sequence}")
        made = chunk.reflected.get(rank, 0)
        if message.sequence > made + MAX_OPEN_PUSHES:
            text = f"{chunk.label}: push {message.sequence} of rank {rank}, of whose pushes {made} are made"
            raise ProtocolError(f"{text}; at most {MAX_OPEN_PUSHES} may be open")
        if not 0 <= message.read_version <= chunk.version:
            raise ProtocolError(f"{chunk.label}: read version {message.read_version}, which is not made yet")
        if rank in chunk.leaving:
            raise PolicyError(f"{chunk.label}: rank {self._roster.label(rank)} has asked for another policy")
        if chunk.policy.decides:
            self._steps.check(chunk, rank, message.clock)
            return chunk.version + 1
        version = chunk.version_of(rank, message.sequence)
        if chunk.is_closed(version, rank):
            # Only a rank that has left can be late: nobody waits for it.
            text = f"{chunk.label}: round {version} went on without rank {self._roster.label(rank)}"
            raise MembershipError(text, ranks=[rank], key=chunk.key, round=version)
        return version

    def pull(self, received: Received, message: AnyPull, rank: Rank, chunks: list[Chunk], now: float) -> list[Effect]:
        """Answer with the values, or park the request until each holds the rank's push number `at_least`.

        Raises:
            CodecError: the value is wanted in an unknown codec.
        """
        self._answers.check_codec(message)
        decides = chunks[0].rounds is not None
        effects = self._steps.skip_rounds(chunks[0], now) if decides else []
        behind = [chunk for chunk in chunks if chunk.policy.waits and chunk.reflected.get(rank, 0) < message.at_least]
        rows = message.rows if isinstance(message, m.PullRows) else b""
        # The rounds of a key that has gone over to another policy are over.
        at_least_round = message.at_least_round if decides else 0
        is_free = not behind and not at_least_round
        if is_free and not any(chunk.gate is not None for chunk in chunks):
            asker = Asker(received.peer, received.request, rank, message.priority, rows, message.value_codec)
            asker.before = message.before
            return [*effects, self._answers.value(asker, chunks)]
        waiter = self._answers.park(received, rank, message, chunks, now)
        waiter.at_least, waiter.left, waiter.rows = message.at_least, len(behind), rows
        waiter.at_least_round, waiter.before = at_least_round, message.before
        if not behind:
            effects += self._answers.finish(waiter, now)
            return effects + self._steps.await_round(chunks[0], waiter, now) if at_least_round else effects
        for chunk in behind:
            chunk.read_later(waiter)
            if self._roster.lost:
                effects += self._pull_lost(chunk, waiter)
        return effects

    def await_round(
        self, received: Received, message: m.AwaitRound, rank: Rank, chunk: Chunk, now: float
    ) -> list[Effect]:
        """Tell a worker when there is something newer of a chunk.

        Raises:
            ProtocolError: newer than nothing.
        """
        if message.newer_than < 0:
            raise ProtocolError(f"{chunk.label}: newer than round {message.newer_than}, which can't be")
        return self._answers.await_round(received, message, rank, chunk, now)

    def _pull_lost(self, chunk: Chunk, waiter: Waiter) -> list[Effect]:
        if chunk.policy.decides:
            return self._steps.pulled(chunk, waiter)
        update = chunk.awaited_update(waiter)
        return [] if update is None else self._refuse_lost(chunk, update)

    # --- updates ---

    def advance(self, chunks: Iterable[Chunk], now: float) -> list[Effect]:
        """Look at all open updates again: the roster has changed."""
        effects: list[Effect] = []
        for chunk in chunks:
            if chunk.rounds is not None:
                effects += self._steps.advance(chunk, now)
            else:
                for update in chunk.updates.values():
                    effects += self._settle(chunk, update)
                effects += self._making.retire(chunk, self._roster)
            effects += self._answers.changed(chunk, now)
        return effects + self._steps.read_on(now)

    def applied(
        self, chunk: Chunk, version: Version, now: float, error: AiokvError | None = None, *, go_on: bool = True
    ) -> list[Effect]:
        """Take note that a version is made, and answer those who waited for nothing else.

        Args:
            chunk: the chunk whose version it is.
            version: the version.
            now: the time in seconds.
            error: why its value is still that of the version before; who has pushed is told so.
            go_on: apply the next one if it is complete.
        """
        update = chunk.updates.pop(version)
        chunk.version = version
        chunk.applying = False
        if chunk.reads is not None:
            self._making.replaced(chunk, update, made=error is None)
        for contribution in update.contributions.values():
            if chunk.rounds is not None:
                chunk.rounds.settle(chunk, contribution)
                chunk.rounds.count(contribution)
            else:
                chunk.reflected[contribution.rank] = contribution.sequence
        if error is not None:
            chunk.refuse(update, error)
        effects = self._answers.advanced(chunk, update.contributions.values(), now)
        if self._answers.roster.respawns:
            effects += self._making.keep(chunk, self._roster, made=error is None)
        done = list(update.waiters)
        update.waiters.clear()
        if error is None:
            effects += self._answers.advance(done, now)
        else:
            effects += [self._answers.refuse(waiter, error) for waiter in done]
        if chunk.pulls:
            ranks = dict.fromkeys(contribution.rank for contribution in update.contributions.values())
            effects += self._answers.read_on(chunk, ranks, now)
        if chunk.awaiting:
            effects += self._answers.reached(chunk, now)
        effects += self._making.retire(chunk, self._roster)
        if not go_on:
            return effects
        if chunk.rounds is not None:
            return effects + self._steps.advance(chunk, now)
        following = chunk.updates.get(version + 1)
        return effects if following is None else effects + self._settle(chunk, following)

    def _settle(self, chunk: Chunk, update: Update) -> list[Effect]:
        """Fold what may be folded; apply the update if it is complete, and refuse its waiters if it never will be."""
        roster = self._answers.roster
        if update.roster is not roster:
            chunk.expect(update, roster)
        missing = update.first_missing()
        effects = self._making.sum_up(chunk, update, missing)
        if missing is not None:
            return effects + self._refuse_lost(chunk, update) if roster.lost else effects
        if not chunk.applying and update.version == chunk.version + 1:
            effects += self._making.begin(chunk, update, roster)
        return effects

    def _refuse_lost(self, chunk: Chunk, update: Update) -> list[Effect]:
        chunk.expect(update, self._roster)
        lost = [rank for rank in self._roster.lost if update.waits_for(rank)]
        if not lost:
            return []
        error = self._roster.loss(lost, f"{chunk.label}, round {update.version}", chunk.key, update.version)
        stuck = list(update.waiters)
        stuck += [pull for pull in chunk.reading() if chunk.awaited_update(pull) is update]
        stuck += [waiter for waiter in chunk.awaiting if waiter.at_least_round >= update.version]
        return [self._answers.refuse(waiter, error) for waiter in stuck]

    # --- ends ---

    def expire(self, name: RequestName, now: float) -> Effect:
        """Refuse a parked request whose time has come, and say what was missing."""
        waiter = self._answers.get(name)
        wait = self.wait(name)
        text = f"{wait.late}; what was pushed stays counted"
        error = RoundTimeoutError(text, ranks=wait.ranks, key=wait.key, round=wait.round)
        if waiter in waiter.chunks[0].awaiting:
            return self._answers.give_up(waiter, error, now)
        return self._answers.refuse(waiter, error)

    def wait(self, name: RequestName) -> Wait:
        """Return for what a parked request waits."""
        waiter = self._answers.get(name)
        chunk = waiter.chunks[0]
        version = chunk.version + 1
        if waiter.held_since is not None:
            version = chunk.version
            missing = self._answers.behind(chunk, waiter.rank)
            behind = self._roster.labels(missing)
            reason = f"rank {waiter.rank} may not read on before rank {behind} has pushed more"
        elif waiter in chunk.awaiting:
            version, missing = waiter.at_least_round, []
            reason = "nobody has closed it"
        elif chunk.policy.decides:
            missing, reason = self._steps.why(chunk, waiter)
        else:
            chunk, version, missing = self._awaited(waiter)
            reason = f"no contribution from rank {self._roster.labels(missing)}" if missing else ""
        if not reason:
            reason = "its update is not applied yet"
            if chunk.gathering:
                reason = f"no norms from {self._norms.missing(chunk)}"
        return Wait(f"{chunk.label}, round {version}", reason, waiter.waits, missing, chunk.key, version)

    def _awaited(self, waiter: Waiter) -> tuple[Chunk, Version, list[Rank]]:
        """Return a chunk for which a request waits, the version that it waits for, and whose contributions miss."""
        awaited = [(chunk, chunk.awaited_update(waiter)) for chunk in waiter.chunks]
        # The first that is not there yet; when all are on their way, the first.
        chunk, update = next((pair for pair in awaited if pair[1] is not None), awaited[0])
        if update is None:
            return chunk, chunk.version + 1, [waiter.rank]
        chunk.expect(update, self._roster)
        return chunk, update.version, update.missing()

    def remove(self, chunk: Chunk, error: AiokvError) -> list[Effect]:
        """Refuse all who wait for a chunk, and free what they have brought."""
        self._answers.replicas.forget_chunk(chunk.key, chunk.start)
        waiting, effects = self._steps.remove(chunk)
        waiters = dict.fromkeys(waiting)
        waiters |= dict.fromkeys(waiter for update in chunk.updates.values() for waiter in update.waiters)
        waiters |= dict.fromkeys([*chunk.reading(), *chunk.gated, *chunk.awaiting])
        effects += [self._answers.refuse(waiter, error) for waiter in waiters if self._answers.is_parked(waiter)]
        for update in chunk.updates.values():
            slots = [update.accumulator, *(part.slot for part in update.contributions.values())]
            effects += [Free(slot) for slot in slots if slot is not None]
        chunk.updates.clear()
        chunk.pending, chunk.gathering = None, False
        return effects

    # --- for tests ---

    def validate(self, chunks: Iterable[Chunk]) -> set[RequestName]:
        """Check what must hold between any two stimuli; return the parked requests.

        Raises:
            AssertionError: an invariant is broken.
        """
        named, parked = self._answers.validate()
        for chunk in chunks:
            assert not chunk.updates or min(chunk.updates) > chunk.version
            assert not chunk.applying or chunk.version + 1 in chunk.updates
            assert chunk.pending is None or chunk.applying
            assert not chunk.gathering or (chunk.pending is not None and not chunk.is_whole)
            for update in chunk.updates.values():
                folded, unfolded = update.folded, update.unfolded
                assert folded == sorted(folded)
                assert len(folded) + len(unfolded) == len(update.contributions)
                assert update.contributions.keys() == {*folded, *unfolded}
                assert update.waiters.keys() <= parked
            if chunk.rounds is not None:
                self._steps.validate(chunk)
            pushed = chunk.pushed
            for rank, reflected in chunk.reflected.items():
                assert reflected <= pushed[rank]
        return named


def _fresh(
    chunks: list[Chunk], versions: list[Version], slots: list[Slot | None]
) -> tuple[list[Chunk], list[Version], list[Slot | None], list[Effect]]:
    """Return what is left of a push without the chunks that have it, and what frees the rest."""
    places = [place for place, version in enumerate(versions) if version != DUPLICATE]
    effects = [effect for place, slot in enumerate(slots) if place not in places for effect in freed(slot)]
    fresh = [chunks[place] for place in places], [versions[place] for place in places]
    return *fresh, [slots[place] for place in places], effects
