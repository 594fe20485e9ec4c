"""A node that others connect to: the driver of the scheduler and of a server."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import TYPE_CHECKING, Self

from aiokv.addresses import format_address
from aiokv.core import effects as ef
from aiokv.errors import BindError, ClosedError
from aiokv.net import tls
from aiokv.net.door import Door
from aiokv.net.driver import Driver, Log
from aiokv.wire.admission import Admission

if TYPE_CHECKING:
    from types import TracebackType

    from aiokv.config import Config
    from aiokv.errors import AiokvError
    from aiokv.net.link import AnyLink
    from aiokv.net.tcp import Link


async def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the address; port 0 means any free port.

    Raises:
        BindError: the address is taken or not this machine's; names address and errno.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server((address[0], address[1]), family=family, backlog=1024)
    except OSError as error:
        number = error.errno or 0
        name = errno.errorcode.get(number, str(number))
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        where = format_address(host, port)
        raise BindError(f"can't listen at {where}: {reason} ({name})", address=where, errno=number) from None


async def local_host_towards(host: str, port: int) -> str:
    """Return the address of this machine from which packets to `host` leave. Sends nothing."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, remote_addr=(host, port or 1))
    try:
        return str(transport.get_extra_info("sockname")[0])
    finally:
        transport.close()


class Node(Driver):
    """A driver with a listening socket; an async context manager that starts and closes it."""

    def __init__(self, config: Config, log: Log | None = None) -> None:
        super().__init__(config, log)
        self.host = ""
        """The address that the node listens at."""
        self.port = 0
        """The real port, also when port 0 was asked for."""
        self.admission = Admission(
            max_connections=config.max_connections,
            max_handshakes=config.max_handshakes,
            rate=config.connection_rate,
        )
        self.listener_context = tls.listener_context(config)
        self._entered: dict[AnyLink, bool] = {}
        """Connections that came in at the door, and whether they are authenticated."""
        self._listener: asyncio.Server | None = None
        self._stopped: asyncio.Future[ef.Stop] | None = None

    @property
    def address(self) -> str:
        """Where the node listens, as `host:port`."""
        return format_address(self.host, self.port)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen, and begin to take part in the cluster.

        Raises:
            BindError: the address is taken or not this machine's.
            ConfigError: the node would listen on a network without a token.
        """
        raise NotImplementedError

    async def _listen(self, host: str, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = self._loop.create_future()
        listening = await bind(host, port)
        self.host, self.port = listening.getsockname()[:2]
        self._listener = await self._loop.create_server(lambda: Door(self), sock=listening)

    # --- the door; see `aiokv.net.door.Keeper` ---

    def let_in(self, remote: str) -> Link:
        """Make the protocol of a connection that may come in."""
        peer, self._next_peer = self._next_peer, self._next_peer + 1
        link = self._make_link(peer, initiator=False, remote=remote)
        self._others[link] = None
        self._entered[link] = False
        return link

    def let_go(self, link: Link, reason: str) -> None:
        """Forget one that came in, and did not get as far as to be a connection of ours."""
        if not link.ended.done():
            link.ended.set_result(None)
            self.link_down(link, reason, None)

    def turn_away(self, error: AiokvError, remote: str) -> None:
        """Take note that one from there may not come in."""
        event = f"connections_refused.{error.details['limit']}"
        self.note("warning", event, f"refused a connection from {remote}: {error}", error.details | {"address": remote})

    def hold(self, task: asyncio.Task[None]) -> None:
        """Keep a task, and cancel it when the node closes."""
        self._connecting[task] = None
        task.add_done_callback(self._connecting.pop)

    def link_up(self, link: AnyLink) -> None:
        """Enter a connection that is authenticated."""
        if link in self._entered:
            self._entered[link] = True
            self.admission.authenticated()
        super().link_up(link)

    def link_down(self, link: AnyLink, reason: str, error: AiokvError | None) -> None:
        """Take out a connection that is over."""
        authenticated = self._entered.pop(link, None)
        if authenticated is not None:
            self.admission.leave(authenticated=authenticated)
        super().link_down(link, reason, error)

    # --- the end ---

    async def wait_stopped(self) -> ef.Stop:
        """Wait until the node's work is over, and return why.

        Raises:
            ClosedError: the node was never started, or is closed before its work is over.
        """
        if self._stopped is None:
            raise ClosedError(f"this {type(self).__name__} is not started: use `async with`")
        return await asyncio.shield(self._stopped)

    def leave(self) -> bool:
        """Ask the others to go on without this node, and end then; return False if there is nobody to be asked."""
        return False

    def _stop(self, effect: ef.Stop) -> None:
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(effect)

    async def close(self) -> None:
        """Stop listening and close all connections. Can be called twice."""
        if self._listener is not None:
            self._listener.close()
        await self._close_links()
        if self._listener is not None:
            await self._listener.wait_closed()
            self._listener = None
        self._stop(ef.Stop("closed"))
