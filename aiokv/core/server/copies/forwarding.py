"""How a standby hands all that comes to it on to a standby of its own, while the place that it is to take moves.

It says that it has something only when its own standby has it too. So whatever its server has told anybody, both have;
and when one of the two takes the place, the other one is its standby without having to get everything anew. What was
before the link is sent once more by the server (`core.server.copies.copying`), since that alone has all of it. When
the link ends there is no such standby any longer: nothing is kept here that could be sent again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Disconnect, Effect, Log, Send, StoredSlots
from aiokv.core.server.copies.acknowledgements import Acknowledgements
from aiokv.core.server.copies.standby_link import ATTACH_REQUEST, StandbyLink
from aiokv.core.server.copies.subjects import subject_of
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.joiner import Joiner
    from aiokv.core.stimuli import Received
    from aiokv.types import Peer


class Forwarding:
    """The part of a `Standby` that deals with its own standby.

    Args:
        joiner: the node's place in the cluster.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self.link = StandbyLink(joiner)
        """The connection to it."""
        self.acks = Acknowledgements()
        """What it has, by the numbers of the server's messages."""
        self._dropped = False
        """Whether there can be no such standby: it lacks something."""

    @property
    def is_up(self) -> bool:
        """Whether all that comes is handed on."""
        return self.link.is_up

    def viewed(self, index: int, entry: m.StandbyEntry | None, now: float) -> list[Effect]:
        """Take over what a newer view says of a standby's own one."""
        effects: list[Effect] = []
        if self.link.viewed(index, entry):
            effects, self._dropped = self.link.close(), False
            self.acks.begin_anew()
        if entry is None:
            return effects
        return effects + (self._drop() if self._dropped else self.link.look_for(now))

    def begin(self, number: int) -> None:
        """Hand on what comes behind a message."""
        self.acks.last = self.acks.acked = number

    def forward(self, received: Received) -> list[Effect]:
        """Hand on what has come, unless there is nobody."""
        if not self.link.is_up:
            return []
        message = received.message
        number = self.acks.handed_on(received.request, subject_of(message), whole=isinstance(message, m.Copy))
        # As a copy: what has landed may be changed at once.
        payload = None if received.slot is None else StoredSlots([received.slot], received.nbytes)
        return [Send(self.link.peer, number, message, payload)]

    # --- the link ---

    def received(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        """Take in what it says."""
        if peer != self.link.peer:
            return []
        if not isinstance(message, m.Replicated):
            reason = message.message if isinstance(message, m.Error) else f"unexpected {type(message).__name__}"
            return [Disconnect(peer, reason), *self.lost(peer, reason, now)]
        if request == ATTACH_REQUEST and not self.link.is_up:
            self.link.attached()
        else:
            self.acks.acknowledged(message.number)
        return []

    def lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Do without it if it had something already; otherwise make another link."""
        if peer != self.link.peer or not self.link.is_up:
            return self.link.lost(peer, reason, now)
        self.link.is_up, self.link.reason, self._dropped = False, reason, True
        self.link.close()
        self.acks.begin_anew()
        return self._drop()

    def due(self, now: float) -> list[Effect]:
        """Tell the scheduler of one that can't be reached, until it says that it counts no more."""
        return self._drop() if self.link.is_late(now) else []

    def _drop(self) -> list[Effect]:
        index, entry = self.link.index, self.link.entry
        assert entry is not None, "there is one to be dropped"
        text = f"{self._joiner.name} has no link to its standby {entry.name}: {self.link.reason}"
        facts = {"server": index, "node": entry.name}
        return [Log("warning", text, "standby_dropped", facts), Send(SCHEDULER, 0, m.DropStandby(index, entry.name))]
