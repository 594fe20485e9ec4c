"""How long a node of servers is of use to somebody, and how it ends; which other nodes its process has started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, StartNode, Stop
from aiokv.core.server.leaving import Leaving

if TYPE_CHECKING:
    from aiokv.core.joiner import Joiner
    from aiokv.core.server.copies.replication import Replication
    from aiokv.core.server.worker_links import WorkerLinks

PATIENCE = 60.0
"""Seconds for which a node stays with nobody to turn to, and no scheduler, when what it has may be wanted again."""


class Lifetime:
    """The part of a `Coordinator` that ends it.

    Args:
        joiner: the node's place in the cluster.
        workers: those that are connected.
        replication: says whether it holds a copy of what another node has.
    """

    def __init__(self, joiner: Joiner, workers: WorkerLinks, replication: Replication) -> None:
        self._joiner = joiner
        self._workers = workers
        self._replication = replication
        self.leaving = Leaving(joiner, lambda reason, failed: self.stop(reason, failed=failed))
        """How it ends while the others go on."""
        self._hosted: dict[str, None] = {}
        """Names of the standbys in this process."""
        self.alone_since: float | None = None
        """Since when neither a scheduler that knows it nor a worker is connected."""
        self.is_over = False
        """Whether it has stopped."""

    def host(self, index: int, name: str) -> list[Effect]:
        """Start a standby in this process, unless that was asked for before."""
        if name in self._hosted or self.is_over:
            return []
        self._hosted[name] = None
        return [StartNode(index, name)]

    def ended(self, name: str, now: float) -> None:
        """Take note that a standby in this process has ended."""
        del self._hosted[name]
        self.look_around(now)

    @property
    def is_of_use(self) -> bool:
        """Whether somebody is there for whom this node, or another one of its process, is of use."""
        view = self._joiner.view
        # A standby is of use as long as its primary is.
        serves = view is not None and any(entry.name in self._hosted for entry in view.servers)
        return bool(self._workers) or serves or self._replication.has_primary

    def look_around(self, now: float) -> None:
        """Take note since when nobody is there for whom it could be of use."""
        # A scheduler that takes nobody back, such as one of another cluster, is nobody either.
        is_alone = self._joiner.joined and not self._joiner.is_registered and not self.is_of_use
        self.alone_since = (self.alone_since if self.alone_since is not None else now) if is_alone else None

    @property
    def alone_until(self) -> float | None:
        """When it stops if nobody comes until then."""
        view = self._joiner.view
        may_return = self._joiner.connected and not self._joiner.is_refused
        if self.alone_since is None or view is None or self.is_over or may_return:
            return None
        if self.leaving.until is not None:
            return self.alone_since
        # What a standby has may be the only copy by now, until the scheduler is there again and says so. Where others
        # may take the places of lost workers, they can't do so before that either.
        may_be_wanted = self._replication.holds_copy or view.on_worker_loss != "fail"
        return self.alone_since + max(view.death_timeout, PATIENCE if may_be_wanted else 0.0)

    def tick(self, now: float) -> list[Effect]:
        """Stop when it has been alone for too long, or others do not take over in time."""
        until = self.alone_until
        effects: list[Effect] = []
        if until is not None and now >= until:
            effects = self.stop("the scheduler is gone and no worker is connected", failed=True)
        return effects + self.leaving.tick(now)

    def stop(self, reason: str, *, failed: bool) -> list[Effect]:
        """Stop, once."""
        if self.is_over:
            return []
        self.is_over = True
        self._joiner.leave()
        return [Stop(reason, failed=failed)]
