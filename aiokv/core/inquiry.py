"""What a node decides that only looks on: it asks the scheduler, and then every server, for what requests wait."""

from __future__ import annotations

from aiokv.core.effects import Complete, Connect, Disconnect, Effect, Fail, Send
from aiokv.core.joiner import retry_delay
from aiokv.core.stimuli import Connected, ConnectFailed, Join, PeerLost, Received, Stimulus, Tick
from aiokv.errors import AiokvError, SchedulerLostError, from_code
from aiokv.types import SCHEDULER, Peer, Role
from aiokv.wire import messages as m

REQUEST = 1
"""Request id of the only question that a peer is asked."""


class Inquiry:
    """The state machine of one look at a cluster. `Join` begins it; `Complete` has the answers by the nodes' names.

    A server that does not answer is in the result with the reason, as text: that is what one wants to know.

    Args:
        scheduler: host and port.
    """

    def __init__(self, scheduler: tuple[str, int]) -> None:
        self._scheduler = scheduler
        self._call = -1
        self._until: float | None = None
        self._timeout = 0.0
        self._attempt = 0
        self._reason = "no answer yet"
        self._asked: dict[Peer, str] = {}
        """Who has not answered, with their names."""
        self._answers: dict[str, m.Waiting | str] = {}

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        return self._until

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        match stimulus:
            case Join(call, timeout):
                self._call, self._timeout, self._until = call, timeout, now + timeout
                self._asked = {SCHEDULER: "scheduler"}
                return [Connect(SCHEDULER, *self._scheduler)]
            case _ if self._until is None:
                # It is over.
                return []
            case Connected(peer):
                return [Send(peer, REQUEST, m.GetWaiting())]
            case Received(peer, _, message):
                return self._received(peer, message)
            case ConnectFailed(peer, reason, error):
                return self._failed(peer, reason, error)
            case PeerLost(peer, reason):
                return self._failed(peer, reason, None) if peer in self._asked else []
            case Tick():
                return self._tick(now)
            case _:
                raise TypeError(f"not a stimulus for who looks on: {stimulus!r}")

    def _received(self, peer: Peer, message: m.Message) -> list[Effect]:
        if peer not in self._asked:
            return []
        match message:
            case m.Waiting():
                return self._answered(peer, message)
            case m.Error(code, text, details):
                return self._failed(peer, text, from_code(code, text, details))
            case _:
                text = f"unexpected {type(message).__name__}"
                return [Disconnect(peer, text), *self._failed(peer, text, None)]

    def _answered(self, peer: Peer, answer: m.Waiting | str) -> list[Effect]:
        self._answers[self._asked.pop(peer)] = answer
        effects: list[Effect] = []
        if peer == SCHEDULER and isinstance(answer, m.Waiting):
            servers = [w for w in answer.members if w.role is Role.SERVER and w.state == "alive" and w.number >= 0]
            self._asked = {server.number: server.name for server in servers}
            effects = [Connect(server.number, server.host, server.port) for server in servers]
        return effects if self._asked else [self._end(Complete(self._call, self._answers))]

    def _failed(self, peer: Peer, reason: str, error: AiokvError | None) -> list[Effect]:
        if peer != SCHEDULER:
            return self._answered(peer, reason)
        if error is not None and not error.retriable:
            return [self._end(Fail(self._call, error))]
        self._reason, self._attempt = reason, self._attempt + 1
        return [Connect(SCHEDULER, *self._scheduler, retry_delay(self._attempt))]

    def _tick(self, now: float) -> list[Effect]:
        if self._until is None or now < self._until:
            return []
        if SCHEDULER in self._asked:
            address = "{}:{}".format(*self._scheduler)
            text = f"no answer from the scheduler at {address} within {self._timeout:g} s: {self._reason}"
            return [self._end(Fail(self._call, SchedulerLostError(text, address=address)))]
        for name in self._asked.values():
            self._answers[name] = f"no answer within {self._timeout:g} s"
        return [self._end(Complete(self._call, self._answers))]

    def _end(self, effect: Effect) -> Effect:
        self._until = None
        return effect
