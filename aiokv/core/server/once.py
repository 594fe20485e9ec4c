"""Requests that must not be carried out twice: what a server has answered, should a worker not have heard it.

A worker whose connection has ended asks everything again that was not answered. Reads may be repeated, and pushes have
numbers of their own. What is left is known by the worker's rank, its incarnation and the number of the request.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Refuse, Send
from aiokv.core.records import Record
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.server.parked import RequestName
    from aiokv.types import Incarnation, Peer, Rank

ONCE = (m.Command, m.Delete, m.SetOptimizer, m.ChangeOptimizer, m.PutRules, m.SetCompression, m.SetPolicy, m.Switched)
"""What is carried out once."""

REMEMBERED = 256
"""Of how many requests of a worker the answers are known."""


class Doing(Record, eq=False):
    """A request that is being carried out, and over which connection it is to be answered."""

    rank: Rank
    peer: Peer
    is_command: bool


class Once:
    """The part of a `Coordinator` that knows the answers to such requests."""

    def __init__(self) -> None:
        self.open: dict[RequestName, Doing] = {}
        """What is not answered yet, by the connection and the number with which it came first."""
        self._lives: dict[Rank, Incarnation] = {}
        self._known: dict[Rank, OrderedDict[int, Doing | Send | Refuse]] = {}

    def attached(self, rank: Rank, incarnation: Incarnation) -> None:
        """Take note of a worker; another process counts its requests anew."""
        if self._lives.get(rank) != incarnation:
            self._lives[rank] = incarnation
            self._known.pop(rank, None)

    def asked(self, peer: Peer, request: int, rank: Rank, message: m.Message) -> list[Effect] | None:
        """Return the answer to a request that has come before, nothing if it is to come; None: carry it out."""
        known = self._known.setdefault(rank, OrderedDict())
        before = known.get(request)
        if before is None:
            self.open[peer, request] = known[request] = Doing(rank, peer, isinstance(message, m.Command))
            if len(known) > REMEMBERED:
                known.popitem(last=False)
            return None
        if isinstance(before, Doing):
            if before.peer == peer:
                # It had to wait for something else, and is looked at again.
                return None
            before.peer = peer
            return []
        return [_to(before, peer)]

    def watch(self, effects: list[Effect]) -> list[Effect]:
        """Keep the answers that are among these effects, and send them to where their worker is now."""
        return [
            self._answered(effect)
            if isinstance(effect, Send | Refuse) and (effect.peer, effect.request) in self.open
            else effect
            for effect in effects
        ]

    def _answered(self, answer: Send | Refuse) -> Effect:
        doing = self.open.pop((answer.peer, answer.request))
        known = self._known.get(doing.rank, OrderedDict())
        if known.get(answer.request) is doing:
            known[answer.request] = answer
        return _to(answer, doing.peer)

    def forget_peer(self, peer: Peer) -> None:
        """Take note that a connection is over: what waits there is carried out when it comes again.

        But commands, which run elsewhere, run on.
        """
        for name, doing in list(self.open.items()):
            if name[0] == peer and not doing.is_command:
                del self.open[name]
                known = self._known.get(doing.rank, OrderedDict())
                if known.get(name[1]) is doing:
                    del known[name[1]]


def _to(answer: Send | Refuse, peer: Peer) -> Effect:
    """Return an answer, sent over another connection."""
    if isinstance(answer, Send):
        return Send(peer, answer.request, answer.message, answer.payload, answer.priority)
    return Refuse(peer, answer.request, answer.error)
