"""How a server follows the view: which members count, what was agreed about those who come, and what it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Send
from aiokv.core.roster import Roster
from aiokv.types import SCHEDULER

if TYPE_CHECKING:
    from aiokv.core.joiner import Joiner
    from aiokv.core.server.answers import Answers
    from aiokv.core.server.boundaries import Boundaries
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.connections import Connections
    from aiokv.core.server.copies.replication import Replication
    from aiokv.core.server.creation import Creation
    from aiokv.core.server.policy_changes import PolicyChanges
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.rounds import Rounds
    from aiokv.core.server.rounds.steps import Steps
    from aiokv.core.server.rounds.whole_call import WholeCall
    from aiokv.core.server.rounds.whole_calls import WholeCalls
    from aiokv.wire import messages as m


class Views:
    """The part of a `Coordinator` that takes over views.

    Args:
        joiner: has the newest view.
        answers: has the members of the newest view that counts.
        boundaries: who lets workers join.
        catalog: the server's keys.
        creation, changes, deciding, steps, rounds: those that wait for members.
        whole: who knows what is to be decided first of workers that are gone.
        replication: what this node serves.
        connections: who is connected.
    """

    def __init__(
        self,
        joiner: Joiner,
        answers: Answers,
        boundaries: Boundaries,
        catalog: Catalog,
        creation: Creation,
        changes: PolicyChanges,
        deciding: Deciding,
        steps: Steps,
        rounds: Rounds,
        whole: WholeCalls,
        replication: Replication,
        connections: Connections,
    ) -> None:
        self._joiner = joiner
        self._answers = answers
        self._boundaries = boundaries
        self._catalog = catalog
        self._creation = creation
        self._changes = changes
        self._deciding = deciding
        self._steps = steps
        self._rounds = rounds
        self._whole = whole
        self._replication = replication
        self._connections = connections

    @property
    def newest(self) -> int:
        """The epoch of the newest view, whether it counts or not yet."""
        return 0 if self._joiner.view is None else self._joiner.view.epoch

    # --- members ---

    def viewed(self, view: m.View, now: float) -> list[Effect]:
        """Take over a newer view."""
        return self.settled(self._whole.viewed(view, now), now)

    def settled(self, effects: list[Effect], now: float) -> list[Effect]:
        """Let the workers of the newest view count, as soon as it is known what counts of those that it takes out."""
        view = self._joiner.view
        if self._whole.is_resuming and not self._whole.is_open:
            effects = effects + self._whole.resumed(now) + self._connections.let_in(now)
        if view is None or view.epoch == self._answers.roster.epoch or self._whole.is_open:
            return effects
        return effects + self._adopt(view, now)

    def _adopt(self, view: m.View, now: float) -> list[Effect]:
        roster = self._answers.roster = Roster(view, self._boundaries.left_after(view.epoch))
        effects = self._joiner.complete()
        effects += self._connections.fence(now)
        replicated, calls = self._replication.viewed(view, now)
        effects += replicated
        if self._replication.is_replaced:
            # What this view would let it make or decide is that other node's.
            return effects
        effects += self.copied(calls, now)
        if (former := self._replication.former) is not None:
            effects += self._connections.cut(former, "its standby has taken its place", now)
        effects += self._connections.let_in(now)
        effects += self._creation.roster_changed(roster) + self._changes.roster_changed()
        effects += self._steps.decided(self._deciding.changed(roster, now), now)
        return effects + self._rounds.advance(self._catalog.chunks.values(), now)

    def copied(self, calls: list[WholeCall], now: float) -> list[Effect]:
        """Go on with calls whose pushes the standby has, or that have none to wait for any longer; take them out."""
        effects: list[Effect] = []
        while calls:
            effects += self.settled(self._whole.copied(calls.pop(0), now), now)
        return effects

    # --- boundaries ---

    def bounded(self, boundary: m.Boundary, now: float) -> list[Effect]:
        """Agree to let nothing be made beyond a boundary, or say why not."""
        effects = self.unbound(now)
        answer = self._boundaries.asked(boundary, self.newest)
        if self._boundaries.announced is not None:
            self._answers.roster = self._answers.roster.bounded(boundary)
        return effects if answer is None else [*effects, Send(SCHEDULER, 0, answer)]

    def unbound(self, now: float) -> list[Effect]:
        """Go on beyond the boundary that was agreed to: it does not come about."""
        if self._boundaries.announced is None:
            return []
        self._boundaries.announced = None
        self._answers.roster = self._answers.roster.bounded(None)
        effects = self._changes.roster_changed() + self._steps.decided(
            self._deciding.changed(self._answers.roster, now), now
        )
        return effects + self._rounds.advance(self._catalog.chunks.values(), now)
