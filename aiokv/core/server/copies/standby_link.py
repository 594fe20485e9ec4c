"""A server's link to its standby: made again, later and later, until the scheduler is told that it can't be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Connect, Disconnect, Effect, Send
from aiokv.core.joiner import retry_delay
from aiokv.types import STANDBY
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.joiner import Joiner
    from aiokv.types import Peer

ATTACH_REQUEST = 1
"""Request id of the one `AttachStandby` of a link."""


class StandbyLink:
    """The connection over which a standby is told what its server does.

    Args:
        joiner: the server's place in the cluster.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self.entry: m.StandbyEntry | None = None
        """What the newest view says of the standby."""
        self.index = 0
        """The index of the server whose parameters it has."""
        self.peer = STANDBY
        """The connection, a new number for each: over an earlier one nothing counts any longer."""
        self.is_up = False
        """Whether the standby knows this server over it."""
        self._connecting = False
        self._attempt = 0
        self.reason = "no answer yet"
        """Why it is not."""
        self._give_up_at: float | None = None
        """When there has been no link for too long."""

    def deadline(self) -> float | None:
        """Return the time at which `is_late` wants to be called."""
        return self._give_up_at

    @property
    def _timeout(self) -> float:
        assert self._joiner.view is not None, "there is a standby in it"
        return self._joiner.view.death_timeout

    def viewed(self, index: int, new: m.StandbyEntry | None) -> bool:
        """Take over what a newer view says; tell whether it is another standby, or there is none."""
        known = self.entry
        self.entry, self.index = new, index
        return known is None or new is None or not _is_same(known, new)

    def close(self) -> list[Effect]:
        """Go on without a link, until `look_for`."""
        is_open, self.is_up, self._connecting = self.is_up or self._connecting, False, False
        self._attempt, self._give_up_at = 0, None
        return [Disconnect(self.peer, "it is not the standby any longer")] if is_open else []

    def look_for(self, now: float) -> list[Effect]:
        """Begin to make a link, if the standby has an address and there is none yet."""
        assert self.entry is not None, "there is a standby"
        if not self.entry.port or self.is_up or self._connecting or self._give_up_at is not None:
            return []
        self._give_up_at = now + self._timeout
        return self._connect()

    def _connect(self) -> list[Effect]:
        assert self.entry is not None, "it has an address"
        self._connecting = True
        self.peer -= 1
        delay = retry_delay(self._attempt) if self._attempt else 0.0
        return [Connect(self.peer, self.entry.host, self.entry.port, delay)]

    def connected(self, peer: Peer) -> list[Effect]:
        """Say who this server is, over a link that is open now."""
        view = self._joiner.view
        if peer != self.peer or not self._connecting or view is None:
            return [Disconnect(peer, "nobody waits for this connection any longer")]
        me = (self.index, self._joiner.name, self._joiner.incarnation)
        return [Send(self.peer, ATTACH_REQUEST, m.AttachStandby(*me, view.epoch, self._timeout))]

    def connect_failed(self, peer: Peer, reason: str) -> list[Effect]:
        """Try again, later and later, until it is `late`."""
        if peer != self.peer or not self._connecting:
            return []
        self.reason = reason
        self._attempt += 1
        return self._connect()

    def attached(self) -> None:
        """Take note that the standby knows this server."""
        self.is_up, self._connecting, self._attempt, self._give_up_at = True, False, 0, None

    def lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Make another link, if it is this one that has ended."""
        if peer != self.peer or not (self.is_up or self._connecting):
            return []
        self.is_up, self.reason = False, reason
        if self._give_up_at is None:
            self._give_up_at = now + self._timeout
        self._attempt += 1
        return self._connect()

    def is_late(self, now: float) -> bool:
        """Tell, from time to time, whether there has been no link for too long."""
        if self._give_up_at is None or now < self._give_up_at:
            return False
        self._give_up_at = now + self._timeout
        return True


def _is_same(one: m.StandbyEntry, other: m.StandbyEntry) -> bool:
    """Tell whether two entries are of one process, which need not have registered by the first."""
    return one.name == other.name and one.incarnation in (0, other.incarnation)
