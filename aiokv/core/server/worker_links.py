"""A server's connections to workers: which worker is at the other end of each, and whether it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import AiokvError, MembershipError, StaleEpochError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.core.roster import Roster
    from aiokv.types import Incarnation, Peer, Rank
    from aiokv.wire import messages as m

GONE = ("lost", "evicted")
"""States of workers without whom the others have gone on, or have given up."""

HERE = ("alive", "away", "finished", "joining")
"""States of workers that may connect: one that is away may only have lost its connection to the scheduler."""


class WorkerLinks:
    """The part of a `Coordinator` that knows who its workers are."""

    def __init__(self) -> None:
        self._ranks: dict[Peer, Rank] = {}
        self._peers: dict[Rank, tuple[Peer, Incarnation]] = {}
        """The connection over which a worker has said who it is last, and which process it is."""
        self._stale: dict[Peer, str] = {}
        """Connections of processes in whose place there is a later one, and what they are told."""

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._ranks

    def find(self, peer: Peer) -> Rank | None:
        """Return which worker is at the other end of a connection, if it is a worker's."""
        return self._ranks.get(peer)

    def rank_of(self, peer: Peer, roster: Roster) -> Rank:
        """Return which worker is at the other end of a connection.

        Raises:
            MembershipError: nobody has said so.
            StaleEpochError: the others have given it up, or there is another process in its place.
        """
        rank = self._ranks.get(peer)
        if rank is None:
            if peer in self._stale:
                raise StaleEpochError(self._stale[peer])
            raise MembershipError("this connection has not said which worker it is")
        if rank in roster.lost:
            # The others were told that it is lost: what a worker that comes to again sends must change nothing.
            text = f"rank {roster.label(rank)} was declared lost: {roster.reason(rank)}"
            raise StaleEpochError(text, ranks=[rank])
        if rank in roster.evicted:
            text = f"the others have gone on without rank {roster.label(rank)}: {roster.reason(rank)}"
            raise StaleEpochError(text, ranks=[rank])
        return rank

    # --- connections ---

    def attach(self, peer: Peer, message: m.Attach) -> Peer | None:
        """Take note which worker is at the other end of a connection; return the one that it had before."""
        older, _ = self._peers.get(message.rank, (peer, 0))
        self._ranks[peer], self._peers[message.rank] = message.rank, (peer, message.incarnation)
        return None if older == peer else older

    def forget_peer(self, peer: Peer) -> None:
        """Take note that nothing counts any more that comes over a connection."""
        rank = self._ranks.pop(peer, None)
        if rank is not None and self._peers[rank][0] == peer:
            del self._peers[rank]

    def ended(self, peer: Peer) -> None:
        """Take note that nothing more comes over a connection."""
        self._stale.pop(peer, None)

    # --- who they may be ---

    def is_unknown(self, message: m.Attach, roster: Roster) -> bool:
        """Tell whether a worker may be the one of a later view.

        It was in one that a scheduler has sent to it alone before it ended, and joins again at the next scheduler.
        """
        entry = roster.entry(message.rank)
        is_later = entry is None or (entry.name == message.name and entry.incarnation < message.incarnation)
        return is_later and message.epoch < roster.epoch

    def refusal(self, message: m.Attach, roster: Roster) -> AiokvError | None:
        """Return why a worker is not the one that the view knows, if it is not."""
        entry = roster.entry(message.rank)
        label = f"{message.name} (rank {message.rank})"
        if entry is not None and entry.name == message.name and entry.state in GONE:
            text = f"{label} was declared {entry.state}: {entry.reason}"
            return StaleEpochError(text, ranks=[message.rank])
        if entry is not None and entry.name == message.name and entry.incarnation > message.incarnation:
            return StaleEpochError(f"{label} is a later process by now", ranks=[message.rank])
        if entry is None or (entry.name, entry.incarnation) != (message.name, message.incarnation):
            return MembershipError(f"{label} is no member of epoch {roster.epoch}", ranks=[message.rank])
        if entry.state not in HERE:
            text = f"{label} is not an alive member of epoch {roster.epoch}"
            return MembershipError(text, ranks=[message.rank])
        return None

    def fence(self, roster: Roster) -> Iterator[tuple[Peer, StaleEpochError]]:
        """Yield the connections of processes in whose place the view has later ones, and what they are told."""
        for rank, (peer, incarnation) in list(self._peers.items()):
            entry = roster.entry(rank)
            if entry is not None and entry.incarnation != incarnation:
                self._stale[peer] = f"rank {roster.label(rank)} is a later process by now"
                yield peer, StaleEpochError(self._stale[peer], ranks=[rank])
