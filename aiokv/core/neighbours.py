"""A server's links to the other servers: made when one is first needed, and used for questions that are answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from aiokv.core.deadlines import earliest
from aiokv.core.effects import Connect, Disconnect, Effect, Send
from aiokv.core.joiner import retry_delay
from aiokv.errors import ProtocolError, ServerLostError
from aiokv.types import peer_of_server
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.joiner import Joiner
    from aiokv.types import Peer

T = TypeVar("T")

ATTACH_REQUEST = 1
"""Request id of the one `AttachServer` of a link; other requests count from 2."""


@dataclass(slots=True, eq=False)
class Neighbour(Generic[T]):
    """The link to one server. `asked` has, by request id, what each question is about; `unsent` waits for the link.

    `give_up_at` is set while the link is being made.
    """

    index: int
    give_up_at: float | None
    connected: bool = False
    attempt: int = 0
    reason: str = "no answer yet"
    asked: dict[int, T] = field(default_factory=dict)
    unsent: dict[int, m.Message] = field(default_factory=dict)


Failed = list[tuple[T, ServerLostError]]
"""What questions that can't be answered were about, and why they can't."""


class Neighbours(Generic[T]):
    """The part of a `Coordinator` that asks other servers. A question is about a `T`, whatever its owner likes.

    A link that can't be made within the death time-out, or that ends, fails the questions that were asked over it; the
    next question makes another one.

    Args:
        joiner: this server's place in the cluster.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self._links: dict[Peer, Neighbour[T]] = {}
        self._next_request = ATTACH_REQUEST + 1

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._links

    @property
    def index(self) -> int:
        """This server's own index."""
        return next(entry.index for entry in self._servers if entry.name == self._joiner.name)

    @property
    def _servers(self) -> tuple[m.ServerEntry, ...]:
        return self._joiner.view.servers if self._joiner.view is not None else ()

    def label(self, index: int) -> str:
        """Return a server as people know it, for messages."""
        entry = self._servers[index]
        return f"server {index} ({entry.name} at {entry.host}:{entry.port})"

    def lost(self, index: int, reason: str) -> ServerLostError:
        """Return the error for what needs a server that is gone."""
        entry = self._servers[index]
        text = f"{self.label(index)} is lost: {reason}"
        return ServerLostError(text, server=index, address=f"{entry.host}:{entry.port}")

    def first_lost(self, indices: list[int]) -> ServerLostError | None:
        """Return the error for the first of these servers that the view says is lost, if there is one."""
        for entry in self._servers:
            if entry.state == "lost" and entry.index in indices:
                return self.lost(entry.index, entry.reason)
        return None

    def entry(self, message: m.AttachServer) -> m.ServerEntry | None:
        """Return the alive server of the view that has sent this, if there is one."""
        alive = [entry for entry in self._servers if entry.state == "alive"]
        named = (message.index, message.name, message.incarnation)
        return next((entry for entry in alive if (entry.index, entry.name, entry.incarnation) == named), None)

    # --- questions ---

    def ask(self, index: int, message: m.Message, about: T, now: float) -> list[Effect]:
        """Send a question to a server that the view does not call lost, over a new link if there is none."""
        peer = peer_of_server(index)
        effects: list[Effect] = []
        link = self._links.get(peer)
        if link is None:
            assert self._joiner.view is not None, "servers are known from the view only"
            link = self._links[peer] = Neighbour(index, now + self._joiner.view.death_timeout)
            effects = [self._connect(link)]
        request, self._next_request = self._next_request, self._next_request + 1
        link.asked[request] = about
        if link.give_up_at is None:
            return [Send(peer, request, message)]
        link.unsent[request] = message
        return effects

    def answered(self, peer: Peer, request: int, message: m.Message) -> tuple[T | None, list[Effect]]:
        """Take in an answer; return what its question was about, None for the link's own, and what is to be done.

        Raises:
            ProtocolError: it was not asked, or the server does not know this one.
        """
        link = self._links[peer]
        if request == ATTACH_REQUEST and link.give_up_at is not None and isinstance(message, m.Done):
            link.give_up_at = None
            unsent, link.unsent = link.unsent, {}
            return None, [Send(peer, number, question) for number, question in unsent.items()]
        # A question that has to wait is answered twice.
        about = link.asked.get(request) if isinstance(message, m.Accepted) else link.asked.pop(request, None)
        if about is None:
            what = message.message if isinstance(message, m.Error) else f"unexpected {type(message).__name__}"
            raise ProtocolError(what)
        return about, []

    # --- links ---

    def _connect(self, link: Neighbour[T]) -> Connect:
        entry = self._servers[link.index]
        delay = retry_delay(link.attempt) if link.attempt else 0.0
        return Connect(peer_of_server(link.index), entry.host, entry.port, delay)

    def connected(self, peer: Peer, now: float) -> list[Effect]:
        """Say who this server is, over a link that is open now."""
        link, view = self._links.get(peer), self._joiner.view
        if link is None or link.give_up_at is None or view is None:
            return [Disconnect(peer, "nobody waits for this connection any longer")]
        link.connected, link.reason = True, "it does not say that it knows this server"
        me, left = self._joiner, max(0.0, link.give_up_at - now)
        return [Send(peer, ATTACH_REQUEST, m.AttachServer(self.index, me.name, me.incarnation, view.epoch, left))]

    def connect_failed(self, peer: Peer, reason: str) -> list[Effect]:
        """Try again, later and later, until `due` gives up."""
        link = self._links.get(peer)
        if link is None:
            return []
        link.attempt, link.reason = link.attempt + 1, reason
        return [self._connect(link)]

    def end(self, peer: Peer, reason: str) -> Failed[T]:
        """Take out a link that is over; the questions that were asked over it fail."""
        link = self._links.pop(peer, None)
        if link is None:
            return []
        error = self.lost(link.index, reason)
        return [(about, error) for about in link.asked.values()]

    def deadline(self) -> float | None:
        """Return the time at which `due` wants to be called."""
        return earliest(*[link.give_up_at for link in self._links.values()]) if self._links else None

    def due(self, now: float) -> list[tuple[Peer, str]]:
        """Return the links that could not be made in time, and why."""
        late = [link for link in self._links.values() if link.give_up_at is not None and link.give_up_at <= now]
        return [(peer_of_server(link.index), f"no link to it: {link.reason}") for link in late]

    def gone(self) -> list[tuple[Peer, str]]:
        """Return the links to servers that the view says are lost, and why."""
        peers = {peer_of_server(entry.index): entry.reason for entry in self._servers if entry.state == "lost"}
        return [(peer, reason) for peer, reason in peers.items() if peer in self._links]
