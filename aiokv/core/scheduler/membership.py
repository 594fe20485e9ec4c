"""The scheduler's decisions: who is in the cluster, who is lost, who waits at a barrier, and when the job is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.deadlines import check_timeout, earliest
from aiokv.core.effects import Disconnect, Effect, Refuse, Report, Send
from aiokv.core.scheduler.cluster import Cluster
from aiokv.core.scheduler.losses import Losses
from aiokv.core.scheduler.rebuilding import Rebuild
from aiokv.core.scheduler.registrations import Registrations
from aiokv.core.scheduler.turnover import Turnover
from aiokv.core.stimuli import ManifestWritten, PeerLost, Received, Stimulus, Tick
from aiokv.errors import AiokvError, MembershipError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.scheduler.cluster_plan import ClusterPlan
    from aiokv.core.scheduler.members import Member
    from aiokv.types import Incarnation, Peer

Said = (
    m.Opened
    | m.View
    | m.CheckpointPart
    | m.CheckpointClock
    | m.StandbyReady
    | m.DropStandby
    | m.BoundaryClock
    | m.Passed
)
"""What nodes tell the scheduler without asking for anything."""


class Membership:
    """The state machine of the scheduler. `handle` is the only door that changes it.

    Args:
        plan: how large the cluster is, and its settings.
        incarnation: number of this scheduler's life; none before or after it has the same.
        started: when it began to listen.
    """

    def __init__(self, plan: ClusterPlan, *, incarnation: Incarnation, started: float) -> None:
        self._plan = plan
        self._cluster = cluster = Cluster(plan, incarnation, started)
        self._members = cluster.members
        self._barriers, self._admissions = cluster.barriers, cluster.admissions
        self._keeper, self._standbys = cluster.keeper, cluster.standbys
        self._losses = Losses(cluster)
        self._turnover = Turnover(cluster)
        self._rebuild = Rebuild(cluster, self._received)
        self._registrations = Registrations(cluster, self._losses, self._turnover, self._rebuild, self._received)

    # --- the door ---

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        was_unsure = self._admissions.is_unsure
        effects = self._handle(stimulus, now)
        while self._admissions.verdicts:
            effects += self._turnover.carry_out(self._admissions.verdicts.popleft(), now)
        return effects + self._cluster.release() if was_unsure else effects

    def _handle(self, stimulus: Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case Received(peer, request, message):
                return self._received(peer, request, message, now)
            case PeerLost(peer, reason):
                return self._peer_lost(peer, reason, now)
            case Tick():
                return self._tick(now)
            case ManifestWritten():
                return self._keeper.written(stimulus) + self._cluster.end_if_over(now)
            case _:
                raise TypeError(f"not a stimulus for the scheduler: {stimulus!r}")

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        members = (self._members.deadline(), self._standbys.deadline())
        begins = (self._registrations.deadline(), self._rebuild.deadline())
        waits = (self._barriers.deadline(), self._admissions.deadline(), self._keeper.deadline())
        return earliest(*members, *begins, *waits, self._cluster.end_by)

    @property
    def missing(self) -> str:
        """The places that nobody has taken yet, in words; empty when the cluster is complete."""
        return self._cluster.missing

    # --- messages ---

    def _received(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        self._losses.heard(peer, now)
        member = self._members.by_peer.get(peer)
        try:
            if member is not None and request in member.answered:
                # It was asked over an earlier connection.
                return [structs.replace(member.answered[request], peer=peer)]
            match message:
                case m.GetWaiting():
                    return [Report(peer, request, self._waiting(now))]
                case m.Heartbeat():
                    return [] if member is None else [Send(peer, 0, m.Heartbeat())]
                case m.Register():
                    return self._registrations.register(peer, request, message, now)
                case _ if isinstance(message, Said):
                    return self._said(peer, message, now)
                case _:
                    return self._asked(peer, request, message, now)
        except AiokvError as error:
            return [Refuse(peer, request, error)]

    def _asked(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        """Do what a member asks."""
        match message:
            case m.Barrier():
                return self._arrive(peer, request, message, now)
            case m.Finish(told):
                return self._turnover.finish(peer, request, told, now)
            case m.PlanLeave(clock):
                return self._turnover.plan_leave(peer, request, clock)
            case m.Leave(early, told):
                return self._turnover.leave(peer, request, told, now, early=early)
            case m.LeaveServer():
                return self._leave_server(peer, request, now)
            case m.Enter(timeout):
                return self._turnover.enter(peer, request, timeout, now)
            case _:
                reason = f"unexpected {type(message).__name__}"
                return [Disconnect(peer, reason), *self._peer_lost(peer, reason, now)]

    def _arrive(self, peer: Peer, request: int, message: m.Barrier, now: float) -> list[Effect]:
        check_timeout(message.timeout)
        member = self._cluster.worker(peer)
        if member.state == "joining":
            # The others have met there long ago.
            return self._members.remember([Send(peer, request, m.Met(()))])
        self._barriers.arrive(peer, request, member.number, message, self._cluster.roster, now)
        return self._cluster.release()

    def _leave_server(self, peer: Peer, request: int, now: float) -> list[Effect]:
        server = self._members.by_peer.get(peer)
        if server is None or server.role is not Role.SERVER or not self._cluster.epoch or self._cluster.is_over:
            raise MembershipError("only a server of the complete cluster can do this")
        return self._standbys.leave(server, request) + self._cluster.publish(now)

    def _said(self, peer: Peer, message: Said, now: float) -> list[Effect]:
        if isinstance(message, m.View):
            return self._rebuild.told(peer, message, now)
        if self._rebuild.is_under_way:
            # Another scheduler has asked for what is about checkpoints. A refusal would look like nonsense to a node
            # that does not know yet that it is not known.
            if not isinstance(message, m.CheckpointPart | m.CheckpointClock):
                self._rebuild.keep(peer, message)
            return []
        member = self._members.by_peer.get(peer)
        if member is None or not self._cluster.epoch:
            raise MembershipError("only a member of the complete cluster can do this")
        if isinstance(message, m.StandbyReady | m.DropStandby):
            return self._told_of_standby(member, message, now)
        if isinstance(message, m.CheckpointClock):
            return self._keeper.answered(peer, message, now)
        if isinstance(message, m.Opened):
            self._cluster.barriers.told(message, self._cluster.roster)
            return self._cluster.release()
        if isinstance(message, m.BoundaryClock):
            is_server = member.role is Role.SERVER
            return self._admissions.answered(member.name, message, is_server=is_server)
        if isinstance(message, m.Passed):
            return self._admissions.passed(member.number, message.clock)
        if member.role is Role.WORKER:
            return self._keeper.passed(member.number, message, now)
        if member.number < 0:
            # Only who serves an index has a part.
            return []
        return self._keeper.wrote(member.number, message, now) + self._cluster.end_if_over(now)

    def _told_of_standby(self, server: Member, message: m.StandbyReady | m.DropStandby, now: float) -> list[Effect]:
        is_ready = isinstance(message, m.StandbyReady)
        if server.name not in self._members.servers and (is_ready or not self._standbys.is_standby(server)):
            raise MembershipError("only a server that serves has a standby")
        if isinstance(message, m.StandbyReady):
            return self._cluster.publish(now) if self._standbys.ready(server, message) else []
        effects = self._standbys.dropped(server, message, now)
        return effects + self._cluster.publish(now) if effects else []

    def _waiting(self, now: float) -> m.Waiting:
        """Return for what every call that is not answered waits, and who is in the cluster."""
        roster, missing = self._cluster.roster, self._cluster.missing
        calls = self._barriers.waiting(roster, now) + self._admissions.waiting(roster, now)
        calls += self._rebuild.waiting(now)
        for peer, _ in self._members.joining.times():
            member = self._members.by_peer[peer]
            reason = f"missing {missing}" if missing else self._registrations.unsettled
            calls.append(m.WaitingCall(member.name, "join", reason, seconds=max(0.0, now - member.heard)))
        members = tuple(
            m.MemberState(
                *(w.role, w.number, w.name, self._standbys.state_of(w), w.reason, w.host, w.port),
                seconds=max(0.0, now - w.heard),
            )
            for w in self._members.by_name.values()
        )
        return m.Waiting(self._cluster.epoch, tuple(calls), members)

    # --- connections and time ---

    def _peer_lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        self._registrations.forget(peer)
        return self._rebuild.forget(peer, now) + self._losses.disconnected(peer, reason, now)

    def _tick(self, now: float) -> list[Effect]:
        cluster = self._cluster
        effects = self._registrations.tick(now) + self._losses.give_up_silent(now)
        effects += self._rebuild.tick(now) + self._losses.give_up_parted(now)
        ended, changed = self._standbys.tick(now)
        effects += ended + cluster.publish(now) if changed and not cluster.is_over else ended
        effects += self._members.remember(self._barriers.expire(cluster.roster, now)) + self._keeper.tick(now)
        effects += self._admissions.expire(cluster.roster, now)
        return effects if cluster.end_by is None else effects + cluster.end_if_over(now)

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        members, plan = self._members, self._plan
        members.validate()
        assert len(members.workers) + len(members.servers) + len(self._standbys.others()) == len(members.by_name)
        if not self._cluster.is_over:
            self._standbys.validate()
        self._barriers.validate()
        self._admissions.validate()
        joins = self._cluster.epoch and plan.max_workers
        assert joins or len(members.workers) <= plan.num_workers
        assert len(members.servers) <= plan.places
        if self._cluster.epoch:
            ranks = [worker.number for worker in members.ordered(Role.WORKER)]
            assert ranks == list(range(max(plan.num_workers, len(ranks))))
