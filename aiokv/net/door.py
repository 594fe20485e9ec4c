"""What an incoming connection meets first: it is counted, turned away or let in, and with TLS it is secured."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Protocol, cast

from aiokv.errors import AiokvError, HandshakeError
from aiokv.net import tls
from aiokv.net.tcp import peer_address
from aiokv.wire.connection import goodbye

if TYPE_CHECKING:
    import ssl

    from aiokv.net.tcp import Link
    from aiokv.wire.admission import Admission


class Keeper(Protocol):
    """The listener, as its doors see it."""

    admission: Admission
    listener_context: ssl.SSLContext | None

    def let_in(self, remote: str) -> Link:
        """Make the protocol of a connection that may come in."""

    def let_go(self, link: Link, reason: str) -> None:
        """Forget one that came in, and did not get as far as to be a connection of ours."""

    def turn_away(self, error: AiokvError, remote: str) -> None:
        """Take note that one from there may not come in."""

    def hold(self, task: asyncio.Task[None]) -> None:
        """Keep a task, and cancel it when the listener closes."""


class Door(asyncio.Protocol):
    """The first protocol of an accepted connection; it takes no memory for it, and reads nothing.

    Args:
        keeper: the listener.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Decide whether it may come in."""
        stream = cast("asyncio.Transport", transport)
        keeper = self._keeper
        name = stream.get_extra_info("peername")
        remote = peer_address(stream)
        host = str(name[0]) if name else "an unknown address"
        error = keeper.admission.enter(host, asyncio.get_running_loop().time())
        if error is not None:
            keeper.turn_away(error, remote)
            if keeper.listener_context is None:
                stream.write(goodbye(error))
            stream.close()
        elif keeper.listener_context is None:
            link = keeper.let_in(remote)
            stream.set_protocol(link)
            link.connection_made(stream)
        else:
            self._begin_tls(stream, keeper.listener_context, remote)

    def _begin_tls(self, stream: asyncio.Transport, context: ssl.SSLContext, remote: str) -> None:
        """Give TLS a socket of its own: nothing of what this transport might read must be missing."""
        link = self._keeper.let_in(remote)
        endpoint = stream.get_extra_info("socket")
        try:
            own = socket.fromfd(endpoint.fileno(), endpoint.family, endpoint.type)
        except OSError as error:
            # No descriptors are left.
            self._keeper.let_go(link, str(error))
        else:
            self._keeper.hold(asyncio.create_task(self._secure(link, own, context)))
        stream.abort()

    async def _secure(self, link: Link, own: socket.socket, context: ssl.SSLContext) -> None:
        """Do the handshake of TLS; our own protocol hears of the connection when that is done.

        Args:
            link: our own protocol.
            own: the socket, which goes over to the transport.
            context: this side of TLS.
        """
        try:
            await self._shake_hands(link, own, context)
        except OSError as error:
            self._keeper.let_go(link, tls.describe(error))
        except asyncio.CancelledError:
            self._keeper.let_go(link, "this node is closing")
            raise

    @staticmethod
    async def _shake_hands(link: Link, own: socket.socket, context: ssl.SSLContext) -> None:
        own.setblocking(False)
        # A failed handshake closes the socket without a word; through this one there is a last one.
        with own.dup() as spare:
            spare.setblocking(False)
            try:
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: link, own, ssl=context, **tls.TIMES)
            except OSError as error:
                if tls.is_plain(error):
                    # A few bytes always fit into the buffer of a fresh connection, and it is no more than a courtesy.
                    with contextlib.suppress(OSError):
                        spare.send(goodbye(HandshakeError(tls.PLAIN_HINT)))
                raise
