"""A worker's connections to its servers: made when it joins, and made again when they end while the server is alive.

A connection may end without anybody's fault: a cable, a switch, a time-out of something in between. So it is made
again, with longer and longer pauses, until the view calls the server lost. What is asked meanwhile waits, and is sent,
with what was not answered, when the server knows the worker again. The same happens when another node serves an index
from a newer view on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Connect, Disconnect, Effect, Log, Send
from aiokv.core.joiner import retry_delay
from aiokv.core.records import Record
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.types import Peer

SHORT_LIFE = 1.0
"""Seconds; a connection that ends before is taken for another attempt that has failed."""


def is_same_node(entry: m.ServerEntry, other: m.ServerEntry) -> bool:
    """Tell whether two entries of an index are one process, and under one address."""
    key = (entry.name, entry.incarnation, entry.host, entry.port)
    return key == (other.name, other.incarnation, other.host, other.port)


class Down(Record, eq=False):
    """A connection that is not there, since a time, or over which the server does not know the worker yet.

    `reason` says why it has ended; empty if there has never been one. `request` is that of the `Attach` under way.
    """

    reason: str
    since: float
    attempt: int = 0
    request: int | None = None


class ServerLinks:
    """The part of a `Session` that keeps its connections.

    Args:
        name: the worker's, for its log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.servers: dict[Peer, m.ServerEntry] = {}
        """All servers of the view, by index."""
        self.lost: dict[Peer, str] = {}
        """Those that are gone for good, and why."""
        self.down: dict[Peer, Down] = {}
        """Those that can't be asked for now."""
        self.reconnects = 0
        """How often a connection was made again."""
        self._up: dict[Peer, tuple[float, int]] = {}
        """Since when there is a connection, and in which attempt it was made."""

    def label(self, peer: Peer) -> str:
        """Return a server as people know it."""
        entry = self.servers[peer]
        return f"server {peer} ({entry.name} at {entry.host}:{entry.port})"

    def outage(self, peer: Peer) -> str:
        """Return what is wrong with the connection to a server, for errors; nothing if there is one."""
        down = self.down.get(peer)
        return f" (the connection has ended: {down.reason})" if down is not None and down.reason else ""

    # --- the view ---

    def begin(self, view: m.View, now: float) -> list[Effect]:
        """Connect to all servers of the first view."""
        self.servers = {entry.index: entry for entry in view.servers}
        self.down = {peer: Down("", now) for peer in self.servers}
        return [self._connect(peer) for peer in self.servers]

    def viewed(self, entry: m.ServerEntry, now: float) -> list[Effect]:
        """Take over an entry of a newer view; go over to another process, or address, if that has its index now."""
        peer = entry.index
        before, self.servers[peer] = self.servers[peer], entry
        if peer in self.lost or is_same_node(before, entry):
            return []
        reason = f"{entry.name} is server {peer} now"
        self._up.pop(peer, None)
        down = self.down.get(peer) or Down(reason, now)
        self.down[peer] = Down(down.reason, down.since)
        text = f"{self._name} goes over to {self.label(peer)}, in the place of {before.name}"
        facts = {"server": peer, "node": entry.name, "before": before.name}
        return [Disconnect(peer, reason), self._connect(peer), Log("warning", text, "server_replaced", facts)]

    def lose(self, peer: Peer, reason: str) -> None:
        """Take note that a server is gone for good."""
        self.down.pop(peer, None)
        self._up.pop(peer, None)
        self.lost[peer] = reason

    # --- connections ---

    def _connect(self, peer: Peer) -> Connect:
        entry, attempt = self.servers[peer], self.down[peer].attempt
        return Connect(peer, entry.host, entry.port, delay=retry_delay(attempt) if attempt else 0.0)

    def attach(self, peer: Peer, request: int) -> None:
        """Take note that the worker says who it is."""
        self.down[peer].request = request

    def failed(self, peer: Peer, reason: str) -> list[Effect]:
        """Try again, later."""
        down = self.down[peer]
        down.attempt += 1
        effects: list[Effect] = [self._connect(peer)]
        if down.attempt == 1:
            text = f"{self._name} waits for {self.label(peer)}: {reason}"
            effects.append(Log("warning", text, "server_unreachable", {"server": peer, "reason": reason}))
        return effects

    def ended(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Connect again."""
        down = self.down.get(peer)
        if down is not None:
            down.request = None
            return self.failed(peer, reason)
        since, attempt = self._up.pop(peer)
        self.down[peer] = Down(reason, now, attempt + 1 if now - since < SHORT_LIFE else 1)
        text = f"{self._name}: the connection to {self.label(peer)} has ended: {reason}; it is made again"
        return [self._connect(peer), Log("warning", text, "connection_ended", {"server": peer, "reason": reason})]

    def attached(self, peer: Peer, now: float, waiting: int) -> list[Effect]:
        """Take note that a server knows the worker; so many requests are sent to it again."""
        down = self.down.pop(peer)
        self._up[peer] = now, down.attempt
        if not down.reason:
            return []
        self.reconnects += 1
        text = f"{self._name} is connected to {self.label(peer)} again after {now - down.since:.1f} s"
        facts = {"server": peer, "seconds": now - down.since, "requests": waiting}
        return [Log("warning", f"{text}; requests that are sent again: {waiting}", "reconnected", facts)]

    def passing(self, effects: list[Effect]) -> list[Effect]:
        """Return effects without what can't be sent now: it stays a request that is not answered."""
        return [
            effect
            for effect in effects
            if not isinstance(effect, Send) or effect.peer not in self.down or isinstance(effect.message, m.Attach)
        ]
