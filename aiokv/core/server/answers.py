"""Requests about chunks that wait on a server, and what they are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.compression import Replicas, is_compressible
from aiokv.core.effects import Effect, Refuse, Send, StoredChunk, StoredChunks, StoredDifference
from aiokv.core.records import Record
from aiokv.core.roster import Roster
from aiokv.core.server.rounds.chunk import NONE
from aiokv.core.server.rounds.updates import Waiter
from aiokv.errors import MembershipError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.core.compression import Codecs
    from aiokv.core.deadlines import Deadlines
    from aiokv.core.effects import Payload
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.tallies import Tallies
    from aiokv.core.server.rounds.updates import Contribution
    from aiokv.core.stimuli import Received
    from aiokv.errors import AiokvError
    from aiokv.types import Peer, Rank, Round, Version

AnyPush = m.Push | m.PushBundle | m.PushRows
AnyPull = m.Pull | m.PullBundle | m.PullRows

DIFFERENCE_PRIORITY = 0
"""At which compressed values are sent, whatever priority they were asked for with."""


class Asker(Record, eq=False):
    """Who gets a value, and how: some rows of it, or what it differs by in a codec; see `Value`."""

    peer: Peer
    request: int
    rank: Rank
    priority: int
    rows: bytes
    value_codec: int
    dropped: str = ""
    before: int = 0


def _common_version(chunks: list[Chunk]) -> Version:
    """Return the version that all of the chunks have at least."""
    return chunks[0].version if len(chunks) == 1 else min([chunk.version for chunk in chunks])


def _earlier(asker: Asker | Waiter, chunks: list[Chunk], versions: list[Version]) -> Effect:
    """Return the answer with values that may be those before the current ones."""
    if NONE in versions:
        label = chunks[versions.index(NONE)].label
        text = f"{label}: the value before push {asker.before} of rank {asker.rank} is not kept"
        return Refuse(asker.peer, asker.request, MembershipError(text, ranks=[asker.rank]))
    payload: Payload = chunks[0].stored(asker.rows, versions[0])
    if len(chunks) > 1:
        both = zip(chunks, versions, strict=True)
        payload = StoredChunks([StoredChunk(one.key, one.start, version, one.nbytes) for one, version in both])
    return Send(asker.peer, asker.request, m.Value(min(versions)), payload, asker.priority)


class Answers:
    """The part of a `Coordinator` that keeps pushes and pulls waiting, and answers them.

    Args:
        deadlines: where parked requests are entered, under peer and request id.
        codecs: which codecs values may be asked for in.
        tallies: where is counted how long reads are held back.
    """

    def __init__(self, deadlines: Deadlines[RequestName], codecs: Codecs, tallies: Tallies) -> None:
        self.roster = Roster()
        """The workers of the newest view; the owner puts it here."""
        self.replicas = Replicas()
        """What peers keep of values that they got compressed."""
        self._deadlines = deadlines
        self._codecs = codecs
        self._tallies = tallies
        self._waiters: dict[RequestName, Waiter] = {}
        self._awaiting: dict[Chunk, None] = {}
        """Chunks of decided rounds that somebody waits for a round of, or has waited."""

    def __contains__(self, name: RequestName) -> bool:
        return name in self._waiters

    def get(self, name: RequestName) -> Waiter:
        """Return a request that waits."""
        return self._waiters[name]

    def check_codec(self, message: AnyPush | AnyPull) -> None:
        """Refuse to answer in a codec that nobody has set.

        Raises:
            CodecError: it is one.
        """
        if message.value_codec:
            self._codecs.find(message.value_codec)

    # --- waiting ---

    def park(
        self, received: Received, rank: Rank, message: AnyPush | AnyPull, chunks: list[Chunk], now: float
    ) -> Waiter:
        """Let a request wait for chunks."""
        peer, request = name = (received.peer, received.request)
        waiter = Waiter(peer, request, rank, message.timeout, chunks, len(chunks), message.priority)
        waiter.name = name
        self._waiters[name] = waiter
        waiter.value_codec = message.value_codec
        self._deadlines.add(name, now + message.timeout)
        return waiter

    def is_parked(self, waiter: Waiter) -> bool:
        """Return True while a request waits, and somebody is there to hear the answer."""
        return self._waiters.get(waiter.name) is waiter

    def _unpark(self, waiter: Waiter) -> None:
        # By the very tuple that it was entered with, which needs no comparing.
        self._waiters.pop(waiter.name, None)
        self._deadlines.discard(waiter.name)

    def _forget(self, waiter: Waiter) -> None:
        """Take a waiter out that is not to be answered by an update."""
        self._unpark(waiter)
        for update in waiter.updates:
            update.waiters.pop(waiter, None)
        for chunk in waiter.chunks:
            chunk.forget_read(waiter)
            chunk.gated.pop(waiter, None)
            chunk.awaiting.pop(waiter, None)

    def forget_peer(self, peer: Peer) -> list[Effect]:
        """Nobody is there any longer to answer; what was pushed stays counted."""
        for waiter in [waiter for waiter in self._waiters.values() if waiter.peer == peer]:
            self._forget(waiter)
        return self.replicas.forget_peer(peer)

    def read_on(self, chunk: Chunk, ranks: Iterable[Rank], now: float) -> list[Effect]:
        """Let the pulls of these ranks go on whose own pushes are in the value of a chunk."""
        effects: list[Effect] = []
        for rank in ranks:
            for pull in list(chunk.pulls.get(rank, ())):
                if chunk.reflected[rank] >= pull.at_least:
                    chunk.forget_read(pull)
                    effects += self.advance([pull], now)
        return effects

    # --- reads that wait for a round ---

    def _stage(self, chunk: Chunk, rank: Rank) -> Round | Version:
        """Return the last round in the value of a chunk, or its version where the chunk decides its own rounds."""
        if chunk.rounds is None:
            return chunk.version
        return chunk.rounds.stage(rank, self.roster, applying=chunk.applying)

    def await_round(
        self, received: Received, message: m.AwaitRound, rank: Rank, chunk: Chunk, now: float
    ) -> list[Effect]:
        """Tell a worker when the value is newer than a round."""
        name = (received.peer, received.request)
        waiter = self._waiters[name] = Waiter(*name, rank, message.timeout, [chunk], 0, want_value=False)
        waiter.name, waiter.key, waiter.at_least_round = name, message.key, message.newer_than + 1
        self._deadlines.add(name, now + message.timeout)
        return self.finish(waiter, now)

    def _is_early(self, waiter: Waiter) -> bool:
        return self._stage(waiter.chunks[0], waiter.rank) < waiter.at_least_round

    def reached(self, chunk: Chunk, now: float) -> list[Effect]:
        """Let those go on whose round is in the value of a chunk now."""
        effects: list[Effect] = []
        for waiter in list(chunk.awaiting):
            if not self._is_early(waiter):
                del chunk.awaiting[waiter]
                effects += self.advance([waiter], now)
        return effects

    def awaited(self) -> list[Chunk]:
        """Return the chunks of decided rounds that somebody waits for a round of."""
        if self._awaiting:
            self._awaiting = {chunk: None for chunk in self._awaiting if chunk.awaiting}
        return list(self._awaiting)

    def let_go(self, chunk: Chunk, now: float) -> list[Effect]:
        """Answer all who wait for a round of a policy that the chunk leaves: with what is there."""
        effects: list[Effect] = []
        for waiter in list(chunk.awaiting):
            self._forget(waiter)
            effects.append(self._answer(waiter, now))
        return effects

    def give_up(self, waiter: Waiter, error: AiokvError, now: float) -> Effect:
        """Answer a request that waits for a round in vain: who wants the value gets what is there."""
        if not waiter.want_value:
            return self.refuse(waiter, error)
        self._forget(waiter)
        return self._answer(waiter, now)

    # --- reads that a policy holds back ---

    def advanced(self, chunk: Chunk, contributions: Iterable[Contribution], now: float) -> list[Effect]:
        """Let those read who waited for these pushes."""
        if chunk.gate is None:
            return []
        members = chunk.members(self.roster)
        counts = [(part.rank, chunk.count(part.rank, chunk.reflected[part.rank])) for part in contributions]
        free = [chunk.gate.advanced(rank, count, members, now) for rank, count in counts]
        return self.release(chunk, now) if any(free) else []

    def changed(self, chunk: Chunk, now: float) -> list[Effect]:
        """Look again who may read, because the members are others."""
        if chunk.gate is None:
            return []
        chunk.gate.changed(chunk.members(self.roster))
        return self.release(chunk, now)

    def release(self, chunk: Chunk, now: float) -> list[Effect]:
        """Let those go on whose reads of a chunk are held back no longer."""
        effects: list[Effect] = []
        for waiter in list(chunk.gated):
            if self._may_read(chunk, waiter.rank):
                del chunk.gated[waiter]
                effects.append(self._answer(waiter, now))
            else:
                effects += self._refuse_held(chunk, waiter)
        return effects

    def _may_read(self, chunk: Chunk, rank: Rank) -> bool:
        return chunk.gate is None or chunk.gate.may_read(rank, chunk.members(self.roster))

    def behind(self, chunk: Chunk, rank: Rank) -> list[Rank]:
        """Return the ranks for which a read of this rank is held back."""
        assert chunk.gate is not None, "it holds the read back"
        return chunk.gate.waits_for(rank, chunk.members(self.roster))

    def _hold(self, waiter: Waiter, now: float) -> list[Effect] | None:
        """Hold a read back, if it has to be; None: it has not."""
        chunk = waiter.chunks[0]
        if self._may_read(chunk, waiter.rank):
            return None
        waiter.left, waiter.held_since = 1, now
        chunk.gated[waiter] = None
        return self._refuse_held(chunk, waiter)

    def _refuse_held(self, chunk: Chunk, waiter: Waiter) -> list[Effect]:
        if not self.roster.lost:
            return []
        lost = [rank for rank in self.behind(chunk, waiter.rank) if rank in self.roster.lost]
        if not lost:
            return []
        return [self.refuse(waiter, self.roster.loss(lost, f"{chunk.label}, read", chunk.key, chunk.version))]

    # --- answers ---

    def refuse(self, waiter: Waiter, error: AiokvError) -> Effect:
        """Answer a request that waits with an error."""
        self._forget(waiter)
        return Refuse(waiter.peer, waiter.request, error)

    def advance(self, waiters: Iterable[Waiter], now: float) -> list[Effect]:
        """Take note that one of the chunks is done for which requests wait; answer each after its last."""
        effects: list[Effect] = []
        for waiter in waiters:
            waiter.left -= 1
            if not waiter.left:
                effects += self.finish(waiter, now)
        return effects

    def finish(self, waiter: Waiter, now: float) -> list[Effect]:
        """Answer a request that waits for no update any longer, as soon as it may read."""
        if waiter.at_least_round and self._is_early(waiter):
            chunk = waiter.chunks[0]
            waiter.left, chunk.awaiting[waiter] = 1, None
            if chunk.rounds is not None:
                self._awaiting[chunk] = None
            return []
        # Keys that have a gate are never read together.
        has_gate = waiter.want_value and waiter.chunks[0].gate is not None
        held = self._hold(waiter, now) if has_gate else None
        return [self._answer(waiter, now)] if held is None else held

    def _answer(self, waiter: Waiter, now: float) -> Effect:
        # As `_unpark`; it is for every push.
        self._waiters.pop(waiter.name, None)
        self._deadlines.pop(waiter.name, None)
        if waiter.held_since is not None:
            self._tallies.waited(waiter.rank, now - waiter.held_since)
        if waiter.want_value:
            return self.value(waiter, waiter.chunks)
        if waiter.key is not None:
            return Send(waiter.peer, waiter.request, m.Reached(self._stage(waiter.chunks[0], waiter.rank)))
        done = m.Done(_common_version(waiter.chunks), waiter.dropped)
        return Send(waiter.peer, waiter.request, done)

    def value(self, asker: Asker | Waiter, chunks: list[Chunk]) -> Effect:
        """Return the answer with the current value of chunks, or with the one before a push of who asks."""
        if asker.before:
            versions = [chunk.version_before(asker.rank, asker.before) for chunk in chunks]
            if versions != [chunk.version for chunk in chunks]:
                return _earlier(asker, chunks, versions)
        payload: Payload = chunks[0].stored(asker.rows, chunks[0].version)
        named = chunks[0].version
        if len(chunks) > 1:
            payload = StoredChunks([StoredChunk(each.key, each.start, each.version, each.nbytes) for each in chunks])
            named = _common_version(chunks)
        for chunk in chunks:
            if chunk.reads is not None:
                chunk.reads.answered(asker.rank, named, chunk.version)
        if asker.value_codec and len(chunks) == 1 and is_compressible(chunks[0].spec.dtype, chunks[0].size):
            return self._difference(asker, chunks[0])
        message = m.Value(named, dropped=asker.dropped)
        if chunks[0].rounds is not None:
            message.round = self._stage(chunks[0], asker.rank)
        return Send(asker.peer, asker.request, message, payload, asker.priority)

    def _difference(self, asker: Asker | Waiter, chunk: Chunk) -> Effect:
        """Answer with what the value differs by from the peer's replica; the first time with the value itself."""
        known = self.replicas.add(asker.peer, chunk.key, chunk.start)
        codec = self._codecs.find(asker.value_codec) if known else None
        payload = StoredDifference(chunk.key, chunk.start, chunk.version, chunk.nbytes, asker.peer, codec)
        message = m.Value(chunk.version, asker.value_codec if known else 0, asker.dropped)
        if chunk.rounds is not None:
            message.round = self._stage(chunk, asker.rank)
        # All at one priority: they are to be added up in the order in which they were made.
        return Send(asker.peer, asker.request, message, payload, DIFFERENCE_PRIORITY)

    # --- for tests ---

    def validate(self) -> tuple[set[RequestName], set[Waiter]]:
        """Check what must hold between any two stimuli; return the parked requests, by name and as they are.

        Raises:
            AssertionError: an invariant is broken.
        """
        for waiter in self._waiters.values():
            waits = 0
            for update in waiter.updates:
                waits += waiter in update.waiters
            for chunk in waiter.chunks:
                if chunk.pulls:
                    waits += waiter in chunk.pulls.get(waiter.rank, ())
                if chunk.gated:
                    waits += waiter in chunk.gated
                if chunk.awaiting:
                    waits += waiter in chunk.awaiting
                if chunk.rounds is not None:
                    waits += sum(one.waiter is waiter for one in chunk.rounds.undecided.values())
                    waits += sum(one.waiter is waiter for one in chunk.rounds.dropped)
            assert waits == waiter.left > 0
        return set(self._waiters), set(self._waiters.values())
