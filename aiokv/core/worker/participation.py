"""In which steps a worker takes part: where it begins, with whom it goes on, and behind which one it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core import stimuli as st
from aiokv.core.effects import Complete, Effect, Fail
from aiokv.core.joiner import answer_time
from aiokv.core.roster import Roster
from aiokv.core.worker.call import Call
from aiokv.core.worker.crossing import Crossing
from aiokv.errors import AiokvError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.worker.calls import Calls
    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.standing import Standing
    from aiokv.types import Peer, Rank

PlaceCall = st.GoOn | st.AskMembers | st.PlanLeave
"""The calls that `Participation` carries out."""


class Participation:
    """The part of a `Session` that knows its rank, and the clocks between which it counts.

    Args:
        name: the worker's.
        standing: whether it is a member.
        calls: what it has asked.
        directory: what is known of the keys.
    """

    def __init__(self, name: str, standing: Standing, calls: Calls, directory: Directory) -> None:
        self._name = name
        self._standing = standing
        self._calls = calls
        self._directory = directory
        self.rank: Rank = -1
        """This worker's; -1 before it has joined."""
        self.roster = Roster()
        """The workers of the newest view."""
        self.crossing = Crossing(calls.requests.pushes_until)
        """The boundaries to which it has agreed."""
        self.is_new = False
        """Whether this worker has come to a running cluster, and does not know yet where it is to begin."""
        self.leaves = False
        """Whether it has told the scheduler that it is about to leave, or knows that it need not."""
        self.going_on: int | None = None
        """The call that asks where another process was."""
        self.planning: int | None = None
        """The request by which it has told the scheduler that it is about to leave."""

    @property
    def since(self) -> int:
        """The clock after which this worker counts in rounds; 0: from the beginning, or that is not known yet."""
        entry = self.roster.entry(self.rank)
        return entry.since if entry is not None else 0

    @property
    def _until(self) -> int:
        """The clock up to which this worker counts; 0: it stays, as far as it knows."""
        entry = self.roster.entry(self.rank)
        return entry.until if entry is not None else 0

    @property
    def _is_joining(self) -> bool:
        """Whether the others do not wait for this worker yet, as far as it knows."""
        entry = self.roster.entry(self.rank)
        return entry is not None and entry.state == "joining"

    def viewed(self, view: m.View, *, first: bool) -> list[Effect]:
        """Take over who is there, and which of the boundaries hold."""
        self.roster = Roster(view)
        effects = self.crossing.viewed(self.roster)
        if first:
            self.rank = self.roster.rank_of(self._name)
            self.is_new = self._is_joining
        self._calls.meetings.viewed(view, is_counted=not self._is_joining)
        return effects + self._limit()

    def tell(self, view: m.View) -> list[Effect]:
        """Tell a scheduler that is there again how far this worker is with who joins."""
        return self.crossing.tell(Roster(view), self.rank, self._directory.counts.clock)

    def called(self, stimulus: PlaceCall, now: float) -> list[Effect]:
        """Find out where this worker is to begin, with whom it goes on, or where it is to end.

        Raises:
            AiokvError: it can't be asked for that; nothing has changed.
        """
        match stimulus:
            case st.AskMembers():
                self._standing.check_ready(Call(stimulus.call, "members", stimulus.timeout))
                return self.crossing.ask(stimulus, self.roster, now)
            case st.PlanLeave(call):
                self._standing.check_open(Call(call, "plan_leave", 0.0))
                return self._plan_leave(call)
            case _:
                return self._go_on(stimulus, now)

    # --- the beginning ---

    def _go_on(self, stimulus: st.GoOn, now: float) -> list[Effect]:
        call = Call(stimulus.call, "resume_step", stimulus.timeout, result=[])
        self._standing.check_ready(call)
        parts = self._directory.push_counts(answer_time(call.timeout))
        self.going_on = call.number
        if not self._is_joining:
            return self._calls.send(call, parts, now)
        self._calls.enter(call, now)
        return self._calls.ask_scheduler(call, m.Enter(answer_time(call.timeout)))

    def entered(self, peer: Peer, request: int, now: float) -> list[Effect]:
        """Ask for numbers of pushes: what was pushed by now is all up to the boundary, after which this worker counts.

        Raises:
            ProtocolError: that was not asked.
        """
        return self._calls.replies.go_on(peer, request, self._directory.push_counts, now)

    def gone_on(self, number: int, effects: list[Effect]) -> list[Effect]:
        """Count from what the servers have, if all of them have said it to the call of this number."""
        done = next((one for one in effects if isinstance(one, Complete) and one.call == number), None)
        if done is None:
            return effects
        self.going_on = None
        self._directory.learn(done.result)
        try:
            if self.is_new:
                done.result = self._directory.counts.admit(self.since, done.result)
                self.is_new = False
            else:
                done.result = self._directory.counts.go_on(done.result)
        except AiokvError as error:
            return [Fail(number, error) if one is done else one for one in effects]
        return effects

    # --- the end ---

    def _plan_leave(self, call: int) -> list[Effect]:
        """Ask behind which clock nobody relies on this worker, if there is somebody who does."""
        if self.leaves:
            return [Complete(call)]
        self.leaves = True
        if not self._directory.keys.waits_for_others:
            return [Complete(call), *self.crossing.leave(self.rank, self.roster)]
        send = self._calls.requests.send(None, SCHEDULER, m.PlanLeave(self._calls.next_clock() - 1))
        self.planning = send.request
        return [Complete(call)] if self._calls.outage is not None else [Complete(call), send]

    def planned(self, peer: Peer, request: int) -> list[Effect]:
        """Leave at once, if no view has said by now where this worker's rounds end."""
        self._calls.requests.take(peer, request)
        self.planning = None
        return [] if self._until else self.crossing.leave(self.rank, self.roster)

    # --- boundaries ---

    def bounded(self, boundary: m.Boundary) -> list[Effect]:
        """Agree to a boundary. Where this worker leaves there, its calls that wait for their turn have to be before."""
        mine = boundary.rank == self.rank
        clock = self._calls.next_clock() - 1 if mine else self._directory.counts.clock
        return self.crossing.bounded(boundary, clock, self.roster) + self._limit()

    def _limit(self) -> list[Effect]:
        """Let no push go beyond the clock up to which this worker counts, or may turn out to count."""
        if self._until:
            return self._calls.limit(self._until, for_good=True)
        return self._calls.limit(self.crossing.last_of(self.rank), for_good=False)
