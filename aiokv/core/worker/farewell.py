"""How a worker leaves in good order: when what it has pushed is answered, and what it writes is written, it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core import stimuli as st
from aiokv.core.effects import Complete, Effect, Fail
from aiokv.core.joiner import answer_time
from aiokv.core.worker.call import NO_CALL, Call
from aiokv.errors import AiokvError, ClosedError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.joiner import Joiner
    from aiokv.core.worker.calls import Calls
    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.participation import Participation
    from aiokv.core.worker.passing import Passing
    from aiokv.core.worker.standing import Standing


class Farewell:
    """The part of a `Session` that lets it leave.

    Args:
        joiner: its place in the cluster.
        standing: whether it is a member.
        calls: what it has asked.
        passing: its part of checkpoints.
        participation: who is asked in which steps.
        directory: what is known of the keys.
    """

    def __init__(
        self,
        joiner: Joiner,
        standing: Standing,
        calls: Calls,
        passing: Passing,
        participation: Participation,
        directory: Directory,
    ) -> None:
        self._joiner = joiner
        self._standing = standing
        self._calls = calls
        self._passing = passing
        self._participation = participation
        self._directory = directory
        self._moves_on = False
        """Whether it leaves for the next cluster."""
        self._call = NO_CALL
        """The call with which this worker leaves."""
        self._draining: tuple[st.Depart, float] | None = None
        """How it will leave when all that it has pushed is answered, and when at the latest."""
        self._writing: tuple[st.Depart, float] | None = None
        """How it will leave when all files are written, and when at the latest."""
        self.until: float | None = None
        """When the present wait is over at the latest; None: there is none, and nothing to `look` for."""

    def _find_until(self) -> None:
        waiting = self._draining or self._writing
        self.until = None if waiting is None else waiting[1]

    def scheduler_gone(self) -> list[Effect]:
        """Look for no other scheduler when nothing is to be said to it: this worker has left, or moves on."""
        has_left = self._standing.closed and self._writing is None and not self._calls.is_open(self._call)
        if has_left or self._moves_on:
            self._joiner.leave()
        return self._calls.fail_requests_to(SCHEDULER, self._unheard) if self._moves_on else []

    @property
    def _is_unheard(self) -> bool:
        """Whether it moves on, and the scheduler that it knows is gone."""
        return self._moves_on and self._calls.outage is not None

    def _unheard(self, what: str) -> AiokvError:
        assert self._calls.outage is not None, "the scheduler is gone"
        return self._calls.outage(f"{what} is for no other one")

    def depart(self, depart: st.Depart, now: float) -> list[Effect]:
        """Begin to leave."""
        number, timeout = depart.call, depart.timeout
        if self._standing.closed:
            return [Complete(number)]
        is_member = self._joiner.joined and self._standing.expulsion is None
        self._moves_on |= depart.moves_on
        if self._is_unheard:
            # One to which it connects again would take this cluster for its own.
            self._joiner.leave()
        drains = depart.drains or self._participation.leaves
        if drains and is_member and self._draining is None:
            # Its time-out becomes the time at which it is over.
            self._draining = (st.Depart(number, now + timeout, drains=True), now + answer_time(timeout))
            self._standing.leaves = True
            self._find_until()
            return []
        effects = self._joiner.fail(ClosedError("join: the worker was closed while it was joining"))

        def error_of(what: str) -> AiokvError:
            return ClosedError(f"{what}: the worker was closed while the call was pending")

        effects += self._calls.fail_all(error_of) + self._participation.crossing.fail_all(error_of)
        self._standing.closed = True
        if not is_member:
            return [*effects, Complete(number)]
        effects += self._passing.departs(self._directory.counts.clock)
        self._writing = (st.Depart(number, now + timeout, drains), now + answer_time(timeout))
        self._find_until()
        return effects

    def look(self, now: float) -> list[Effect]:
        """Go on, if what was waited for is there, or there is no more time for that."""
        effects: list[Effect] = []
        if self._draining is not None and (now >= self._draining[1] or not self._calls.is_pushing):
            effects += self._drained(self._draining[0], now)
        if self._writing is not None:
            effects += self._take_leave(*self._writing, now)
        return effects

    def _drained(self, depart: st.Depart, now: float) -> list[Effect]:
        effects = self.depart(st.Depart(depart.call, max(0.0, depart.timeout - now), drains=True), now)
        self._draining = None
        self._standing.leaves = False
        self._find_until()
        return effects

    def _take_leave(self, depart: st.Depart, until: float, now: float) -> list[Effect]:
        """Say that this worker leaves, when what it had left of gradients is written, which belongs to a checkpoint."""
        if self._passing.writes and now < until:
            return []
        self._writing = None
        self._find_until()
        if self._standing.expulsion is not None:
            return [Complete(depart.call)]
        if self._is_unheard:
            return [Fail(depart.call, self._unheard("leave"))]
        self._call = depart.call
        call = Call(depart.call, "leave", max(0.0, depart.timeout - now))
        self._calls.enter(call, now)
        return self._calls.ask_scheduler(call, m.Leave(depart.drains, self._participation.crossing.told))
