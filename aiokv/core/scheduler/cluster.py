"""The cluster as the scheduler has it: what all members are told of it, and when its work is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Send, Stop
from aiokv.core.roster import Roster
from aiokv.core.scheduler.admission import Admissions, Party
from aiokv.core.scheduler.barriers import Barriers
from aiokv.core.scheduler.checkpoint_keeper import PATIENCE, Keeper
from aiokv.core.scheduler.first_places import FirstPlaces
from aiokv.core.scheduler.member_table import MemberTable
from aiokv.core.scheduler.standbys import Standbys
from aiokv.errors import MembershipError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.scheduler.cluster_plan import ClusterPlan
    from aiokv.core.scheduler.members import Member
    from aiokv.types import Incarnation, Peer


class Cluster:
    """Who is a member, what they have in common, and the view of it that was published last.

    Args:
        plan: how large it is, and its settings.
        incarnation: number of the scheduler's life; none before or after it has the same.
        started: when it began to listen.
    """

    def __init__(self, plan: ClusterPlan, incarnation: Incarnation, started: float) -> None:
        self.plan = plan
        self.barriers = Barriers()
        self.members = MemberTable(self.barriers.forget_peer)
        self.admissions = Admissions()
        self.keeper = Keeper(plan.checkpoints, plan.num_workers, plan.places)
        self.standbys = Standbys(plan.replication, plan.takes_servers, plan.death_timeout, self.members)
        self.first_places = FirstPlaces(plan, self.members, self.standbys.chains)
        self.founder = incarnation
        """The incarnation of the scheduler that has formed it, or is to."""
        self.settled = started + plan.settling
        """From when on it may be decided which cluster it is."""
        self.epoch = 0
        """That of the view; 0: the cluster has never been complete."""
        self.view: m.View | None = None
        self.roster = Roster()
        self.is_over = False
        self.end_by: float | None = None
        """When the job ends, whether the checkpoint that is under way is complete or not."""

    @property
    def missing(self) -> str:
        """What is not there yet, in words; empty when the cluster is complete."""
        absent = []
        for role, wanted in ((Role.WORKER, self.plan.num_workers), (Role.SERVER, self.plan.num_servers)):
            present = self.first_places.count_others(role)
            if present < wanted:
                absent.append(f"{wanted - present} of {wanted} {role}s")
        if places := self.first_places.missing:
            absent.append(f"{places} of {self.plan.places} places of servers")
        return " and ".join(absent)

    def worker(self, peer: Peer) -> Member:
        """Return the worker that is connected there.

        Raises:
            MembershipError: there is none, or the cluster has never been complete.
        """
        member = self.members.by_peer.get(peer)
        if member is None or member.role is not Role.WORKER or not self.epoch:
            raise MembershipError("only a worker of the complete cluster can do this")
        return member

    # --- what members are told ---

    def publish(self, now: float) -> list[Effect]:
        """Tell all who is there now, in a view of the next epoch."""
        self.epoch += 1
        effects, gone = self.standbys.switch()
        if gone:
            effects += self.keeper.interrupted("a server has given its place to another one")
        hosted = self.standbys.host(self.epoch, now)
        workers, servers = self.members.ordered(Role.WORKER), self.members.ordered(Role.SERVER)
        view = self.view = self._make_view(workers, servers)
        self.roster = Roster(view)
        # Servers first: a worker that is quick to call should find that they know it.
        here = [one for one in (*servers, *self.standbys.others(), *workers) if one.is_here]
        effects += [Send(one.peer, 0, view) for one in here if one.connected]
        # Who has given its place to another one stops when it sees that.
        effects += [Send(peer, 0, view) for peer, _ in gone]
        effects += [Send(peer, request, m.Done()) for peer, request in gone if request]
        return effects + hosted + self.tell_keepers(now)

    def _make_view(self, workers: list[Member], servers: list[Member]) -> m.View:
        plan = self.plan
        return m.View(
            self.epoch,
            tuple(m.WorkerEntry(w.number, w.name, w.incarnation, w.state, w.reason, w.since, w.until) for w in workers),
            tuple(self.standbys.chains.entry(server) for server in servers),
            plan.heartbeat,
            plan.chunk_bytes,
            plan.split_bytes,
            plan.death_timeout,
            plan.on_worker_loss,
            self.keeper.due,
            plan.checkpoints.folder,
            plan.checkpoints.run,
            plan.checkpoints.resume,
            plan.replication,
            plan.num_workers if len(workers) > plan.num_workers else 0,
            self.barriers.opened,
            self.founder,
            self.admissions.told,
        )

    def tell_keepers(self, now: float) -> list[Effect]:
        """Tell who keeps checkpoints, and who lets workers in, over which connections the members are reached."""
        servers, workers = self.members.ordered(Role.SERVER), self.members.ordered(Role.WORKER)
        servers_here, workers_here = ([one.peer for one in some if one.connected] for some in (servers, workers))
        told = self.keeper.viewed(servers_here, workers_here, self.roster, now)
        return told + self.tell_parties() if self.plan.max_workers or self.admissions.is_active else told

    def tell_parties(self) -> list[Effect]:
        """Say who has to agree before another worker counts, or leaves: who is lost, or has gone, does not."""
        vacant, lost = self.vacant, self.roster.lost
        loss = self.roster.loss(lost, "a join") if lost else None
        servers, workers = self.members.ordered(Role.SERVER), self.members.ordered(Role.WORKER)
        there = [one for one in servers if one.is_here]
        there += [one for one in workers if one.state in {"alive", "away"} and one not in vacant]
        ranks = {worker.name: worker.number for worker in workers}
        parties = [Party(one.name, one.peer if one.connected else None, ranks.get(one.name)) for one in there]
        return self.admissions.viewed(parties, loss, stuck=bool(vacant))

    @property
    def vacant(self) -> list[Member]:
        """Workers that are away and whose places anybody may take: there are too few others."""
        if self.plan.on_worker_loss == "respawn":
            return []
        return [worker for worker in self.members.workers.values() if worker.state == "away"]

    def release(self) -> list[Effect]:
        """Let those go on that wait at a barrier for nobody any longer, when it is known who that may be."""
        if self.admissions.is_unsure:
            return []
        return self.members.remember(self.barriers.release(self.roster))

    def go_on(self, now: float) -> list[Effect]:
        """Tell all that somebody is here no longer, and let those go on that have waited for it."""
        return self.publish(now) + self.release() + self.end_if_over(now)

    # --- the end ---

    def end_if_over(self, now: float) -> list[Effect]:
        """Let all stop when no worker is left; a checkpoint that is under way may be completed before."""
        workers = list(self.members.workers.values())
        if self.is_over or not self.epoch or any(worker.is_expected for worker in workers):
            return []
        if self.keeper.is_busy and not self.roster.lost:
            self.end_by = now + PATIENCE if self.end_by is None else self.end_by
            if now < self.end_by:
                return []
        self.is_over, self.end_by = True, None
        known = self.members.by_name.values()
        lost = [member.name for member in known if member.state == "lost"]
        evicted = [member.name for member in known if member.state == "evicted"]
        if not any(worker.state == "left" for worker in workers):
            lost += evicted
        reason = "all workers have left" + (f"; gone before: {', '.join(evicted)}" if evicted else "")
        if lost:
            reason = f"no worker is left; lost: {', '.join(lost)}"
        servers = [*self.members.servers.values(), *self.standbys.others()]
        stops = [Send(server.peer, 0, m.Stop(reason)) for server in servers if server.state == "alive"]
        return [*stops, Stop(reason, failed=bool(lost))]
