"""What is saved of rounds that one server decides for all keys, so that another cluster goes on deciding from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.saved_state import RoundsState
from aiokv.core.server.rounds.decisions import Decisions
from aiokv.policy import Token

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.core.saved_state import ChunkState
    from aiokv.core.server.rounds.decisions import Group, Verdict
    from aiokv.types import Rank, Round


def state_of(decisions: Decisions) -> RoundsState:
    """Return what is to be saved of a group, as it is now."""
    steps: list[tuple[Rank, int, Round, str]] = []
    for rank, clock in sorted(decisions.passed.items()):
        # Of what was decided so long ago that it is forgotten nobody asks.
        verdict = decisions.verdicts.get(Token(rank, clock), "")
        steps.append((rank, clock, 0, verdict) if isinstance(verdict, str) else (rank, clock, verdict, ""))
    last = tuple(decisions.rounds.get(decisions.newest, ()))
    return RoundsState(*decisions.group, decisions.newest, last, tuple(steps), tuple(decisions.known.items()))


class SavedRounds:
    """Rounds of one group, as another cluster goes on from them.

    Args:
        state: what was saved.
        parts: what was saved of the keys.
    """

    def __init__(self, state: RoundsState, parts: Iterable[ChunkState]) -> None:
        self.state = state
        self._lead: dict[Rank, int] = {}
        """How much larger a rank's clock is than the number of its pushes of a key."""
        own = [part for part in parts if (part.policy, part.group) == self.group]
        for part in own:
            self._lead |= _leads(part)
        self.newest = max([state.round, *[part.round for part in own]])
        """The last round. A chunk may have one more, if there was nothing of a later clock."""

    @property
    def group(self) -> Group:
        """Whose rounds they are."""
        return self.state.policy, self.state.group

    def decisions(self) -> Decisions:
        """Return what a server has to know of them."""
        found = Decisions(self.group, None)
        steps = [(Token(rank, clock), number, reason) for rank, clock, number, reason in self.state.steps]
        for token, number, reason in sorted(steps, key=lambda step: step[1]):
            verdict: Verdict = number or reason
            if verdict:
                found.settle(token, verdict)
            found.seen[token.rank] = found.passed[token.rank] = token.clock
            found.settled[token.rank] = self.newest
        found.newest = self.newest
        if self.newest:
            found.close(self.newest, [Token(*step) for step in self.state.last])
        return found

    def counts(self, parts: Iterable[ChunkState]) -> dict[Rank, tuple[int, int]]:
        """Return how many pushes of each rank a chunk made of these parts has that are decided, and the last clock.

        A worker pushes a key in each of its steps, or never. So what was dropped is counted too, wherever it has come.
        """
        lead = dict(self._lead)
        for part in parts:
            lead |= _leads(part)
        return {rank: (clock - lead[rank], clock) for rank, clock, _, _ in self.state.steps if rank in lead}


def _leads(part: ChunkState) -> dict[Rank, int]:
    return {rank: clock - sequence for rank, sequence, clock in part.pushes}
