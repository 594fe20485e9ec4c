"""Whether a node serves a part of the keys or holds a copy of one, and how it comes to take its server's place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Disconnect, Effect, Log
from aiokv.core.roster import standbys_of
from aiokv.core.server.copies.copying import Copying
from aiokv.core.server.copies.standby import Standby
from aiokv.core.stimuli import Connected, ConnectFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.joiner import Joiner
    from aiokv.core.rules import Rules
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.cluster_checkpoints import Checkpoints
    from aiokv.core.server.copies.forwarding import Forwarding
    from aiokv.core.server.resuming import Resuming
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.rounds import Rounds
    from aiokv.core.server.rounds.whole_call import WholeCall
    from aiokv.core.server.rounds.whole_calls import WholeCalls
    from aiokv.types import Peer
    from aiokv.wire import messages as m


class Replication:
    """The part of a `Coordinator` that knows which other node has, or is to have, the same.

    Args:
        joiner: the node's place in the cluster.
        catalog: its keys.
        rules: its update rule.
        resuming: who loads a checkpoint first.
        checkpoints: who takes part in those of the cluster.
        rounds: who makes the versions of chunks.
        deciding: who knows which step is in which round.
        whole: who knows which calls count.
        copying: makes what fills a standby; is told whether answers may go on while the first one is being filled.
        alone: is called when there is none any longer.
        standby: makes what holds a copy.
        stop: ends the node, for a reason, because others have what it had.
    """

    def __init__(
        self,
        joiner: Joiner,
        catalog: Catalog,
        rules: Rules,
        resuming: Resuming,
        checkpoints: Checkpoints,
        rounds: Rounds,
        deciding: Deciding,
        whole: WholeCalls,
        *,
        copying: Callable[[bool], Copying],
        alone: Callable[[], None],
        standby: Callable[[], Standby],
        stop: Callable[[str], list[Effect]],
    ) -> None:
        self._joiner = joiner
        self._catalog = catalog
        self._rules = rules
        self._resuming = resuming
        self._checkpoints = checkpoints
        self._rounds = rounds
        self._deciding = deciding
        self._whole = whole
        self._make_copying = copying
        self._end_copying = alone
        self._make_standby = standby
        self._stop = stop
        self.twin: Copying | Standby | None = None
        """What deals with this server's standby; or, of a standby, with what it is to have, and its own standby."""
        self.serves = False
        """Whether the newest view says so, and all is here."""
        self.is_replaced = False
        """Whether another node serves what this one did, or was to; then this one does nothing more."""
        self._had_none = False
        """Whether there was no standby, so that answers do not wait for one that is new."""

    @property
    def holds_copy(self) -> bool:
        """Whether this node has, or is to have, a copy of what another server has."""
        return isinstance(self.twin, Standby)

    @property
    def has_primary(self) -> bool:
        """Whether that server is connected."""
        return isinstance(self.twin, Standby) and self.twin.peer is not None

    @property
    def former(self) -> Peer | None:
        """The connection of the server whose place the newest view gives to this node."""
        return self.twin.peer if isinstance(self.twin, Standby) and self.twin.place is not None else None

    @property
    def is_filling(self) -> bool:
        """Whether workers wait, because the values are not here yet, or another node has them in the newest view."""
        waits = self._resuming.is_busy or self._whole.is_resuming
        return waits or (self._joiner.view is not None and not self.serves)

    # --- the view ---

    def viewed(self, view: m.View, now: float) -> tuple[list[Effect], list[WholeCall]]:
        """Serve a part of the keys, or hold a copy of one, as a view says.

        Returns:
            What is to be done, and the calls that have a standby to wait for no longer.
        """
        entry = self._joiner.entry_of(view)
        if entry is None:
            if self.serves or (isinstance(self.twin, Standby) and self.twin.place is not None):
                self.twin, self.serves, self.is_replaced = None, False, True
                return self._stop("another node serves its part of the keys by now"), []
            return self._hold_copy(view, now), []
        if isinstance(self.twin, Standby):
            # It takes over when all is done that has come.
            self.twin.place = entry
            return [], []
        self.serves = True
        effects = self._resuming.viewed(view, entry.index)
        self._checkpoints.viewed(view, entry.index)
        effects += self._look_for_standby(entry, now)
        return effects, [] if entry.standby is not None else self._go_on_alone()

    def _hold_copy(self, view: m.View, now: float) -> list[Effect]:
        """Hold a copy of what a server has, if the view says so."""
        mine = _copy_in(view, self._joiner.name)
        if mine is None:
            return []
        if self.twin is None:
            self.twin = self._make_standby()
        assert isinstance(self.twin, Standby), "it serves nothing"
        return self.twin.viewed(*mine, now)

    def _look_for_standby(self, entry: m.ServerEntry, now: float) -> list[Effect]:
        """Have a standby filled, if the view has one."""
        if isinstance(self.twin, Copying):
            return self.twin.viewed(entry, now)
        if entry.standby is None:
            self._had_none = True
            return []
        self.twin = copying = self._make_copying(self._had_none)
        return copying.viewed(entry, now)

    def _go_on_alone(self) -> list[WholeCall]:
        """Go on without a standby; return the calls that have waited for it."""
        if not isinstance(self.twin, Copying):
            return []
        there, self.twin, self._had_none = self.twin.calls.there, None, True
        self._end_copying()
        return there

    # --- a standby ---

    def linked(self, stimulus: Connected | ConnectFailed) -> list[Effect]:
        """Take in what has become of the link to the standby."""
        if self.twin is None:
            return [Disconnect(stimulus.peer, "there is no standby")]
        if isinstance(stimulus, Connected):
            return self.twin.link.connected(stimulus.peer)
        return self.twin.link.connect_failed(stimulus.peer, stimulus.reason)

    def told(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        """Take in what the standby says."""
        return [] if self.twin is None else self.twin.told(peer, request, message, now)

    def lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Take note that the link to the standby has ended."""
        return [] if self.twin is None else self.twin.link_lost(peer, reason, now)

    def deadline(self) -> float | None:
        """Return the time at which `due` wants to be called."""
        return None if self.twin is None else self.twin.link.deadline()

    def due(self, now: float) -> list[Effect]:
        """Give up a standby that can't be reached."""
        return [] if self.twin is None else self.twin.due(now)

    # --- a copy ---

    def take_over(self, now: float) -> list[Effect]:
        """Serve what this node had a copy of, if a view says so and all is done that has come."""
        standby, view = self.twin, self._joiner.view
        assert isinstance(standby, Standby), "it was one"
        entry = standby.place
        if entry is None or not standby.is_idle:
            return []
        assert view is not None, "it says so"
        standby.rounds.take_over(self._deciding, self._catalog.chunks.values())
        self.twin, self.serves, self._had_none = None, True, True
        self._catalog.complete_bundles()
        self._resuming.skip(view, entry.index)
        passed = self._checkpoints.taken_over(view, entry.index, self._rules.newest)
        for chunk in self._catalog.chunks.values():
            self._rounds.begin(chunk)
        text = f"{self._joiner.name} serves the part of server {entry.index} from now on"
        log = Log("warning", text, "failover", {"server": entry.index, "node": self._joiner.name})
        effects = [log, *passed, *self._take_up(standby.forwarding, entry), *self._look_for_standby(entry, now)]
        for place, part in standby.pushes.take():
            effects += self._rounds.take_in(self._catalog.chunks[place], part, now)
        return effects + standby.calls.take_over(self._whole, now)

    def _take_up(self, forwarding: Forwarding, entry: m.ServerEntry) -> list[Effect]:
        """Go on with the standby that this node had while it was one itself."""
        if forwarding.link.entry is None:
            return []
        if entry.standby is None:
            return forwarding.link.close()
        self.twin = copying = self._make_copying(self._had_none)
        return copying.take_up(forwarding, entry)


def _copy_in(view: m.View, name: str) -> tuple[int, m.StandbyEntry] | None:
    """Return which server's copy a node is to have, and what a view says of the node; None: it is to have none."""
    found = ((entry.index, standby) for entry in view.servers for standby in standbys_of(entry))
    return next(((index, standby) for index, standby in found if standby.name == name), None)
