"""How workers of a running cluster come to count, and how they leave it in good order: the scheduler's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import check_timeout
from aiokv.core.effects import Disconnect, Effect, Log, Refuse, Send
from aiokv.core.roster import IN_ROUNDS
from aiokv.core.scheduler.members import Member
from aiokv.core.scheduler.places import Place, place_of, state_of_leaver
from aiokv.errors import ClusterFullError, StaleEpochError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.scheduler.admission import Verdict
    from aiokv.core.scheduler.cluster import Cluster
    from aiokv.types import Peer


class Turnover:
    """The part of a `Membership` that deals with workers which come later, leave or have finished.

    Args:
        cluster: whose members they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._plan = cluster.plan
        self._members = cluster.members
        self._admissions = cluster.admissions

    # --- who comes ---

    def place_of(self, known: Member | None) -> Place:
        """Return what a worker gets whose name is that of a member, or of nobody."""
        in_use = sum(worker.state in IN_ROUNDS for worker in self._members.workers.values())
        in_use -= len(self._cluster.vacant)
        state, most = None if known is None else known.state, self._plan.max_workers
        return place_of(state, on_worker_loss=self._plan.on_worker_loss, in_use=in_use, most=most)

    def take_in(self, known: Member | None, peer: Peer, request: int, message: m.Register, now: float) -> list[Effect]:
        """Let a worker in that counts when it asks for that.

        Raises:
            ClusterFullError: there is no place for it.
            StaleEpochError: another process of its name has come after it.
        """
        place, most = self.place_of(known), self._plan.max_workers
        if known is not None and place is Place.TAKEN:
            raise ClusterFullError(
                f"the name {known.name!r} is taken by a member that is {known.state}", got=known.name
            )
        number = len(self._members.workers) if known is None else known.number
        # One that had joined, and alone has heard so when the scheduler ended, gets what it was told.
        is_another = message.epoch > 0 and message.number != number
        if is_another or (known is not None and message.incarnation < known.incarnation):
            raise StaleEpochError(f"the cluster has gone on without this process of {message.name}")
        if place is Place.FULL:
            text = f"{most} workers are there, as many as may be; {message.name!r} is one too many"
            raise ClusterFullError(text, expected=most)
        effects: list[Effect] = []
        if known is not None:
            if known.connected:
                effects.append(Disconnect(known.peer, "another process has connected under its name"))
            self._members.drop(known, "left", "")
            effects += self._admissions.forget(known.name)
        head = (peer, request, Role.WORKER, message.name, message.incarnation, message.host, message.port, now)
        member = Member(*head, "joining", number=number)
        self._members.add(member, counts=True)
        self._members.bind(member, now + self._plan.death_timeout)
        text = f"rank {number} ({member.name}) has come to the running cluster; it counts when it is ready"
        return [*effects, Log("info", text), *self._cluster.publish(now)]

    def enter(self, peer: Peer, request: int, timeout: float, now: float) -> list[Effect]:
        """Let a worker count from a boundary on."""
        check_timeout(timeout)
        member = self._cluster.worker(peer)
        member.request = request
        if member.state != "joining":
            return self._members.remember([Send(peer, request, m.Entered(member.since))])
        return self._admissions.enter(member.name, member.number, timeout, now)

    def carry_out(self, verdict: Verdict, now: float) -> list[Effect]:
        """Do what has come of a worker that wants to count, or to leave."""
        cluster, member = self._cluster, self._members.by_name[verdict.name]
        if verdict.leaves:
            return self._let_go(member, verdict, now)
        if verdict.error is None and not verdict.entered:
            member.since = verdict.clock
            for vacant in cluster.vacant[:1]:
                self._members.away.discard(vacant.name)
                self._members.drop(vacant, "evicted", f"{vacant.reason}; {member.name} has taken its place")
            return cluster.publish(now)
        if verdict.entered:
            member.state = "alive"
            published = cluster.publish(now)
            if not member.connected or not member.request:
                # It asks again.
                return published + cluster.release()
            return published + self._members.remember([Send(member.peer, member.request, m.Entered(member.since))])
        effects: list[Effect] = []
        if member.connected and member.request:
            error = verdict.error or StaleEpochError("")
            effects += self._members.remember([Refuse(member.peer, member.request, error)])
        if not verdict.clock:
            return effects
        # Rounds wait for it already.
        reason = f"was not let in: {verdict.error}"
        self._members.drop(member, "evicted", reason)
        said = Log("error", f"worker {member.name} {reason}", "worker_evicted", member.facts | {"reason": reason})
        return [*effects, said, *cluster.publish(now), *cluster.end_if_over(now)]

    # --- who leaves ---

    def plan_leave(self, peer: Peer, request: int, clock: int) -> list[Effect]:
        """Let a worker go behind a clock that nobody knows anything of yet."""
        member = self._cluster.worker(peer)
        if member.state not in {"alive", "joining"} or member.until:
            return self._members.remember([Send(peer, request, m.Done())])
        asked = [] if self._admissions.is_active else self._cluster.tell_parties()
        return asked + self._admissions.leave(member.name, member.number, (peer, request), clock)

    def _let_go(self, member: Member, verdict: Verdict, now: float) -> list[Effect]:
        """Say up to which clock a worker counts, or that it may go at once: where others would wait for one more."""
        others = sum(not other.until for other in self._members.others(member))
        early, least = self._plan.max_workers > 0, self._plan.min_workers
        if state_of_leaver(member.state, early=early, others=others, least=least) == "left" and member.state == "alive":
            member.until = verdict.clock
        effects = self._cluster.publish(now) if verdict.clock else []
        if member.until:
            text = f"{member.name} leaves; it counts up to round {member.until}"
            effects.append(Log("info", text, "worker_leaves", {"node": member.name, "clock": member.until}))
        peer, request = verdict.asked
        if peer not in self._members.by_peer:
            # It asks again.
            return effects
        return effects + self._members.remember([Send(peer, request, m.Done())])

    def leave(self, peer: Peer, request: int, told: int, now: float, *, early: bool) -> list[Effect]:
        """Let a worker go that was told who counts up to a clock; `early`: its work is not done."""
        member = self._cluster.worker(peer)
        self._admissions.told = max(self._admissions.told, told)
        others, least = len(self._members.others(member)), self._plan.min_workers
        early = early and self._plan.max_workers > 0
        state = state_of_leaver(member.state, early=early, others=others, least=least)
        reason = "left in good order"
        if state == "away":
            reason = f"{reason}; the job needs at least {least} workers"
            self._members.away.add(member.name, now + self._plan.respawn_timeout)
            member.until = 0
        self._members.drop(member, state, reason)
        effects: list[Effect] = [Send(peer, request, m.Done())]
        if state == "away":
            text = f"worker {member.name} is away: {reason}"
            effects.append(Log("warning", text, "worker_away", member.facts | {"reason": reason}))
        return effects + self._admissions.forget(member.name) + self._cluster.go_on(now)

    def finish(self, peer: Peer, request: int, told: int, now: float) -> list[Effect]:
        """Take note that a worker contributes no more, which was told who counts up to a clock."""
        self._cluster.worker(peer).state = "finished"
        self._admissions.told = max(self._admissions.told, told)
        done = self._members.remember([Send(peer, request, m.Done())])
        return [*done, *self._cluster.publish(now), *self._cluster.release()]
