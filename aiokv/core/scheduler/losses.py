"""When a member counts as gone, and what becomes of the others then: the scheduler's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Disconnect, Effect, Log
from aiokv.core.scheduler.attention import Attention
from aiokv.core.scheduler.places import state_of_gone
from aiokv.types import Role

if TYPE_CHECKING:
    from aiokv.core.scheduler.cluster import Cluster
    from aiokv.core.scheduler.members import Member
    from aiokv.types import Peer


class Losses:
    """The part of a `Membership` that deals with nodes of which nothing more is heard.

    Args:
        cluster: whose members they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._plan = cluster.plan
        self._members = cluster.members
        self._attention = Attention(cluster.plan.heartbeat, cluster.plan.death_timeout)

    def heard(self, peer: Peer, now: float) -> None:
        """Take note that somebody has said something, a member perhaps."""
        self._attention.heard(now)
        member = self._members.by_peer.get(peer)
        if member is None:
            return
        member.heard = now
        if self._cluster.epoch:
            self._members.silent.add(peer, now + self._plan.death_timeout)

    def disconnected(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Give a member whose connection has ended a moment for another one."""
        member = self._members.by_peer.get(peer)
        if member is None:
            return []
        reason = f"{reason}, last heard {now - member.heard:.1f} s before"
        if not self._cluster.epoch or self._cluster.is_over or not self._plan.reconnect_grace:
            return self.lose(member, reason, now)
        self._members.unbind(member)
        member.reason = reason
        grace = self._plan.reconnect_grace
        if self._attention.is_unsure(now):
            # It may have given up this scheduler, which did not run for a while.
            grace = max(grace, self._plan.time_to_come_back)
        self._members.parted.add(member.name, now + grace)
        return []

    def lose(self, member: Member, reason: str, now: float) -> list[Effect]:
        """Go on without a member, or wait for another one in its place."""
        cluster = self._cluster
        if member.role is Role.SERVER and cluster.epoch and not cluster.is_over:
            effects = cluster.standbys.lose(member, reason) + cluster.keeper.interrupted("a server is lost")
            return effects + cluster.go_on(now)
        state = self._state_without(member)
        if state == "away":
            if self._plan.on_worker_loss == "shrink":
                reason = f"{reason}; the job needs at least {self._plan.min_workers} workers"
                member.until = 0
            self._members.away.add(member.name, now + self._plan.respawn_timeout)
        self._members.drop(member, state, reason)
        if cluster.is_over:
            # The servers were told to stop.
            return []
        text, event = f"{member.role} {member.name} is {member.state}: {reason}", f"{member.role}_{member.state}"
        said = Log("error", text, event, member.facts | {"reason": reason})
        if not cluster.epoch:
            self._members.remove(member)
            return [said, *cluster.first_places.interrupted(member)]
        return [said, *cluster.admissions.forget(member.name), *cluster.go_on(now)]

    def _state_without(self, member: Member) -> str:
        """Return what becomes of a member that is gone."""
        cluster = self._cluster
        if member.state == "alive" and (member.role is not Role.WORKER or not cluster.epoch or cluster.is_over):
            return "lost"
        mode, others, least = self._plan.on_worker_loss, len(self._members.others(member)), self._plan.min_workers
        return state_of_gone(member.state, on_worker_loss=mode, others=others, least=least)

    # --- time ---

    def give_up_silent(self, now: float) -> list[Effect]:
        """Lose those that say nothing, and those in whose place nobody has come."""
        effects: list[Effect] = []
        unsure = self._cluster.epoch > 0 and self._attention.is_unsure(now)
        for peer in self._members.silent.due(now):
            if peer not in self._members.by_peer:
                # It was lost with another node of its process.
                continue
            if unsure:
                self._members.silent.add(peer, now + self._plan.heartbeat)
                continue
            member = self._members.by_peer[peer]
            silence = now - member.heard
            text = f"no heartbeat for {silence:.1f} s"
            facts = member.facts | {"seconds": silence}
            said = Log("error", f"{member.role} {member.name}: {text}", "silent", facts)
            effects += [Disconnect(peer, "no heartbeat"), said, *self.lose(member, text, now)]
        for name in self._members.away.due(now):
            member = self._members.by_name[name]
            text = f"{member.reason}; nobody has taken its place within {self._plan.respawn_timeout:g} s"
            effects += self.lose(member, text, now)
        return effects

    def give_up_parted(self, now: float) -> list[Effect]:
        """Lose those whose connection has ended, and which have not made another one."""
        effects: list[Effect] = []
        for name in self._members.parted.due(now):
            member = self._members.by_name.get(name)
            if member is not None and member.is_here:
                effects += self.lose(member, f"{member.reason}, and it has not come back", now)
        return effects
