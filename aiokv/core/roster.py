"""What a member reads out of the view: who counts, who is lost, and how to name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Key, Rank, Version
    from aiokv.wire.messages import View, WorkerEntry


class Roster:
    """The workers of a view, by rank."""

    def __init__(self, view: View | None = None) -> None:
        self.epoch = view.epoch if view else 0
        self._workers: dict[Rank, WorkerEntry] = {entry.rank: entry for entry in view.workers} if view else {}
        self.members: list[Rank] = sorted(rank for rank, entry in self._workers.items() if entry.state != "left")
        """Ranks that have not left: alive or lost."""
        self.world = len(self._workers)
        """How many workers the cluster was declared with."""
        self.lost: list[Rank] = [rank for rank in self.members if self._workers[rank].state == "lost"]

    def entry(self, rank: Rank) -> WorkerEntry | None:
        """Return a worker's entry."""
        return self._workers.get(rank)

    def reason(self, rank: Rank) -> str:
        """Return why a worker of the view is not alive."""
        return self._workers[rank].reason

    def label(self, rank: Rank) -> str:
        """Return a rank with its name, for messages."""
        entry = self._workers.get(rank)
        return f"{rank} ({entry.name})" if entry else str(rank)

    def labels(self, ranks: Sequence[Rank]) -> str:
        """Return ranks with their names, for messages."""
        return ", ".join(self.label(rank) for rank in ranks)

    def loss(self, ranks: Sequence[Rank], what: str, key: Key | None = None, version: Version = 0) -> WorkerLostError:
        """Return the error for a wait that can't end because these ranks are lost."""
        reasons = "; ".join(f"rank {self.label(rank)}: {self.reason(rank)}" for rank in ranks)
        details = {} if key is None else {"key": key, "round": version}
        return WorkerLostError(f"{what} can't complete: workers lost: {reasons}", ranks=list(ranks), **details)
