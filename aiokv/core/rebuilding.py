"""A scheduler that was started again: it learns from the nodes that come back what the cluster was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from aiokv.types import Peer
    from aiokv.wire import messages as m


class Registration(Record, eq=False):
    """What a node has said when it registered."""

    peer: Peer
    request: int
    message: m.Register
    heard: float


class Rebuilding(Record, eq=False):
    """What is known of a cluster whose nodes come back, until it goes on.

    `until` is when those who are not back are given up, `beat_at` when the others hear from the scheduler. `back` are
    nodes of the cluster, by name, `later` others that want to join; `asked` is the newest epoch of whose view somebody
    was asked, and `view` the newest that has come. `said` is what nodes have told meanwhile besides.
    """

    until: float
    beat_at: float
    back: dict[str, Registration] = field(default_factory=dict)
    later: list[Registration] = field(default_factory=list)
    asked: int = 0
    view: m.View | None = None
    said: list[tuple[Peer, m.Message]] = field(default_factory=list)

    def forget(self, peer: Peer) -> None:
        """Take out a node whose connection has ended."""
        self.back = {name: one for name, one in self.back.items() if one.peer != peer}
        self.later = [one for one in self.later if one.peer != peer]

    @property
    def is_whole(self) -> bool:
        """Whether all are back that were there in the newest epoch that anybody knows."""
        if self.view is None or self.view.epoch < self.asked:
            return False
        here = [entry.name for entry in self.view.workers if entry.state in {"alive", "finished"}]
        here += [entry.name for entry in self.view.servers if entry.state == "alive"]
        standbys = [entry.standby for entry in self.view.servers if entry.standby is not None]
        here += [standby.name for standby in standbys if standby.state != "expected"]
        return all(name in self.back for name in here)
