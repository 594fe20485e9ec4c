"""Nodes that register: whether they are in, which place they get, and when the cluster is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import check_timeout
from aiokv.core.effects import Disconnect, Effect, Log, Refuse, Send
from aiokv.core.roster import EXPECTED, natural_order
from aiokv.core.scheduler.members import Member
from aiokv.core.scheduler.places import Place
from aiokv.core.scheduler.rebuilding import Registration
from aiokv.errors import ClusterFullError, JoinTimeoutError, MembershipError, StaleEpochError
from aiokv.types import Role

if TYPE_CHECKING:
    from aiokv.core.scheduler.cluster import Cluster
    from aiokv.core.scheduler.losses import Losses
    from aiokv.core.scheduler.rebuilding import Rebuild, Receive
    from aiokv.core.scheduler.turnover import Turnover
    from aiokv.types import Peer
    from aiokv.wire import messages as m


class Registrations:
    """The part of a `Membership` that deals with nodes which want to be members, or to be reached in another way.

    Args:
        cluster: whose members they are to be.
        losses: deals with those in whose place others come.
        turnover: takes workers in when the cluster is complete.
        rebuild: takes nodes in that know of a cluster of which this scheduler does not.
        receive: takes in a message as if it came now.
    """

    def __init__(
        self, cluster: Cluster, losses: Losses, turnover: Turnover, rebuild: Rebuild, receive: Receive
    ) -> None:
        self._cluster = cluster
        self._plan = cluster.plan
        self._members = cluster.members
        self._losses = losses
        self._turnover = turnover
        self._rebuild = rebuild
        self._receive = receive
        self._early: dict[Peer, Registration] = {}
        """Workers that want to join, and have come before the cluster is complete."""
        self._is_unsettled = False
        """Whether all were there before it may be decided which cluster it is."""

    def deadline(self) -> float | None:
        """Return the time at which `tick` wants to be called."""
        return self._cluster.settled if self._is_unsettled else None

    @property
    def unsettled(self) -> str:
        """For what a cluster waits of which all are there, in words."""
        return f"no member of an earlier cluster comes back within {self._plan.settling:g} s"

    def register(self, peer: Peer, request: int, message: m.Register, now: float) -> list[Effect]:
        """Let a node in.

        Raises:
            ClusterFullError: there is no place for it.
            MembershipError: it can't be a member over this connection.
            StaleEpochError: the cluster has gone on without it.
        """
        check_timeout(message.timeout)
        wanted = {Role.WORKER: self._plan.num_workers, Role.SERVER: self._plan.num_servers}.get(message.role)
        if wanted is None or peer in self._members.by_peer:
            raise MembershipError(f"{message.name!r} can't register as a {message.role} on this connection")
        index = self._index_of(message)
        if index is not None:
            return self._begin_place(peer, request, message, index, now)
        if not self._cluster.epoch and (message.epoch or message.standby >= 0 or self._rebuild.is_under_way):
            early, self._early, self._is_unsettled = self._early, {}, False
            return self._rebuild.come_back(Registration(peer, request, message, now), list(early.values()), now)
        if message.epoch and message.founder != self._cluster.founder:
            raise StaleEpochError(
                f"{message.name} belongs to an earlier cluster: it was not back when this one began without it"
            )
        effects = self._make_room(message, now)
        known = self._members.by_name.get(message.name)
        if known is not None and not self._cluster.epoch and _is_of(known, message):
            effects += self._leave_connection(known)
        elif known is not None:
            return effects + self._return(known, peer, request, message, now)
        if self._cluster.epoch and message.role is Role.WORKER and self._plan.max_workers:
            return self._turnover.take_in(None, peer, request, message, now)
        return effects + self._add(peer, request, message, wanted, now)

    def _add(self, peer: Peer, request: int, message: m.Register, wanted: int, now: float) -> list[Effect]:
        """Let a node in that is new here; so many of its role are `wanted`."""
        is_more = self._cluster.first_places.count_others(message.role) >= wanted
        is_worker = message.role is Role.WORKER
        if is_more and is_worker and len(self._early) < self._plan.max_workers - wanted:
            # It joins as soon as all are there who are to be there from the beginning.
            self._early[peer] = Registration(peer, request, message, now)
            missing = self._cluster.missing
            return [Log("info", f"{message.role} {message.name} is here, too; waiting for {missing}")]
        takes_more = not is_worker and (message.standby >= 0 or self._cluster.standbys.takes_spares)
        if is_more and not takes_more:
            text = f"all {wanted} places for a {message.role} are taken; {message.name!r} is one too many"
            raise ClusterFullError(text, expected=wanted)
        if is_more:
            self._cluster.standbys.check(message)
        member = Member(peer, request, message.role, message.name, message.incarnation, message.host, message.port, now)
        self._members.add(member, counts=not is_more and not self._cluster.epoch)
        if self._cluster.epoch:
            self._members.bind(member, now + self._plan.death_timeout)
            return self._cluster.standbys.joined(member) + self._cluster.publish(now)
        return self._wait(member, message.timeout, now)

    def _wait(self, member: Member, timeout: float, now: float) -> list[Effect]:
        """Let a node wait until the cluster is complete, or let it be so."""
        self._members.joining.add(member.peer, now + timeout)
        self._members.bind(member, now + timeout + self._plan.death_timeout)
        asked = self._cluster.first_places.host() or self._cluster.first_places.remind(member)
        missing = self._cluster.missing
        if not missing and now >= self._cluster.settled:
            return self._form(now)
        self._is_unsettled = not missing
        waits = f"waiting for {missing}" if missing else f"waiting until {self.unsettled}"
        return [Log("info", f"{member.role} {member.name} is here; {waits}"), *asked]

    def _form(self, now: float) -> list[Effect]:
        """Give out the numbers, by name, and tell everybody: the cluster is complete."""
        workers = sorted(self._members.workers.values(), key=lambda member: natural_order(member.name))
        for number, member in enumerate(workers):
            member.number = number
        for server, number in self._cluster.first_places.numbers():
            server.number = number
        for peer in self._members.by_peer:
            self._members.joining.discard(peer)
            self._members.silent.add(peer, now + self._plan.death_timeout)
        text = f"complete, workers: {self._plan.num_workers}, servers: {self._plan.num_servers}"
        effects: list[Effect] = [Log("info", text), *self._cluster.publish(now)]
        early, self._early = self._early, {}
        for one in early.values():
            effects += self._receive(one.peer, one.request, one.message, now)
        return effects

    def _leave_connection(self, known: Member) -> list[Effect]:
        """Forget a node that waits for the cluster to be complete, over another connection from now on."""
        self._members.drop(known, "left", "")
        self._members.remove(known)
        return [Disconnect(known.peer, "its process has connected again")]

    # --- places of the beginning ---

    def _index_of(self, message: m.Register) -> int | None:
        """Return the index of the place for which a node was started; None: it is another one.

        Raises:
            StaleEpochError: it is needed no longer.
        """
        if self._cluster.epoch or message.epoch or self._rebuild.is_under_way:
            # What an earlier scheduler has asked for may have the same name.
            return None
        if self._cluster.first_places.is_given_up(message.name):
            raise StaleEpochError(f"{message.name} is no longer wanted as server {message.standby}")
        return self._cluster.first_places.index_of(message.name)

    def _begin_place(self, peer: Peer, request: int, message: m.Register, index: int, now: float) -> list[Effect]:
        """Let a node in that was started for a place."""
        known = self._members.by_name.get(message.name)
        effects = [] if known is None else self._leave_connection(known)
        head = (peer, request, Role.SERVER, message.name, message.incarnation, message.host, message.port, now)
        member = Member(*head)
        self._members.add(member, counts=True)
        self._cluster.first_places.joined(member)
        return effects + self._wait(member, message.timeout, now)

    # --- names that are known ---

    def _make_room(self, message: m.Register, now: float) -> list[Effect]:
        """Do without a server whose name a later process has, so that this one can be of use."""
        known = self._members.by_name.get(message.name)
        if known is None or not self._cluster.epoch or message.epoch or message.incarnation <= known.incarnation:
            return []
        if message.role is not Role.SERVER or not self._cluster.standbys.can_do_without(known):
            return []
        effects: list[Effect] = [Disconnect(known.peer, "a later process has its name")] if known.connected else []
        return effects + self._losses.lose(known, "a later process has its name", now)

    def _return(self, member: Member, peer: Peer, request: int, message: m.Register, now: float) -> list[Effect]:
        """Let a member go on over another connection, or another process take its place."""
        is_same = self._is_same(member, message)
        if not is_same and self._turnover.place_of(member) is not Place.SUCCESSION:
            return self._turnover.take_in(member, peer, request, message, now)
        label = _label(member)
        if message.incarnation < member.incarnation:
            raise StaleEpochError(f"{label} is a later process by now", ranks=[member.number])
        effects: list[Effect] = []
        if member.connected:
            effects.append(Disconnect(member.peer, "its process, or another one, has connected again"))
        publishes = not is_same or member.state == "away"
        self._members.drop(member, member.state if is_same else "alive", "")
        self._members.away.discard(member.name)
        if not is_same:
            member.answered.clear()
            effects += self._cluster.admissions.forget(member.name)
        if member.state == "away":
            member.state = "alive"
        member.peer, member.request, member.incarnation, member.heard = peer, 0, message.incarnation, now
        self._members.bind(member, now + self._plan.death_timeout)
        how = "is back" if is_same else "is back, as another process"
        effects.append(Log("warning", f"{label} {how}", f"{member.role}_back", member.facts))
        if member.name in self._members.servers:
            effects += self._cluster.keeper.interrupted()
        effects += self._cluster.standbys.remind(member)
        if publishes or self._cluster.standbys.is_wanting:
            return effects + self._cluster.publish(now)
        assert self._cluster.view is not None, "the cluster is complete"
        return [*effects, Send(peer, 0, self._cluster.view), *self._cluster.tell_keepers(now)]

    def _is_same(self, member: Member, message: m.Register) -> bool:
        """Tell whether it is the process that was there before; raise an error if nobody may come in its place."""
        taken = f"the name {member.name!r} is taken by a member that is {member.state}"
        if member.role is not message.role or not self._cluster.epoch:
            raise ClusterFullError(taken, got=member.name)
        is_same = message.incarnation == member.incarnation
        if is_same and member.state not in EXPECTED:
            ranks = {"ranks": [member.number]} if member.role is Role.WORKER else {}
            raise StaleEpochError(f"{_label(member)} is {member.state}: {member.reason}", **ranks)
        if not is_same and member.role is Role.SERVER:
            raise ClusterFullError(taken, got=member.name)
        return is_same

    # --- who does not stay ---

    def forget(self, peer: Peer) -> None:
        """Take out a node whose connection has ended."""
        self._early.pop(peer, None)

    def tick(self, now: float) -> list[Effect]:
        """Let the cluster begin when all were there before it might, and refuse those that have waited too long."""
        effects: list[Effect] = []
        if self._is_unsettled and now >= self._cluster.settled:
            self._is_unsettled = False
            # Somebody may have gone, or come that knows of another cluster.
            effects += [] if self._cluster.missing else self._form(now)
        return effects + self._give_up(now)

    def _give_up(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        # What is missing is the same for all that give up now, so it is read before the first is taken out.
        missing = self._cluster.missing
        for peer in self._members.joining.due(now):
            if peer not in self._members.by_peer:
                # It was for a place, and its process has given up.
                continue
            member = self._members.by_peer[peer]
            awaited = f"missing {missing}" if missing else f"it waits until {self.unsettled}"
            text = f"the cluster is not complete after {now - member.heard:.3g} s: {awaited}"
            self._members.drop(member, "left", text)
            self._members.remove(member)
            said = Log("error", f"{member.name}: {text}", "join_timeout", member.facts | {"missing": missing})
            effects += [Refuse(member.peer, member.request, JoinTimeoutError(text)), said]
            effects += self._cluster.first_places.interrupted(member)
        return effects


def _is_of(member: Member, message: m.Register) -> bool:
    """Tell whether it is the same process that registers."""
    return (message.role, message.incarnation) == (member.role, member.incarnation)


def _label(member: Member) -> str:
    return f"rank {member.number} ({member.name})" if member.role is Role.WORKER else member.name
