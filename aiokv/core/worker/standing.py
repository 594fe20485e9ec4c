"""Whether a worker may ask for anything, and what its calls fail with when it may not, or when nobody can answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import check_timeout
from aiokv.core.keys import name_keys
from aiokv.errors import AiokvError, ClosedError, SchedulerLostError, ServerLostError
from aiokv.types import SCHEDULER

if TYPE_CHECKING:
    from aiokv.core.joiner import Joiner
    from aiokv.core.server_links import ServerLinks
    from aiokv.core.worker.call import Call
    from aiokv.core.worker.directory import Directory
    from aiokv.types import Peer


class Standing:
    """The part of a `Session` that knows whether it is a member, and whom it has lost.

    Args:
        joiner: its place in the cluster.
        links: its connections to servers.
        directory: what is known of the keys.
    """

    def __init__(self, joiner: Joiner, links: ServerLinks, directory: Directory) -> None:
        self._joiner = joiner
        self._links = links
        self._directory = directory
        self.leaves = False
        """Whether it waits for the answers to its pushes, to leave then."""
        self.closed = False
        """Whether its user has done with it."""
        self.expulsion: AiokvError | None = None
        """Why this worker is no member any longer, as far as it knows."""

    @property
    def is_ready(self) -> bool:
        """Whether `check_ready` has nothing against a call with a time-out."""
        is_member = self._joiner.joined and self.expulsion is None
        return is_member and not (self.closed or self.leaves or self._links.lost)

    def check_open(self, call: Call) -> None:
        """Refuse a call of a worker that has not joined, or leaves.

        Raises:
            ClosedError: it can't be asked for anything.
            ConfigError: the call would never be over.
        """
        check_timeout(call.timeout)
        if self.closed or self.leaves or not self._joiner.joined:
            state = "leaving" if self.leaves else "closed" if self.closed else "not connected"
            raise ClosedError(f"{call.what}: this worker is {state}")

    def check_ready(self, call: Call) -> None:
        """Refuse a call that could not succeed, or would count nowhere.

        Raises:
            AiokvError: this worker is no member, or a server is lost.
        """
        self.check_open(call)
        if self.expulsion is not None:
            raise self.expulsion
        if self._links.lost:
            peer, reason = next(iter(self._links.lost.items()))
            raise self.server_error(peer, reason, call.what)

    # --- what is said of others ---

    def label(self, peer: Peer) -> str:
        """Return the scheduler or a server as people know it."""
        if peer == SCHEDULER:
            return f"the scheduler at {self._joiner.address}"
        return self._links.label(peer)

    def server_error(self, peer: Peer, reason: str, what: str) -> ServerLostError:
        """Return what something fails with because a server is gone."""
        entry = self._links.servers[peer]
        address = f"{entry.host}:{entry.port}"
        text = f"{what}: {self.label(peer)} is lost: {reason}"
        keys = tuple(self._directory.layout.keys_on(peer, self._directory.keys.records))
        if keys:
            text += f"; with it, at least in part: {name_keys(keys)}"
        return ServerLostError(text, server=peer, address=address, keys=list(keys))

    def scheduler_error(self, reason: str) -> SchedulerLostError:
        """Return what something fails with because the scheduler is gone."""
        return SchedulerLostError(f"{self.label(SCHEDULER)} is gone: {reason}", address=self._joiner.address)
