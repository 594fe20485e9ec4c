"""The scheduler's decisions: who is in the cluster, who is lost, who waits at a barrier, and when the job is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from aiokv.core.admission import Admissions, Party, Verdict
from aiokv.core.attention import Attention
from aiokv.core.barriers import Barriers
from aiokv.core.checkpoint_keeper import PATIENCE, CheckpointPlan, Keeper
from aiokv.core.deadlines import Deadlines, check_timeout, earliest
from aiokv.core.effects import Disconnect, Effect, Log, Refuse, Report, Send, Stop
from aiokv.core.joiner import LAST_DELAY
from aiokv.core.members import Member
from aiokv.core.places import Place, place_of, state_of_gone, state_of_leaver
from aiokv.core.rebuilding import Rebuilding, Registration
from aiokv.core.roster import EXPECTED, IN_ROUNDS, Roster, natural_order
from aiokv.core.standbys import Standbys
from aiokv.core.stimuli import ManifestWritten, PeerLost, Received, Stimulus, Tick
from aiokv.errors import (
    AiokvError,
    ClusterFullError,
    JoinTimeoutError,
    MembershipError,
    StaleEpochError,
)
from aiokv.types import Peer, Role
from aiokv.wire import messages as m

COME_BACK = 2.0 * LAST_DELAY
"""Seconds that nodes have to come back to a scheduler that was started again, at least: they try now and then."""

MAX_ANSWERED = 64
"""So many answers to a member are kept, in case that its connection ends before it has them."""

Said = m.View | m.CheckpointPart | m.CheckpointClock | m.StandbyReady | m.DropStandby | m.BoundaryClock | m.Passed
"""What nodes tell the scheduler without asking for anything."""


@dataclass(slots=True, frozen=True)
class ClusterPlan:
    """How many members the cluster has, and the settings that all of them share.

    Seconds for `heartbeat`, `death_timeout`, `respawn_timeout` and `reconnect_grace`, bytes for `chunk_bytes` and
    `split_bytes`. `on_worker_loss` and `replication` are as in a view; with "shrink" the workers never become fewer
    than `min_workers`. With `elastic_servers`, or with a `replication` of 2, servers may come when all are there; and
    unless `max_workers` is 0 workers may, until there are so many.
    """

    num_workers: int
    num_servers: int
    heartbeat: float
    death_timeout: float
    chunk_bytes: int
    split_bytes: int
    on_worker_loss: str = "fail"
    respawn_timeout: float = 30.0
    checkpoints: CheckpointPlan = field(default_factory=CheckpointPlan)
    min_workers: int = 1
    reconnect_grace: float = 0.0
    replication: int = 1
    elastic_servers: bool = False
    max_workers: int = 0


class Membership:
    """The state machine of the scheduler. `handle` is the only door that changes it."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._members: dict[str, Member] = {}
        self._here: dict[Role, dict[str, Member]] = {Role.WORKER: {}, Role.SERVER: {}}
        """The members of each role that count: all workers, and the servers that serve."""
        self._by_peer: dict[Peer, Member] = {}
        self._epoch = 0
        self._joining: Deadlines[Peer] = Deadlines()
        self._silent: Deadlines[Peer] = Deadlines()
        self._away: Deadlines[str] = Deadlines()
        """Names of workers whose place is kept."""
        self._parted: Deadlines[str] = Deadlines()
        """Names of members whose connection has ended, and which may make another one."""
        self._attention = Attention(plan.heartbeat)
        self._barriers = Barriers()
        self._admissions = Admissions()
        self._early: dict[Peer, Registration] = {}
        """Workers that want to join, and have come before the cluster is complete."""
        self._keeper = Keeper(plan.checkpoints, plan.num_workers, plan.num_servers)
        servers = self._here[Role.SERVER]
        how = (plan.replication, plan.elastic_servers, plan.death_timeout)
        self._standbys = Standbys(*how, self._members, servers, self._drop)
        self._roster = Roster()
        self._view: m.View | None = None
        self._rebuilding: Rebuilding | None = None
        """Is there while nodes come back to a scheduler that was started again."""
        self._over = False
        self._end_by: float | None = None
        """When the job ends, whether the checkpoint that is under way is complete or not."""

    # --- the door ---

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        """Take in one stimulus and return what is to be done, in order."""
        effects = self._handle(stimulus, now)
        while self._admissions.verdicts:
            effects += self._carry_out(self._admissions.verdicts.popleft(), now)
        return effects

    def _handle(self, stimulus: Stimulus, now: float) -> list[Effect]:
        match stimulus:
            case Received(peer, request, message):
                return self._received(peer, request, message, now)
            case PeerLost(peer, reason):
                return self._peer_lost(peer, reason, now)
            case Tick():
                return self._tick(now)
            case ManifestWritten():
                return self._keeper.written(stimulus) + self._end_if_over(now)
            case _:
                raise TypeError(f"not a stimulus for the scheduler: {stimulus!r}")

    def deadline(self) -> float | None:
        """Return the time at which a `Tick` is wanted."""
        joined = earliest(self._joining.next(), self._silent.next(), self._away.next(), self._parted.next())
        joined = earliest(joined, self._standbys.deadline())
        if self._rebuilding is not None:
            joined = earliest(joined, self._rebuilding.until, self._rebuilding.beat_at)
        waits = (self._barriers.deadline(), self._admissions.deadline())
        return earliest(joined, *waits, self._keeper.deadline(), self._end_by)

    @property
    def _time_to_come_back(self) -> float:
        """Seconds that nodes have to connect again to a scheduler that was not there."""
        return max(self._plan.death_timeout / 2, COME_BACK)

    @property
    def missing(self) -> str:
        """The places that nobody has taken yet, in words; empty when the cluster is complete."""
        absent = []
        for role, wanted in ((Role.WORKER, self._plan.num_workers), (Role.SERVER, self._plan.num_servers)):
            present = len(self._here[role])
            if present < wanted:
                absent.append(f"{wanted - present} of {wanted} {role}s")
        return " and ".join(absent)

    def _received(self, peer: Peer, request: int, message: m.Message, now: float) -> list[Effect]:
        self._attention.heard(now)
        member = self._by_peer.get(peer)
        if member is not None:
            member.heard = now
            if self._epoch:
                self._silent.add(peer, now + self._plan.death_timeout)
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
                    return self._register(peer, request, message, now)
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
            case m.Finish():
                return self._finish(peer, request, now)
            case m.PlanLeave(clock):
                return self._plan_leave(peer, request, clock)
            case m.Leave(early):
                return self._leave(peer, request, now, early=early)
            case m.LeaveServer():
                return self._leave_server(peer, request, now)
            case m.Enter(timeout):
                return self._enter(peer, request, timeout, now)
            case _:
                reason = f"unexpected {type(message).__name__}"
                return [Disconnect(peer, reason), *self._peer_lost(peer, reason, now)]

    def _waiting(self, now: float) -> m.Waiting:
        """Return for what every call that is not answered waits, and who is in the cluster."""
        calls = self._barriers.waiting(self._roster, now) + self._admissions.waiting(self._roster, now)
        missing = self.missing
        for peer, _ in self._joining.times():
            member = self._by_peer[peer]
            calls.append(m.WaitingCall(member.name, "join", f"missing {missing}", seconds=max(0.0, now - member.heard)))
        members = tuple(
            m.MemberState(
                *(w.role, w.number, w.name, self._standbys.state_of(w), w.reason, w.host, w.port),
                seconds=max(0.0, now - w.heard),
            )
            for w in self._members.values()
        )
        return m.Waiting(self._epoch, tuple(calls), members)

    # --- joining ---

    def _of(self, role: Role) -> list[Member]:
        return list(self._here[role].values())

    def _remove(self, member: Member) -> None:
        """Let the member's place be free again: the cluster has never been complete."""
        del self._members[member.name]
        self._here[member.role].pop(member.name, None)

    def _register(self, peer: Peer, request: int, message: m.Register, now: float) -> list[Effect]:
        check_timeout(message.timeout)
        wanted = {Role.WORKER: self._plan.num_workers, Role.SERVER: self._plan.num_servers}.get(message.role)
        if wanted is None or peer in self._by_peer:
            raise MembershipError(f"{message.name!r} can't register as a {message.role} on this connection")
        if not self._epoch and (message.epoch or message.standby >= 0 or self._rebuilding is not None):
            return self._come_back(Registration(peer, request, message, now), now)
        effects = self._make_room(message, now)
        known = self._members.get(message.name)
        if known is not None:
            return effects + self._return(known, peer, request, message, now)
        is_worker = message.role is Role.WORKER
        if self._epoch and is_worker and self._plan.max_workers:
            return self._take_in(None, peer, request, message, now)
        is_more = len(self._here[message.role]) >= wanted
        takes_more = message.role is Role.SERVER and (message.standby >= 0 or self._standbys.takes_spares)
        if is_more and is_worker and len(self._early) < self._plan.max_workers - wanted:
            # It joins as soon as all are there who are to be there from the beginning.
            self._early[peer] = Registration(peer, request, message, now)
            return [Log("info", f"{message.role} {message.name} is here, too; waiting for {self.missing}")]
        if is_more and not takes_more:
            text = f"all {wanted} places for a {message.role} are taken; {message.name!r} is one too many"
            raise ClusterFullError(text, expected=wanted)
        if is_more:
            self._standbys.check(message)
        member = Member(peer, request, message.role, message.name, message.incarnation, message.host, message.port, now)
        self._members[message.name] = self._by_peer[peer] = member
        if self._epoch:
            self._silent.add(peer, now + self._plan.death_timeout)
            return effects + self._standbys.joined(member) + self._publish(now)
        if not is_more:
            self._here[member.role][message.name] = member
        self._joining.add(peer, now + message.timeout)
        self._silent.add(peer, now + message.timeout + self._plan.death_timeout)
        if self.missing:
            return [Log("info", f"{message.role} {message.name} is here; waiting for {self.missing}")]
        return self._form(now)

    def _make_room(self, message: m.Register, now: float) -> list[Effect]:
        """Do without a server whose name a later process has, so that this one can be of use."""
        known = self._members.get(message.name)
        if known is None or not self._epoch or message.epoch or message.incarnation <= known.incarnation:
            return []
        if message.role is not Role.SERVER or not self._standbys.can_do_without(known):
            return []
        effects: list[Effect] = [Disconnect(known.peer, "a later process has its name")] if known.connected else []
        return effects + self._lose(known, "a later process has its name", now)

    def _return(self, member: Member, peer: Peer, request: int, message: m.Register, now: float) -> list[Effect]:
        """Let a member go on over another connection, or another process take its place."""
        label = f"rank {member.number} ({member.name})" if member.role is Role.WORKER else member.name
        taken = f"the name {member.name!r} is taken by a member that is {member.state}"
        if member.role is not message.role or not self._epoch:
            raise ClusterFullError(taken, got=member.name)
        is_same = message.incarnation == member.incarnation and message.epoch > 0
        if is_same and member.state not in EXPECTED:
            ranks = {"ranks": [member.number]} if member.role is Role.WORKER else {}
            raise StaleEpochError(f"{label} is {member.state}: {member.reason}", **ranks)
        if not is_same and member.role is Role.SERVER:
            raise ClusterFullError(taken, got=member.name)
        if not is_same and self._place_of(member) is not Place.SUCCESSION:
            return self._take_in(member, peer, request, message, now)
        if message.incarnation < member.incarnation:
            raise StaleEpochError(f"{label} is a later process by now", ranks=[member.number])
        effects: list[Effect] = []
        if member.connected:
            effects.append(Disconnect(member.peer, "its process, or another one, has connected again"))
        publishes = not is_same or member.state == "away"
        self._drop(member, member.state if is_same else "alive", "")
        self._away.discard(member.name)
        if not is_same:
            member.answered.clear()
            effects += self._admissions.forget(member.name)
        if member.state == "away":
            member.state = "alive"
        member.peer, member.request, member.incarnation, member.heard = peer, request, message.incarnation, now
        member.connected = True
        self._by_peer[peer] = member
        self._silent.add(peer, now + self._plan.death_timeout)
        how = "is back" if is_same else "is back, as another process"
        effects.append(Log("warning", f"{label} {how}", f"{member.role}_back", member.facts))
        if member.name in self._here[Role.SERVER]:
            effects += self._keeper.interrupted()
        effects += self._standbys.remind(member)
        if publishes or self._standbys.is_wanting:
            return effects + self._publish(now)
        assert self._view is not None, "the cluster is complete"
        return [*effects, Send(peer, 0, self._view), *self._tell_keeper(now)]

    # --- workers that join a cluster that is complete ---

    def _place_of(self, known: Member | None) -> Place:
        """Return what a worker gets whose name is that of a member, or of nobody."""
        in_use = sum(worker.state in IN_ROUNDS for worker in self._of(Role.WORKER)) - len(self._vacant)
        state, most = None if known is None else known.state, self._plan.max_workers
        return place_of(state, on_worker_loss=self._plan.on_worker_loss, in_use=in_use, most=most)

    @property
    def _vacant(self) -> list[Member]:
        """Workers that are away and whose places anybody may take: there are too few others."""
        if self._plan.on_worker_loss == "respawn":
            return []
        return [worker for worker in self._of(Role.WORKER) if worker.state == "away"]

    def _take_in(self, known: Member | None, peer: Peer, request: int, message: m.Register, now: float) -> list[Effect]:
        """Let a worker in that counts when it asks for that."""
        place, most = self._place_of(known), self._plan.max_workers
        if known is not None and place is Place.TAKEN:
            raise ClusterFullError(
                f"the name {known.name!r} is taken by a member that is {known.state}", got=known.name
            )
        if message.epoch or (known is not None and message.incarnation < known.incarnation):
            raise StaleEpochError(f"the cluster has gone on without this process of {message.name}")
        if place is Place.FULL:
            text = f"{most} workers are there, as many as may be; {message.name!r} is one too many"
            raise ClusterFullError(text, expected=most)
        effects: list[Effect] = []
        number = len(self._of(Role.WORKER)) if known is None else known.number
        if known is not None:
            if known.connected:
                effects.append(Disconnect(known.peer, "another process has connected under its name"))
            self._drop(known, "left", "")
            effects += self._admissions.forget(known.name)
        head = (peer, request, Role.WORKER, message.name, message.incarnation, message.host, message.port, now)
        member = Member(*head, "joining", number=number)
        self._members[member.name] = self._here[Role.WORKER][member.name] = self._by_peer[peer] = member
        self._silent.add(peer, now + self._plan.death_timeout)
        text = f"rank {number} ({member.name}) has come to the running cluster; it counts when it is ready"
        return [*effects, Log("info", text), *self._publish(now)]

    def _enter(self, peer: Peer, request: int, timeout: float, now: float) -> list[Effect]:
        """Let a worker count from a boundary on."""
        check_timeout(timeout)
        member = self._worker(peer)
        member.request = request
        if member.state != "joining":
            return self._remember([Send(peer, request, m.Entered(member.since))])
        return self._admissions.enter(member.name, member.number, timeout, now)

    def _carry_out(self, verdict: Verdict, now: float) -> list[Effect]:
        """Do what has come of a worker that wants to count, or to leave."""
        member = self._members[verdict.name]
        if verdict.leaves:
            return self._let_go(member, verdict, now)
        if verdict.error is None and not verdict.entered:
            member.since = verdict.clock
            for vacant in self._vacant[:1]:
                self._away.discard(vacant.name)
                self._drop(vacant, "evicted", f"{vacant.reason}; {member.name} has taken its place")
            return self._publish(now)
        if verdict.entered:
            member.state = "alive"
            published = self._publish(now)
            if not member.connected:
                # It asks again.
                return published + self._release()
            return published + self._remember([Send(member.peer, member.request, m.Entered(member.since))])
        effects: list[Effect] = []
        if member.connected:
            effects += self._remember([Refuse(member.peer, member.request, verdict.error or StaleEpochError(""))])
        if not verdict.clock:
            return effects
        # Rounds wait for it already.
        reason = f"was not let in: {verdict.error}"
        self._drop(member, "evicted", reason)
        said = Log("error", f"worker {member.name} {reason}", "worker_evicted", member.facts | {"reason": reason})
        return [*effects, said, *self._publish(now), *self._end_if_over(now)]

    # --- workers that are about to leave ---

    def _plan_leave(self, peer: Peer, request: int, clock: int) -> list[Effect]:
        """Let a worker go behind a clock that nobody knows anything of yet."""
        member = self._worker(peer)
        if member.state not in {"alive", "joining"} or member.until:
            return self._remember([Send(peer, request, m.Done())])
        asked = [] if self._admissions.is_active else self._tell_parties()
        return asked + self._admissions.leave(member.name, member.number, (peer, request), clock)

    def _let_go(self, member: Member, verdict: Verdict, now: float) -> list[Effect]:
        """Say up to which clock a worker counts, or that it may go at once: where others would wait for one more."""
        others = sum(not other.until for other in self._others(member))
        early, least = self._plan.max_workers > 0, self._plan.min_workers
        if state_of_leaver(member.state, early=early, others=others, least=least) == "left" and member.state == "alive":
            member.until = verdict.clock
        effects = self._publish(now) if verdict.clock else []
        if member.until:
            text = f"{member.name} leaves; it counts up to round {member.until}"
            effects.append(Log("info", text, "worker_leaves", {"node": member.name, "clock": member.until}))
        peer, request = verdict.asked
        if peer not in self._by_peer:
            # It asks again.
            return effects
        return effects + self._remember([Send(peer, request, m.Done())])

    # --- a scheduler that was started again ---

    def _come_back(self, one: Registration, now: float) -> list[Effect]:
        """Take note of a node that registers while the cluster is rebuilt, or begin with that."""
        rebuilding = self._rebuilding
        if rebuilding is None:
            rebuilding = self._rebuilding = Rebuilding(
                until=now + self._time_to_come_back, beat_at=now + self._plan.heartbeat
            )
            for member in list(self._members.values()):
                # They want to join a cluster that is there already.
                head = (member.role, member.name, member.incarnation, member.host, member.port)
                message = m.Register(*head, self._plan.death_timeout)
                rebuilding.later.append(Registration(member.peer, member.request, message, member.heard))
                self._drop(member, "left", "")
                self._remove(member)
        if not one.message.epoch:
            rebuilding.later.append(one)
            return []
        rebuilding.back[one.message.name] = one
        text, facts = f"{one.message.name} comes back from epoch {one.message.epoch}", {"node": one.message.name}
        effects: list[Effect] = [Log("warning", text, f"{one.message.role}_back", facts)]
        if one.message.epoch > rebuilding.asked:
            rebuilding.asked = one.message.epoch
            effects.append(Send(one.peer, 0, m.GetView()))
        return effects + self._rebuild_if_whole(rebuilding, now)

    def _told(self, peer: Peer, view: m.View, now: float) -> list[Effect]:
        """Take in what a node that has come back says of the cluster; nobody else is believed."""
        rebuilding = self._rebuilding
        if rebuilding is None and peer in self._by_peer:
            # The answer is no longer needed.
            return []
        if rebuilding is None or all(one.peer != peer for one in rebuilding.back.values()):
            raise MembershipError("only a node that has come back can say what the cluster was")
        if rebuilding.view is None or view.epoch > rebuilding.view.epoch:
            rebuilding.view = view
        return self._rebuild_if_whole(rebuilding, now)

    def _rebuild_if_whole(self, rebuilding: Rebuilding, now: float) -> list[Effect]:
        return self._rebuild(rebuilding, now) if rebuilding.is_whole else []

    def _rebuild(self, rebuilding: Rebuilding, now: float) -> list[Effect]:
        """Go on with the cluster as it was: who is not back is lost."""
        self._rebuilding = None
        if not rebuilding.back:
            # All who knew of a cluster have gone away again: the others make one of their own.
            return self._join_now(rebuilding.later, now)
        view, registrations = rebuilding.view, [*rebuilding.back.values(), *rebuilding.later]
        counts = (self._plan.num_workers, self._plan.num_servers)
        if view is None or (view.declared or len(view.workers), len(view.servers)) != counts:
            reason = "nobody has told what the cluster was, or it was of another size"
            said = Log("error", reason, "not_rebuilt", {"reason": reason})
            return [said, *(Disconnect(one.peer, reason) for one in registrations)]
        for worker in view.workers:
            self._restore(rebuilding, Role.WORKER, worker.rank, worker, ("", 0), now)
        for server in view.servers:
            self._restore(rebuilding, Role.SERVER, server.index, server, (server.host, server.port), now)
            self._standbys.restore(server, now)
            standby = server.standby
            if standby is not None and standby.state != "expected":
                entry = m.ServerEntry(-1, standby.name, standby.incarnation, standby.host, standby.port)
                self._restore(rebuilding, Role.SERVER, -1, entry, (standby.host, standby.port), now)
        self._epoch = view.epoch
        self._keeper.restarted()
        text = f"was started again, goes on from epoch {view.epoch}; back: {', '.join(rebuilding.back)}"
        others = [one for name, one in rebuilding.back.items() if name not in self._members]
        facts = {"epoch": view.epoch, "back": list(rebuilding.back)}
        effects: list[Effect] = [Log("warning", text, "rebuilt", facts), *self._publish(now)]
        effects += self._join_now([*others, *rebuilding.later], now)
        for peer, message in rebuilding.said:
            if peer in self._by_peer:
                effects += self._received(peer, 0, message, now)
        return effects

    def _join_now(self, waiting: list[Registration], now: float) -> list[Effect]:
        """Look at those who have waited until it was known which cluster it is."""
        effects: list[Effect] = []
        for one in waiting:
            effects += self._received(one.peer, one.request, one.message, now)
        return effects

    def _restore(
        self,
        rebuilding: Rebuilding,
        role: Role,
        number: int,
        entry: m.WorkerEntry | m.ServerEntry,
        address: tuple[str, int],
        now: float,
    ) -> None:
        one = rebuilding.back.get(entry.name)
        is_back = one is not None and one.message.incarnation == entry.incarnation
        member = Member(-1, 0, role, entry.name, entry.incarnation, *address, now, entry.state, entry.reason, number)
        self._members[entry.name] = member
        if number >= 0:
            self._here[role][entry.name] = member
        if isinstance(entry, m.WorkerEntry) and entry.state != "joining":
            # Who is only about to count asks for that again.
            member.since, member.until = entry.since, entry.until
        if one is not None and is_back and member.is_expected:
            member.peer, member.request = one.peer, one.request
            member.state = "alive" if member.state == "away" else member.state
            self._by_peer[one.peer] = member
            self._silent.add(one.peer, now + self._plan.death_timeout)
            return
        member.connected = False
        if member.state == "away":
            self._away.add(member.name, now + self._plan.respawn_timeout)
        elif member.is_here:
            member.reason = "was not there when the scheduler was started again"
            self._parted.add(member.name, now)

    def _form(self, now: float) -> list[Effect]:
        """Give out the numbers, by name, and tell everybody: the cluster is complete."""
        for role in (Role.WORKER, Role.SERVER):
            for number, member in enumerate(sorted(self._of(role), key=lambda member: natural_order(member.name))):
                member.number = number
        for peer in self._by_peer:
            self._joining.discard(peer)
            self._silent.add(peer, now + self._plan.death_timeout)
        text = f"complete, workers: {self._plan.num_workers}, servers: {self._plan.num_servers}"
        effects: list[Effect] = [Log("info", text), *self._publish(now)]
        early, self._early = self._early, {}
        for one in early.values():
            effects += self._received(one.peer, one.request, one.message, now)
        return effects

    def _publish(self, now: float) -> list[Effect]:
        self._epoch += 1
        effects, gone = self._standbys.switch()
        if gone:
            effects += self._keeper.interrupted("a server has given its place to another one")
        hosted = self._standbys.host(self._epoch, now)
        workers = sorted(self._of(Role.WORKER), key=lambda member: member.number)
        servers = sorted(self._of(Role.SERVER), key=lambda member: member.number)
        view = m.View(
            self._epoch,
            tuple(m.WorkerEntry(w.number, w.name, w.incarnation, w.state, w.reason, w.since, w.until) for w in workers),
            tuple(self._standbys.entry(server) for server in servers),
            self._plan.heartbeat,
            self._plan.chunk_bytes,
            self._plan.split_bytes,
            self._plan.death_timeout,
            self._plan.on_worker_loss,
            self._keeper.due,
            self._plan.checkpoints.folder,
            self._plan.checkpoints.run,
            self._plan.checkpoints.resume,
            self._plan.replication,
            self._plan.num_workers if len(workers) > self._plan.num_workers else 0,
        )
        self._roster = Roster(view)
        self._view = view
        # Servers first: a worker that is quick to call should find that they know it.
        here = [one for one in (*servers, *self._standbys.others(), *workers) if one.is_here]
        effects += [Send(one.peer, 0, view) for one in here if one.connected]
        # Who has given its place to another one stops when it sees that.
        effects += [Send(peer, 0, view) for peer, _ in gone]
        effects += [Send(peer, request, m.Done()) for peer, request in gone if request]
        return effects + hosted + self._tell_keeper(now)

    def _tell_keeper(self, now: float) -> list[Effect]:
        """Tell who keeps checkpoints, and who lets workers in, over which connections the members are reached."""
        servers = sorted(self._of(Role.SERVER), key=lambda member: member.number)
        workers = sorted(self._of(Role.WORKER), key=lambda member: member.number)
        servers_here, workers_here = ([one.peer for one in some if one.is_here] for some in (servers, workers))
        told = self._keeper.viewed(servers_here, workers_here, self._roster, now)
        return told + self._tell_parties() if self._plan.max_workers or self._admissions.is_active else told

    def _tell_parties(self) -> list[Effect]:
        """Say who has to agree before another worker counts, or leaves: who is lost, or has gone, does not."""
        vacant, lost = self._vacant, self._roster.lost
        loss = self._roster.loss(lost, "a join") if lost else None
        servers = sorted(self._of(Role.SERVER), key=lambda member: member.number)
        workers = sorted(self._of(Role.WORKER), key=lambda member: member.number)
        there = [one for one in servers if one.is_here]
        there += [one for one in workers if one.state in {"alive", "away"} and one not in vacant]
        ranks = {worker.name: worker.number for worker in workers}
        parties = [Party(one.name, one.peer if one.connected else None, ranks.get(one.name)) for one in there]
        return self._admissions.viewed(parties, loss, stuck=bool(vacant))

    def _said(self, peer: Peer, message: Said, now: float) -> list[Effect]:
        if isinstance(message, m.View):
            return self._told(peer, message, now)
        if self._rebuilding is not None and isinstance(message, m.CheckpointPart | m.CheckpointClock):
            # Another scheduler has asked for that.
            return []
        if self._rebuilding is not None:
            # A refusal would look like nonsense to a node that does not know yet that it is not known.
            self._rebuilding.said.append((peer, message))
            return []
        member = self._by_peer.get(peer)
        if member is None or not self._epoch:
            raise MembershipError("only a member of the complete cluster can do this")
        if isinstance(message, m.StandbyReady | m.DropStandby):
            return self._told_of_standby(member, message, now)
        if isinstance(message, m.CheckpointClock):
            return self._keeper.answered(peer, message, now)
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
        return self._keeper.wrote(member.number, message, now) + self._end_if_over(now)

    def _told_of_standby(self, server: Member, message: m.StandbyReady | m.DropStandby, now: float) -> list[Effect]:
        if server.name not in self._here[Role.SERVER]:
            raise MembershipError("only a server that serves has a standby")
        if isinstance(message, m.StandbyReady):
            return self._publish(now) if self._standbys.ready(server, message) else []
        effects = self._standbys.dropped(server, message, now)
        return effects + self._publish(now) if effects else []

    # --- leaving and getting lost ---

    def _worker(self, peer: Peer) -> Member:
        member = self._by_peer.get(peer)
        if member is None or member.role is not Role.WORKER or not self._epoch:
            raise MembershipError("only a worker of the complete cluster can do this")
        return member

    def _leave_server(self, peer: Peer, request: int, now: float) -> list[Effect]:
        server = self._by_peer.get(peer)
        if server is None or server.role is not Role.SERVER or not self._epoch or self._over:
            raise MembershipError("only a server of the complete cluster can do this")
        return self._standbys.leave(server, request) + self._publish(now)

    def _leave(self, peer: Peer, request: int, now: float, *, early: bool) -> list[Effect]:
        member = self._worker(peer)
        others, least = len(self._others(member)), self._plan.min_workers
        early = early and self._plan.max_workers > 0
        state = state_of_leaver(member.state, early=early, others=others, least=least)
        reason = "left in good order"
        if state == "away":
            reason = f"{reason}; the job needs at least {least} workers"
            self._away.add(member.name, now + self._plan.respawn_timeout)
            member.until = 0
        self._drop(member, state, reason)
        effects: list[Effect] = [Send(peer, request, m.Done())]
        if state == "away":
            text = f"worker {member.name} is away: {reason}"
            effects.append(Log("warning", text, "worker_away", member.facts | {"reason": reason}))
        effects += self._admissions.forget(member.name) + self._publish(now)
        return effects + self._release() + self._end_if_over(now)

    def _others(self, member: Member) -> list[Member]:
        """Return the other workers for which rounds wait, and that may still come."""
        return [other for other in self._of(Role.WORKER) if other.state in {"alive", "away"} and other is not member]

    def _finish(self, peer: Peer, request: int, now: float) -> list[Effect]:
        self._worker(peer).state = "finished"
        done = self._remember([Send(peer, request, m.Done())])
        return [*done, *self._publish(now), *self._release()]

    def _arrive(self, peer: Peer, request: int, message: m.Barrier, now: float) -> list[Effect]:
        check_timeout(message.timeout)
        member = self._worker(peer)
        if member.state == "joining":
            # The others have met there long ago.
            return self._remember([Send(peer, request, m.Done())])
        self._barriers.arrive(peer, request, member.number, message, self._roster, now)
        return self._release()

    def _release(self) -> list[Effect]:
        return self._remember(self._barriers.release(self._roster))

    def _remember(self, answers: list[Effect]) -> list[Effect]:
        """Keep what members are answered, until they have had it for sure."""
        for answer in answers:
            assert isinstance(answer, Send | Refuse), "barriers do nothing else"
            answered = self._by_peer[answer.peer].answered
            answered[answer.request] = answer
            if len(answered) > MAX_ANSWERED:
                del answered[next(iter(answered))]
        return answers

    def _peer_lost(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        member = self._by_peer.get(peer)
        self._early.pop(peer, None)
        if self._rebuilding is not None:
            self._rebuilding.forget(peer)
        if member is None:
            return []
        reason = f"{reason}, last heard {now - member.heard:.1f} s before"
        if not self._epoch or self._over or not self._plan.reconnect_grace:
            return self._lose(member, reason, now)
        self._unbind(member)
        member.reason = reason
        grace = self._plan.reconnect_grace
        if self._attention.is_unsure(now):
            # It may have given up this scheduler, which did not run for a while.
            grace = max(grace, self._time_to_come_back)
        self._parted.add(member.name, now + grace)
        return []

    def _unbind(self, member: Member) -> None:
        """Take out the connection of a member."""
        member.connected = False
        self._by_peer.pop(member.peer, None)
        self._silent.discard(member.peer)
        self._joining.discard(member.peer)
        self._barriers.forget_peer(member.peer)

    def _drop(self, member: Member, state: str, reason: str) -> None:
        member.state, member.reason = state, reason
        self._parted.discard(member.name)
        self._unbind(member)

    def _state_without(self, member: Member) -> str:
        """Return what becomes of a member that is gone."""
        if member.state == "alive" and (member.role is not Role.WORKER or not self._epoch or self._over):
            return "lost"
        mode, others, least = self._plan.on_worker_loss, len(self._others(member)), self._plan.min_workers
        return state_of_gone(member.state, on_worker_loss=mode, others=others, least=least)

    def _lose(self, member: Member, reason: str, now: float) -> list[Effect]:
        if member.role is Role.SERVER and self._epoch and not self._over:
            effects = self._standbys.lose(member, reason) + self._keeper.interrupted("a server is lost")
            return effects + self._publish(now) + self._release() + self._end_if_over(now)
        state = self._state_without(member)
        if state == "away":
            if self._plan.on_worker_loss == "shrink":
                reason = f"{reason}; the job needs at least {self._plan.min_workers} workers"
                member.until = 0
            self._away.add(member.name, now + self._plan.respawn_timeout)
        self._drop(member, state, reason)
        if self._over:
            # The servers were told to stop.
            return []
        text, event = f"{member.role} {member.name} is {member.state}: {reason}", f"{member.role}_{member.state}"
        effects = [Log("error", text, event, member.facts | {"reason": reason})]
        if not self._epoch:
            self._remove(member)
            return effects
        effects += self._admissions.forget(member.name) + self._publish(now)
        return effects + self._release() + self._end_if_over(now)

    def _end_if_over(self, now: float) -> list[Effect]:
        workers = self._of(Role.WORKER)
        if self._over or not self._epoch or any(worker.is_expected for worker in workers):
            return []
        if self._keeper.is_busy and not self._roster.lost:
            self._end_by = now + PATIENCE if self._end_by is None else self._end_by
            if now < self._end_by:
                return []
        self._over, self._end_by = True, None
        lost = [member.name for member in self._members.values() if member.state == "lost"]
        evicted = [member.name for member in self._members.values() if member.state == "evicted"]
        if not any(worker.state == "left" for worker in workers):
            lost += evicted
        reason = "all workers have left" + (f"; gone before: {', '.join(evicted)}" if evicted else "")
        if lost:
            reason = f"no worker is left; lost: {', '.join(lost)}"
        servers = [one for one in (*self._of(Role.SERVER), *self._standbys.others()) if one.state == "alive"]
        return [*(Send(server.peer, 0, m.Stop(reason)) for server in servers), Stop(reason, failed=bool(lost))]

    # --- time ---

    def _tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        # What is missing is the same for all that give up now, so it is read before the first is taken out.
        missing = self.missing
        for peer in self._joining.due(now):
            effects += self._give_up_join(self._by_peer[peer], missing, now)
        unsure = self._epoch > 0 and self._attention.is_unsure(now)
        for peer in self._silent.due(now):
            if peer not in self._by_peer:
                # It was lost with another node of its process.
                continue
            if unsure:
                self._silent.add(peer, now + self._plan.heartbeat)
                continue
            member = self._by_peer[peer]
            silence = now - member.heard
            text = f"no heartbeat for {silence:.1f} s"
            facts = member.facts | {"seconds": silence}
            said = Log("error", f"{member.role} {member.name}: {text}", "silent", facts)
            effects += [Disconnect(peer, "no heartbeat"), said, *self._lose(member, text, now)]
        for name in self._away.due(now):
            member = self._members[name]
            text = f"{member.reason}; nobody has taken its place within {self._plan.respawn_timeout:g} s"
            effects += self._lose(member, text, now)
        if self._rebuilding is not None and now >= self._rebuilding.beat_at:
            # Those who are back would take silence for a loss.
            self._rebuilding.beat_at = now + self._plan.heartbeat
            effects += [Send(one.peer, 0, m.Heartbeat()) for one in self._rebuilding.back.values()]
        if self._rebuilding is not None and now >= self._rebuilding.until:
            effects += self._rebuild(self._rebuilding, now)
        for name in self._parted.due(now):
            if name in self._members and self._members[name].is_here:
                member = self._members[name]
                effects += self._lose(member, f"{member.reason}, and it has not come back", now)
        ended, changed = self._standbys.tick(now)
        effects += ended + self._publish(now) if changed and not self._over else ended
        effects += self._remember(self._barriers.expire(self._roster, now)) + self._keeper.tick(now)
        effects += self._admissions.expire(self._roster, now)
        return effects if self._end_by is None else effects + self._end_if_over(now)

    def _give_up_join(self, member: Member, missing: str, now: float) -> list[Effect]:
        text = f"the cluster is not complete after {now - member.heard:.3g} s: missing {missing}"
        self._drop(member, "left", text)
        self._remove(member)
        said = Log("error", f"{member.name}: {text}", "join_timeout", member.facts | {"missing": missing})
        return [Refuse(member.peer, member.request, JoinTimeoutError(text)), said]

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert all(self._members[member.name] is member for member in self._by_peer.values())
        assert all(member.is_here and member.connected for member in self._by_peer.values())
        parted = {one.name for one in self._members.values() if one.is_here and not one.connected}
        assert self._parted.holds(parted)
        assert self._away.holds({member.name for member in self._members.values() if member.state == "away"})
        assert sum(map(len, self._here.values())) + len(self._standbys.others()) == len(self._members)
        for role, here in self._here.items():
            assert all(self._members[name] is member and member.role is role for name, member in here.items())
        if not self._over:
            self._standbys.validate()
        self._barriers.validate()
        self._admissions.validate()
        joins = self._epoch and self._plan.max_workers
        assert joins or len(self._of(Role.WORKER)) <= self._plan.num_workers
        assert len(self._of(Role.SERVER)) <= self._plan.num_servers
        if self._epoch:
            assert [w.number for w in sorted(self._of(Role.WORKER), key=lambda w: w.number)] == list(
                range(max(self._plan.num_workers, len(self._of(Role.WORKER))))
            )
