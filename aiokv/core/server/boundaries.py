"""How workers come to count while training goes on: a server's part, see `core.scheduler.admission`.

Once a server has agreed to a boundary, it takes the rank for one that counts in every round after it, so that none of
these is made before it is known whether it does. No round of before waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.roster import Roster
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.cluster_checkpoints import Checkpoints
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.types import Rank


class Boundaries:
    """The part of a `Coordinator` that lets workers join a running cluster.

    Args:
        catalog: the server's keys.
        checkpoints: knows the clock of the newest update that this server has made.
    """

    def __init__(self, catalog: Catalog, checkpoints: Checkpoints) -> None:
        self._catalog = catalog
        self._checkpoints = checkpoints
        self._epoch = 0
        self.announced: m.Boundary | None = None
        """A rank that may count after a clock."""
        self.on_change: Callable[[Chunk], None] = lambda chunk: None
        """Is told of a chunk that has changed, but not by an update."""

    def left_after(self, epoch: int) -> m.Boundary | None:
        """Return what is left of what was announced when a view is taken over: a later view has decided about it."""
        if epoch > self._epoch:
            self.announced = None
        return self.announced

    def asked(self, message: m.Boundary, epoch: int) -> m.BoundaryClock | None:
        """Agree to a boundary, or say why not; None: nobody is to join. The newest view was of that epoch."""
        self.announced, self._epoch = None, epoch
        if not message.clock:
            return None
        chunks = self._catalog.chunks.values()
        for chunk in chunks:
            if not chunk.policy.admits:
                text = f"key {chunk.key!r} has policy {chunk.policy}, with which nobody can join a running job"
                return m.BoundaryClock(message.clock, 0, text)
        past = [update.clock for chunk in chunks for update in chunk.updates.values() if update.is_past(message.rank)]
        # A server that has taken the place of another one has not made what there is.
        made = [chunk.version - chunk.since for chunk in chunks if chunk.is_next_in_step]
        # Not all that has come is in an update where one server decides, and what has come must not come again.
        seen = [max(chunk.rounds.decisions.seen.values(), default=0) for chunk in chunks if chunk.rounds is not None]
        newest = max([self._checkpoints.newest, *past, *made, *seen])
        if newest <= message.clock:
            self.announced = message
        waits = any(chunk.policy.meets(chunk.version + 1 - chunk.since) for chunk in chunks)
        return m.BoundaryClock(message.clock, newest, waits=waits)

    def enter(self, rank: Rank, roster: Roster, now: float) -> list[Chunk]:
        """Let a rank go on from the first of its rounds, if it has not begun with it; return the chunks concerned."""
        since = roster.newcomers.get(rank, 0)
        chunks = [chunk for chunk in self._catalog.chunks.values() if not chunk.has_begun(rank, roster)]
        admitted = [chunk for chunk in chunks if not chunk.group or rank in chunk.group]
        for chunk in admitted:
            chunk.admit(rank, since, roster, now)
            self.on_change(chunk)
        return admitted
