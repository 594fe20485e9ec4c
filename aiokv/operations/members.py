"""The calls of a worker about the others: to wait for them, to leave, and to hear who takes part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core import stimuli as st
from aiokv.operations.base import BaseOperations
from aiokv.types import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable


class MemberOperations(BaseOperations):
    """The part of `Operations` that deals with the other workers."""

    async def barrier(self, name: str = "", *, group: Iterable[int] = (), timeout: float | None = None) -> None:
        """Wait until every worker of a group has called it with this name. Ranks are counted, not calls.

        Args:
            name: any text.
            group: the ranks that are waited for; all when not given.
            timeout: seconds.

        Raises:
            BarrierTimeoutError: names the ranks that did not come; the barrier can be used again.
            MembershipError: this worker is not in the group.
        """
        seconds = self._seconds(timeout)
        ranks = tuple(group)
        await self._call(lambda call: st.EnterBarrier(call, name, seconds, ranks))

    async def finish(self, *, timeout: float | None = None) -> None:
        """Say that this worker has no more batches: no round and no barrier waits for it from now on.

        The pushes that were called before still count. It stays a member and can still read. What a mean is over then
        is said by `reduction` of `set_optimizer`.
        """
        seconds = self._seconds(timeout)
        await self._call(lambda call: st.Finish(call, seconds))

    async def members(self, step: int, *, timeout: float | None = None) -> list[int]:
        """Return the ranks that push in a step, counted from 0; ascending.

        Where workers join while training goes on, a worker asks before each of its steps, and all are told the same: so
        they can deal out the step's data. So it is where a worker leaves that has called `plan_leave`. One that is
        lost, or leaves without that, counts until the others hear of it.

        Raises:
            CallTimeoutError: a worker is about to join, or to leave, and the scheduler did not say in time whether it
                does.
        """
        seconds = self._seconds(timeout)
        ranks: list[int] = await self._call(lambda call: st.AskMembers(call, step, seconds))
        return ranks

    async def plan_leave(self) -> None:
        """Say that this worker is about to leave; returns at once.

        From one of the next steps on `members` leaves this worker out: for all workers from the same step on. Until
        then it goes on as before; then it calls `leave`. So the others never wait for it, and no data is split with it
        that it does not see::

            for step in range(start, steps):
                if kv.rank not in await kv.members(step):
                    break
                ...
            await kv.leave()

        A push of a later step is refused with a `MembershipError`. Where nobody relies on this worker, or nobody could
        push any longer, it is left out at once: under `asp` and alike, when workers are lost, and with less than
        `min_workers` without it.
        """
        await self._call(st.PlanLeave)

    async def tallies(self, *, timeout: float | None = None) -> dict[int, Tally]:
        """Return what became of every worker's contributions so far, by rank: staleness, what was dropped, waits."""
        seconds = self._seconds(timeout)
        answers = await self._call(lambda call: st.ReadTallies(call, seconds))
        totals: dict[int, Tally] = {}
        for rank, one in (pair for answer in answers for pair in answer.ranks.items()):
            total = totals.setdefault(rank, Tally())
            total.applied += one.applied
            total.waited += one.waited
            total.duplicates += one.duplicates
            for counts, more in ((total.dropped, one.dropped), (total.staleness, one.staleness)):
                for name, count in more.items():
                    counts[name] = counts.get(name, 0) + count
        return dict(sorted(totals.items()))
