"""How large the cluster is, and the settings that all of its nodes share: what the scheduler is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.core.joiner import LAST_DELAY
from aiokv.core.scheduler.checkpoint_keeper import CheckpointPlan

if TYPE_CHECKING:
    from aiokv.wire.messages import View

COME_BACK = 2.0 * LAST_DELAY
"""Seconds that nodes have to come back to a scheduler that was started again, at least: they try now and then."""


@dataclass(slots=True, frozen=True)
class ClusterPlan:
    """How many members the cluster has, and the settings that all of them share.

    Seconds for `heartbeat`, `death_timeout`, `respawn_timeout` and `reconnect_grace`, bytes for `chunk_bytes` and
    `split_bytes`. `on_worker_loss` and `replication` are as in a view; with "shrink" the workers never become fewer
    than `min_workers`. With `elastic_servers`, or with a `replication` of 2, servers may come when all are there; and
    unless `max_workers` is 0 workers may, until there are so many.

    Keys are cut for `num_places`, of which each server has some at the beginning; 0: it has one. Where there are more
    than servers, these may come too.

    Where processes may come later, no cluster begins, and none goes on, before a scheduler has been there for
    `settle_time` seconds: members of an earlier cluster, whatever they alone have heard of it, have found it by then.
    """

    num_workers: int
    num_servers: int
    heartbeat: float
    death_timeout: float
    chunk_bytes: int
    split_bytes: int
    on_worker_loss: str = "fail"
    respawn_timeout: float = 30.0
    checkpoints: CheckpointPlan = field(default_factory=CheckpointPlan)
    min_workers: int = 1
    reconnect_grace: float = 0.0
    replication: int = 1
    elastic_servers: bool = False
    max_workers: int = 0
    num_places: int = 0
    settle_time: float = 0.0

    @property
    def places(self) -> int:
        """How many places for parts of the keys there are."""
        return max(self.num_places, self.num_servers)

    @property
    def takes_servers(self) -> bool:
        """Whether servers may come when all are there, also without copies."""
        return self.elastic_servers or self.places > self.num_servers

    @property
    def settling(self) -> float:
        """Seconds that pass from a scheduler's start until it may decide which cluster it is."""
        # Where nobody may come later there are no processes that could be taken for a cluster instead of its members.
        takes_others = self.max_workers > 0 or self.takes_servers or self.replication > 1
        return self.settle_time if takes_others else 0.0

    @property
    def time_to_come_back(self) -> float:
        """Seconds that nodes have to connect again to a scheduler that was not there."""
        return max(self.death_timeout / 2, COME_BACK)

    def differences(self, view: View) -> list[tuple[str, int | str, int | str]]:
        """Return the settings that a cluster keeps and that are others here: their names, the values there and here."""
        settings: list[tuple[str, int | str, int | str]] = [
            ("num_workers", view.declared or len(view.workers), self.num_workers),
            ("num_servers or num_places", len(view.servers), self.places),
            ("chunk_bytes", view.chunk_bytes, self.chunk_bytes),
            ("split_bytes", view.split_bytes, self.split_bytes),
            ("on_worker_loss", view.on_worker_loss, self.on_worker_loss),
            ("replication", view.replication, self.replication),
        ]
        return [(name, there, here) for name, there, here in settings if there != here]
