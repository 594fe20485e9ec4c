"""How workers come and go while training goes on: the part of those who are there, see `core.scheduler.admission`.

A worker says how far it has gone, and has promised to its user to go on with whom. When it is past a boundary, and has
answers to all that it had pushed before, it says that too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import Deadlines
from aiokv.core.effects import Complete, Effect, Fail, Send
from aiokv.errors import CallTimeoutError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.roster import Roster
    from aiokv.core.stimuli import AskMembers
    from aiokv.errors import AiokvError
    from aiokv.types import Rank


class Crossing:
    """The part of a `Session` that deals with boundaries behind which another worker counts, or one does no longer.

    Args:
        open_pushes: returns the ids of the requests that push something of a clock or of an earlier one, and are not
            answered.
    """

    def __init__(self, open_pushes: Callable[[int], list[int]]) -> None:
        self._open_pushes = open_pushes
        self.told = 0
        """The newest clock of which it was said who counts in it."""
        self._agreed: m.Boundary | None = None
        """The boundary behind which nothing is known, until there is a view."""
        self.watched = 0
        """The clock that is to be passed; 0: none. If there is one, `look` has to be called after every stimulus."""
        self._outside: Rank | None = None
        """This worker's rank, when it leaves without a boundary."""
        self._asking: dict[int, AskMembers] = {}
        """Calls of users who want to know who counts in a step."""
        self.deadlines: Deadlines[int] = Deadlines()
        """When these have waited too long."""

    def last_of(self, rank: Rank) -> int | None:
        """Return the boundary behind which nothing may be pushed until it is known whether a rank leaves there."""
        return self._agreed.clock if self._agreed is not None and self._agreed.rank == rank else None

    def bounded(self, boundary: m.Boundary, clock: int, roster: Roster) -> list[Effect]:
        """Agree to a boundary, unless something is beyond it already."""
        newest = max(clock, self.told)
        # Once it is in a view, it is only to be passed.
        is_known = not boundary.clock or roster.newcomers.get(boundary.rank) == boundary.clock
        self.watched = boundary.clock
        self._agreed = boundary if newest <= boundary.clock and not is_known else None
        effects = self._answer(roster)
        if boundary.clock:
            effects.append(Send(SCHEDULER, 0, m.BoundaryClock(boundary.clock, newest)))
        return effects

    def viewed(self, roster: Roster) -> list[Effect]:
        """Take note of a newer view: what was agreed to is in it, or will be asked for again."""
        self._agreed = None
        return self._answer(roster)

    def tell(self, roster: Roster, mine: Rank, clock: int) -> list[Effect]:
        """Tell a scheduler, which may be another one, whether the boundary is passed behind which somebody counts.

        So it knows that before it hears at which barrier this worker is.
        """
        fixed = [since for rank, since in roster.newcomers.items() if rank not in (mine, *roster.members)]
        if not fixed:
            return []
        # One is let in after the other.
        self.watched = fixed[0]
        return self.look(clock)

    def leave(self, rank: Rank, roster: Roster) -> list[Effect]:
        """Take note that this worker is in none of the next steps."""
        self._outside = rank
        return self._answer(roster)

    def look(self, clock: int) -> list[Effect]:
        """Tell the scheduler when the boundary is passed."""
        passed = self.watched
        if clock <= passed or self._open_pushes(passed):
            return []
        self.watched = 0
        return [Send(SCHEDULER, 0, m.Passed(passed))]

    # --- who counts ---

    def ask(self, asking: AskMembers, roster: Roster, now: float) -> list[Effect]:
        """Complete a call with the ranks that count in a step, as soon as they are known."""
        self._asking[asking.call] = asking
        self.deadlines.add(asking.call, now + asking.timeout)
        return self._answer(roster)

    def forget(self, call: int) -> None:
        """Take out a call whose caller does not wait any longer."""
        self._asking.pop(call, None)
        self.deadlines.discard(call)

    def fail_all(self, error_of: Callable[[str], AiokvError]) -> list[Effect]:
        """End all calls with errors."""
        calls = list(self._asking)
        for call in calls:
            self.forget(call)
        return [Fail(call, error_of("members")) for call in calls]

    def expire(self, now: float) -> list[Effect]:
        """End the calls that have waited too long."""
        effects: list[Effect] = []
        for call in self.deadlines.due(now):
            seconds, agreed = self._asking.pop(call).timeout, self._agreed
            assert agreed is not None, "it waits for that"
            what = f"whether rank {agreed.rank} joins or leaves"
            text = f"members: no word from the scheduler within {seconds:.3g} s {what}"
            effects.append(Fail(call, CallTimeoutError(text, ranks=[agreed.rank])))
        return effects

    def _answer(self, roster: Roster) -> list[Effect]:
        effects: list[Effect] = []
        for call, asking in list(self._asking.items()):
            clock = asking.step + 1
            if self._agreed is None or clock <= self._agreed.clock:
                self.forget(call)
                self.told = max(self.told, clock)
                effects.append(Complete(call, [rank for rank in roster.pushing(clock) if rank != self._outside]))
        return effects
