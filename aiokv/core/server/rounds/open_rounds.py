"""What a server remembers of a chunk whose rounds are decided for all keys at once, see `decisions` beside it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aiokv.core.records import Record, field
from aiokv.core.server.rounds.updates import Update

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.core.roster import Roster
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.decisions import Decisions
    from aiokv.core.server.rounds.updates import Contribution, Waiter
    from aiokv.policy import Token
    from aiokv.types import Rank, Round, Slot, Version

REMEMBERED_VERSIONS = 1024
"""Of how many versions is known which rounds are in them."""

CLOCK_BITS = 64


def step_place(rank: Rank, clock: int) -> int:
    """Return where a step stands in the sum of a round, which may have several of a rank."""
    return rank << CLOCK_BITS | clock


class Undecided(Record, eq=False):
    """A contribution of whose step is not known in which round it is, and who waits for its answer."""

    contribution: Contribution
    waiter: Waiter


class Dropped(Record, eq=False):
    """A contribution that is in no round, and who is told so when the value has all rounds up to `round`.

    Who wants no value may be `told` at once.
    """

    round: Round
    contribution: Contribution
    waiter: Waiter
    told: bool = False


class OpenRounds(Record, eq=False):
    """The rounds of one chunk that are not made yet.

    What a worker pushes to one server arrives in its order. So a step that has not come here, although a later one of
    its worker has come to some key of the server, will not come any more: its worker has not pushed this key in that
    step. A round that has nothing here at all makes no version.

    Attributes:
        decisions: what is known about the rounds of the chunk's group.
        first: the first round that is not made here.
        reached: how many steps of that round, in their order, are known to be here or not to come.
        until: the last round in a version that is not the newest.
        undecided: contributions by their step.
        updates: what has come for rounds that are closed.
        dropped: what is in no round, while the worker's next read has to wait.
        clocks: the last step of each rank that has come here.
        unsettled: each rank's pushes that are neither made nor dropped, by their number.
        left: the ranks that have asked for another policy, so that nothing more comes of them.
        made: the last push of each rank that is in the value.
        passed: the clock of the last push of each rank that is made or dropped.
    """

    decisions: Decisions
    first: Round
    reached: int = 0
    until: dict[Version, Round] = field(default_factory=dict)
    undecided: dict[Token, Undecided] = field(default_factory=dict)
    updates: dict[Round, Update] = field(default_factory=dict)
    dropped: deque[Dropped] = field(default_factory=deque)
    clocks: dict[Rank, int] = field(default_factory=dict)
    unsettled: dict[Rank, dict[int, None]] = field(default_factory=dict)
    left: dict[Rank, None] = field(default_factory=dict)
    made: dict[Rank, int] = field(default_factory=dict)
    passed: dict[Rank, int] = field(default_factory=dict)

    def go_on(self, version: Version, clocks: Mapping[Rank, int]) -> None:
        """Begin with a version that has all rounds before the first one, and all steps of ranks up to these clocks."""
        self.until[version - 1] = self.first - 2
        self.clocks, self.passed = dict(clocks), dict(clocks)

    def admit(self, rank: Rank, clock: int) -> None:
        """Let a rank begin behind a clock, whatever it had made before."""
        self.clocks[rank] = self.passed[rank] = clock
        self.left.pop(rank, None)

    def read(self, rank: Rank, version: Version, newest: Version) -> Round:
        """Return the last round in a version that a rank has read.

        A round to which nothing comes here may stay open for long. So the newest version counts as that of all rounds
        that were closed when the rank's last step was decided, unless something has come for one that is not made, or
        may have come to the server in whose place this one is.
        """
        if version in self.until:
            return self.until[version]
        if version != newest:
            return next(iter(self.until.values()), 0)
        made = self.first - 1 if self.until else 0
        is_open = self.updates or self.first <= self.decisions.resumed
        return made if is_open else max(made, self.decisions.settled.get(rank, 0))

    def stage(self, rank: Rank, roster: Roster, *, applying: bool) -> Round:
        """Return the last round in the value, as far as a rank that reads it can tell.

        All rounds up to that are made here, or nothing has come for them and nothing is expected to.
        """
        if applying:
            # The update that is under way is that of the last round before `first`.
            return self.first - 2
        number = self.first
        while number <= self.decisions.newest and not self._is_open(number, rank, roster):
            number += 1
        return number - 1

    def _is_open(self, number: Round, rank: Rank, roster: Roster) -> bool:
        if number in self.updates:
            return True
        return any(self._expects(token, rank, roster) for token in self.decisions.rounds.get(number, ()))

    def _expects(self, token: Token, rank: Rank, roster: Roster) -> bool:
        """Tell whether a reader has to wait for a step.

        What the reader itself pushed has come before it asks. Another worker is thought to push this key in a step if
        it has done so in the step before. So nobody waits for keys that are left out of steps.
        """
        if token.rank == rank or not self._waits_for(token, roster):
            return False
        before, here = self.decisions.step_before(token), self.clocks.get(token.rank, 0)
        if before:
            return here >= before
        # What had come to the server that was here before comes again.
        is_known = self.decisions.resumed > 0 and here > 0
        return is_known or self.decisions.counts.get(token.rank, 0) <= 1

    def add(self, number: Round, contribution: Contribution) -> Update:
        """Enter a contribution to a closed round, or to the next one if that is made already."""
        if number < self.first and not self.until:
            # Nothing is made yet, so no round can be over here.
            self.first, self.reached = number, 0
        number = max(number, self.first)
        update = self.updates.get(number)
        if update is None:
            update = self.updates[number] = Update(0)
        contribution.place = step_place(contribution.rank, contribution.clock)
        update.add(contribution)
        return update

    def _waits_for(self, token: Token, roster: Roster) -> bool:
        rank, clock = token
        if self.clocks.get(rank, 0) >= clock or self.decisions.seen.get(rank, 0) > clock:
            return False
        if rank in self.left or not roster.is_pushing(rank):
            return False
        # Where nobody waits for others, what a lost worker has pushed is on all servers, or counts nowhere.
        return rank not in roster.lost or not self.decisions.per_step

    def missing(self, roster: Roster) -> list[Rank]:
        """Return the ranks whose steps of the first round may still come here, ascending."""
        tokens = self.decisions.rounds.get(self.first, [])[self.reached :]
        return list(dict.fromkeys(token.rank for token in tokens if self._waits_for(token, roster)))

    def blocker(self, roster: Roster) -> Rank | None:
        """Return a rank whose step of the first round may still come here, if there is one. None is looked at twice."""
        tokens = self.decisions.rounds.get(self.first, ())
        while self.reached < len(tokens):
            if self._waits_for(tokens[self.reached], roster):
                return tokens[self.reached].rank
            self.reached += 1
        return None

    def begin(self, version: Version) -> Update | None:
        """Take out what makes the next version of the first round; None: nothing has come for it."""
        number, self.first, self.reached = self.first, self.first + 1, 0
        update = self.updates.pop(number, None)
        if update is None:
            return None
        update.version = version + 1
        self.skip_to(number, version)
        return update

    def clock_of_last(self, clock: int) -> int:
        """Return the newest clock of all steps up to the round that was begun last, or that of what has come for it."""
        return max(clock, self.decisions.highs.get(self.first - 1, 0))

    def skip_to(self, number: Round, version: Version) -> None:
        """Take note that the version behind this one is made of a round, and that all rounds before are over."""
        self.first, self.reached = number + 1, 0
        self.until[version] = number - 1
        if len(self.until) > REMEMBERED_VERSIONS:
            del self.until[next(iter(self.until))]

    def held(self, rank: Rank, sequence: int) -> Undecided | Dropped | Update | None:
        """Return what has a push of a rank; None: its round is made, or it is dropped for good."""
        holders: list[Undecided | Dropped] = [*self.undecided.values(), *self.dropped]
        for one in holders:
            if (one.contribution.rank, one.contribution.sequence) == (rank, sequence):
                return one
        for update in self.updates.values():
            if update.has(rank, sequence):
                return update
        return None

    def has_open(self, contribution: Contribution) -> bool:
        """Tell whether a contribution waits for its round to be decided, or to be made."""
        return any(part is contribution for part in self.open)

    def enter(self, rank: Rank, clock: int, sequence: int) -> None:
        """Take note of a push."""
        self.clocks[rank] = clock
        self.unsettled.setdefault(rank, {})[sequence] = None

    def settle(self, chunk: Chunk, contribution: Contribution) -> None:
        """Take note that a contribution is made, or dropped: reads of its rank wait no longer for it."""
        rank = contribution.rank
        unsettled = self.unsettled[rank]
        del unsettled[contribution.sequence]
        self.passed[rank] = contribution.clock
        chunk.reflected[rank] = next(iter(unsettled), chunk.pushed[rank] + 1) - 1

    def take_dropped(self, chunk: Chunk, *, in_order: bool) -> list[Dropped]:
        """Take out what is in no round, where the rounds are made that were closed by then, and settle it.

        With `in_order` nothing before that an earlier push of the same worker is settled.
        """
        ready: list[Dropped] = []
        while self.dropped and self.dropped[0].round < self.first - chunk.applying:
            ready.append(self.dropped.popleft())
        left: list[Dropped] = []
        if in_order:
            ready.sort(key=lambda one: one.contribution.sequence)
        settled: list[Dropped] = []
        for one in ready:
            part = one.contribution
            if in_order and next(iter(self.unsettled[part.rank])) != part.sequence:
                left.append(one)
                continue
            self.settle(chunk, part)
            settled.append(one)
        self.dropped.extendleft(reversed(left))
        return settled

    def is_in_order(self, chunk: Chunk) -> bool:
        """Tell whether of each worker all pushes are settled up to one, and nobody was told of a later one."""
        if any(one.told for one in self.dropped):
            return False
        return all(
            chunk.pushed.get(rank, 0) - chunk.reflected.get(rank, 0) == len(numbers)
            for rank, numbers in self.unsettled.items()
        )

    def count(self, contribution: Contribution) -> None:
        """Take note that a contribution is in the value."""
        rank = contribution.rank
        self.made[rank] = max(self.made.get(rank, 0), contribution.sequence)

    @property
    def waiters(self) -> list[Waiter]:
        """Who has pushed what is in a closed round, or in none; they may have been answered."""
        return [waiter for update in self.updates.values() for waiter in update.waiters] + [
            one.waiter for one in self.dropped
        ]

    @property
    def contributions(self) -> list[Contribution]:
        """All that is neither made, or being made, nor dropped for good."""
        return [*self.open, *(one.contribution for one in self.dropped)]

    @property
    def open(self) -> list[Contribution]:
        """All that may still be in a value, and in none yet."""
        parts = [one.contribution for one in self.undecided.values()]
        return parts + [part for update in self.updates.values() for part in update.contributions.values()]

    @property
    def slots(self) -> list[Slot]:
        """The contributions that it holds."""
        return [part.slot for part in self.open if part.slot is not None]
