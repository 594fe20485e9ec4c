"""Connections that others have made to a server: who is at the other end, who has to wait, and what ends with one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Disconnect, Effect, Refuse, Send
from aiokv.core.server.copies.standby import Standby
from aiokv.core.waiting import Wait
from aiokv.errors import CallTimeoutError, MembershipError, StaleEpochError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.core.deadlines import Deadlines
    from aiokv.core.joiner import Joiner
    from aiokv.core.server.answers import Answers
    from aiokv.core.server.consulting import Neighbourhood
    from aiokv.core.server.copies.replication import Replication
    from aiokv.core.server.lifetime import Lifetime
    from aiokv.core.server.once import Once
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.resuming import Resuming
    from aiokv.core.server.worker_links import WorkerLinks
    from aiokv.errors import AiokvError
    from aiokv.types import Peer

AnyAttach = m.Attach | m.AttachServer | m.AttachStandby


class Connections:
    """The part of a `Coordinator` that lets others in.

    Args:
        joiner: this server's place in the cluster.
        workers: those that have said who they are.
        neighbours: the same of other servers.
        once: knows what must not be done twice for a worker.
        answers: has the members of the newest view that counts.
        deadlines: where requests that wait are entered, under peer and request id.
        resuming: who loads a checkpoint first.
        replication: says whether this node serves, or holds a copy of what another one has.
        lifetime: is told of who comes and goes.
        forget: ends what else was to be done for a connection.
    """

    def __init__(
        self,
        joiner: Joiner,
        workers: WorkerLinks,
        neighbours: Neighbourhood,
        once: Once,
        answers: Answers,
        deadlines: Deadlines[RequestName],
        resuming: Resuming,
        replication: Replication,
        lifetime: Lifetime,
        forget: Callable[[Peer], list[Effect]],
    ) -> None:
        self._joiner = joiner
        self._workers = workers
        self._neighbours = neighbours
        self._once = once
        self._answers = answers
        self._deadlines = deadlines
        self._resuming = resuming
        self._replication = replication
        self._lifetime = lifetime
        self._forget = forget
        self._attaching: dict[RequestName, AnyAttach] = {}

    def __iter__(self) -> Iterator[RequestName]:
        return iter(self._attaching)

    # --- who they are ---

    def attach(self, peer: Peer, request: int, message: AnyAttach, now: float) -> list[Effect]:
        """Take in who somebody says to be, at once or as soon as that can be known.

        Raises:
            MembershipError: it was said before.
        """
        if self._resuming.error is not None:
            return [Refuse(peer, request, self._resuming.error)]
        if not self._can_answer(message):
            # The other side is in a view that has not reached this server yet, or the values are not here.
            if any(other == peer for other, _ in self._attaching):
                raise MembershipError("who it is was said on this connection already, and is not known yet")
            self._attaching[peer, request] = message
            self._deadlines.add((peer, request), now + message.timeout)
            return []
        return self._answer(peer, request, message, now)

    def _can_answer(self, message: AnyAttach) -> bool:
        is_filling = self._replication.is_filling and not isinstance(message, m.AttachStandby)
        is_new = message.epoch > self._answers.roster.epoch or self._is_unknown(message)
        return not (is_filling or is_new)

    def _is_unknown(self, message: AnyAttach) -> bool:
        return isinstance(message, m.Attach) and self._workers.is_unknown(message, self._answers.roster)

    def let_in(self, now: float) -> list[Effect]:
        """Answer those who have said who they are before that could be known, or before their values were there."""
        effects: list[Effect] = []
        for (peer, request), attach in list(self._attaching.items()):
            if self._can_answer(attach):
                del self._attaching[peer, request]
                self._deadlines.discard((peer, request))
                effects += self._answer(peer, request, attach, now)
        return effects

    def refuse(self, error: AiokvError) -> list[Effect]:
        """Let nobody in who waits for that."""
        for name in self._attaching:
            self._deadlines.discard(name)
        effects: list[Effect] = [Refuse(*name, error) for name in self._attaching]
        self._attaching.clear()
        return effects

    def _answer(self, peer: Peer, request: int, message: AnyAttach, now: float) -> list[Effect]:
        if isinstance(message, m.AttachServer):
            return self._attach_server(peer, request, message, now)
        if isinstance(message, m.Attach):
            return self._attach_worker(peer, request, message, now)
        if isinstance(self._replication.twin, Standby):
            return self._replication.twin.attach(peer, request, message)
        text = f"{self._joiner.name} is nobody's standby"
        return [Refuse(peer, request, StaleEpochError(text, server=message.index))]

    def _attach_server(self, peer: Peer, request: int, message: m.AttachServer, now: float) -> list[Effect]:
        if self._neighbours.entry(message) is None:
            epoch = self._answers.roster.epoch
            text = f"{message.name} (server {message.index}) is not an alive server of epoch {epoch}"
            return [Refuse(peer, request, MembershipError(text, server=message.index))]
        effects: list[Effect] = [Send(peer, request, m.Done())]
        for older in self._neighbours.attach(peer, message):
            effects += self.cut(older, "its server has connected again", now)
        return effects

    def _attach_worker(self, peer: Peer, request: int, message: m.Attach, now: float) -> list[Effect]:
        error = self._workers.refusal(message, self._answers.roster)
        if error is not None:
            return [Refuse(peer, request, error)]
        before = self._workers.attach(peer, message)
        self._once.attached(message.rank, message.incarnation)
        self._lifetime.look_around(now)
        effects: list[Effect] = [Send(peer, request, m.Done())]
        if before is not None:
            effects += self.cut(before, "its worker has connected again", now)
        return effects

    # --- waiting ---

    def wait(self, name: RequestName) -> Wait:
        """Return for what somebody waits who has said who it is."""
        attach = self._attaching[name]
        what = f"{attach.name} at {self._joiner.name}"
        if not self._replication.serves:
            return Wait(what, "it does not serve its part of the keys yet", attach.timeout)
        if self._resuming.is_busy:
            return Wait(what, "the checkpoint is not loaded yet", attach.timeout)
        missing = f"the view of epoch {attach.epoch} is not here yet"
        if attach.epoch <= self._answers.roster.epoch:
            missing = "it is no member of the newest view"
        return Wait(what, missing, attach.timeout)

    def expire(self, name: RequestName) -> list[Effect]:
        """Refuse somebody who has waited too long, if it still waits."""
        attach = self._attaching.pop(name, None)
        if attach is None:
            return []
        text = f"{self._joiner.name} did not begin to serve its part of the keys in {attach.timeout:g} s"
        if self._resuming.is_busy:
            text = f"{self._joiner.name} has not loaded its part of the checkpoint in {attach.timeout:g} s"
        elif attach.epoch > self._answers.roster.epoch:
            text = f"the view of epoch {attach.epoch} did not reach {self._joiner.name} in {attach.timeout:g} s"
        elif isinstance(attach, m.Attach) and (error := self._workers.refusal(attach, self._answers.roster)):
            return [Refuse(*name, error)]
        return [Refuse(*name, CallTimeoutError(text))]

    # --- ends ---

    def cut(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Close a connection. What still comes over it must not count."""
        return [Disconnect(peer, reason), *self.lost(peer, now)]

    def lost(self, peer: Peer, now: float) -> list[Effect]:
        """Take note that a connection is over."""
        if isinstance(self._replication.twin, Standby):
            self._replication.twin.forget_peer(peer)
        self._workers.forget_peer(peer)
        self._once.forget_peer(peer)
        for name in [name for name in self._attaching if name[0] == peer]:
            del self._attaching[name]
            self._deadlines.discard(name)
        effects = self._forget(peer)
        self._neighbours.forget_caller(peer)
        self._lifetime.look_around(now)
        return effects

    def fence(self, now: float) -> list[Effect]:
        """Take nothing any more from those in whose place the view has others; tell workers so."""
        effects: list[Effect] = []
        for peer, error in self._workers.fence(self._answers.roster):
            waiting = [name for name in self._deadlines if name[0] == peer]
            effects += self.lost(peer, now)
            effects += [Refuse(*name, error) for name in waiting]
        return effects

    def cut_strangers(self, now: float) -> list[Effect]:
        """Close the connections of other servers that are in the view no longer as those that they were."""
        effects: list[Effect] = []
        for peer in self._neighbours.strangers():
            effects += self.cut(peer, "it is no server of the view any longer", now)
        return effects
