"""Connections in simulated time: who listens where, and when what was sent arrives.

A connection is two pipes, one in each direction. A pipe carries one thing after the other, in order; a message takes
latency + (64 + payload) / bandwidth from the moment at which the pipe is free for it. Connections share no bandwidth.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from sim.clock import after

if TYPE_CHECKING:
    from collections.abc import Callable

    import simpy

    from aiokv.types import Peer
    from aiokv.wire.messages import Message

HEAD_BYTES: Final = 64
"""What a message takes without its payload."""

Address = tuple[str, int]


@dataclass(slots=True)
class Packet:
    """A message under way."""

    request: int
    message: Message
    nbytes: int


@dataclass(slots=True)
class Closing:
    """The last thing that a pipe carries: the other side closed the connection, or died."""

    reason: str


class Host(Protocol):
    """One end of a connection."""

    name: str
    alive: bool

    def accept(self, pipe: Pipe) -> Peer:
        """Take the pipe to a node that connects, and return the number that it gets here."""
        ...

    def arrive(self, peer: Peer, pipe: Pipe, item: Packet | Closing) -> None:
        """Take what came from a peer; `pipe` is the way back to it."""
        ...


class Pipe:
    """One direction of a connection, towards `target`, which knows the sending side as `peer`."""

    __slots__ = ("_bandwidth", "_closed", "_env", "_free_at", "_items", "_latency", "back", "peer", "target")

    def __init__(self, env: simpy.Environment, target: Host, latency: float, bandwidth: float) -> None:
        self._env = env
        self._latency = latency
        self._bandwidth = bandwidth
        self._free_at = 0.0
        self._items: deque[Packet | Closing] = deque()
        self._closed = False
        self.target = target
        self.peer: Peer = 0
        self.back: Pipe = self

    def send(self, packet: Packet) -> None:
        """Send a message; it arrives after all that was sent before it."""
        self._put(packet, (HEAD_BYTES + packet.nbytes) / self._bandwidth)

    def close(self, reason: str) -> None:
        """Tell the target that there is nothing more to come, after all that was sent before."""
        self._put(Closing(reason), 0.0)
        self._closed = True

    def _put(self, item: Packet | Closing, duration: float) -> None:
        if self._closed:
            return
        now = self._env.now
        self._free_at = max(now, self._free_at) + duration
        self._items.append(item)
        # What arrives is always the oldest item, so that rounding of times can't change the order.
        after(self._env, self._free_at - now + self._latency, self._deliver)

    def _deliver(self) -> None:
        self.target.arrive(self.peer, self.back, self._items.popleft())


class Network:
    """All listeners and connections of a cluster.

    Args:
        env: the simulated time.
        latency: seconds that everything is under way.
        bandwidth: bytes per second of every pipe.
    """

    def __init__(self, env: simpy.Environment, *, latency: float = 0.0, bandwidth: float = float("inf")) -> None:
        self._env = env
        self._latency = latency
        self._bandwidth = bandwidth
        self._listeners: dict[Address, Host] = {}

    def listen(self, address: Address, host: Host) -> None:
        """Let others find a node under an address."""
        self._listeners[address] = host

    def connect(self, initiator: Host, peer: Peer, address: Address, done: Callable[[Pipe | None], None]) -> None:
        """Open a connection; it takes a round trip.

        Args:
            initiator: the node that connects.
            peer: the number under which it knows the other side.
            address: where the other side listens.
            done: is called with the pipe to the other side, or with None when nobody listens there.
        """

        def arrived() -> None:
            target = self._listeners.get(address)
            pipe = self._join(initiator, peer, target) if target is not None and target.alive else None
            after(self._env, self._latency, lambda: done(pipe))

        after(self._env, self._latency, arrived)

    def _join(self, initiator: Host, peer: Peer, target: Host) -> Pipe:
        there = Pipe(self._env, target, self._latency, self._bandwidth)
        back = Pipe(self._env, initiator, self._latency, self._bandwidth)
        there.back, back.back = back, there
        back.peer = peer
        there.peer = target.accept(back)
        return there
