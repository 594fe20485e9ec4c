"""What workers do with the keys of a server: create, push, pull, save, delete; and what has to wait meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Forget, Refuse, Send, freed
from aiokv.core.server.parked import Parked
from aiokv.core.server.rounds.bundle import Bundle, divide
from aiokv.core.waiting import Wait
from aiokv.errors import AiokvError, KeyDeletedError, ProtocolError, UnknownKeyError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from aiokv.core.deadlines import Deadlines
    from aiokv.core.roster import Roster
    from aiokv.core.server.answers import Answers
    from aiokv.core.server.boundaries import Boundaries
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.cluster_checkpoints import Checkpoints
    from aiokv.core.server.creation import Creation
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.norms import Norms
    from aiokv.core.server.rounds.rounds import Rounds
    from aiokv.core.server.rounds.rows import Tables
    from aiokv.core.server.saving import Saving
    from aiokv.core.stimuli import Applied, Received
    from aiokv.types import Key, Peer, Rank, Slot


Requested = (
    *(m.Push, m.Pull, m.PushBundle, m.PullBundle, m.PushRows, m.PullRows, m.Init, m.InitBundle, m.InitRows),
    *(m.AwaitRound, m.GetState, m.PutState, m.GetPushes),
)
"""The requests that `Exchanges` carries out, besides `Delete`, which concerns others too."""


class Exchanges:
    """The part of a `Coordinator` that deals with requests about keys.

    Args:
        catalog: the server's keys.
        creation: who makes them.
        rounds: who makes their versions.
        answers: who keeps requests waiting for these.
        tables: who deals with row-sparse keys.
        norms: who computes norms for updates.
        saving: who reads and writes saved state.
        boundaries: who lets workers join.
        checkpoints: who holds on to values before they are no more.
        deadlines: where requests that wait are entered, under peer and request id.
        again: looks at a request once more that had to wait.
    """

    def __init__(
        self,
        catalog: Catalog,
        creation: Creation,
        rounds: Rounds,
        answers: Answers,
        tables: Tables,
        norms: Norms,
        saving: Saving,
        boundaries: Boundaries,
        checkpoints: Checkpoints,
        deadlines: Deadlines[RequestName],
        again: Callable[[Received, float], list[Effect]],
    ) -> None:
        self._catalog = catalog
        self._creation = creation
        self._rounds = rounds
        self._answers = answers
        self._tables = tables
        self._norms = norms
        self._saving = saving
        self._boundaries = boundaries
        self._checkpoints = checkpoints
        self._deadlines = deadlines
        self._again = again
        self._early: Parked[Received] = Parked()

    def __contains__(self, name: RequestName) -> bool:
        return name in self._early

    def __iter__(self) -> Iterator[RequestName]:
        return iter(self._early)

    def requested(self, received: Received, rank: Rank, roster: Roster, now: float) -> list[Effect]:
        """Do what a worker asks for, or let it wait.

        Raises:
            AiokvError: it can't be done.
        """
        message = received.message
        match message:
            case m.Push() | m.Pull():
                return self._exchange(received, message, rank, now)
            case m.PushBundle() | m.PullBundle():
                return self._exchange_bundle(received, message, rank, now)
            case m.Init() | m.InitBundle():
                return self._init(received, message, rank, roster, now)
            case m.InitRows() | m.PushRows() | m.PullRows():
                return self._exchange_rows(received, message, rank, roster, now)
            case m.AwaitRound(key):
                return self._rounds.await_round(received, message, rank, self._catalog.first(key), now)
            case m.Delete():
                return self._delete(received, message)
            case m.GetPushes():
                return self._count_pushes(received, message, rank, roster, now)
            case _:
                assert isinstance(message, m.GetState | m.PutState), "all others are above"
                return self._exchange_state(received, message, roster, now)

    def _count_pushes(
        self, received: Received, message: m.GetPushes, rank: Rank, roster: Roster, now: float
    ) -> list[Effect]:
        chunk = self._catalog.lookup_state(message)
        effects: list[Effect] = []
        for admitted in self._boundaries.enter(rank, roster, now):
            effects += self._answers.changed(admitted, now)
        pushes = m.Pushes(*chunk.settled(rank), str(chunk.policy))
        return [*effects, Send(received.peer, received.request, pushes)]

    def forget_peer(self, peer: Peer) -> list[Effect]:
        """Nobody is there any longer to answer; what was pushed stays counted."""
        self._creation.forget_peer(peer)
        for name, _ in self._early.take_peer(peer):
            self._deadlines.discard(name)
        return self._answers.forget_peer(peer) + self._tables.forget_peer(peer)

    def applied(self, chunk: Chunk, applied: Applied, now: float) -> list[Effect]:
        """Take note that the store has made a version, and go on with what has waited for it."""
        held, chunk.held = chunk.held, []
        effects = self._rounds.applied(chunk, applied.version, now, applied.error, go_on=not held)
        if not held:
            return effects
        # No further update begins before these are looked at.
        bundle = self._catalog.bundle_of(chunk.key)
        keys = (chunk.key,) if bundle is None else bundle.keys
        if bundle is not None:
            effects += self.divide(bundle)
        for received in held:
            effects += self._again(received, now)
        left = [other for other in self._catalog.chunks.values() if other.key in keys]
        return effects + self._rounds.advance(left, now)

    # --- requests ---

    def _init(
        self, received: Received, message: m.Init | m.InitBundle, rank: Rank, roster: Roster, now: float
    ) -> list[Effect]:
        effects = self._creation.init(received, message, rank, roster, now)
        keys, start = ((message.key,), message.start) if isinstance(message, m.Init) else (message.keys, 0)
        return effects + self._wake(keys, start, now)

    def _wait_for_key(self, received: Received, message: m.Pull | m.PullRows, now: float) -> list[Effect]:
        """Let a worker read a key before its root has made it. A push that early is a mistake."""
        self._catalog.check_key(message.key)
        name = (received.peer, received.request)
        self._early.add(name, received, message.key, message.start)
        self._deadlines.add(name, now + message.timeout)
        return []

    def _wake(self, keys: tuple[Key, ...], start: int, now: float) -> list[Effect]:
        """Look again at what has waited for keys, if they are there."""
        effects: list[Effect] = []
        for key in keys:
            chunk = self._catalog.find(key, start)
            if chunk is not None:
                self._rounds.begin(chunk)
                for name, early in self._early.take_place(key, start):
                    self._deadlines.discard(name)
                    effects += self._again(early, now)
        return effects

    def _exchange_rows(
        self, received: Received, message: m.InitRows | m.PushRows | m.PullRows, rank: Rank, roster: Roster, now: float
    ) -> list[Effect]:
        if isinstance(message, m.PullRows) and message.key not in self._catalog:
            return self._wait_for_key(received, message, now)
        effects = self._tables.received(received, message, rank, roster, now)
        return effects + self._wake((message.key,), message.start, now) if isinstance(message, m.InitRows) else effects

    def _exchange(self, received: Received, message: m.Push | m.Pull, rank: Rank, now: float) -> list[Effect]:
        # Not by `isinstance`, which takes five times as long to say no.
        if type(message) is m.Pull and self._is_missing(message):
            return self._wait_for_key(received, message, now)
        chunk = self._catalog.lookup(message)
        bundle = self._catalog.bundle_of(message.key)
        if bundle is None:
            return self._carry_out(received, message, rank, chunk.alone, now)
        # Somebody uses a key of a bundle alone.
        if chunk.applying:
            chunk.held.append(received)
            return []
        effects = self.divide(bundle)
        chunk = self._catalog.lookup(message)
        return effects + self._carry_out(received, message, rank, chunk.alone, now)

    def _is_missing(self, message: m.Pull) -> bool:
        return self._catalog.find(message.key, message.start) is None and not self._catalog.is_sparse(message.key)

    def _exchange_bundle(
        self, received: Received, message: m.PushBundle | m.PullBundle, rank: Rank, now: float
    ) -> list[Effect]:
        bundle = self._catalog.bundle(message.bundle)
        if bundle.chunk is not None:
            return self._carry_out(received, message, rank, [bundle.chunk], now)
        effects: list[Effect] = []
        for key in bundle.keys:
            other = self._catalog.bundle_of(key)
            if other is None:
                continue
            if other.chunk is not None and other.chunk.applying:
                other.chunk.held.append(received)
                return effects
            effects += self.divide(other)
        chunks = [self._catalog.chunks[key, 0] for key in bundle.keys]
        return effects + self._carry_out(received, message, rank, chunks, now)

    def _carry_out(
        self,
        received: Received,
        message: m.Push | m.Pull | m.PushBundle | m.PullBundle,
        rank: Rank,
        chunks: list[Chunk],
        now: float,
    ) -> list[Effect]:
        try:
            if isinstance(message, (m.Push, m.PushBundle)):
                return self._rounds.push(received, message, rank, chunks, now)
            return self._rounds.pull(received, message, rank, chunks, now)
        except AiokvError as error:
            # Caught here too, because what was divided for it stays divided.
            return [*freed(received.slot), Refuse(received.peer, received.request, error)]

    def _exchange_state(
        self, received: Received, message: m.GetState | m.PutState, roster: Roster, now: float
    ) -> list[Effect]:
        if isinstance(message, m.PutState):
            if received.slot is None:
                raise ProtocolError(f"key {message.key!r}: a state without a payload")
            if created := self._saving.create(message, roster):
                chunk = self._catalog.lookup_state(message)
                # Who waits for the key reads what was saved.
                effects = created + self._saving.write(received, message, chunk, received.slot)
                return effects + self._wake((message.key,), chunk.start, now)
        chunk = self._catalog.lookup_state(message)
        if chunk.applying:
            chunk.held.append(received)
            return []
        if isinstance(message, m.GetState):
            return self._saving.read(received, message, chunk)
        assert received.slot is not None, "it was looked for"
        effects = []
        bundle = self._catalog.bundle_of(message.key)
        if bundle is not None:
            # Keys that come from elsewhere may have been updated a different number of times.
            effects = self.divide(bundle)
            chunk = self._catalog.lookup_state(message)
        return effects + self._saving.write(received, message, chunk, received.slot)

    def new_slot(self) -> Slot:
        """Return a number for a slot that is made by cutting another."""
        return self._rounds.new_slot()

    def divide(self, bundle: Bundle) -> list[Effect]:
        """Make chunks of their own of the keys of a bundle whose chunk is not being updated."""
        whole = bundle.chunk
        assert whole is not None, "a bundle is divided once"
        self._answers.replicas.forget_chunk(whole.key, whole.start)
        chunks, effects = divide(bundle, self._rounds.new_slot)
        self._catalog.replace(bundle, chunks)
        return effects

    def divide_all(self, received: Received, keys: Iterable[Key]) -> tuple[list[Effect], bool]:
        """Make chunks of their own of keys; False: a bundle is being updated, and the request waits for that."""
        effects: list[Effect] = []
        for key in keys:
            bundle = self._catalog.bundle_of(key)
            if bundle is None:
                continue
            if bundle.chunk is not None and bundle.chunk.applying:
                bundle.chunk.held.append(received)
                return effects, False
            effects += self.divide(bundle)
        return effects, True

    def _delete(self, received: Received, message: m.Delete) -> list[Effect]:
        here = [key for key in message.keys if key in self._catalog]
        effects, divided = self.divide_all(received, here)
        if not divided:
            return effects
        chunks = [chunk for (key, _), chunk in self._catalog.chunks.items() if key in here]
        applying = next((chunk for chunk in chunks if chunk.is_busy), None)
        if applying is not None:
            applying.held.append(received)
            return effects
        effects += self._checkpoints.removing(chunks, message.clock)
        for key in here:
            error = KeyDeletedError(f"key {key!r} was deleted while the call was pending", key=key)
            effects += self.forget(key, error)
        return [*effects, Send(received.peer, received.request, m.Done())]

    def forget(self, key: Key, error: AiokvError) -> list[Effect]:
        """Let a key be no more that is in no bundle; who waits for it gets an error."""
        effects: list[Effect] = []
        chunks = self._catalog.remove(key)
        for chunk in chunks:
            effects += [*self._rounds.remove(chunk, error), Forget(chunk.key, chunk.start)]
        return effects + self._norms.remove(key, chunks)

    def expire(self, name: RequestName) -> Effect:
        """Refuse a pull whose key was not made in time."""
        wait = self.wait(name)
        self._early.take(name)
        text = f"key {wait.key!r} is not initialized, and nobody did it within {wait.seconds:.3g} s"
        return Refuse(*name, UnknownKeyError(text, key=wait.key))

    def wait(self, name: RequestName) -> Wait:
        """Return for what a pull of a key that is not there waits."""
        message = self._early.get(name).message
        assert isinstance(message, m.Pull | m.PullRows), "only pulls wait for a key"
        return Wait(f"pull of key {message.key!r}", "nobody has initialized it", message.timeout, [], message.key)
