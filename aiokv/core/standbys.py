"""Where the standbys of servers are, and which of them takes a lost server's place: the scheduler's decisions.

A standby is a node of its own in the process of another server, with which it comes and goes; so none is in the process
of the server whose parameters it holds. As in a ring, the standby of a server is in the next process that is there. It
takes the server's place only when it is ready, which the server itself has said: from then on nobody was answered
before the standby had the same.

Places change hands in the same way while all is well: all those of a process that wants to end, at once; and one of a
process that has more than another one, which came later. Where there is no standby one is made for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import Deadlines, earliest
from aiokv.core.effects import Disconnect, Effect, Log, Send
from aiokv.core.records import Record
from aiokv.core.roster import natural_order
from aiokv.errors import MembershipError, StaleEpochError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.member_table import MemberTable
    from aiokv.core.members import Member
    from aiokv.types import Peer

BALANCED = 2
"""A process that serves so many indices more than another one gives one of them to it."""


class Standby(Record, eq=False):
    """The node that has, or is to have, a copy of a server's parameters. The fields are those of a `StandbyEntry`."""

    name: str
    process: str
    state: str = "expected"


class Standbys:
    """The part of a `Membership` that deals with the nodes of servers: those that serve, standbys and spares.

    Args:
        replication: on how many servers every parameter is.
        elastic: whether processes may join when all indices are served.
        patience: seconds that a standby has to register, and that pass when one was no success.
        table: all nodes of the cluster.
    """

    def __init__(
        self,
        replication: int,
        elastic: bool,
        patience: float,
        table: MemberTable,
    ) -> None:
        self._replication = replication
        self.takes_spares = elastic or replication > 1
        """Whether a process of servers may join when all indices are served."""
        self._patience = patience
        self._members, self._servers = table.by_name, table.servers
        self._drop = table.drop
        self._of: dict[int, Standby] = {}
        self._processes: dict[str, str] = {}
        """The name of the node in whose process a node is, by its name; those in their own are not here."""
        self._expected: Deadlines[int] = Deadlines()
        """Indices whose standby has not registered yet."""
        self._resting: Deadlines[int] = Deadlines()
        """Indices whose last standby was no success: they get none for a while, or this would go on without a pause."""
        self._failed: dict[int, str] = {}
        """In which process that was."""
        self._leaving: dict[str, int] = {}
        """Processes that want to end, by the names of their nodes, and under which number they have asked."""
        self._moves: dict[int, str] = {}
        """Indices that are to go over to a process."""

    def deadline(self) -> float | None:
        """Return the time at which `tick` wants to be called."""
        return earliest(self._expected.next(), self._resting.next())

    def process_of(self, name: str) -> str:
        """Return the name of the node in whose process a node is."""
        return self._processes.get(name, name)

    def others(self) -> list[Member]:
        """Return the nodes of servers that serve nothing: standbys and spares."""
        return [one for one in self._members.values() if one.role is Role.SERVER and one.name not in self._servers]

    # --- what others are told ---

    def entry(self, server: Member) -> m.ServerEntry:
        """Return what a view says of a server, and of its standby."""
        facts = (server.number, server.name, server.incarnation, server.host, server.port, server.state, server.reason)
        process = self._processes.get(server.name, "")
        standby = self._of.get(server.number)
        if standby is None:
            return m.ServerEntry(*facts, process=process)
        entry, node = m.StandbyEntry(standby.name, standby.process), self._members.get(standby.name)
        if node is not None:
            entry.incarnation, entry.host, entry.port, entry.state = (
                node.incarnation,
                node.host,
                node.port,
                standby.state,
            )
        return m.ServerEntry(*facts, entry, process)

    def state_of(self, node: Member) -> str:
        """Return what people are told of a node's state."""
        if node.role is not Role.SERVER or node.name in self._servers:
            return node.state
        index = self._index_of(node.name)
        return "spare" if index is None else f"standby of {index}, {self._of[index].state}"

    # --- hosting ---

    @property
    def is_wanting(self) -> bool:
        """Whether a server has no standby although there is a process for it."""
        return bool(self._wanted())

    def host(self, epoch: int, now: float) -> list[Effect]:
        """Have standbys started for the servers that want one; their names are new in every epoch."""
        effects: list[Effect] = []
        for server, host in self._wanted():
            standby = Standby(f"{host.name}/{server.number}.{epoch}", host.name)
            self._of[server.number], self._processes[standby.name] = standby, host.name
            self._expected.add(server.number, now + self._patience)
            effects.append(Send(host.peer, 0, m.HostStandby(server.number, standby.name)))
        return effects

    def remind(self, host: Member) -> list[Effect]:
        """Ask a node that has connected again for what may have got lost with its connection."""
        mine = [(index, one) for index, one in self._of.items() if (one.process, one.state) == (host.name, "expected")]
        return [Send(host.peer, 0, m.HostStandby(index, one.name)) for index, one in mine]

    def _wanted(self) -> list[tuple[Member, Member]]:
        """Return the servers that want a standby, each with the node in whose process it is to be."""
        servers = sorted(self._servers.values(), key=lambda server: server.number)
        wanting = [one for one in servers if one.is_here and (self._replication > 1 or self._is_moving(one))]
        without = [one for one in wanting if one.number not in self._of and one.number not in self._resting]
        found = [(server, self._choose(server)) for server in without]
        return [(server, host) for server, host in found if host is not None]

    def _choose(self, server: Member) -> Member | None:
        """Return who has the next process of the ring; one in which the last standby failed is the last choice."""
        if server.number in self._moves:
            return self._members[self._moves[server.number]]
        own, failed = self.process_of(server.name), self._failed.get(server.number)

        def order(node: Member) -> tuple[bool, bool, list[tuple[int, int, str]]]:
            place = natural_order(node.name)
            return node.name == failed, place < natural_order(own), place

        return min((one for one in self._hosts() if one.name != own), key=order, default=None)

    def _hosts(self) -> list[Member]:
        """Return the nodes in whose processes standbys can be started."""
        nodes = [one for one in self._members.values() if one.role is Role.SERVER and one.name not in self._processes]
        return [one for one in nodes if one.is_here and one.connected and one.name not in self._leaving]

    def can_do_without(self, node: Member) -> bool:
        """Tell whether nothing is lost with a process that has a node of servers for itself."""
        if node.role is not Role.SERVER or node.name in self._processes or not node.is_here:
            return False
        standby = self._of.get(node.number)
        return node.name not in self._servers or (standby is not None and standby.state == "ready")

    # --- a standby's life ---

    def check(self, message: m.Register) -> None:
        """Check that a node which is new here may be one that serves nothing.

        Raises:
            StaleEpochError: it is a standby that nobody wants any longer, or another node has taken its place.
        """
        if message.standby >= 0:
            standby = self._of.get(message.standby)
            if standby is None or standby.name != message.name:
                raise StaleEpochError(f"{message.name} is no longer wanted as a standby of server {message.standby}")
        elif message.epoch and message.number >= 0:
            raise StaleEpochError(f"{message.name} was lost; another one is server {message.number} by now")

    def joined(self, node: Member) -> list[Effect]:
        """Take note that a standby has registered, or a spare."""
        index = self._index_of(node.name)
        if index is None:
            return [Log("info", f"server {node.name} is here as a spare")]
        self._expected.discard(index)
        self._of[index].state = "filling"
        return []

    def ready(self, server: Member, message: m.StandbyReady) -> bool:
        """Take note that a server has filled its standby; tell whether this is news."""
        standby = self._standby_of(server, message)
        if standby is None or standby.state != "filling":
            return False
        standby.state = "ready"
        self._failed.pop(message.index, None)
        return True

    def dropped(self, server: Member, message: m.DropStandby, now: float) -> list[Effect]:
        """Do without a standby that its server can't reach; return nothing if that is no news."""
        standby = self._standby_of(server, message)
        if standby is None:
            return []
        return self._fail(message.index, standby, f"server {message.index} can't reach it", now)

    def _standby_of(self, server: Member, message: m.StandbyReady | m.DropStandby) -> Standby | None:
        """Return the standby that a message is about; None: it is one of earlier times."""
        standby = self._of.get(message.index)
        is_it = standby is not None and (server.number, standby.name) == (message.index, message.name)
        return standby if is_it else None

    def _fail(self, index: int, standby: Standby, reason: str, now: float) -> list[Effect]:
        self._moves.pop(index, None)
        self._resting.add(index, now + self._patience)
        self._failed[index] = standby.process
        text = f"server {index} has no standby for now; {standby.name}: {reason}"
        facts = {"server": index, "standby": standby.name}
        return [Log("warning", text, "standby_dropped", facts), *self._end(index, reason)]

    def _end(self, index: int, reason: str) -> list[Effect]:
        """Take out a standby, and let its node end."""
        standby = self._of.pop(index)
        self._expected.discard(index)
        del self._processes[standby.name]
        node = self._members.pop(standby.name, None)
        if node is None:
            return []
        ends: list[Effect] = [Send(node.peer, 0, m.Stop(reason))] if node.connected else []
        self._drop(node, "left", reason)
        return ends

    def _index_of(self, name: str) -> int | None:
        """Return the index whose standby a node is."""
        return next((index for index, standby in self._of.items() if standby.name == name), None)

    # --- places that change hands ---

    def _is_moving(self, server: Member) -> bool:
        return server.number in self._moves or self.process_of(server.name) in self._leaving

    def leave(self, node: Member, request: int) -> list[Effect]:
        """Begin to do without a process.

        Raises:
            MembershipError: there is no other one that could go on with what it serves.
        """
        if node.name in self._processes:
            raise MembershipError(f"{node.name} can't leave alone; {self._processes[node.name]} stands for its process")
        if not any(one is not node for one in self._hosts()):
            raise MembershipError(f"{node.name} can't leave: there is no other process of servers", got=node.name)
        self._leaving[node.name] = request
        self._moves = {index: to for index, to in self._moves.items() if to != node.name}
        there = [index for index, standby in self._of.items() if standby.process == node.name]
        return [effect for index in there for effect in self._end(index, f"{node.name} leaves")]

    def _balance(self) -> list[Effect]:
        """Begin to move an index from the process that has most to the one that has fewest, when all is well."""
        servers, hosts = list(self._servers.values()), self._hosts()
        # A connection that has ended may be the first sign of a loss, and what moves has no other copy for a while.
        is_well = all(one.is_here and one.connected for one in (*servers, *self.others()))
        is_well = is_well and (self._replication == 1 or all(self._is_ready(one.number) for one in servers))
        if not self.takes_spares or not hosts or not is_well or self._moves or self._leaving:
            return []
        places = [self.process_of(one.name) for one in servers]
        few = min(hosts, key=lambda one: (places.count(one.name), natural_order(one.name))).name
        many = max(places, key=lambda name: (places.count(name), natural_order(name)))
        if places.count(many) - places.count(few) < BALANCED:
            return []
        # A node that stands for its process stays: with it the process would end.
        found = [one for one in servers if self._processes.get(one.name) == many]
        moved = max(found, key=lambda one: (self._is_in(one.number, few), one.number))
        self._moves[moved.number] = few
        if moved.number in self._of and not self._is_in(moved.number, few):
            return self._end(moved.number, f"server {moved.number} is to move to {few}")
        return []

    def _is_ready(self, index: int) -> bool:
        return index in self._of and self._of[index].state == "ready"

    def _is_in(self, index: int, process: str) -> bool:
        return index in self._of and self._of[index].process == process

    def switch(self) -> tuple[list[Effect], list[tuple[Peer, int]]]:
        """Let places change hands for which that is prepared.

        Returns:
            What is to be done, and the connections of the nodes that serve nothing any longer, with the number under
            which they have asked for that, 0 if they have not.
        """
        effects = self._balance()
        gone: list[tuple[Peer, int]] = []
        for index, process in list(self._moves.items()):
            if self._is_ready(index) and self._is_in(index, process):
                (server,) = [one for one in self._servers.values() if one.number == index]
                gone.append((server.peer, 0))
                effects += self._replace(server)
                self._drop(server, "left", f"{process} serves its part of the keys by now")
        for name, request in list(self._leaving.items()):
            places = [one for one in self._servers.values() if self.process_of(one.name) == name]
            if not all(self._is_ready(one.number) for one in places):
                continue
            node = self._members[name]
            gone += [(one.peer, 0) for one in places if one is not node] + [(node.peer, request)]
            for one in places:
                effects += self._replace(one)
            del self._leaving[name]
            self._members.pop(name, None)
            for one in {id(one): one for one in (*places, node)}.values():
                self._drop(one, "left", "left in good order")
        return effects, gone

    # --- getting lost ---

    def lose(self, lost: Member, reason: str) -> list[Effect]:
        """Do without a node, and without all others of its process; standbys that are ready take their places."""
        siblings = [one for one in self._members.values() if self._processes.get(one.name) == lost.name]
        nodes = [lost, *(one for one in siblings if one.is_here)]
        effects: list[Effect] = []
        for node in nodes:
            why = reason if node is lost else f"the process of {lost.name} is gone: {reason}"
            if node.connected and node is not lost:
                effects.append(Disconnect(node.peer, why))
            self._drop(node, "lost", why)
            self._leaving.pop(node.name, None)
            text, facts = f"{node.role} {node.name} is lost: {why}", node.facts | {"reason": why}
            effects.append(Log("error", text, "server_lost", facts))
        for index, standby in list(self._of.items()):
            # Others that take a place would be wanted again at once.
            if lost.name in {standby.name, standby.process}:
                del self._of[index], self._processes[standby.name]
                self._expected.discard(index)
        self._moves = {index: to for index, to in self._moves.items() if to != lost.name}
        for node in nodes:
            effects += self._do_without(node)
        return effects

    def _do_without(self, node: Member) -> list[Effect]:
        index, standby = node.number, self._of.get(node.number)
        if node.name not in self._servers:
            del self._members[node.name]
            return []
        self._moves.pop(index, None)
        if self._is_ready(index):
            return self._replace(node)
        ends = [] if standby is None else self._end(index, f"server {index} is lost")
        if self._replication == 1:
            return ends
        text = f"server {index} ({node.name}) is lost, and nobody has a copy of its parameters"
        return [Log("error", text, "parameters_lost", {"server": index, "node": node.name}), *ends]

    def _replace(self, node: Member) -> list[Effect]:
        """Give a server's place to its standby."""
        index, standby = node.number, self._of[node.number]
        self._moves.pop(index, None)
        successor = self._members[standby.name]
        successor.number = index
        del self._of[index], self._members[node.name], self._servers[node.name]
        self._processes.pop(node.name, None)
        self._servers[successor.name] = successor
        text = f"{successor.name} takes the place of {node.name} as server {index}"
        facts = {"server": index, "node": successor.name, "before": node.name}
        return [Log("warning", text, "server_replaced", facts)]

    # --- time ---

    def tick(self, now: float) -> tuple[list[Effect], bool]:
        """Give up standbys that do not register; return also whether there is anything new for a view."""
        effects: list[Effect] = []
        late, rested = self._expected.due(now), self._resting.due(now)
        for index in late:
            effects += self._fail(index, self._of[index], f"has not registered within {self._patience:g} s", now)
        return effects, bool(late or rested)

    # --- a scheduler that was started again ---

    def restore(self, entry: m.ServerEntry, now: float) -> None:
        """Take over what a view says of a server's place and of its standby."""
        if entry.process:
            self._processes[entry.name] = entry.process
        standby = entry.standby
        if standby is None:
            return
        self._of[entry.index] = Standby(standby.name, standby.process, standby.state)
        self._processes[standby.name] = standby.process
        if standby.state == "expected":
            self._expected.add(entry.index, now + self._patience)

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        numbers = [server.number for server in self._servers.values()]
        assert numbers == [-1] * len(numbers) or sorted(numbers) == list(range(len(numbers)))
        assert self._expected.holds({index for index, one in self._of.items() if one.state == "expected"})
        by_index = {server.number: server for server in self._servers.values()}
        for index, standby in self._of.items():
            node = self._members.get(standby.name)
            assert (node is None) == (standby.state == "expected")
            assert by_index[index].is_here
            assert standby.process != self.process_of(by_index[index].name)
        assert all(self._members[process].is_here for process in (*self._moves.values(), *self._leaving))
        named = {standby.name for standby in self._of.values()} | self._servers.keys()
        assert self._processes.keys() <= named
