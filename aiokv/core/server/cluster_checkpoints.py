"""A server's part of the cluster's checkpoints: which version of each chunk belongs to one, and when all are there.

The checkpoint of clock C has all updates whose clock is at most C. A chunk is held on to when its first update with a
larger clock is about to be made. What gets no such update is held on to when the scheduler says that all workers are
past C and have answers to all that they had pushed by then: so nothing of before is still to come, and when what has
come is made, it is as it was at C. Then all that is held is written, by a thread; nobody waits for that.

Where rounds are the same for all keys, that is the same cut through all keys of all servers. Elsewhere each chunk has a
cut of its own: it has counted each push once, or not at all, and says how many of each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from aiokv.core.checkpoint_names import place_of
from aiokv.core.effects import DropSnapshots, Effect, Log, Send, Snapshot, WriteSnapshots
from aiokv.core.keys import BUNDLE_START
from aiokv.core.saved_state import ChunkState, RoundsState
from aiokv.core.server.rounds.saved_rounds import state_of
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.core.rules import Rules
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.decisions import Decisions, Group
    from aiokv.core.stimuli import PartWritten
    from aiokv.policy import Token
    from aiokv.types import Key, TensorSpec


class Checkpoints:
    """The part of a `Coordinator` that deals with the cluster's checkpoints.

    One at a time is asked for. Where another one is still being written, which nobody wants any longer, the scheduler
    is answered when that is over: so a server is never asked for more than it can do.

    Args:
        catalog: the server's keys.
        rules: its update rule.
        deciding: who decides rounds.
    """

    def __init__(self, catalog: Catalog, rules: Rules, deciding: Deciding) -> None:
        self._catalog = catalog
        self._rules = rules
        self._deciding = deciding
        deciding.on_closing = self.closing
        self._view: m.View | None = None
        self._index = 0
        self.newest = 0
        """The clock of the newest update."""
        self._clock = 0
        """Of the checkpoint that is asked for, and not written yet; 0: there is none."""
        self._holds = False
        """Whether something is held on to for it."""
        self._rounds: dict[Group, RoundsState] = {}
        """What was decided before the first round behind its clock, where there is such a round."""
        self.unmade: dict[Chunk, None] = {}
        """When all workers are past its clock, chunks that have something of before to make."""
        self._writing = 0
        """The clock of the one which is being written."""
        self._is_wanted = False
        """Whether the scheduler still waits for that."""
        self._next = 0
        """The clock of one that is to be answered when nothing is being written."""

    def viewed(self, view: m.View, index: int) -> None:
        """Take over where checkpoints are, and from the first view which one is due; this is the server of an index."""
        if self._view is None:
            self._clock = view.checkpoint_at
        self._view, self._index = view, index

    def resumed(self, clock: int) -> None:
        """Go on after a clock, up to which updates were made in an earlier life of the job."""
        self.newest = clock

    def taken_over(self, view: m.View, index: int, clock: int) -> list[Effect]:
        """Go on after a clock in the place of another server; what was held there is lost."""
        self._view, self._index, self.newest = view, index, clock
        return self._pass_over()

    def before(self, chunk: Chunk, clock: int) -> list[Effect]:
        """Hold on to the value of a chunk that is about to be updated, if the update belongs to no open checkpoint."""
        self.newest = max(self.newest, clock)
        if not self._clock:
            return []
        if clock > self._clock:
            return [self._hold(chunk)] if self._lacks(chunk) else []
        if chunk.cut == self._clock and chunk.policy.in_step:
            return self._drop(f"{chunk.label} has got an update of round {clock} after others had gone on")
        return []

    def closing(self, decisions: Decisions, tokens: list[Token]) -> None:
        """Keep what was decided before a round that is about to be closed, if it belongs to no open checkpoint."""
        if not self._clock or decisions.group in self._rounds:
            return
        if any(token.clock > self._clock for token in tokens):
            self._rounds[decisions.group] = state_of(decisions)

    @property
    def _reached(self) -> int:
        """The clock of the newest update that is made, or that is decided here."""
        decided = [decisions.high for decisions in self._deciding.groups if decisions.decider is not None]
        return max([self.newest, *decided])

    def removing(self, chunks: Iterable[Chunk], clock: int) -> list[Effect]:
        """Hold on to a key that is about to be deleted by a worker after its push of a clock."""
        if not 0 < self._clock < clock:
            return []
        return [self._hold(chunk) for chunk in chunks if self._lacks(chunk)]

    def _lacks(self, chunk: Chunk) -> bool:
        """Tell whether a chunk is to be held on to: what was made behind the clock is not."""
        return chunk.cut != self._clock and chunk.born <= self._clock

    def _hold(self, chunk: Chunk) -> Effect:
        self._holds, chunk.cut = True, self._clock
        return Snapshot(self._clock, chunk.key, chunk.start, chunk.version, self._states(chunk))

    def _states(self, chunk: Chunk) -> list[ChunkState]:
        if chunk.start != BUNDLE_START:
            return [self._state(chunk, chunk.key, chunk.spec, chunk.start, chunk.stop)]
        bundle = self._catalog.bundle_of(chunk.key)
        assert bundle is not None, "only that of a bundle begins there"
        named = zip(bundle.keys, bundle.specs, strict=True)
        states = [self._state(chunk, key, spec, 0, spec.size) for key, spec in named]
        for state in states:
            state.bundle = bundle.keys
        return states

    def _state(self, chunk: Chunk, key: Key, spec: TensorSpec, start: int, stop: int) -> ChunkState:
        entry = self._catalog.entry(key)
        assert entry is not None, "it has a chunk"
        counts = tuple(sorted(chunk.counted.items()))
        state = ChunkState(key, spec.shape, spec.dtype, start, stop, chunk.version, counts, entry.policy, entry.group)
        state.digest, state.made = entry.digest, chunk.version - chunk.since
        if chunk.rounds is not None:
            state.round = chunk.rounds.first - 1 - chunk.applying
            clocks = sorted(chunk.rounds.clocks.items())
            state.pushes = tuple((rank, chunk.pushed[rank], clock) for rank, clock in clocks)
        if entry.rows is not None:
            state.sparse, state.lazy = True, entry.rows.lazy
            state.initializer = msgspec.to_builtins(entry.rows.initializer)
        return state

    # --- what the scheduler says ---

    def told(self, message: m.CheckpointAt | m.CheckpointRest | m.CheckpointDropped) -> list[Effect]:
        """Do what the scheduler says about one."""
        if isinstance(message, m.CheckpointAt):
            return self.asked(message.clock)
        if isinstance(message, m.CheckpointRest):
            return self.rest(message.clock)
        return self.dropped(message.clock)

    def asked(self, clock: int) -> list[Effect]:
        """Let the next checkpoint be made at a clock, unless it is passed already; the one before is over."""
        effects = self._let_go()
        if self._writing:
            self._is_wanted, self._next = False, clock
            return effects
        return effects + self._answer(clock)

    def _answer(self, clock: int) -> list[Effect]:
        newest = self._reached
        if clock >= newest:
            self._clock = clock
            for chunk in self._catalog.chunks.values():
                # A scheduler that was started again may ask for one that was held on to before, and let go.
                chunk.cut = 0
        return [Send(SCHEDULER, 0, m.CheckpointClock(clock, newest))]

    def rest(self, clock: int) -> list[Effect]:
        """Hold on to all that has not changed since a clock, and write what is held.

        When that is said again, what has come and is not made is waited for no longer.
        """
        if clock != self._clock:
            # It is being written, or was dropped here, which the scheduler knows.
            return []
        if self.unmade:
            return self._drop(f"something of {next(iter(self.unmade)).label} was not made for long")
        return self._hold_rest(list(self._catalog.chunks.values()))

    def go_on(self) -> list[Effect]:
        """Hold on to what is made by now; to be called after whatever has happened while something is unmade."""
        chunks = self._catalog.chunks
        is_there = all(chunks.get((chunk.key, chunk.start)) is chunk for chunk in self.unmade)
        # Its place may have been taken by the keys of a bundle.
        return self._hold_rest(list(self.unmade) if is_there else list(chunks.values()))

    def _hold_rest(self, chunks: list[Chunk]) -> list[Effect]:
        assert self._view is not None, "it comes from the scheduler"
        clock = self._clock
        left = [chunk for chunk in chunks if self._lacks(chunk)]
        self.unmade = {chunk: None for chunk in left if chunk.has_open(clock)}
        effects = [self._hold(chunk) for chunk in left if chunk not in self.unmade]
        if self.unmade:
            return effects
        self._clock, self._holds = 0, False
        self._writing, self._is_wanted = clock, True
        rules = self._rules.saved(until=clock)
        rounds, self._rounds = self._decided(), {}
        return [*effects, WriteSnapshots(clock, place_of(self._view, clock), self._index, rules, rounds)]

    def _decided(self) -> list[RoundsState]:
        """Return what this server had decided when all was made that is held on to."""
        own = [decisions for decisions in self._deciding.groups if decisions.decider is not None]
        return [self._rounds.get(decisions.group) or state_of(decisions) for decisions in own]

    def written(self, written: PartWritten) -> list[Effect]:
        """Tell the scheduler how the writing went, and answer if it has asked for another one meanwhile."""
        part = [_part(written.clock, written.file, written.reason)] if self._is_wanted else []
        clock, self._writing, self._next = self._next, 0, 0
        return [*part, *(self._answer(clock) if clock else [])]

    def dropped(self, clock: int) -> list[Effect]:
        """Let go of what is held for a checkpoint that nobody wants any longer. Writing is not stopped."""
        self._is_wanted = self._is_wanted and clock != self._writing
        self._next = 0 if clock == self._next else self._next
        return self._let_go() if clock == self._clock else []

    def _let_go(self) -> list[Effect]:
        clock, held = self._clock, self._holds
        self._clock, self._holds, self.unmade, self._rounds = 0, False, {}, {}
        return [DropSnapshots(clock)] if held else []

    # --- what makes one impossible ---

    def _drop(self, reason: str) -> list[Effect]:
        clock = self._clock
        text = f"there is no checkpoint of round {clock}: {reason}"
        log = Log("warning", text, "checkpoint_dropped", {"clock": clock, "reason": reason})
        return [log, *self._let_go(), _part(clock, reason=reason)]

    def _pass_over(self) -> list[Effect]:
        """Tell the scheduler, if the one that is asked for can't be made any longer; nothing is held for it."""
        clock, newest = self._clock, self._reached
        if not clock or clock >= newest:
            return []
        return [*self._let_go(), Send(SCHEDULER, 0, m.CheckpointClock(clock, newest))]

    def scheduler_gone(self) -> list[Effect]:
        """Drop what is open: nobody is there to complete it."""
        self._is_wanted, self._next = False, 0
        return self._let_go()

    def loaded(self, clock: int) -> list[Effect]:
        """Go on after a load, which may have changed values in the middle of a checkpoint."""
        effects = self._drop("values were loaded meanwhile") if self._holds or self.unmade else []
        self.resumed(clock)
        return effects + self._pass_over()


def _part(clock: int, file: m.CheckpointFile | None = None, reason: str = "") -> Send:
    return Send(SCHEDULER, 0, m.CheckpointPart(clock, file, reason))
