"""How a worker makes itself known to its servers, and what becomes of its calls when one of them is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core import stimuli as st
from aiokv.core.effects import Disconnect, Effect
from aiokv.core.joiner import answer_time
from aiokv.errors import AiokvError, OverloadedError, from_code
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.joiner import Joiner
    from aiokv.core.server_links import ServerLinks
    from aiokv.core.worker.calls import Calls
    from aiokv.core.worker.participation import Participation
    from aiokv.core.worker.standing import Standing
    from aiokv.types import Peer

LinkEvent = st.Connected | st.ConnectFailed | st.PeerLost


class Attaching:
    """The part of a `Session` that deals with its servers, as processes.

    Args:
        joiner: its place in the cluster.
        standing: whether it is a member.
        links: its connections.
        calls: what it has asked.
        participation: its rank.
    """

    def __init__(
        self, joiner: Joiner, standing: Standing, links: ServerLinks, calls: Calls, participation: Participation
    ) -> None:
        self._joiner = joiner
        self._standing = standing
        self._links = links
        self._calls = calls
        self._participation = participation

    # --- views ---

    def begin(self, view: m.View, now: float) -> list[Effect]:
        """Connect to the servers of the first view."""
        connects = self._links.begin(view, now)
        for entry in view.servers:
            if entry.state != "alive":
                # Only who takes the place of another worker can meet with that.
                return self.gone(entry.index, entry.reason)
        return connects

    def viewed(self, view: m.View, now: float) -> list[Effect]:
        """Let go of the servers that are lost, and go over to those that have another's place."""
        effects: list[Effect] = []
        for entry in view.servers:
            if entry.state == "lost" and entry.index not in self._links.lost:
                self._links.servers[entry.index] = entry
                effects += [Disconnect(entry.index, entry.reason), *self.gone(entry.index, entry.reason)]
            else:
                effects += self._links.viewed(entry, now)
        return effects

    # --- connections ---

    def event(self, stimulus: LinkEvent, now: float) -> list[Effect]:
        """The connection to a server is there, or is over."""
        peer = stimulus.peer
        if self._standing.closed or peer in self._links.lost or not (self._joiner.joining or self._joiner.joined):
            is_open = isinstance(stimulus, st.Connected)
            return [Disconnect(peer, "nobody waits for this connection any longer")] if is_open else []
        if isinstance(stimulus, st.Connected):
            return self._attach(peer, now)
        reason, error = stimulus.reason, stimulus.error
        # What a server can't hold now would be too much again: its user has to know.
        is_full = isinstance(stimulus, st.PeerLost) and isinstance(error, OverloadedError)
        if error is not None and (is_full or not error.retriable):
            return [*self._joiner.fail(error), *self.gone(peer, reason)]
        if isinstance(stimulus, st.PeerLost):
            return self._links.ended(peer, reason, now)
        return self._links.failed(peer, reason)

    def _attach(self, peer: Peer, now: float) -> list[Effect]:
        view = self._joiner.view
        assert view is not None, "servers are known from the view only"
        seconds = self._joiner.join_by - now if self._joiner.joining else view.death_timeout
        left = answer_time(max(0.0, seconds))
        rank = self._participation.rank
        message = m.Attach(rank, self._joiner.name, self._joiner.incarnation, view.epoch, left)
        send = self._calls.requests.send(None, peer, message)
        self._links.attach(peer, send.request)
        return [send]

    def answered(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        """Send what is to be asked again, now that a server knows this worker, unless it does not want it.

        Raises:
            ProtocolError: that was not asked.
        """
        if request != self._links.down[peer].request:
            # What is left of the connection before; it is asked again.
            return []
        self._calls.requests.take(peer, request)
        if isinstance(message, m.Error):
            return self._refused(peer, from_code(message.code, message.message, message.details), now)
        again = self._calls.again(peer, now)
        effects = self._links.attached(peer, now, len(again)) + again
        if self._joiner.joining and not self._links.down:
            effects += self._joiner.complete()
        return effects

    def _refused(self, peer: Peer, error: AiokvError, now: float) -> list[Effect]:
        if self._joiner.joining:
            return self._joiner.fail(error)
        reason = f"the server does not take this worker: {error}"
        if error.retriable:
            return [Disconnect(peer, reason), *self._links.ended(peer, reason, now)]
        # It is no member any longer: nothing that it does counts.
        self._standing.expulsion = error
        self._links.lose(peer, error.message)
        failed = self._calls.fail_held(lambda _: error) + self._calls.fail_requests_to(peer, lambda _: error)
        return [Disconnect(peer, reason), *failed]

    def gone(self, peer: Peer, reason: str) -> list[Effect]:
        """A server is lost: end the calls that need it."""
        self._links.lose(peer, reason)
        effects = self._joiner.fail(self._standing.server_error(peer, reason, "join"))

        def error_of(what: str) -> AiokvError:
            return self._standing.server_error(peer, reason, what)

        # What has not been sent would not be now either: a call needs all servers.
        return [*effects, *self._calls.fail_held(error_of), *self._calls.fail_requests_to(peer, error_of)]
