"""What servers ask each other: sums for norms, which step is in which round, and whether a call counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Disconnect, Effect
from aiokv.core.server.neighbours import Neighbours
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.decisions import Question
from aiokv.core.server.rounds.whole_call import WholeCall
from aiokv.core.stimuli import Applied, Normed
from aiokv.errors import AiokvError, ProtocolError
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.server.answers import Answers
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.exchanges import Exchanges
    from aiokv.core.server.neighbours import Failed
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.making import Making
    from aiokv.core.server.rounds.norms import Norms, Outcome
    from aiokv.core.server.rounds.steps import Steps
    from aiokv.core.server.rounds.whole_calls import WholeCalls
    from aiokv.core.server.views import Views
    from aiokv.types import Peer

Neighbourhood = Neighbours[Chunk | Question | WholeCall]
"""The other servers, and what may be asked of them."""


class Consulting:
    """The part of a `Coordinator` that answers other servers, and goes on with what they have answered.

    Args:
        neighbours: the other servers.
        catalog: this server's keys.
        answers: has the members of the newest view that counts.
        norms: who adds up totals of keys.
        deciding: who knows which step is in which round.
        steps: who puts contributions into these.
        whole: who knows which calls count.
        making: how updates are made.
        exchanges: who goes on with chunks that have a new version.
        views: who takes over a view when all is decided that has to be.
    """

    def __init__(
        self,
        neighbours: Neighbourhood,
        catalog: Catalog,
        answers: Answers,
        norms: Norms,
        deciding: Deciding,
        steps: Steps,
        whole: WholeCalls,
        making: Making,
        exchanges: Exchanges,
        views: Views,
    ) -> None:
        self._neighbours = neighbours
        self._catalog = catalog
        self._answers = answers
        self._norms = norms
        self._deciding = deciding
        self._steps = steps
        self._whole = whole
        self._making = making
        self._exchanges = exchanges
        self._views = views

    # --- what others ask ---

    def asked(
        self, peer: Peer, request: int, message: m.Sums | m.Arrived | m.GetRounds | m.Gathered, now: float
    ) -> list[Effect] | None:
        """Answer what another server asks; None: it is none that has said so.

        Raises:
            ProtocolError: this server is not the one to be asked.
        """
        if isinstance(message, m.Sums):
            return self._go_on(self._norms.asked(peer, request, message), now)
        index = self._neighbours.caller(peer)
        if index is None:
            return None
        if isinstance(message, m.Gathered):
            return self._views.settled(self._whole.asked(peer, request, message, index, now), now)
        decided = self._deciding.asked((peer, request), message, self._answers.roster, now)
        return self._steps.decided(decided, now)

    # --- what others answer ---

    def answered(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        """Go on with what another server says, over a link that this one has made."""
        if peer not in self._neighbours:
            return []
        try:
            about, effects = self._neighbours.answered(peer, request, message, now)
        except ProtocolError as error:
            return [Disconnect(peer, error.message), *self._neighbours.ended(peer, error.message, now)]
        if about is None:
            return effects
        if isinstance(about, Question):
            return self._steps.decided(self._deciding.answered(about, message), now)
        if isinstance(about, WholeCall):
            return self._views.settled(self._whole.answered(about, message, now), now)
        return self._go_on(self._norms.answered(about, message), now)

    def viewed(self, view: m.View, now: float) -> list[Effect]:
        """Take over the servers of a newer view."""
        effects = self._go_on(self._norms.viewed(view), now)
        return effects + self._unanswered(*self._neighbours.viewed(now), now)

    def due(self, now: float) -> list[Effect]:
        """Give up what has waited too long for a link."""
        return self._unanswered(*self._neighbours.due(now), now)

    def _unanswered(
        self, effects: list[Effect], failed: Failed[Chunk | Question | WholeCall], now: float
    ) -> list[Effect]:
        """Go on without answers that can't come."""
        for about, error in failed:
            if isinstance(about, Question):
                effects += self._steps.decided(self._deciding.refused(about, error), now)
            elif isinstance(about, WholeCall):
                effects += self._views.settled(self._whole.link_lost(about, now), now)
            else:
                effects += self._go_on(self._norms.refused(about, error), now)
        return effects

    # --- norms ---

    def measured(self, normed: Normed, now: float) -> list[Effect]:
        """Go on with what the store has computed of a chunk."""
        chunk = self._catalog.chunks[normed.key, normed.start]
        return self._go_on(self._norms.measured(chunk, normed, now), now)

    def _go_on(self, outcome: Outcome, now: float) -> list[Effect]:
        """Go on with the updates of chunks that have their norms, or do without."""
        effects = outcome.effects
        for ready in outcome.ready:
            chunk, result = ready.chunk, ready.result
            if chunk.pending is None:
                # Its key was deleted meanwhile.
                continue
            if not isinstance(result, AiokvError):
                effects += self._making.normed(chunk, result)
                continue
            effects += self._making.skip(chunk)
            effects += self._exchanges.applied(chunk, Applied(chunk.key, chunk.start, chunk.version + 1, result), now)
        return effects
