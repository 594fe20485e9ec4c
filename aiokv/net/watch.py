"""The clock of one connection: its handshake may not take for ever, and later its peer must be there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from aiokv.errors import HandshakeError

if TYPE_CHECKING:
    from aiokv.errors import AiokvError
    from aiokv.wire.connection import Connection


class Watched(Protocol):
    """A link, as its watch sees it."""

    @property
    def is_reading(self) -> bool:
        """False while nothing is read, so that nothing can be heard."""

    @property
    def unsent_bytes(self) -> int:
        """How much the system has not taken yet, since the other side takes no more."""

    def write_link_frames(self) -> None:
        """Write what the connection itself has to say."""

    def refuse(self, error: AiokvError) -> None:
        """Close, and say why."""

    def abort(self) -> None:
        """Close at once."""


class Watch:
    """Tells a connection when its time is over, and what shows that its peer is there besides what it sends.

    Args:
        connection: whose deadlines these are.
        link: carries it.
    """

    def __init__(self, connection: Connection, link: Watched) -> None:
        self._connection = connection
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        """What was unsent at the last look."""
        self.emptied = False
        """Whether all was sent at some time since then; set by the link."""

    def begin(self) -> None:
        """Wait for the next deadline."""
        self.end()
        deadline = self._connection.deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._passed, deadline)

    def end(self) -> None:
        """Wait no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def established(self) -> None:
        """See from now on whether the peer is still there."""
        self._connection.watch(self._loop.time())
        self.begin()

    def _passed(self, deadline: float) -> None:
        self._look()
        try:
            # The timer of a loop may fire a rounding error too early.
            self._connection.handle_timeout(max(deadline, self._loop.time()))
        except HandshakeError as error:
            self._link.refuse(error)
            return
        if self._connection.gone:
            self._link.abort()
            return
        self._link.write_link_frames()
        self.begin()

    def _look(self) -> None:
        """Tell the connection of what the peer has taken; and while nothing is read its silence means nothing."""
        before, self._unsent = self._unsent, self._link.unsent_bytes
        took = before > 0 and (self.emptied or self._unsent < before)
        self.emptied = False
        if took or not self._link.is_reading:
            self._connection.heard()
