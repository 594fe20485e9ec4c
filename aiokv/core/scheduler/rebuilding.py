"""A scheduler that was started again: it learns from the nodes that come back what the cluster was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.deadlines import earliest
from aiokv.core.effects import Disconnect, Effect, Log, Refuse, Send
from aiokv.core.records import Record, field
from aiokv.core.roster import EXPECTED, standbys_of
from aiokv.core.scheduler.members import Member
from aiokv.errors import MembershipError, OtherSettingsError, StaleEpochError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.scheduler.cluster import Cluster
    from aiokv.types import Incarnation, Peer

UNSEEN = 1000
"""So many epochs are left out, and as many for every second before: schedulers before may have sent newer views than
anybody who is back knows of, and there must not be two of one epoch."""

FLAPPING = 60.0
"""Seconds from the beginning for which those whose connections have ended again have their time to come back anew."""

Receive = Callable[["Peer", int, m.Message, float], list[Effect]]
"""Takes in a message over a connection, with its request id, as if it came now."""


class Registration(Record, eq=False):
    """What a node has said when it registered, and when that was."""

    peer: Peer
    request: int
    message: m.Register
    heard: float

    @property
    def until(self) -> float:
        """Until when it waits for an answer, if it wants to join."""
        return self.heard + self.message.timeout

    def left(self, now: float) -> m.Register:
        """Return the same with the time that is left of what it waits for its place."""
        return structs.replace(self.message, timeout=self.until - now)


class Rebuilding(Record, eq=False):
    """What is known of a cluster whose nodes come back, until it goes on.

    `until` is when those who are not back are given up, `last` the latest that this can become. `beat_at` is when the
    others hear from the scheduler, and `settles_at` from when on it may go on because all are back. `back` are nodes of
    the cluster that `founder` has formed, by name; when all who were back are gone, `deserted` is until when they may
    come again. `later` are others that want to join. `asked` is the newest epoch of whose view somebody was asked, over
    the connection `teller`, and `view` the newest that has come. `said` is what nodes have told meanwhile besides.
    `refusal` is why this scheduler can't go on with what they have told, since `refused_at`: then it waits until it is
    ended, or they are gone.
    """

    until: float
    last: float
    beat_at: float
    settles_at: float | None = None
    founder: Incarnation = 0
    deserted: float | None = None
    back: dict[str, Registration] = field(default_factory=dict)
    later: list[Registration] = field(default_factory=list)
    asked: int = 0
    teller: Peer = -1
    view: m.View | None = None
    said: list[tuple[Peer, m.Message]] = field(default_factory=list)
    refusal: OtherSettingsError | None = None
    refused_at: float = 0.0

    @property
    def ends_at(self) -> float | None:
        """When it is over, whoever is back then."""
        if self.deserted is None and self.refusal is not None:
            return None
        return self.until if self.deserted is None else self.deserted

    def is_over(self, now: float) -> bool:
        """Tell whether it is time to go on."""
        return self.ends_at is not None and now >= self.ends_at

    @property
    def patience(self) -> float | None:
        """When the first of those who want to join has waited for long enough, if it is in vain."""
        return None if self.refusal is None else min((one.until for one in self.later), default=None)

    def give_up(self, now: float) -> list[Registration]:
        """Take out those who have waited so long."""
        late = [one for one in self.later if self.refusal is not None and now >= one.until]
        self.later = [one for one in self.later if one not in late]
        return late

    def forget(self, peer: Peer, until: float) -> None:
        """Take out a node whose connection has ended, which has until some time to come back again."""
        if any(one.peer == peer for one in self.back.values()):
            self.until = max(self.until, min(until, self.last))
        self.back = {name: one for name, one in self.back.items() if one.peer != peer}
        self.later = [one for one in self.later if one.peer != peer]

    def ask(self, candidates: Iterable[Registration]) -> list[Effect]:
        """Ask for the newest view that any of some nodes knows, unless that was done."""
        newest = max(candidates, key=lambda one: one.message.epoch, default=None)
        if newest is None or newest.message.epoch <= self.asked:
            return []
        self.asked, self.teller = newest.message.epoch, newest.peer
        return [Send(newest.peer, 0, m.GetView())]

    def ask_others(self, peer: Peer) -> list[Effect]:
        """Ask others if a connection has ended over which no answer has come."""
        known = 0 if self.view is None else self.view.epoch
        if peer != self.teller or known >= self.asked:
            return []
        self.asked = known
        return self.ask(self.back.values())

    def recognise(self) -> None:
        """Count those as back that are in the view, although it had not come to them when the scheduler ended."""
        if self.view is None:
            return
        known = {(worker.name, worker.incarnation) for worker in self.view.workers if worker.state in EXPECTED}
        known |= {(server.name, server.incarnation) for server in self.view.servers if server.state in EXPECTED}
        standbys = [standby for entry in self.view.servers for standby in standbys_of(entry)]
        known |= {(standby.name, standby.incarnation) for standby in standbys if standby.state != "expected"}
        for one in list(self.later):
            name = one.message.name
            if (name, one.message.incarnation) in known and name not in self.back:
                self.later.remove(one)
                self.back[name] = one

    @property
    def is_whole(self) -> bool:
        """Whether all are back that were there in the newest epoch that anybody knows."""
        if self.view is None or self.view.epoch < self.asked:
            return False
        here = [entry.name for entry in self.view.workers if entry.state in {"alive", "finished", "joining"}]
        here += [entry.name for entry in self.view.servers if entry.state == "alive"]
        standbys = [standby for entry in self.view.servers for standby in standbys_of(entry)]
        here += [standby.name for standby in standbys if standby.state != "expected"]
        return all(name in self.back for name in here)


class Rebuild:
    """The part of a `Membership` that deals with nodes which know of a cluster of which this scheduler does not.

    Args:
        cluster: is as it was before when this is done.
        receive: takes in a message as if it came now.
    """

    def __init__(self, cluster: Cluster, receive: Receive) -> None:
        self._cluster = cluster
        self._plan = cluster.plan
        self._members = cluster.members
        self._receive = receive
        self._rebuilding: Rebuilding | None = None
        """Is there while nodes come back."""

    @property
    def is_under_way(self) -> bool:
        """Whether it is not known yet which cluster it is."""
        return self._rebuilding is not None

    def deadline(self) -> float | None:
        """Return the time at which `tick` wants to be called."""
        one = self._rebuilding
        return None if one is None else earliest(one.ends_at, one.beat_at, one.settles_at, one.patience)

    # --- who comes back ---

    def come_back(self, one: Registration, early: list[Registration], now: float) -> list[Effect]:
        """Take note of a node that registers while the cluster is rebuilt, or begin with that.

        Args:
            one: what it has said.
            early: others that want to join, and have come before.
            now: the time.

        Raises:
            StaleEpochError: it is one of an earlier cluster than others that are back.
        """
        rebuilding = self._rebuilding or self._begin(now)
        rebuilding.later += early
        if not one.message.epoch:
            rebuilding.later.append(one)
            return self._go_on_or_refuse(rebuilding, [], now)
        if one.message.founder < rebuilding.founder:
            raise StaleEpochError(f"{one.message.name} belongs to an earlier cluster than others that are back")
        effects = self._begin_with(rebuilding, one) if one.message.founder > rebuilding.founder else []
        rebuilding.deserted = None
        rebuilding.back[one.message.name] = one
        text, facts = f"{one.message.name} comes back from epoch {one.message.epoch}", {"node": one.message.name}
        effects.append(Log("warning", text, f"{one.message.role}_back", facts))
        effects += rebuilding.ask([one])
        return effects + self._go_on_or_refuse(rebuilding, [one], now)

    def _begin(self, now: float) -> Rebuilding:
        settled = self._cluster.settled
        until, beat_at = max(settled, now + self._plan.time_to_come_back), now + self._plan.heartbeat
        last = max(until, now + FLAPPING)
        rebuilding = self._rebuilding = Rebuilding(until, last, beat_at, settled if settled > now else None)
        places = self._cluster.first_places
        for member in list(self._members.by_name.values()):
            # They want to join a cluster that is there already. What was asked for may have been there before, too.
            head = (member.role, member.name, member.incarnation, member.host, member.port)
            index = places.index_of(member.name)
            left = self._members.joining[member.peer] - member.heard
            message = m.Register(*head, left, standby=-1 if index is None else index)
            rebuilding.later.append(Registration(member.peer, member.request, message, member.heard))
            self._members.drop(member, "left", "")
            self._members.remove(member)
        places.forget()
        return rebuilding

    def _begin_with(self, rebuilding: Rebuilding, one: Registration) -> list[Effect]:
        """Go on with a later cluster than the one of which nodes are back."""
        text = f"an earlier cluster than that of {one.message.name}, which is back, too"
        earlier, rebuilding.back = rebuilding.back, {}
        rebuilding.founder, rebuilding.asked, rebuilding.view = one.message.founder, 0, None
        rebuilding.refusal = None
        return [
            Refuse(each.peer, each.request, StaleEpochError(f"{name} belongs to {text}"))
            for name, each in earlier.items()
        ]

    def told(self, peer: Peer, view: m.View, now: float) -> list[Effect]:
        """Take in what a node that has come back says of the cluster; nobody else is believed.

        Raises:
            MembershipError: it is somebody else.
        """
        rebuilding = self._rebuilding
        if rebuilding is None and peer in self._members.by_peer:
            # The answer is no longer needed.
            return []
        if rebuilding is None or all(one.peer != peer for one in rebuilding.back.values()):
            raise MembershipError("only a node that has come back can say what the cluster was")
        if rebuilding.view is None or view.epoch > rebuilding.view.epoch:
            rebuilding.view = view
        return self._go_on_or_refuse(rebuilding, [], now)

    def keep(self, peer: Peer, message: m.Message) -> None:
        """Keep what a node says meanwhile, until it is known which cluster it is."""
        assert self._rebuilding is not None, "it is under way"
        if self._rebuilding.refusal is None:
            self._rebuilding.said.append((peer, message))

    def forget(self, peer: Peer, now: float) -> list[Effect]:
        """Take out a node whose connection has ended; wait for the others as long as somebody knows of them."""
        rebuilding = self._rebuilding
        if rebuilding is None:
            return []
        known = bool(rebuilding.back)
        rebuilding.forget(peer, now + self._plan.time_to_come_back)
        if not known or rebuilding.back:
            return rebuilding.ask_others(peer)
        # It may only have lost its connection.
        rebuilding.deserted = now + self._plan.settling
        return self.tick(now)

    def tick(self, now: float) -> list[Effect]:
        """Let those hear from the scheduler that are back, and go on when the time of the others is over."""
        rebuilding, effects = self._rebuilding, list[Effect]()
        if rebuilding is None:
            return effects
        if now >= rebuilding.beat_at:
            # Those who are back would take silence for a loss.
            rebuilding.beat_at = now + self._plan.heartbeat
            effects += [Send(one.peer, 0, m.Heartbeat()) for one in rebuilding.back.values()]
        if rebuilding.settles_at is not None and now >= rebuilding.settles_at:
            rebuilding.settles_at = None
            effects += self._go_on_or_refuse(rebuilding, [], now)
        effects += self._go_on_or_refuse(rebuilding, rebuilding.give_up(now), now) if rebuilding.refusal else []
        return effects + self._go_on(rebuilding, now) if self.is_under_way and rebuilding.is_over(now) else effects

    def waiting(self, now: float) -> list[m.WaitingCall]:
        """Return what is said of a cluster that can't go on."""
        one = self._rebuilding
        if one is None or one.refusal is None:
            return []
        what = f"going on with the cluster of epoch {one.asked}"
        return [m.WaitingCall("the scheduler", what, one.refusal.message, seconds=max(0.0, now - one.refused_at))]

    # --- the cluster as it was ---

    def _go_on_or_refuse(self, rebuilding: Rebuilding, asking: list[Registration], now: float) -> list[Effect]:
        """Go on if all are back, or tell those of the cluster who ask why that can't be."""
        rebuilding.recognise()
        if rebuilding.refusal is not None:
            return [Refuse(one.peer, one.request, rebuilding.refusal) for one in asking]
        return self._go_on(rebuilding, now) if rebuilding.is_whole and rebuilding.settles_at is None else []

    def _go_on(self, rebuilding: Rebuilding, now: float) -> list[Effect]:
        """Go on with the cluster as it was: who is not back is lost."""
        view = rebuilding.view
        refusal = self._refusal(view) if rebuilding.back and view is not None else None
        if refusal is not None:
            return self._refuse(rebuilding, refusal, now)
        self._rebuilding = None
        if not rebuilding.back:
            return self._make_another(rebuilding.later, now)
        if view is None:
            reason = "nobody has told what the cluster was"
            said = Log("error", reason, "not_rebuilt", {"reason": reason})
            return [said, *(Disconnect(one.peer, reason) for one in (*rebuilding.back.values(), *rebuilding.later))]
        self._restore(rebuilding, view, now)
        text = f"the scheduler was started again, goes on from epoch {view.epoch}; back: {', '.join(rebuilding.back)}"
        others = [one for name, one in rebuilding.back.items() if name not in self._members.by_name]
        facts = {"epoch": view.epoch, "back": list(rebuilding.back)}
        effects: list[Effect] = [Log("warning", text, "rebuilt", facts), *self._cluster.publish(now)]
        effects += self._join_now([*others, *rebuilding.later], now)
        for peer, message in rebuilding.said:
            if peer in self._members.by_peer:
                effects += self._receive(peer, 0, message, now)
        # The last worker may have left just before the scheduler ended.
        return effects + self._cluster.end_if_over(now)

    def _refuse(self, rebuilding: Rebuilding, refusal: OtherSettingsError, now: float) -> list[Effect]:
        """Tell who is back that only another scheduler can go on with the cluster, and wait until this one is ended."""
        rebuilding.refusal, rebuilding.refused_at = refusal, now
        said = Log("error", refusal.message, "not_rebuilt", {"reason": refusal.message, **refusal.details})
        return [said, *self._go_on_or_refuse(rebuilding, list(rebuilding.back.values()), now)]

    def _refusal(self, view: m.View) -> OtherSettingsError | None:
        """Return why this scheduler can't go on with the cluster of a view, if that is so."""
        differences = self._plan.differences(view)
        if not differences:
            return None
        named = "; ".join(f"{name} = {here}, where the cluster has {there}" for name, there, here in differences)
        text = (
            f"this scheduler was started with other settings than the cluster that comes back: {named}; start it again "
            "with those of the cluster"
        )
        expected, got = [there for _, there, _ in differences], [here for _, _, here in differences]
        return OtherSettingsError(text, expected=expected, got=got)

    def _make_another(self, waiting: list[Registration], now: float) -> list[Effect]:
        """Let a cluster begin: all who knew of one have gone away again, or there was none that was complete."""
        effects: list[Effect] = []
        for one in waiting:
            if one.message.standby >= 0:
                name, index = one.message.name, one.message.standby
                self._cluster.first_places.pass_over(name)
                text = f"{name} is no longer wanted as server {index}: nobody is back who knows of a cluster"
                effects.append(Refuse(one.peer, one.request, StaleEpochError(text)))
        return effects + self._join_now([one for one in waiting if one.message.standby < 0], now)

    def _join_now(self, waiting: list[Registration], now: float) -> list[Effect]:
        """Look at those who have waited until it was known which cluster it is."""
        effects: list[Effect] = []
        for one in waiting:
            effects += self._receive(one.peer, one.request, one.left(now), now)
        return effects

    def _restore(self, rebuilding: Rebuilding, view: m.View, now: float) -> None:
        """Take over what a view says, and who is back."""
        for worker in view.workers:
            head = (-1, 0, Role.WORKER, worker.name, worker.incarnation, "", 0, now)
            member = Member(*head, worker.state, worker.reason, worker.rank, since=worker.since, until=worker.until)
            self._restore_member(rebuilding, member, now)
            if worker.state == "joining" and worker.since:
                patience = self._plan.death_timeout
                self._cluster.admissions.inherit(worker.name, worker.rank, worker.since, patience, now)
        for server in view.servers:
            head = (-1, 0, Role.SERVER, server.name, server.incarnation, server.host, server.port, now)
            self._restore_member(rebuilding, Member(*head, server.state, server.reason, server.index), now)
            self._cluster.standbys.restore(server, now)
            for standby in standbys_of(server):
                if standby.state != "expected":
                    head = (-1, 0, Role.SERVER, standby.name, standby.incarnation, standby.host, standby.port, now)
                    self._restore_member(rebuilding, Member(*head), now)
        self._cluster.founder = view.founder
        self._cluster.epoch = max(view.epoch + UNSEEN, int(UNSEEN * now))
        self._cluster.barriers.opened = view.barriers
        self._cluster.admissions.told = view.told
        self._cluster.keeper.restarted()

    def _restore_member(self, rebuilding: Rebuilding, member: Member, now: float) -> None:
        self._members.add(member, counts=member.number >= 0)
        one = rebuilding.back.get(member.name)
        if one is not None and one.message.incarnation == member.incarnation and member.is_expected:
            member.peer = one.peer
            member.state = "alive" if member.state == "away" else member.state
            self._members.bind(member, now + self._plan.death_timeout)
            return
        member.connected = False
        if member.state == "away":
            self._members.away.add(member.name, now + self._plan.respawn_timeout)
        elif member.is_here:
            member.reason = "was not there when the scheduler was started again"
            self._members.parted.add(member.name, now)
