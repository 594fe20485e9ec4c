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

from aiokv.core.bundle import BUNDLE_START
from aiokv.core.effects import DropSnapshots, Effect, Log, Send, Snapshot, WriteSnapshots
from aiokv.core.saved_chunks import ChunkState
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.catalog import Catalog
    from aiokv.core.chunk import Chunk
    from aiokv.core.rules import Rules
    from aiokv.core.stimuli import PartWritten
    from aiokv.types import Key, TensorSpec

NEVER = 1 << 62
"""A clock that no update has."""


def name_of(run: int, clock: int) -> str:
    """Return the name of a checkpoint; later ones come later in the order of names.

    Args:
        run: how often the job was started in this folder.
        clock: of the updates that it has.
    """
    return f"run-{run:06d}-clock-{clock:010d}"


def place_of(view: m.View, clock: int) -> str:
    """Return the folder of a checkpoint."""
    return f"{view.checkpoints}/{name_of(view.run, clock)}"


class Clocks:
    """The clocks of which checkpoints are due: regular ones, and those that the scheduler asks for."""

    def __init__(self) -> None:
        self.every = 0
        """Regular ones are due after so many rounds; 0: none are."""
        self._asked = 0
        self._passed = 0
        self.next = NEVER
        """The first one that is not passed."""

    def begin(self, every: int, passed: int) -> None:
        """Go on after a clock, with regular ones or without."""
        self.every, self._passed, self._asked = every, passed, 0
        self._find_next()

    def ask(self, clock: int) -> None:
        """Add one that is not passed yet."""
        self._asked = clock
        self._find_next()

    def pass_over(self, clock: int) -> list[int]:
        """Return those below a clock, ascending, that were not passed: the first one and the last."""
        due = []
        if self.next < clock:
            due = [self.next]
            last = max((clock - 1) // self.every * self.every if self.every else 0, self._asked * (self._asked < clock))
            due += [last] * (last > self.next)
            self._passed = due[-1]
            self._find_next()
        return due

    def _find_next(self) -> None:
        regular = (self._passed // self.every + 1) * self.every if self.every else NEVER
        self.next = min(regular, self._asked if self._asked > self._passed else NEVER)


class Checkpoints:
    """The part of a `Coordinator` that deals with the cluster's checkpoints. One at a time is under way.

    Args:
        catalog: the server's keys.
        rules: its update rule.
    """

    def __init__(self, catalog: Catalog, rules: Rules) -> None:
        self._catalog = catalog
        self._rules = rules
        self._clocks = Clocks()
        self._view: m.View | None = None
        self._index = 0
        self.newest = 0
        """The clock of the newest update."""
        self._open = 0
        """The clock of the checkpoint whose versions are being collected; 0: there is none."""
        self._writing = 0
        """That of the one which is being written."""
        self.unmade: dict[Chunk, None] = {}
        """When all workers are past the clock of the open one, chunks that have something of before to make."""

    def viewed(self, view: m.View, index: int) -> None:
        """Take over the cluster's settings, from the first view; this is the server with that index."""
        if self._view is None:
            self._clocks.begin(view.checkpoint_every, 0)
        self._view, self._index = view, index

    def resumed(self, clock: int) -> None:
        """Go on after a clock, up to which updates were made in an earlier life of the job."""
        self._clocks.begin(self._clocks.every, clock)
        self.newest = clock

    def taken_over(self, clock: int) -> list[Effect]:
        """Go on after a clock in the place of another server: what that one had not written is not written any more."""
        self.resumed(clock)
        every = self._clocks.every
        last = clock // every * every if every else 0
        reason = f"server {self._index} is another node by now"
        return [Send(SCHEDULER, 0, m.CheckpointPart(last, None, reason))] if last else []

    def before(self, chunk: Chunk, clock: int) -> list[Effect]:
        """Hold on to the value of a chunk that is about to be updated, if the update belongs to no open checkpoint."""
        if clock > self.newest:
            self.newest = clock
            if clock > self._clocks.next:
                self._pass_over(clock)
        if not self._open:
            return []
        if clock > self._open:
            return [] if chunk.cut == self._open else [self._hold(chunk, self._open)]
        if chunk.cut == self._open and chunk.policy.in_step:
            return self._drop(f"{chunk.label} has got an update of round {clock} after others had gone on")
        return []

    def _pass_over(self, clock: int) -> None:
        due = self._clocks.pass_over(clock)
        # Of those that are passed at once the others are dropped, when all workers are past them.
        if due and not self._open and not self._writing:
            self._open = due[0]

    def _hold(self, chunk: Chunk, clock: int) -> Effect:
        chunk.cut = clock
        return Snapshot(clock, chunk.key, chunk.start, chunk.version, self._states(chunk))

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
        state.digest = entry.digest
        if entry.rows is not None:
            state.sparse, state.lazy = True, entry.rows.lazy
            state.initializer = msgspec.to_builtins(entry.rows.initializer)
        return state

    # --- what the scheduler says ---

    def asked(self, clock: int) -> list[Effect]:
        """Let a checkpoint be made at a clock, unless it is passed already."""
        if clock >= self.newest:
            self._clocks.ask(clock)
        return [Send(SCHEDULER, 0, m.CheckpointClock(clock, self.newest))]

    def rest(self, clock: int) -> list[Effect]:
        """Hold on to all that has not changed since a clock, and write what is held."""
        if clock >= self._clocks.next:
            self._pass_over(clock + 1)
        effects: list[Effect] = []
        if self._open < clock:
            # What is open and earlier will not be asked for any more, unless it was already, and is waited for.
            late = "others were past the next one before all of it was made"
            effects = self._drop(late) if self.unmade else self.dropped(self._open)
        if self._open != clock:
            # It was dropped here, or has never begun because there was another one.
            return [*effects, _part(clock, reason="the server was busy with another one")]
        return self._hold_rest(clock, list(self._catalog.chunks.values()))

    def go_on(self) -> list[Effect]:
        """Hold on to what is made by now; to be called after whatever has happened while something is unmade."""
        chunks = self._catalog.chunks
        is_there = all(chunks.get((chunk.key, chunk.start)) is chunk for chunk in self.unmade)
        # Its place may have been taken by the keys of a bundle.
        return self._hold_rest(self._open, list(self.unmade) if is_there else list(chunks.values()))

    def _hold_rest(self, clock: int, chunks: list[Chunk]) -> list[Effect]:
        assert self._view is not None, "it comes from the scheduler"
        left = [chunk for chunk in chunks if chunk.cut != clock]
        self.unmade = {chunk: None for chunk in left if chunk.has_open(clock)}
        effects = [self._hold(chunk, clock) for chunk in left if chunk not in self.unmade]
        if self.unmade:
            return effects
        self._open, self._writing = 0, clock
        rules = self._rules.saved(until=clock)
        return [*effects, WriteSnapshots(clock, place_of(self._view, clock), self._index, rules)]

    def written(self, written: PartWritten) -> list[Effect]:
        """Tell the scheduler how the writing went."""
        self._writing = 0
        return [_part(written.clock, written.file, written.reason)]

    def dropped(self, clock: int) -> list[Effect]:
        """Let go of what is held for a checkpoint that nobody wants any longer. Writing is not stopped."""
        if not clock or self._open != clock:
            return []
        self._open, self.unmade = 0, {}
        return [DropSnapshots(clock)]

    # --- what makes one impossible ---

    def _drop(self, reason: str) -> list[Effect]:
        clock = self._open
        text = f"there is no checkpoint of round {clock}: {reason}"
        log = Log("warning", text, "checkpoint_dropped", {"clock": clock, "reason": reason})
        return [log, *self.dropped(clock), _part(clock, reason=reason)]

    def scheduler_gone(self) -> list[Effect]:
        """Drop what is open: nobody is there to complete it."""
        return self.dropped(self._open)

    def loaded(self, clock: int) -> list[Effect]:
        """Go on after a load, which has changed values in the middle of a checkpoint."""
        effects = self._drop("values were loaded meanwhile") if self._open else []
        self.resumed(clock)
        return effects


def _part(clock: int, file: m.CheckpointFile | None = None, reason: str = "") -> Send:
    return Send(SCHEDULER, 0, m.CheckpointPart(clock, file, reason))
