"""Sums over whole tensors, for rules that need them before an update: gathered where the chunks lie on several servers.

Each chunk's server computes the sums of its own elements. The server of a key's element 0 is its home: the others send
it theirs, it adds them in the order of the chunks, so that the bits are always the same, and answers with the totals. A
key whose only chunk is here needs nobody. When one chunk can't take part, the update is refused to all that have not
made it: there is no silent wait.

A server may send its sums again: the answer got lost with its connection, or its standby has its place now and makes
again what it has not heard of. So the home remembers the last totals of each key, and its own standby is told of them
before anybody else: when that has its place, who has gone on with totals does not send sums for them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Refuse, Send, Sums
from aiokv.core.placement import Chunk as Place
from aiokv.core.placement import place
from aiokv.errors import AiokvError, KeyDeletedError, ProtocolError, UpdateRefusedError, from_code
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.neighbours import Neighbours
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.decisions import Question
    from aiokv.core.server.rounds.whole_call import WholeCall
    from aiokv.core.stimuli import Normed
    from aiokv.types import Key, Peer, Version


REMEMBERED = 64
"""How many totals of a key are remembered: so far behind may a standby be, in phases of updates."""


Total = tuple["Version", int, tuple[float, ...]]
"""The sums of all chunks of a key before the update that makes a version, of one phase."""


@dataclass(slots=True)
class Ready:
    """A chunk of this server whose wait is over: with the sums over whole tensors, or without an update."""

    chunk: Chunk
    result: Sums | AiokvError


@dataclass(slots=True)
class Outcome:
    """What came of a step: effects, and chunks that can go on."""

    effects: list[Effect] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)

    def add(self, other: Outcome) -> Outcome:
        """Put another outcome behind this one, and return this one."""
        self.effects += other.effects
        self.ready += other.ready
        return self


@dataclass(slots=True, eq=False)
class Gathering:
    """At a key's home: what is there for one phase of one update; `here` and `away` wait for the rest.

    Who has sent its sums and has lost its connection since is in neither, and comes again.
    """

    version: Version
    phase: int
    sums: dict[int, tuple[float, ...]] = field(default_factory=dict)
    here: list[Chunk] = field(default_factory=list)
    away: list[RequestName] = field(default_factory=list)


class Norms:
    """The part of a `Coordinator` that gathers sums over whole tensors.

    Args:
        catalog: the server's keys.
        neighbours: the other servers.
    """

    def __init__(self, catalog: Catalog, neighbours: Neighbours[Chunk | Question | WholeCall]) -> None:
        self.view: m.View | None = None
        """The newest view; the owner puts it here."""
        self._catalog = catalog
        self._neighbours = neighbours
        self._open: dict[Key, Gathering] = {}
        self._failed: dict[Key, tuple[Version, AiokvError]] = {}
        """For each key the last update that failed, as late chunks have to hear."""
        self._totals: dict[Key, dict[tuple[Version, int], tuple[float, ...]]] = {}
        """The last totals of each key, by version and phase, as may have to be told again."""
        self.on_total: Callable[[Key, Total], None] | None = None
        """Is called when there are new totals of a key."""
        self._places: dict[Key, list[Place]] = {}

    # --- chunks of this server ---

    def measured(self, chunk: Chunk, normed: Normed, now: float) -> Outcome:
        """Take in the sums of a chunk's own elements."""
        if chunk.is_whole:
            return Outcome([], [Ready(chunk, normed.error or normed.sums)])
        version, phase = normed.version, normed.phase
        places, me = self._places_of(chunk.key), self._neighbours.index
        if Place(me, chunk.start, chunk.stop) not in places:
            text = f"{chunk.label}: elements {chunk.start} to {chunk.stop} are no chunk of server {me}"
            return Outcome([], [Ready(chunk, UpdateRefusedError(text, key=chunk.key, round=version))])
        chunk.gathering = True
        # None say that they could not be computed.
        own = normed.sums[0] if normed.error is None else ()
        home = places[0].server
        if home == me:
            return self._add(chunk.key, version, phase, chunk.start, own, chunk)
        error = self._neighbours.first_lost([home])
        if error is not None:
            return Outcome([], [Ready(chunk, error)])
        return Outcome(self._neighbours.ask(home, m.Sums(chunk.key, chunk.start, version, phase, own), chunk, now))

    def answered(self, chunk: Chunk, message: m.Message) -> Outcome:
        """Take in what the home of a chunk's key says."""
        if isinstance(message, m.Totals):
            return Outcome([], [Ready(chunk, [message.totals])])
        error: AiokvError = ProtocolError(f"unexpected {type(message).__name__}")
        if isinstance(message, m.Error):
            error = from_code(message.code, message.message, message.details)
        return self.refused(chunk, error)

    def refused(self, chunk: Chunk, error: AiokvError) -> Outcome:
        """Let a chunk do without the update. Who has pushed is told why, by an error that lets the push count."""
        if not error.counted:
            version = chunk.version + 1
            text = f"{chunk.label}, round {version}: the update could not be made: {error.message}"
            error = UpdateRefusedError(text, key=chunk.key, round=version)
        return Outcome([], [Ready(chunk, error)])

    def missing(self, chunk: Chunk) -> str:
        """Return whose sums a chunk waits for, in words."""
        places = self._places_of(chunk.key)
        gathering = self._open.get(chunk.key)
        absent = [places[0].server]
        if gathering is not None:
            absent = [each.server for each in places if each.start not in gathering.sums]
        return " and ".join(self._neighbours.label(index) for index in dict.fromkeys(absent))

    # --- other servers ---

    def asked(self, peer: Peer, request: int, message: m.Sums) -> Outcome:
        """Take in the sums of another server's chunk.

        Raises:
            ProtocolError: the connection is not a server's, or the chunk is not its own.
            UnknownKeyError: no such key here.
        """
        places = self._places_of(message.key)
        index = self._neighbours.caller(peer)
        owners = [each.server for each in places if each.start == message.start]
        if index is None or owners != [index] or places[0].server != self._neighbours.index:
            raise ProtocolError(f"key {message.key!r}: no sums for the chunk at {message.start} from this connection")
        name = (peer, request)
        return self._add(message.key, message.version, message.phase, message.start, message.sums, name)

    def forget_peer(self, peer: Peer) -> None:
        """Tell nothing over a connection that is over; who has asked over it asks again."""
        for gathering in self._open.values():
            gathering.away[:] = [name for name in gathering.away if name[0] != peer]

    def viewed(self, view: m.View) -> Outcome:
        """Take over a newer view, and fail what needs a server that it calls lost."""
        self.view = view
        outcome = Outcome()
        for entry in view.servers:
            if entry.state == "lost":
                outcome.add(self._fail_with(entry.index, entry.reason))
        return outcome

    def remove(self, key: Key, chunks: list[Chunk]) -> list[Effect]:
        """Forget a key that was deleted, and its chunks; the other servers that wait for it are refused."""
        for chunk in chunks:
            # The key may be made again; what is asked about this one must not be taken for that.
            self._neighbours.withdraw(chunk)
        self._places.pop(key, None)
        error = KeyDeletedError(f"key {key!r} was deleted while its update was made", key=key)
        effects = self._fail(key, error).effects
        self._failed.pop(key, None)
        self._totals.pop(key, None)
        return effects

    # --- what a standby has to know ---

    def remember(self, key: Key, totals: Iterable[Total]) -> None:
        """Remember totals of a key, by version and phase; the oldest are forgotten."""
        known = self._totals.setdefault(key, {})
        known.update(((version, phase), each) for version, phase, each in totals)
        while len(known) > REMEMBERED:
            del known[next(iter(known))]

    def remembered(self, key: Key) -> list[Total]:
        """Return the last totals of a key, the newest last."""
        return [(version, phase, each) for (version, phase), each in self._totals.get(key, {}).items()]

    @property
    def totalled(self) -> Iterator[Key]:
        """The keys of which there are totals."""
        return iter(self._totals)

    # --- at home ---

    def _places_of(self, key: Key) -> list[Place]:
        places = self._places.get(key)
        if places is None:
            view, spec = self.view, self._catalog.spec(key)
            assert view is not None, "keys come after the first view"
            places = self._places[key] = place(
                key, spec, servers=len(view.servers), chunk_bytes=view.chunk_bytes, split_bytes=view.split_bytes
            )
        return places

    def _add(
        self, key: Key, version: Version, phase: int, start: int, sums: tuple[float, ...], asker: Chunk | RequestName
    ) -> Outcome:
        failed = self._failed.get(key)
        if failed is not None and version <= failed[0]:
            return self._refuse(asker, failed[1])
        known = self._totals.get(key, {})
        if (version, phase) in known:
            return self._tell(asker, known[version, phase])
        if known and (version, phase) < next(reversed(known)):
            text = f"key {key!r}, round {version}: its norms are remembered no longer; others have made the update"
            return self._refuse(asker, UpdateRefusedError(text, key=key, round=version))
        gathering = self._open.get(key)
        if gathering is not None and (gathering.version, gathering.phase) != (version, phase):
            # A server that is further has done without this update.
            text = f"key {key!r}, round {gathering.version}: another server has not made the update"
            outcome = self._fail(key, UpdateRefusedError(text, key=key, round=gathering.version))
            return outcome.add(self._add(key, version, phase, start, sums, asker))
        if gathering is None:
            gathering = self._open[key] = Gathering(version, phase)
        gathering.sums[start] = sums
        if isinstance(asker, tuple):
            gathering.away.append(asker)
        else:
            gathering.here.append(asker)
        places = self._places_of(key)
        error: AiokvError | None = self._neighbours.first_lost([each.server for each in places])
        if error is None and (not sums or any(len(own) != len(sums) for own in gathering.sums.values())):
            text = f"key {key!r}, round {version}: the norms of its elements from {start} on could not be computed"
            error = UpdateRefusedError(text, key=key, round=version)
        if error is not None:
            return self._fail(key, error)
        return self._total(key, gathering) if len(gathering.sums) == len(places) else Outcome()

    def _total(self, key: Key, gathering: Gathering) -> Outcome:
        """Add what is there now of all chunks, in their order."""
        del self._open[key]
        first, *others = [gathering.sums[start] for start in sorted(gathering.sums)]
        totals = first
        for sums in others:
            totals = tuple(total + own for total, own in zip(totals, sums, strict=True))
        total = (gathering.version, gathering.phase, totals)
        self.remember(key, [total])
        if self.on_total is not None:
            self.on_total(key, total)
        outcome = Outcome()
        askers: list[Chunk | RequestName] = [*gathering.away, *gathering.here]
        for asker in askers:
            outcome.add(self._tell(asker, totals))
        return outcome

    def _tell(self, asker: Chunk | RequestName, totals: tuple[float, ...]) -> Outcome:
        if isinstance(asker, tuple):
            return Outcome([Send(*asker, m.Totals(totals))])
        return Outcome([], [Ready(asker, [totals])])

    def _fail_with(self, index: int, reason: str) -> Outcome:
        outcome = Outcome()
        for key in list(self._open):
            if any(each.server == index for each in self._places_of(key)):
                outcome.add(self._fail(key, self._neighbours.lost(index, reason)))
        return outcome

    def _fail(self, key: Key, error: AiokvError) -> Outcome:
        gathering = self._open.pop(key, None)
        outcome = Outcome()
        if gathering is not None:
            self._failed[key] = (gathering.version, error)
            askers: list[Chunk | RequestName] = [*gathering.away, *gathering.here]
            for asker in askers:
                outcome.add(self._refuse(asker, error))
        return outcome

    def _refuse(self, asker: Chunk | RequestName, error: AiokvError) -> Outcome:
        if isinstance(asker, tuple):
            return Outcome([Refuse(*asker, error)])
        return self.refused(asker, error)

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        for key, gathering in self._open.items():
            assert len(gathering.here) + len(gathering.away) <= len(gathering.sums) < len(self._places_of(key))
            assert all(chunk.gathering and chunk.pending is not None for chunk in gathering.here)
            assert all(self._neighbours.caller(peer) is not None for peer, _ in gathering.away)
