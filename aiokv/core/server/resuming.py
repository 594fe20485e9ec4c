"""How a server begins with a checkpoint of the cluster, before workers are let in.

The checkpoint may have been written by any number of servers. Each one reads what all of them had, makes those chunks
that are its own in this cluster, and puts them together from the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Configure, Effect, Install, InstallRows, LoadSnapshots, Log, ReadCheckpoint, WantedChunk
from aiokv.core.placement import place, place_rows
from aiokv.core.server.rounds.rows import options_of
from aiokv.core.server.rounds.saved_rounds import SavedRounds
from aiokv.errors import AiokvError, MembershipError
from aiokv.optim import Assign
from aiokv.types import Piece
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from aiokv.core.placement import Chunk as Place
    from aiokv.core.rules import Rules
    from aiokv.core.saved_state import ChunkState
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.decisions import Group
    from aiokv.core.stimuli import CheckpointRead, SnapshotsLoaded
    from aiokv.types import Key

Numbered = dict[int, "ChunkState"]
"""Parts of one key, by their numbers in what was read."""


class Resuming:
    """The part of a `Coordinator` that loads a checkpoint.

    Args:
        catalog: where the keys are entered.
        rules: where the update rule is set.
        deciding: who decides rounds, or knows of them.
        begin: is told of each chunk that is made.
    """

    def __init__(self, catalog: Catalog, rules: Rules, deciding: Deciding, begin: Callable[[Chunk], None]) -> None:
        self._catalog = catalog
        self._rules = rules
        self._deciding = deciding
        self._begin = begin
        self._view: m.View | None = None
        self._saved_workers = 0
        self._decided: dict[Group, SavedRounds] = {}
        self._index = 0
        self.is_busy = False
        """Whether the values are not there yet."""
        self.error: AiokvError | None = None
        """Why they can't be loaded."""

    def viewed(self, view: m.View, index: int) -> list[Effect]:
        """Begin to load, if the first view says so; this is the server with that index."""
        if self._view is not None:
            return []
        self._view, self._index = view, index
        if not view.resume:
            return []
        self.is_busy = True
        return [ReadCheckpoint(view.resume)]

    def skip(self, view: m.View, index: int) -> None:
        """Load nothing: this server goes on where another one was."""
        self._view, self._index = view, index

    def read(self, read: CheckpointRead) -> list[Effect]:
        """Make the rule and the chunks, and have them filled."""
        try:
            if read.error is not None:
                raise read.error
            assert read.rules is not None, "there is a rule or an error"
            self._saved_workers = read.workers
            effects = self._set_rule(read.rules, read.clock)
            for state in read.rounds:
                rounds = SavedRounds(state, read.states)
                self._decided[rounds.group] = rounds
                self._deciding.resume(rounds.decisions(), dict(state.known), taken_over=False)
            effects += self._make_all(read.states)
            for chunk in self._catalog.chunks.values():
                chunk.clocks = {rank: (count, read.clock) for rank, count in chunk.pushed.items()} | chunk.clocks
        except AiokvError as error:
            self.error = error
            return []
        assert self._view is not None, "it said what to read"
        return [*effects, LoadSnapshots(self._view.resume, self._wanted)]

    def loaded(self, loaded: SnapshotsLoaded) -> None:
        """Take note that the values are there."""
        self.error = loaded.error
        self.is_busy = loaded.error is not None

    def _set_rule(self, rules: m.RulesState, clock: int) -> list[Effect]:
        rule = self._rules.restore(rules)
        self._rules.newest = clock
        return [] if rule is None else [Configure(rule)]

    @property
    def _workers(self) -> int:
        """How many workers there are now."""
        view = self._view
        assert view is not None, "it said what to read"
        return view.declared or len(view.workers)

    def _check_group(self, state: ChunkState) -> None:
        """Refuse a key for ranks that do not exist."""
        absent = [rank for rank in state.group if rank >= self._workers]
        if absent:
            text = f"key {state.key!r} is one of the group {state.group}, and this job has {self._workers} workers"
            raise MembershipError(text, ranks=absent, expected=f"{max(absent) + 1} workers at least", got=self._workers)

    def _make_all(self, states: list[ChunkState]) -> list[Effect]:
        of_key: dict[Key, Numbered] = {}
        for number, state in enumerate(states):
            self._check_group(state)
            of_key.setdefault(state.key, {})[number] = state
        self._wanted: list[WantedChunk] = []
        effects: list[Effect] = []
        for keys in dict.fromkeys(state.bundle for state in states if state.bundle):
            members = [of_key.get(key, {}) for key in keys]
            if all(self._is_here(parts, keys) for parts in members):
                effects.append(self._make_bundle({number: part for parts in members for number, part in parts.items()}))
        for key, parts in of_key.items():
            if key in self._catalog:
                continue
            if not _covers(parts):
                # All servers see that, so that none has it.
                text = f"key {key!r} was made or deleted while the checkpoint was, and is not in it"
                effects.append(Log("warning", text, "key_not_resumed", {"key": key}))
                continue
            effects += [self._make(spot, parts) for spot in self._places(next(iter(parts.values())))]
        return effects

    def _places(self, state: ChunkState) -> Iterator[Place]:
        view = self._view
        assert view is not None, "it said what to read"
        sizes = {"servers": len(view.servers), "split_bytes": view.split_bytes}
        if state.sparse:
            places = place_rows(state.key, state.spec, **sizes)
        else:
            places = place(state.key, state.spec, chunk_bytes=view.chunk_bytes, **sizes)
        return (spot for spot in places if spot.server == self._index)

    def _is_here(self, parts: Numbered, bundle: tuple[Key, ...]) -> bool:
        """Tell whether a key of a bundle is whole, and this server's."""
        whole = len(parts) == 1 and all(part.bundle == bundle for part in parts.values())
        return whole and any(self._places(next(iter(parts.values()))))

    def _make_bundle(self, parts: Numbered) -> Effect:
        """Enter keys that were one chunk as one again, so that they go on to be decided and sent together."""
        states = list(parts.values())
        first, keys = states[0], tuple(state.key for state in states)
        shapes, digests = tuple(state.shape for state in states), tuple(state.digest for state in states)
        nbytes = sum(state.spec.nbytes for state in states)
        message = m.InitBundle(keys, shapes, first.dtype, first.policy, 0.0, first.group, digests)
        chunk = self._catalog.create_bundle(message, nbytes).chunk
        assert chunk is not None, "a new bundle is one chunk"
        pieces = [Piece(state.key, 0, state.spec.size, state.spec.row_size) for state in states]
        self._fill(chunk, parts, nbytes)
        return Install(chunk.key, chunk.start, first.dtype, chunk.size, None, pieces)

    def _make(self, spot: Place, parts: Numbered) -> Effect:
        """Enter a chunk, and remember of which parts it is to be made."""
        sources = {number: part for number, part in parts.items() if _overlap(spot, part)}
        state = next(iter(sources.values()))
        head = (state.key, state.shape, state.dtype, spot.start, spot.stop)
        rest = (state.policy, 0.0, state.group, state.digest)
        nbytes = (spot.stop - spot.start) * state.spec.itemsize * (state.spec.row_size if state.sparse else 1)
        if state.sparse:
            message = m.InitRows(*head, 0, 0, 0, *rest, state.lazy, state.initializer)
            options = options_of(message)
            chunk: Chunk = self._catalog.create_table(message, options)
            made: Effect = InstallRows(
                chunk.key, chunk.start, chunk.stop, chunk.spec, options.initializer, options.lazy, None
            )
        else:
            chunk = self._catalog.create(m.Init(*head, *rest), nbytes)
            pieces = [Piece(chunk.key, chunk.start, chunk.size, state.spec.row_size)]
            made = Install(chunk.key, chunk.start, state.dtype, chunk.size, None, pieces)
        self._fill(chunk, sources, nbytes)
        return made

    def _fill(self, chunk: Chunk, sources: Numbered, nbytes: int) -> None:
        """Let a chunk go on where its parts were, and have their values put into it."""
        # Cuts of async keys may differ from chunk to chunk; of a part that lags behind nothing is counted twice.
        chunk.version = max(part.version for part in sources.values())
        for part in sources.values():
            for rank, count in part.counts:
                if rank < self._workers:
                    chunk.pushed[rank] = max(count, chunk.pushed.get(rank, 0))
        decided = self._count_decided(chunk, sources.values())
        most = max(chunk.pushed.values(), default=0)
        for rank in range(self._saved_workers, 0 if chunk.group else self._workers):
            # Who is new begins where those are that have come furthest, which is the same in all chunks.
            chunk.pushed.setdefault(rank, most)
        chunk.newest, chunk.reflected = chunk.version, dict(chunk.pushed)
        # Others begin as when they are set, so that who was behind is not behind any more.
        made = max(sources.values(), key=lambda part: part.version).made if chunk.policy.has_phases else 0
        chunk.since = chunk.version - made
        chunk.before = {rank: count - made for rank, count in chunk.pushed.items()}
        self._begin(chunk)
        if decided is not None and chunk.rounds is not None:
            chunk.rounds.go_on(chunk.version, {rank: clock for rank, (_, clock) in chunk.clocks.items()})
            # A push may come again of which these know what became of it.
            chunk.former = chunk.rounds.decisions
        rule = Assign() if chunk.policy.keeps_sum else self._rules.current
        self._wanted.append(WantedChunk(chunk.key, chunk.start, chunk.stop, chunk.version, rule, list(sources), nbytes))

    def _count_decided(self, chunk: Chunk, parts: Iterable[ChunkState]) -> SavedRounds | None:
        """Count what was pushed to a chunk and is decided; return the rounds in which it goes on, if there are any."""
        decided = self._decided.get((str(chunk.policy), chunk.group))
        if decided is not None:
            for rank, (count, clock) in decided.counts(parts).items():
                if rank < self._workers:
                    chunk.pushed[rank] = max(count, chunk.pushed.get(rank, 0))
                    chunk.clocks[rank] = (chunk.pushed[rank], clock)
        return decided


def _overlap(spot: Place, part: ChunkState) -> bool:
    """Tell whether a part has something of a chunk; each has something of one without elements."""
    return max(spot.start, part.start) < min(spot.stop, part.stop) or spot.start == spot.stop


def _covers(parts: Numbered) -> bool:
    """Tell whether parts are all of a key."""
    first = next(iter(parts.values()))
    end = 0
    for part in sorted(parts.values(), key=lambda part: part.start):
        if part.start > end or part.shape != first.shape or part.dtype != first.dtype:
            return False
        end = max(end, part.stop)
    return end == (first.shape[0] if first.sparse else first.spec.size)
