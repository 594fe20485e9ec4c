"""A server's links to the other servers: made when one is first needed, and used for questions that are answered.

A link may end without anybody's fault. While there is something to be answered over it, it is made again, with longer
and longer pauses, and what is not answered is asked again, in its order. So who is asked may hear a question twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from aiokv.core.deadlines import earliest
from aiokv.core.effects import Connect, Disconnect, Effect, Log, Send
from aiokv.core.joiner import retry_delay
from aiokv.core.server_links import SHORT_LIFE, is_same_node
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
class Asked(Generic[T]):
    """A question that is not answered. `since` is when it was asked, or when the link has ended, if that was later.

    Without a `message` nobody needs the answer any longer.
    """

    about: T
    message: m.Message | None
    since: float


@dataclass(slots=True, eq=False)
class Neighbour(Generic[T]):
    """The link to one server, `entry` in the view. `asked` has the questions by request id, in their order.

    `up_since` is set while the other side knows this server over it, `connected` from its connection on. `attempt`
    counts those in vain; `reason` says why there is no link.
    """

    entry: m.ServerEntry
    connected: bool = False
    up_since: float | None = None
    attempt: int = 0
    reason: str = "no answer yet"
    asked: dict[int, Asked[T]] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        """Whether questions can be sent."""
        return self.up_since is not None

    @property
    def peer(self) -> Peer:
        """The number of the connection."""
        return peer_of_server(self.entry.index)

    def connect(self) -> Connect:
        """Return what makes the connection."""
        self.connected, self.up_since = False, None
        delay = retry_delay(self.attempt) if self.attempt else 0.0
        return Connect(self.peer, self.entry.host, self.entry.port, delay)

    def again(self, reason: str) -> Connect:
        """Return what makes the connection after an attempt in vain."""
        self.attempt, self.reason = self.attempt + 1, reason
        return self.connect()

    def wait_from(self, now: float) -> None:
        """Let all questions wait anew for a link."""
        for asked in self.asked.values():
            asked.since = now


Failed = list[tuple[T, ServerLostError]]
"""What questions that can't be answered were about, and why they can't."""


class Neighbours(Generic[T]):
    """The part of a `Coordinator` that asks other servers. A question is about a `T`, whatever its owner likes.

    It fails when the view calls the other server lost, or when there was no link for the death time-out.

    Args:
        joiner: this server's place in the cluster.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self.links: dict[Peer, Neighbour[T]] = {}
        """Those that this server has made, or is to make."""
        self._next_request = ATTACH_REQUEST + 1
        self._callers: dict[Peer, m.AttachServer] = {}
        """Who is at the other end of connections that other servers have made."""

    def __contains__(self, peer: Peer) -> bool:
        return peer in self.links

    @property
    def index(self) -> int:
        """This server's own index."""
        return self._joiner.number

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

    # --- those who ask this one ---

    def entry(self, message: m.AttachServer) -> m.ServerEntry | None:
        """Return the alive server of the view that has sent this, if there is one."""
        alive = [entry for entry in self._servers if entry.state == "alive"]
        named = (message.index, message.name, message.incarnation)
        return next((entry for entry in alive if (entry.index, entry.name, entry.incarnation) == named), None)

    def attach(self, peer: Peer, message: m.AttachServer) -> list[Peer]:
        """Take note who is at the other end of a connection; return the connections that it had before."""
        before = [other for other, one in self._callers.items() if one.index == message.index and other != peer]
        self._callers[peer] = message
        return before

    def caller(self, peer: Peer) -> int | None:
        """Return the index of the server at the other end of a connection that it has made; None: it is none."""
        message = self._callers.get(peer)
        return None if message is None else message.index

    def forget_caller(self, peer: Peer) -> None:
        """Take note that a connection is over."""
        self._callers.pop(peer, None)

    def strangers(self) -> list[Peer]:
        """Return the connections of servers that are not, or no longer, in the view as those that they are."""
        return [peer for peer, message in self._callers.items() if self.entry(message) is None]

    # --- questions ---

    def ask(self, index: int, message: m.Message, about: T, now: float) -> list[Effect]:
        """Send a question to a server that the view does not call lost, over a new link if there is none."""
        peer = peer_of_server(index)
        effects: list[Effect] = []
        link = self.links.get(peer)
        if link is None:
            link = self.links[peer] = Neighbour(self._servers[index])
            effects = [link.connect()]
        request, self._next_request = self._next_request, self._next_request + 1
        link.asked[request] = Asked(about, message, now)
        return [Send(peer, request, message)] if link.is_up else effects

    def withdraw(self, about: T) -> None:
        """Take note that the answer to a question is not needed any longer; it is not asked again."""
        for link in self.links.values():
            for asked in link.asked.values():
                if asked.about is about:
                    asked.message = None

    def answered(self, peer: Peer, request: int, message: m.Message, now: float) -> tuple[T | None, list[Effect]]:
        """Take in an answer; return what its question was about, None for the link's own, and what is to be done.

        Raises:
            ProtocolError: it was not asked.
        """
        link = self.links[peer]
        if not link.is_up:
            return None, self._attached(link, request, message, now)
        # A question that has to wait is answered twice.
        asked = link.asked.get(request) if isinstance(message, m.Accepted) else link.asked.pop(request, None)
        if asked is None:
            raise ProtocolError(f"unexpected {type(message).__name__}")
        return asked.about, []

    # --- links ---

    def _attached(self, link: Neighbour[T], request: int, message: m.Message, now: float) -> list[Effect]:
        """Ask all that is not answered, if the other side knows this server now."""
        if not link.connected or request != ATTACH_REQUEST:
            # What is left of the connection before.
            return []
        if not isinstance(message, m.Done):
            reason = message.message if isinstance(message, m.Error) else f"unexpected {type(message).__name__}"
            return [Disconnect(link.peer, reason), link.again(reason)]
        link.up_since = now
        link.asked = {request: asked for request, asked in link.asked.items() if asked.message is not None}
        return [Send(link.peer, number, one.message) for number, one in link.asked.items() if one.message is not None]

    def connected(self, peer: Peer, now: float) -> list[Effect]:
        """Say who this server is, over a link that is open now."""
        link, view = self.links.get(peer), self._joiner.view
        if link is None or view is None:
            return [Disconnect(peer, "nobody waits for this connection any longer")]
        link.connected, link.reason = True, "it does not say that it knows this server"
        me = self._joiner
        message = m.AttachServer(self.index, me.name, me.incarnation, view.epoch, view.death_timeout)
        return [Send(peer, ATTACH_REQUEST, message)]

    def connect_failed(self, peer: Peer, reason: str) -> list[Effect]:
        """Try again, later and later, while something is to be asked."""
        link = self.links.get(peer)
        return [] if link is None else [link.again(reason)]

    def ended(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Make a link that is over again if something is not answered; else the next question makes another one."""
        link = self.links.get(peer)
        if link is None:
            return []
        if not link.asked:
            del self.links[peer]
            return []
        if link.up_since is None:
            return [link.again(reason)]
        link.attempt = link.attempt if now - link.up_since < SHORT_LIFE else 0
        link.wait_from(now)
        text = f"{self._joiner.name}: the link to {self.label(link.entry.index)} has ended: {reason}; it is made again"
        return [link.again(reason), Log("warning", text, "link_ended", {"server": link.entry.index, "reason": reason})]

    def viewed(self, now: float) -> tuple[list[Effect], Failed[T]]:
        """Take over the servers of a newer view; return what can't be answered because one is lost."""
        effects: list[Effect] = []
        failed: Failed[T] = []
        for link in list(self.links.values()):
            entry = self._servers[link.entry.index]
            if entry.state == "lost":
                del self.links[link.peer]
                effects.append(Disconnect(link.peer, entry.reason))
                failed += [(asked.about, self.lost(entry.index, entry.reason)) for asked in link.asked.values()]
            elif not is_same_node(entry, link.entry):
                link.entry, link.attempt = entry, 0
                link.wait_from(now)
                effects += [Disconnect(link.peer, f"{entry.name} is server {entry.index} now"), link.connect()]
        return effects, failed

    def deadline(self) -> float | None:
        """Return the time at which `due` wants to be called."""
        view = self._joiner.view
        if view is None or not self.links:
            return None
        first = earliest(*[asked.since for link in self._down() for asked in link.asked.values()])
        return None if first is None else first + view.death_timeout

    def _down(self) -> list[Neighbour[T]]:
        return [link for link in self.links.values() if not link.is_up]

    def due(self, now: float) -> tuple[list[Effect], Failed[T]]:
        """Give up the questions that have waited too long for a link, and a link over which nothing is to be asked."""
        view = self._joiner.view
        effects: list[Effect] = []
        failed: Failed[T] = []
        for link in self._down():
            assert view is not None, "servers are known from the view only"
            error = self.lost(link.entry.index, f"no link to it: {link.reason}")
            late = [number for number, asked in link.asked.items() if asked.since + view.death_timeout <= now]
            failed += [(link.asked.pop(number).about, error) for number in late]
            if not link.asked:
                del self.links[link.peer]
                effects.append(Disconnect(link.peer, link.reason))
        return effects, failed
