"""Connections in simulated time: who listens where, and when what was sent arrives.

A connection is two pipes, one in each direction. Of what waits in a pipe, the highest priority leaves first, one
message at a time; a message of n bytes takes 64 + n bytes of its sender's and its receiver's network card, which all
their connections share, and then the latency of the way. What has left arrives in that order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

from aiokv.core.effects import URGENT
from aiokv.core.records import Record
from aiokv.wire.sendqueue import SendQueue
from sim.fabric import FairFabric, FifoFabric
from sim.record import LinkRecord
from sim.sections import NetworkSection
from sim.way import Way

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.types import Peer
    from aiokv.wire.messages import Message
    from sim.clock import Clock
    from sim.fabric import Fabric, Port
    from sim.timeline import Disturbance

HEAD_BYTES: Final = 64
"""What a message takes without its payload."""

Address = tuple[str, int]


class Packet(Record, eq=False, gc=False):
    """A message under way."""

    request: int
    message: Message
    nbytes: int
    sent: float = 0.0
    """When, if the network is metered."""


class Closing(Record, eq=False):
    """The last thing that a pipe carries: the other side closed the connection, or died."""

    reason: str


class Host(Protocol):
    """One end of a connection."""

    name: str
    alive: bool

    def accept(self, pipe: Pipe) -> Peer:
        """Take the pipe to a node that connects, and return the number that it gets here."""
        ...

    def arrive(self, pipe: Pipe, item: Packet | Closing) -> None:
        """Take what came over a pipe from its peer."""
        ...


class Pipe:
    """One direction of a connection, towards `target`, which knows the sending side as `peer`."""

    __slots__ = (
        "_closed",
        "_closing",
        "_env",
        "_fabric",
        "_fixed",
        "_is_instant",
        "_items",
        "_last",
        "_limit",
        "_meter",
        "_moving",
        "_queue",
        "back",
        "delivered",
        "early",
        "flights",
        "is_heard",
        "messages",
        "peer",
        "sent",
        "source",
        "target",
        "way",
    )

    def __init__(self, network: Network, way: Way, target: Host) -> None:
        self._env = network.env
        self._fabric = network.fabric
        self._meter = network.meter
        self._limit = network.limit
        self.way = way
        self._fixed = way.fixed
        self._is_instant = way.fixed == 0 and network.fabric is None
        """Whether nothing is under way for longer than an instant; nobody watches such flights."""
        self._queue: SendQueue[Packet] = SendQueue()
        self._moving: Packet | None = None
        self._items: list[Packet | Closing] = []
        """What has left the sender; mostly one, and a `deque` would take 700 bytes for it."""
        self._last = 0.0
        self._closed = False
        self._closing: Closing | None = None
        self.target = target
        self.flights: Flights | None = None
        """Is told of every message from its sending to its arrival."""
        self.early: Closing | None = None
        """The end of the connection, when that has come before the node which sends over it knows that it was made."""
        self.is_heard = False
        """Whether the target takes in what comes over it."""
        self.source = way.source
        """The name of the node that sends over it."""
        self.peer: Peer = 0
        self.back: Pipe = self
        self.sent = 0
        """Bytes that were handed over, each once; of what takes no time, when they arrive."""
        self.delivered = 0
        self.messages = 0

    def send(self, packet: Packet, priority: int = URGENT) -> None:
        """Send a message; of those that wait, the highest priority leaves first."""
        if self._closed:
            return
        env = self._env
        if self._is_instant:
            env.soon((self._pass, (packet,)))
            return
        now, nbytes = env.now, HEAD_BYTES + packet.nbytes
        self.sent += nbytes
        self.messages += 1
        if self._meter is not None:
            packet.sent = now
            self._meter.enter(now)
        if self.flights is not None:
            self.flights.enter(now)
        if self._fabric is None:
            # As `_leave`, which would be a call for each message.
            delay = self._fixed
            if delay is None:
                arrives, last = now + self.way.delay(now, nbytes), self._last
                if arrives > last:
                    self._last = last = arrives
                delay = last - now
            self._items.append(packet)
            if delay < math.inf:
                env.after(delay, self._deliver)
            return
        self._queue.add(packet, priority)
        if self._moving is None:
            self._next()

    @property
    def is_closed(self) -> bool:
        """Whether its sending side has closed the connection, or it has ended otherwise."""
        return self._closed

    def close(self, reason: str) -> None:
        """Tell the target that there is nothing more to come, after all that was sent before."""
        if self._closed:
            return
        self._closed = True
        if self._moving is not None:
            self._closing = Closing(reason)
        else:
            self._leave(Closing(reason))

    def abort(self, reason: str) -> None:
        """Tell the target that there is nothing more to come; what has not left the sender is lost."""
        now = self._env.now
        while self._queue:
            packet = self._queue.take()
            self.sent -= HEAD_BYTES + packet.nbytes
            self.messages -= 1
            if self._meter is not None:
                self._meter.leave(now, packet.sent)
            if self.flights is not None:
                self.flights.leave(now)
        self.close(reason)

    def reset(self, reason: str) -> None:
        """End the connection at once, on both sides: what is under way comes to nothing."""
        for pipe in (self, self.back):
            pipe._closed = True
        for pipe in (self, self.back):
            pipe.target.arrive(pipe, Closing(reason))

    def _next(self) -> None:
        assert self._fabric is not None, "only cards with a limited bandwidth let messages wait"
        packet = self._moving = self._queue.take()
        way = self.way
        limit = math.inf if way.is_plain else way.share(self._env.now) * self._limit
        nbytes = HEAD_BYTES + packet.nbytes
        self._fabric.start(way.source, way.target, nbytes, limit, lambda: self._left(packet))

    def _left(self, packet: Packet) -> None:
        self._moving = None
        self._leave(packet)
        if self._queue:
            self._next()
        elif self._closing is not None:
            self._leave(self._closing)

    def _leave(self, item: Packet | Closing) -> None:
        """Put what has left the sender on its way."""
        env, delay = self._env, self._fixed
        if delay is None:
            now, nbytes = env.now, HEAD_BYTES + item.nbytes if type(item) is Packet else 0
            arrives = now + self.way.delay(now, nbytes)
            # A stream keeps its order: what would overtake waits.
            if arrives > self._last:  # noqa: PLR1730 - for every message
                self._last = arrives
            delay = self._last - now
        self._items.append(item)
        if delay < math.inf:
            # What arrives is always the oldest item, so that rounding of times can't change the order.
            env.after(delay, self._deliver)

    def _pass(self, packet: Packet) -> None:
        """Deliver what takes no time. It is counted here, where the pipe is needed: of thousands none is in a cache."""
        self.sent = self.delivered = self.sent + HEAD_BYTES + packet.nbytes
        self.messages += 1
        self.target.arrive(self, packet)

    def _deliver(self) -> None:
        item = self._items.pop(0)
        if type(item) is Packet:
            self.delivered += HEAD_BYTES + item.nbytes
            if self._meter is not None:
                self._meter.leave(self._env.now, item.sent)
            if self.flights is not None:
                self.flights.leave(self._env.now)
        self.target.arrive(self, item)

    @property
    def takes_time(self) -> bool:
        """Whether anything is under way for longer than an instant."""
        return not self._is_instant

    @property
    def under_way(self) -> list[Packet]:
        """Messages that were sent and have not arrived."""
        return [item for item in (*self._queue, self._moving, *self._items) if isinstance(item, Packet)]


class Flights:
    """For how long at least one message from or to a worker was under way."""

    __slots__ = ("_count", "_since", "_total")

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0
        self._total = 0.0

    def enter(self, now: float) -> None:
        """A message is sent."""
        if not self._count:
            self._since = now
        self._count += 1

    def leave(self, now: float) -> None:
        """A message arrives."""
        self._count -= 1
        if not self._count:
            self._total += now - self._since

    def total(self, now: float) -> float:
        """Return the seconds up to now."""
        return self._total + (now - self._since if self._count else 0.0)


class Meter:
    """Two ways to count the time that messages spend under way: by their number at each moment, and one by one."""

    __slots__ = ("_area", "_at", "_inside", "spent")

    def __init__(self) -> None:
        self._inside = 0
        self._area = 0.0
        self._at = 0.0
        self.spent = 0.0
        """Seconds that all messages together took which have arrived."""

    def enter(self, now: float) -> None:
        """A message is sent."""
        self._area += self._inside * (now - self._at)
        self._at = now
        self._inside += 1

    def leave(self, now: float, sent: float) -> None:
        """A message arrives that was sent at that time."""
        self._area += self._inside * (now - self._at)
        self._at = now
        self._inside -= 1
        self.spent += now - sent

    def area_until(self, now: float) -> float:
        """Return the number of messages under way, summed over time."""
        return self._area + self._inside * (now - self._at)


class Network:
    """All listeners and connections of a cluster.

    Args:
        env: the simulated time.
        net: latency, bandwidth and so on.
        rack_of: in which rack a node stands.
        disturbances: what link faults do, by source and target.
        seed: the run's seed.
        metered: whether messages under way are counted.
    """

    def __init__(
        self,
        env: Clock,
        net: NetworkSection | None = None,
        *,
        rack_of: Callable[[str], int] = lambda name: 0,
        disturbances: Sequence[Disturbance] = (),
        seed: int = 0,
        metered: bool = False,
    ) -> None:
        self.env = env
        self._net = net = net or NetworkSection()
        self._rack_of = rack_of
        self._seed = seed
        self._disturbances = disturbances
        self._listeners: dict[Address, Host] = {}
        self.ways: dict[tuple[str, str], Way] = {}
        self.pipes: list[Pipe] = []
        self.limit = net.bandwidth
        self.meter = Meter() if metered else None
        self.fabric: Fabric | None = None
        if not math.isinf(net.bandwidth):
            self.fabric = (FairFabric if net.sharing == "fair" else FifoFabric)(env, self.capacity)

    @property
    def takes_time(self) -> bool:
        """Whether anything may be under way for longer than an instant."""
        net = self._net
        delays = bool(net.latency or net.jitter or net.loss or net.rack_latency or self._disturbances)
        return delays or self.fabric is not None

    def capacity(self, port: Port) -> float:
        """Return the bytes a second of a port."""
        return self._net.bandwidth

    def way(self, source: str, target: str) -> Way:
        """Return the way from one node to another."""
        found = self.ways.get((source, target))
        if found is None:
            apart = self._rack_of(source) != self._rack_of(target)
            faults = [d for d in self._disturbances if (d.source, d.target) == (source, target)]
            found = self.ways[source, target] = Way(
                self._net,
                source,
                target,
                extra=self._net.rack_latency if apart else 0.0,
                disturbances=faults,
                seed=self._seed,
            )
        return found

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
        there, back = self.way(initiator.name, address[0]), self.way(address[0], initiator.name)
        if there.refuses(self.env.now) or back.refuses(self.env.now):
            fixed = self._net.retransmit
            self.env.after(fixed, done, (None,))
            return

        def arrived() -> None:
            target = self._listeners.get(address)
            pipe = self._join(initiator, peer, target) if target is not None and target.alive else None
            self._after(back, lambda: done(pipe))

        self._after(there, arrived)

    def _after(self, way: Way, action: Callable[[], None]) -> None:
        delay = way.delay(self.env.now, HEAD_BYTES)
        if delay < math.inf:
            self.env.after(delay, action)

    def _join(self, initiator: Host, peer: Peer, target: Host) -> Pipe:
        there = Pipe(self, self.way(initiator.name, target.name), target)
        back = Pipe(self, self.way(target.name, initiator.name), initiator)
        there.back, back.back = back, there
        back.peer = peer
        there.peer = target.accept(back)
        self.pipes += (there, back)
        return there

    def traffic(self) -> list[LinkRecord]:
        """Return what went over each way that was used, by source and target."""
        links: dict[tuple[str, str], LinkRecord] = {}
        for pipe in self.pipes:
            way = pipe.way
            pair = (way.source, way.target)
            link = links.get(pair)
            if link is None:
                link = links[pair] = LinkRecord(*pair, 0, 0, 0, way.lost, way.duplicate)
            link.messages += pipe.messages
            link.sent += pipe.sent
            link.delivered += pipe.delivered
        return [link for _, link in sorted(links.items()) if link.messages]
