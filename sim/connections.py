"""A node's connections, and whether it is there to take what comes over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core import stimuli as st
from aiokv.types import SCHEDULER

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.effects import Connect
    from aiokv.core.stimuli import Stimulus
    from aiokv.types import Peer
    from sim.network import Address, Closing, Flights, Packet, Pipe
    from sim.world import World


class Connected:
    """The part of a node that others talk to.

    Args:
        world: what all nodes share.
        name: the node's name.
        address: where it listens; None: nowhere.
        flights: is told of the messages to and from the servers.
    """

    # With thousands of nodes none is in a cache: what each message needs lies in front.
    __slots__ = (
        "_accepted",
        "_attempts",
        "_dialogue",
        "_env",
        "_flights",
        "_pauses",
        "_pipes",
        "_waiting",
        "_world",
        "alive",
        "name",
    )

    def __init__(self, world: World, name: str, address: Address | None, flights: Flights | None) -> None:
        self.name = name
        self.alive = True
        self._world = world
        self._env = world.env
        self._dialogue = None if world.checks is None else world.checks.dialogue
        """Looks at the messages."""
        self._flights = flights
        self._pipes: dict[Peer, Pipe] = {}
        self._attempts: dict[Peer, object] = {}
        """The newest attempt to connect under each number."""
        self._accepted = 0
        self._pauses = 0
        self._waiting: list[Callable[[], None]] = []
        """What is done after the pause."""
        if address is not None:
            world.network.listen(address, self)

    def deliver(self, stimulus: Stimulus) -> None:
        """Hand a stimulus to the state machine and perform what it decides."""
        raise NotImplementedError

    def arrive(self, pipe: Pipe, item: Packet | Closing) -> None:
        """Take what came from a peer; what comes over a connection that is closed here is dropped."""
        raise NotImplementedError

    # --- pauses ---

    @property
    def is_paused(self) -> bool:
        """Whether it is stopped for a while."""
        return self._pauses > 0

    def afterwards(self, action: Callable[[], None]) -> None:
        """Do something when the pause is over."""
        self._waiting.append(action)

    # --- connections ---

    def accept(self, pipe: Pipe) -> Peer:
        """Take the pipe to a node that connects, and return the number that it gets here."""
        peer = self._accepted
        self._accepted += 1
        self._attach(peer, pipe)
        return peer

    def _attach(self, peer: Peer, pipe: Pipe) -> None:
        self._pipes[peer] = pipe
        pipe.back.is_heard = True

    def _detach(self, peer: Peer) -> Pipe | None:
        pipe = self._pipes.pop(peer, None)
        if pipe is not None:
            pipe.back.is_heard = False
        return pipe

    def _closed(self, pipe: Pipe, closing: Closing) -> None:
        """The other side has closed a connection."""
        self._detach(pipe.peer)
        if self._dialogue is not None:
            self._dialogue.closed(self.name, pipe.peer, pipe.source, self._env.now)
        self.deliver(st.PeerLost(pipe.peer, closing.reason))

    def _connect(self, effect: Connect) -> None:
        attempt = self._attempts[effect.peer] = object()
        self._env.after(effect.delay, self._dial, (effect.peer, (effect.host, effect.port), attempt))

    def _dial(self, peer: Peer, address: Address, attempt: object) -> None:
        if self.alive and self._attempts.get(peer) is attempt:
            self._world.network.connect(self, peer, address, lambda pipe: self._connected(peer, address, pipe, attempt))

    def _connected(self, peer: Peer, address: Address, pipe: Pipe | None, attempt: object) -> None:
        if self._pauses and self.alive:
            self._waiting.append(lambda: self._connected(peer, address, pipe, attempt))
        elif self._attempts.get(peer) is not attempt:
            if pipe is not None:
                pipe.close("it is wanted no longer")
        elif pipe is None:
            self.deliver(st.ConnectFailed(peer, f"nobody listens at {address[0]}:{address[1]}"))
        elif self.alive:
            self._attach(peer, pipe)
            if peer != SCHEDULER:
                for each in (pipe, pipe.back):
                    each.flights = self._flights if each.takes_time else None
            self.deliver(st.Connected(peer))
            if pipe.early is not None:
                self.arrive(pipe.back, pipe.early)
        else:
            pipe.close("the node that connected is gone")

    def _disconnect(self, peer: Peer, reason: str) -> None:
        """Close a connection, if there is one."""
        pipe = self._detach(peer)
        if pipe is not None:
            if self._dialogue is not None:
                self._dialogue.closed(self.name, peer, pipe.target.name, self._env.now, by_itself=True)
            pipe.close(reason)

    def reset(self, other: str) -> None:
        """Let the connections to another node end, and to those in its process."""
        for pipe in [pipe for pipe in self._pipes.values() if pipe.target.name.partition("/")[0] == other]:
            pipe.reset("connection reset")
