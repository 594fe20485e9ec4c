"""The open updates of a server and the requests that wait for them: fold, apply, answer, refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.bundle import split_slot
from aiokv.core.chunk import Chunk, Contribution, Update, Waiter
from aiokv.core.compression import Replicas, is_compressible
from aiokv.core.effects import (
    Apply,
    Effect,
    Free,
    Norms,
    Refuse,
    Retire,
    Send,
    Skip,
    StoredChunk,
    StoredChunks,
    StoredDifference,
    Sums,
)
from aiokv.core.reads import Reads
from aiokv.core.records import Record
from aiokv.core.roster import Roster
from aiokv.errors import AiokvError, MembershipError, ProtocolError, RoundTimeoutError
from aiokv.optim import Assign
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.core.compression import Codecs
    from aiokv.core.deadlines import Deadlines
    from aiokv.core.effects import Payload
    from aiokv.core.norms import Norms as Gatherer
    from aiokv.core.parked import RequestName
    from aiokv.core.rules import Rules
    from aiokv.core.stimuli import Received
    from aiokv.optim import Optimizer
    from aiokv.types import Peer, Rank, Slot, Version

DIFFERENCE_PRIORITY = 0
"""At which compressed values are sent, whatever priority they were asked for with."""

AnyPush = m.Push | m.PushBundle | m.PushRows
AnyPull = m.Pull | m.PullBundle | m.PullRows

MAX_OPEN_UPDATES = 1024
"""How far a worker may push ahead of the rounds that are closed, per chunk."""


class Asker(Record, eq=False):
    """Who gets a value, and how: some rows of it, or what it differs by in a codec; see `Value`."""

    peer: Peer
    request: int
    rank: Rank
    priority: int
    rows: bytes
    codec: int


class Rounds:
    """The part of a `Coordinator` that deals with pushes and pulls of chunks that it has found.

    Args:
        deadlines: where parked requests are entered, under peer and request id.
        rules: which rule makes an update.
        norms: who gathers sums over whole tensors, for rules that need them.
        codecs: which codecs values may be asked for in.
    """

    def __init__(self, deadlines: Deadlines[RequestName], rules: Rules, norms: Gatherer, codecs: Codecs) -> None:
        self.roster = Roster()
        """The workers of the newest view; the owner puts it here."""
        self._deadlines = deadlines
        self._rules = rules
        self._norms = norms
        self._codecs = codecs
        self.replicas = Replicas()
        """What peers keep of values that they got compressed."""
        self._waiters: dict[RequestName, Waiter] = {}
        self._last_slot: Slot = 0

    def __contains__(self, name: RequestName) -> bool:
        return name in self._waiters

    def new_slot(self) -> Slot:
        """Return a number for a slot that is made by cutting another; the store counts its own upwards from 0."""
        self._last_slot -= 1
        return self._last_slot

    # --- requests ---

    def push(self, received: Received, message: AnyPush, rank: Rank, chunks: list[Chunk], now: float) -> list[Effect]:
        """Take a rank's contribution to each of the chunks.

        Raises:
            ProtocolError: a wrong length, sequence or version; nothing is taken.
            MembershipError: the round has gone on without the rank.
            CodecError: the value is wanted in an unknown codec.
        """
        self._check_codec(message)
        nbytes = sum(chunk.nbytes_of(message) for chunk in chunks)
        if received.nbytes != nbytes:
            raise ProtocolError(f"{chunks[0].label}: expected {nbytes} bytes, got {received.nbytes}")
        versions = [self._check_push(chunk, message, rank) for chunk in chunks]
        slots: list[Slot | None] = [received.slot]
        effects: list[Effect] = []
        if len(chunks) > 1:
            slots, effects = split_slot(received.slot, chunks, self.new_slot)
        waiter = self._park(received, rank, message, chunks, now)
        waiter.want_value = message.want_value
        for chunk, version, slot in zip(chunks, versions, slots, strict=True):
            update = chunk.updates.get(version)
            if update is None:
                update = chunk.updates[version] = Update(version)
            contribution = Contribution(rank, message.sequence, message.read_version, message.clock, slot)
            contribution.read = self._read(chunk, rank, message.read_version)
            update.add(contribution)
            update.waiters[waiter] = None
            waiter.updates.append(update)
            chunk.pushed[rank] = message.sequence
            chunk.newest = max(chunk.newest, version)
        for chunk, update in zip(chunks, list(waiter.updates), strict=True):
            effects += self._settle(chunk, update)
        return effects

    def _check_push(self, chunk: Chunk, message: AnyPush, rank: Rank) -> Version:
        """Return the version that the push helps to make."""
        if chunk.group and rank not in chunk.group:
            who = self.roster.label(rank)
            text = f"{chunk.label} belongs to ranks {list(chunk.group)}; rank {who} is none of them"
            raise MembershipError(text, ranks=[rank], key=chunk.key)
        expected = chunk.pushed.get(rank, 0) + 1
        if message.sequence != expected:
            raise ProtocolError(f"{chunk.label}: expected push {expected} of rank {rank}, got {message.sequence}")
        version = chunk.policy.version_of(sequence=message.sequence, newest=chunk.newest)
        if chunk.is_closed(version, rank):
            # Only a rank that has left can be late: nobody waits for it.
            text = f"{chunk.label}: round {version} went on without rank {self.roster.label(rank)}"
            raise MembershipError(text, ranks=[rank], key=chunk.key, round=version)
        if version > chunk.version + MAX_OPEN_UPDATES:
            raise ProtocolError(
                f"{chunk.label}: push for version {version}, but the chunk is at {chunk.version}; "
                f"at most {MAX_OPEN_UPDATES} may be open"
            )
        if not 0 <= message.read_version <= chunk.version:
            raise ProtocolError(f"{chunk.label}: read version {message.read_version}, which is not made yet")
        return version

    def pull(self, received: Received, message: AnyPull, rank: Rank, chunks: list[Chunk], now: float) -> list[Effect]:
        """Answer with the values, or park the request until each holds the rank's push number `at_least`.

        Raises:
            CodecError: the value is wanted in an unknown codec.
        """
        self._check_codec(message)
        behind = [chunk for chunk in chunks if chunk.reflected.get(rank, 0) < message.at_least]
        rows = message.rows if isinstance(message, m.PullRows) else b""
        if not behind:
            asker = Asker(received.peer, received.request, rank, message.priority, rows, message.value_codec)
            return [self._value(asker, chunks)]
        waiter = self._park(received, rank, message, chunks, now)
        waiter.at_least, waiter.left, waiter.rows = message.at_least, len(behind), rows
        effects: list[Effect] = []
        for chunk in behind:
            chunk.pulls[waiter] = None
            update = chunk.awaited_update(waiter)
            if update is not None and self.roster.lost:
                effects += self._refuse_lost(chunk, update)
        return effects

    def _check_codec(self, message: AnyPush | AnyPull) -> None:
        if message.value_codec:
            self._codecs.find(message.value_codec)

    # --- updates ---

    def advance(self, chunks: Iterable[Chunk]) -> list[Effect]:
        """Look at all open updates again: the roster has changed."""
        effects: list[Effect] = []
        for chunk in chunks:
            for update in chunk.updates.values():
                effects += self._settle(chunk, update)
            effects += self._retire(chunk)
        return effects

    def applied(
        self, chunk: Chunk, version: Version, error: AiokvError | None = None, *, go_on: bool = True
    ) -> list[Effect]:
        """Take note that a version is made, and answer those who waited for nothing else.

        Args:
            chunk: the chunk whose version it is.
            version: the version.
            error: why its value is still that of the version before; who has pushed is told so.
            go_on: apply the next one if it is complete.
        """
        update = chunk.updates.pop(version)
        chunk.version = version
        chunk.applying = False
        if chunk.reads is not None:
            self._replaced(chunk, update, made=error is None)
        for rank, contribution in update.contributions.items():
            chunk.reflected[rank] = contribution.sequence
        done = list(update.waiters)
        update.waiters.clear()
        if chunk.pulls:
            ready = [pull for pull in chunk.pulls if chunk.reflected.get(pull.rank, 0) >= pull.at_least]
            for pull in ready:
                del chunk.pulls[pull]
            done += ready
        effects: list[Effect] = []
        for waiter in done:
            if error is not None and not waiter.at_least:
                effects.append(self._refuse(waiter, error))
                continue
            waiter.left -= 1
            if not waiter.left:
                effects.append(self._answer(waiter))
        effects += self._retire(chunk)
        following = chunk.updates.get(version + 1)
        return effects + self._settle(chunk, following) if go_on and following is not None else effects

    def _settle(self, chunk: Chunk, update: Update) -> list[Effect]:
        """Fold what may be folded; apply the update if it is complete, and refuse its waiters if it never will be."""
        chunk.expect(update, self.roster)
        missing = update.first_missing()
        robust = None if chunk.policy.keeps_sum else self._rules.robust
        effects = chunk.combine(update, missing, robust) if robust else chunk.fold(update, missing)
        if missing is not None:
            return effects + self._refuse_lost(chunk, update) if self.roster.lost else effects
        if not chunk.applying and update.version == chunk.version + 1:
            chunk.applying = True
            effects.append(self._begin(chunk, update))
        return effects

    def _begin(self, chunk: Chunk, update: Update) -> Effect:
        """Apply an update, or first let the norms be computed that its rule needs."""
        apply = self._apply(chunk, update)
        if not apply.rule.norm_counts:
            return chunk.completed(update, apply)
        chunk.pending = apply
        return self._norms_of(apply)

    def _norms_of(self, apply: Apply) -> Norms:
        head = (apply.key, apply.start, apply.version, apply.slot)
        return Norms(*head, len(apply.norms), list(apply.norms), apply.clock, apply.rule, apply.divisor)

    def normed(self, chunk: Chunk, sums: Sums) -> list[Effect]:
        """Go on with the sums over whole tensors of one phase before an update."""
        apply = chunk.pending
        assert apply is not None, "norms are for an update"
        chunk.gathering = False
        apply.norms.append(sums)
        if len(apply.norms) < apply.rule.norm_phases:
            return [self._norms_of(apply)]
        chunk.pending = None
        return [apply]

    def skip(self, chunk: Chunk) -> list[Effect]:
        """Do without the update for which norms were computed; `applied` is to follow."""
        apply, chunk.pending, chunk.gathering = chunk.pending, None, False
        assert apply is not None, "norms are for an update"
        return [Skip(apply.key, apply.start, apply.version, apply.slot)]

    def _apply(self, chunk: Chunk, update: Update) -> Apply:
        ranks = list(update.folded)
        behind = [chunk.version - update.contributions[rank].read_version for rank in ranks]
        clock = max(contribution.clock for contribution in update.contributions.values())
        rule: Optimizer = Assign()
        divisor = 1
        if not chunk.policy.keeps_sum:
            rule = self._rules.for_update(clock)
            divisor = self._rules.divisor(len(ranks), len(chunk.group) or self.roster.world)
        apply = Apply(chunk.key, chunk.start, update.version, update.accumulator, ranks, behind, clock, rule, divisor)
        if chunk.reads is not None:
            read = update.contributions[ranks[0]].read
            apply.read = chunk.version if read is None else read
            update.keeps = True
        return apply

    # --- what workers had read ---

    def _read(self, chunk: Chunk, rank: Rank, named: Version) -> Version | None:
        """Return the version that a rank had read, if the rule looks at it; from now on such versions are kept."""
        if chunk.reads is None:
            if not (self._rules.current.reads_weight and chunk.policy.per_push and chunk.is_dense):
                return None
            # An update that is under way keeps nothing.
            chunk.reads = Reads(chunk.version + chunk.applying)
        return chunk.reads.read(rank, named)

    def _replaced(self, chunk: Chunk, update: Update, *, made: bool) -> None:
        """Take note of what became of the value before an update: it is kept, or has another number now."""
        assert chunk.reads is not None, "nobody asks otherwise"
        before = update.version - 1
        if made and update.keeps:
            chunk.reads.kept.append(before)
        elif not made:
            chunk.reads.replaced(before, update.version)
            for contribution in self._open_contributions(chunk):
                if contribution.read == before:
                    contribution.read = update.version

    def _open_contributions(self, chunk: Chunk) -> list[Contribution]:
        return [part for update in chunk.updates.values() for part in update.contributions.values()]

    def _retire(self, chunk: Chunk) -> list[Effect]:
        """Drop the versions that no rank can refer to any longer."""
        if chunk.reads is None:
            return []
        roster = self.roster
        ranks = [rank for rank in roster.members_of(chunk.group) if rank not in roster.lost]
        pending = [part.read for part in self._open_contributions(chunk) if part.read is not None]
        versions = chunk.reads.retire(ranks, pending)
        return [Retire(chunk.key, chunk.start, versions)] if versions else []

    def _refuse_lost(self, chunk: Chunk, update: Update) -> list[Effect]:
        chunk.expect(update, self.roster)
        lost = [rank for rank in self.roster.lost if update.waits_for(rank)]
        if not lost:
            return []
        error = self.roster.loss(lost, f"{chunk.label}, round {update.version}", chunk.key, update.version)
        stuck = list(update.waiters)
        stuck += [pull for pull in chunk.pulls if chunk.awaited_update(pull) is update]
        return [self._refuse(waiter, error) for waiter in stuck]

    # --- waiting requests ---

    def _park(
        self,
        received: Received,
        rank: Rank,
        message: AnyPush | AnyPull,
        chunks: list[Chunk],
        now: float,
    ) -> Waiter:
        name = (received.peer, received.request)
        waiter = self._waiters[name] = Waiter(*name, rank, message.timeout, chunks, len(chunks), message.priority)
        waiter.value_codec = message.value_codec
        self._deadlines.add(name, now + message.timeout)
        return waiter

    def _unpark(self, waiter: Waiter) -> None:
        name = (waiter.peer, waiter.request)
        self._waiters.pop(name, None)
        self._deadlines.discard(name)

    def _forget(self, waiter: Waiter) -> None:
        """Take a waiter out that is not to be answered by an update."""
        self._unpark(waiter)
        for update in waiter.updates:
            update.waiters.pop(waiter, None)
        for chunk in waiter.chunks:
            chunk.pulls.pop(waiter, None)

    def forget_peer(self, peer: Peer) -> list[Effect]:
        """Nobody is there any longer to answer; what was pushed stays counted."""
        for waiter in [waiter for waiter in self._waiters.values() if waiter.peer == peer]:
            self._forget(waiter)
        return self.replicas.forget_peer(peer)

    def expire(self, name: RequestName) -> Effect:
        """Refuse a parked request whose time has come, and say what was missing."""
        waiter = self._waiters[name]
        return self._refuse(waiter, self._late(waiter))

    def _refuse(self, waiter: Waiter, error: AiokvError) -> Effect:
        self._forget(waiter)
        return Refuse(waiter.peer, waiter.request, error)

    def _answer(self, waiter: Waiter) -> Effect:
        self._unpark(waiter)
        if waiter.want_value:
            named = waiter.peer, waiter.request, waiter.rank
            asker = Asker(*named, waiter.priority, waiter.rows, waiter.value_codec)
            return self._value(asker, waiter.chunks)
        return Send(waiter.peer, waiter.request, m.Done(min(chunk.version for chunk in waiter.chunks)))

    def _value(self, asker: Asker, chunks: list[Chunk]) -> Effect:
        payload: Payload = chunks[0].stored(asker.rows)
        if len(chunks) > 1:
            payload = StoredChunks([StoredChunk(each.key, each.start, each.version, each.nbytes) for each in chunks])
        named = min(chunk.version for chunk in chunks)
        for chunk in chunks:
            if chunk.reads is not None:
                chunk.reads.answered(asker.rank, named, chunk.version)
        if asker.codec and len(chunks) == 1 and is_compressible(chunks[0].spec.dtype, chunks[0].size):
            return self._difference(asker, chunks[0])
        return Send(asker.peer, asker.request, m.Value(named), payload, asker.priority)

    def _difference(self, asker: Asker, chunk: Chunk) -> Effect:
        """Answer with what the value differs by from the peer's replica; the first time with the value itself."""
        known = self.replicas.add(asker.peer, chunk.key, chunk.start)
        codec = self._codecs.find(asker.codec) if known else None
        payload = StoredDifference(chunk.key, chunk.start, chunk.version, chunk.nbytes, asker.peer, codec)
        message = m.Value(chunk.version, asker.codec if known else 0)
        # All at one priority: they are to be added up in the order in which they were made.
        return Send(asker.peer, asker.request, message, payload, DIFFERENCE_PRIORITY)

    def _late(self, waiter: Waiter) -> RoundTimeoutError:
        awaited = [(chunk, chunk.awaited_update(waiter)) for chunk in waiter.chunks]
        # The first that is not there yet; when all are on their way, the first.
        chunk, update = next((pair for pair in awaited if pair[1] is not None), awaited[0])
        version = update.version if update else chunk.version + 1
        missing = [waiter.rank]
        if update is not None:
            chunk.expect(update, self.roster)
            missing = update.missing()
        reason = "its update is not applied yet"
        if missing:
            reason = f"no contribution from rank {self.roster.labels(missing)}"
        elif chunk.gathering:
            reason = f"no norms from {self._norms.missing(chunk)}"
        return RoundTimeoutError(
            f"{chunk.label}, round {version}: {reason} within {waiter.waits:.3g} s; what was pushed stays counted",
            ranks=missing,
            key=chunk.key,
            round=version,
        )

    def remove(self, chunk: Chunk, error: AiokvError) -> list[Effect]:
        """Refuse all who wait for a chunk, and free what they have brought."""
        self.replicas.forget_chunk(chunk.key, chunk.start)
        waiters = dict.fromkeys(waiter for update in chunk.updates.values() for waiter in update.waiters)
        waiters |= dict.fromkeys(chunk.pulls)
        effects = [self._refuse(waiter, error) for waiter in waiters]
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
        for chunk in chunks:
            assert all(version > chunk.version for version in chunk.updates)
            assert not chunk.applying or chunk.version + 1 in chunk.updates
            assert chunk.pending is None or chunk.applying
            assert not chunk.gathering or (chunk.pending is not None and not chunk.is_whole)
            for update in chunk.updates.values():
                assert set(update.folded) <= set(update.contributions)
                assert update.folded == sorted(update.folded)
                assert sorted(update.folded + update.unfolded) == sorted(update.contributions)
                assert all(self._waiters[w.peer, w.request] is w for w in update.waiters)
            for rank, reflected in chunk.reflected.items():
                assert reflected <= chunk.pushed[rank]
        for waiter in self._waiters.values():
            waits = sum(waiter in update.waiters for update in waiter.updates)
            waits += sum(waiter in chunk.pulls for chunk in waiter.chunks)
            assert waits == waiter.left > 0
        return set(self._waiters)
