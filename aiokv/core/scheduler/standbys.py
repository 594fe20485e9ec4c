"""Where the standbys of servers are, and which of them takes a lost server's place: the scheduler's decisions.

A standby is a node of its own in the process of another server, with which it comes and goes; so none is in the process
of the server whose parameters it holds. As in a ring, the standby of a server is in the next process that is there. It
takes the server's place only when it is ready, which the server itself has said: from then on nobody was answered
before the standby had the same.

Places change hands in the same way while all is well: all those of a process that wants to end, at once; and one of a
process that has more than another one, which came later. Where there is no standby one is made for that. With
`replication = 2` the standby gets one of its own first, as in a chain (van Renesse and Schneider, OSDI 2004): the first
node goes only when two are left that have everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import Deadlines, earliest
from aiokv.core.effects import Disconnect, Effect, Log, Send
from aiokv.core.roster import natural_order, standbys_of
from aiokv.core.scheduler.balance import unbalanced
from aiokv.core.scheduler.chains import Chains, Standby
from aiokv.errors import MembershipError, StaleEpochError
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.scheduler.member_table import MemberTable
    from aiokv.core.scheduler.members import Member
    from aiokv.types import Peer


class Standbys:
    """The part of a `Membership` that deals with the nodes of servers: those that serve, standbys and spares.

    Args:
        replication: on how many servers every parameter is.
        elastic: whether processes may join when all indices are served.
        patience: seconds that a standby has to register, and that pass when one was no success.
        table: all nodes of the cluster.
    """

    def __init__(self, replication: int, elastic: bool, patience: float, table: MemberTable) -> None:
        self._replication = replication
        self.takes_spares = elastic or replication > 1
        """Whether a process of servers may join when all indices are served."""
        self._patience = patience
        self._members, self._servers = table.by_name, table.servers
        self._drop = table.drop
        self.chains = Chains(table.by_name)
        self._expected: Deadlines[str] = Deadlines()
        """Names of standbys that have not registered yet."""
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

    def others(self) -> list[Member]:
        """Return the nodes of servers that serve nothing: standbys and spares."""
        return [one for one in self._members.values() if one.role is Role.SERVER and one.name not in self._servers]

    def state_of(self, node: Member) -> str:
        """Return what people are told of a node's state."""
        if node.role is not Role.SERVER or node.name in self._servers:
            return node.state
        found = self.chains.find(node.name)
        if found is None:
            return "spare"
        index, standby = found
        whose = index if self.chains.of[index] is standby else f"the standby of {index}"
        return f"standby of {whose}, {standby.state}"

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
            self.chains.add(server.number, standby)
            self._expected.add(standby.name, now + self._patience)
            effects.append(Send(host.peer, 0, m.HostStandby(server.number, standby.name)))
        return effects

    def remind(self, host: Member) -> list[Effect]:
        """Ask a node that has connected again for what may have got lost with its connection."""
        mine = [(index, one) for index, one in self.chains if (one.process, one.state) == (host.name, "expected")]
        return [Send(host.peer, 0, m.HostStandby(index, one.name)) for index, one in mine]

    def _wanted(self) -> list[tuple[Member, Member]]:
        """Return the servers that want one more standby, each with the node in whose process it is to be."""
        servers = sorted(self._servers.values(), key=lambda server: server.number)
        wanting = [one for one in servers if one.is_here and one.number not in self._resting and self._wants(one)]
        found = [(server, self._choose(server)) for server in wanting]
        return [(server, host) for server, host in found if host is not None]

    def _wants(self, server: Member) -> bool:
        """Tell whether a server wants a standby; or its standby wants one, because the place is to change hands."""
        standby, moves = self.chains.of.get(server.number), self._is_moving(server)
        if standby is None:
            return self._replication > 1 or moves
        return self._replication > 1 and moves and standby.is_ready and standby.tail is None

    def _choose(self, server: Member) -> Member | None:
        """Return who has the next process of the ring; one in which the last standby failed is the last choice."""
        standby, failed = self.chains.of.get(server.number), self._failed.get(server.number)
        own = self.chains.process_of(server.name) if standby is None else standby.process
        target = self._moves.get(server.number, own)
        if target != own:
            return self._members[target]

        def order(node: Member) -> tuple[bool, bool, list[tuple[int, int, str]]]:
            place = natural_order(node.name)
            return node.name == failed, place < natural_order(own), place

        return min((one for one in self._hosts() if one.name != own), key=order, default=None)

    def _hosts(self) -> list[Member]:
        """Return the nodes in whose processes standbys can be started."""
        return [one for one in self._processes() if one.is_here and one.connected]

    def _processes(self) -> list[Member]:
        """Return the nodes that stand for a process of servers, but for those that leave."""
        nodes = [one for one in self._members.values() if one.role is Role.SERVER]
        return [one for one in nodes if one.name not in self.chains.processes and one.name not in self._leaving]

    def can_do_without(self, node: Member) -> bool:
        """Tell whether nothing is lost with a process that has a node of servers for itself."""
        if node.role is not Role.SERVER or node.name in self.chains.processes or not node.is_here:
            return False
        return node.name not in self._servers or self._is_ready(node.number)

    # --- a standby's life ---

    def check(self, message: m.Register) -> None:
        """Check that a node which is new here may be one that serves nothing.

        Raises:
            StaleEpochError: it is a standby that nobody wants any longer, or another node has taken its place.
        """
        if message.standby >= 0:
            found = self.chains.find(message.name)
            if found is None or found[0] != message.standby:
                raise StaleEpochError(f"{message.name} is no longer wanted as a standby of server {message.standby}")
        elif message.epoch and message.number >= 0:
            raise StaleEpochError(f"{message.name} was lost; another one is server {message.number} by now")

    def joined(self, node: Member) -> list[Effect]:
        """Take note that a standby has registered, or a spare."""
        found = self.chains.find(node.name)
        if found is None:
            return [Log("info", f"server {node.name} is here as a spare")]
        self._expected.discard(node.name)
        found[1].state = "filling"
        return []

    def ready(self, server: Member, message: m.StandbyReady) -> bool:
        """Take note that a server has filled a standby; tell whether this is news."""
        standby = self._standby_of(server, message)
        if standby is None or standby.state != "filling":
            return False
        standby.state = "ready"
        self._failed.pop(message.index, None)
        return True

    def dropped(self, node: Member, message: m.DropStandby, now: float) -> list[Effect]:
        """Do without a standby that can't be reached; return nothing if that is no news."""
        standby = self._standby_of(node, message)
        if standby is None:
            return []
        who = f"server {message.index}" if node.number == message.index else node.name
        return self._fail(message.index, standby, f"{who} can't reach it", now)

    def is_standby(self, node: Member) -> bool:
        """Tell whether a node is the standby of another one."""
        return self.chains.find(node.name) is not None

    def _standby_of(self, node: Member, message: m.StandbyReady | m.DropStandby) -> Standby | None:
        """Return the standby that a message is about; None: it is one of earlier times, or of others."""
        found, first = self.chains.find(message.name), self.chains.of.get(message.index)
        if found is None or first is None or found[0] != message.index:
            return None
        # The standby itself speaks of its own.
        is_its = found[1] is first.tail and node.name == first.name
        return found[1] if node.number == message.index or is_its else None

    def _fail(self, index: int, standby: Standby, reason: str, now: float) -> list[Effect]:
        self._moves.pop(index, None)
        self._resting.add(index, now + self._patience)
        self._failed[index] = standby.process
        is_first = self.chains.of[index] is standby
        whose = f"server {index}" if is_first else f"the standby of server {index}"
        facts = {"server": index, "standby": standby.name}
        text = f"{whose} has no standby for now; {standby.name}: {reason}"
        return [Log("warning", text, "standby_dropped", facts), *self._end(index, standby, reason)]

    def _end(self, index: int, standby: Standby, reason: str) -> list[Effect]:
        """Take out a standby, and the one behind it, and let their nodes end."""
        return self._let_end(self.chains.cut(index, standby), reason)

    def _let_end(self, standbys: list[Standby], reason: str) -> list[Effect]:
        ends: list[Effect] = []
        for one in standbys:
            self._expected.discard(one.name)
            node = self._members.pop(one.name, None)
            if node is None:
                continue
            if node.connected:
                ends.append(Send(node.peer, 0, m.Stop(reason)))
            self._drop(node, "left", reason)
        return ends

    # --- places that change hands ---

    def _is_moving(self, server: Member) -> bool:
        return server.number in self._moves or self.chains.process_of(server.name) in self._leaving

    def leave(self, node: Member, request: int) -> list[Effect]:
        """Begin to do without a process.

        Raises:
            MembershipError: there is no other one that could go on with what it serves.
        """
        if node.name in self.chains.processes:
            process = self.chains.processes[node.name]
            raise MembershipError(f"{node.name} can't leave alone; {process} stands for its process")
        # Who has lost its connection only may be back at once.
        if not any(one.is_here and one is not node for one in self._processes()):
            raise MembershipError(f"{node.name} can't leave: there is no other process of servers", got=node.name)
        self._leaving[node.name] = request
        self._moves = {index: to for index, to in self._moves.items() if to != node.name}
        effects: list[Effect] = []
        for index, standby in self.chains:
            if standby.process == node.name:
                effects += self._end(index, standby, f"{node.name} leaves")
        return effects

    def _balance(self) -> None:
        """Begin to move an index from the process that has most to the one that has fewest, when all is well."""
        servers, hosts = list(self._servers.values()), self._hosts()
        # A connection that has ended may be the first sign of a loss.
        is_well = all(one.is_here and one.connected for one in (*servers, *self.others()))
        is_well = is_well and (self._replication == 1 or all(self._is_ready(one.number) for one in servers))
        if not self.takes_spares or not is_well or self._moves or self._leaving:
            return
        places = [self.chains.process_of(one.name) for one in servers]
        found = unbalanced(places, [one.name for one in hosts])
        if found is None:
            return
        many, few = found
        # A node that stands for its process stays: with it the process would end.
        hosted = [one.number for one in servers if self.chains.processes.get(one.name) == many]
        moved = max(hosted, key=lambda index: (self._is_in(index, few), index))
        self._moves[moved] = few

    def _is_ready(self, index: int) -> bool:
        return index in self.chains.of and self.chains.of[index].is_ready

    def _is_in(self, index: int, process: str) -> bool:
        return index in self.chains.of and self.chains.of[index].process == process

    def _is_whole(self, index: int) -> bool:
        """Tell whether there are as many copies as there are to be when a server has given its place to its standby."""
        standby = self.chains.of.get(index)
        if standby is None or not standby.is_ready:
            return False
        return self._replication == 1 or (standby.tail is not None and standby.tail.is_ready)

    def switch(self) -> tuple[list[Effect], list[tuple[Peer, int]]]:
        """Let places change hands for which that is prepared.

        Returns:
            What is to be done, and the connections of the nodes that serve nothing any longer, with the number under
            which they have asked for that, 0 if they have not.
        """
        effects: list[Effect] = []
        gone: list[tuple[Peer, int]] = []
        for index, process in list(self._moves.items()):
            if self._is_whole(index) and (self._replication > 1 or self._is_in(index, process)):
                (server,) = [one for one in self._servers.values() if one.number == index]
                gone.append((server.peer, 0))
                reason = f"{self.chains.of[index].process} serves its part of the keys by now"
                effects += self._replace(server)
                self._drop(server, "left", reason)
        for name, request in list(self._leaving.items()):
            places = [one for one in self._servers.values() if self.chains.process_of(one.name) == name]
            if not all(self._may_go(one) for one in places):
                continue
            node = self._members[name]
            gone += [(one.peer, 0) for one in places if one is not node] + [(node.peer, request)]
            for one in places:
                effects += self._replace(one)
            del self._leaving[name]
            self._members.pop(name, None)
            for one in {id(one): one for one in (*places, node)}.values():
                self._drop(one, "left", "left in good order")
        self._balance()
        return effects, gone

    def _may_go(self, server: Member) -> bool:
        """Tell whether the standby of one that leaves may take its place: there are copies, or there can't be more."""
        index = server.number
        if self._is_whole(index):
            return True
        can_be_more = index not in self._resting and self._choose(server) is not None
        return self._is_ready(index) and self.chains.of[index].tail is None and not can_be_more

    # --- getting lost ---

    def lose(self, lost: Member, reason: str) -> list[Effect]:
        """Do without a node, and without all others of its process; standbys that are ready take their places."""
        siblings = [one for one in self._members.values() if self.chains.processes.get(one.name) == lost.name]
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
        for index, standby in list(self.chains):
            # Others that take a place would be wanted again at once.
            if lost.name in {standby.name, standby.process}:
                gone, *behind = self.chains.cut(index, standby)
                self._expected.discard(gone.name)
                effects += self._let_end(behind, f"{gone.name} is lost")
        self._moves = {index: to for index, to in self._moves.items() if to != lost.name}
        for node in nodes:
            effects += self._do_without(node)
        return effects

    def _do_without(self, node: Member) -> list[Effect]:
        index, standby = node.number, self.chains.of.get(node.number)
        if node.name not in self._servers:
            del self._members[node.name]
            return []
        if self._is_ready(index):
            return self._replace(node)
        self._moves.pop(index, None)
        ends = [] if standby is None else self._end(index, standby, f"server {index} is lost")
        if self._replication == 1:
            return ends
        text = f"server {index} ({node.name}) is lost, and nobody has a copy of its parameters"
        return [Log("error", text, "parameters_lost", {"server": index, "node": node.name}), *ends]

    def _replace(self, node: Member) -> list[Effect]:
        """Give a server's place to its standby."""
        index, standby = node.number, self.chains.advance(node.number)
        if self._moves.get(index) == standby.process:
            del self._moves[index]
        successor = self._members[standby.name]
        successor.number = index
        del self._members[node.name], self._servers[node.name]
        self.chains.processes.pop(node.name, None)
        self._servers[successor.name] = successor
        text = f"{successor.name} takes the place of {node.name} as server {index}"
        facts = {"server": index, "node": successor.name, "before": node.name}
        return [Log("warning", text, "server_replaced", facts)]

    # --- time ---

    def tick(self, now: float) -> tuple[list[Effect], bool]:
        """Give up standbys that do not register; return also whether there is anything new for a view."""
        effects: list[Effect] = []
        late, rested = self._expected.due(now), self._resting.due(now)
        for name in late:
            found = self.chains.find(name)
            assert found is not None, "it is expected"
            effects += self._fail(*found, f"has not registered within {self._patience:g} s", now)
        return effects, bool(late or rested)

    # --- a scheduler that was started again ---

    def restore(self, entry: m.ServerEntry, now: float) -> None:
        """Take over what a view says of a server's place and of its standbys."""
        self.chains.restore(entry)
        for standby in standbys_of(entry):
            if standby.state == "expected":
                self._expected.add(standby.name, now + self._patience)

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        numbers = [server.number for server in self._servers.values()]
        assert numbers == [-1] * len(numbers) or sorted(numbers) == list(range(len(numbers)))
        assert self._expected.holds({one.name for _, one in self.chains if one.state == "expected"})
        self.chains.validate(self._servers)
        assert all(self._members[process].is_here for process in (*self._moves.values(), *self._leaving))
