"""The places of a cluster that begins with more of them than there are processes of servers: the scheduler's part.

Each place is a node of servers of its own. When all processes are there they are asked in turn to start the nodes that
are missing, and the cluster is complete when those have registered. So servers that join later get some of them.
"""

from __future__ import annotations

from itertools import chain, count
from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Send
from aiokv.core.roster import natural_order
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.scheduler.chains import Chains
    from aiokv.core.scheduler.cluster_plan import ClusterPlan
    from aiokv.core.scheduler.member_table import MemberTable
    from aiokv.core.scheduler.members import Member
    from aiokv.types import Role


class FirstPlaces:
    """The nodes that processes of servers have started, or are to start, before the cluster is complete.

    Args:
        plan: says how many places there are to be.
        members: all nodes that have registered.
        chains: knows in whose process nodes are.
    """

    def __init__(self, plan: ClusterPlan, members: MemberTable, chains: Chains) -> None:
        self._plan = plan
        self._members = members
        self._chains = chains
        self._wanted: dict[str, tuple[int, str]] = {}
        """Their indices and processes, by their names."""
        self._given_up: dict[str, None] = {}
        """Names that no node is to have again."""

    @property
    def missing(self) -> int:
        """How many places have no node yet that was asked for."""
        return len(self._wanted.keys() - self._members.servers.keys())

    def count_others(self, role: Role) -> int:
        """Return how many nodes of a role are there that were not asked for."""
        there = self._members.of(role)
        return len(there) - len(self._wanted.keys() & there.keys())

    def index_of(self, name: str) -> int | None:
        """Return the index of a node that was asked for."""
        found = self._wanted.get(name)
        return None if found is None else found[0]

    def is_given_up(self, name: str) -> bool:
        """Tell whether a node was asked for, and is needed no longer."""
        return name in self._given_up

    def numbers(self) -> list[tuple[Member, int]]:
        """Return all servers with the indices that they get: those of processes first, by their names."""
        servers = self._members.servers
        own = sorted((name for name in servers if name not in self._wanted), key=natural_order)
        others = [(servers[name], index) for name, (index, _) in self._wanted.items()]
        return [(servers[name], index) for index, name in enumerate(own)] + others

    # --- how they come and go ---

    def host(self) -> list[Effect]:
        """Ask the processes for nodes when all are there, unless that was done."""
        servers = self._members.servers.values()
        if self._wanted or len(servers) < self._plan.num_servers:
            return []
        hosts = sorted(servers, key=lambda member: natural_order(member.name))
        for index in range(len(hosts), self._plan.places):
            process = hosts[index % len(hosts)].name
            self._wanted[self._new_name(f"{process}/{index}.0")] = index, process
        return [effect for host in hosts for effect in self.remind(host)]

    def _new_name(self, name: str) -> str:
        names = chain([name], (f"{name}.{attempt}" for attempt in count(1)))
        return next(each for each in names if each not in self._given_up)

    def remind(self, host: Member) -> list[Effect]:
        """Ask a process for the nodes of its own that have not registered."""
        mine = [(index, name) for name, (index, process) in self._wanted.items() if process == host.name]
        missing = [(index, name) for index, name in mine if name not in self._members.by_name]
        return [Send(host.peer, 0, m.HostStandby(index, name)) for index, name in missing]

    def joined(self, node: Member) -> None:
        """Take note that a node has registered."""
        self._chains.processes[node.name] = self._wanted[node.name][1]

    def interrupted(self, gone: Member) -> list[Effect]:
        """Begin anew if a process, or a node in one, is gone: the places are dealt to those that there will be."""
        processes = [process for _, process in self._wanted.values()]
        if gone.name not in self._wanted and gone.name not in processes:
            return []
        return self.give_up() + self.host()

    def give_up(self) -> list[Effect]:
        """Let all nodes end that were asked for."""
        effects: list[Effect] = []
        for name in self._wanted:
            self._given_up[name] = None
            self._chains.processes.pop(name, None)
            node = self._members.by_name.get(name)
            if node is not None:
                effects.append(Send(node.peer, 0, m.Stop("a server has gone before the cluster was complete")))
                self._members.drop(node, "left", "")
                self._members.remove(node)
        self._wanted.clear()
        return effects

    def forget(self) -> None:
        """Wait for no node any longer that was asked for: there is a cluster that has other ones."""
        for name in self._wanted:
            self._chains.processes.pop(name, None)
        self._wanted.clear()

    def pass_over(self, name: str) -> None:
        """Do without a node that another scheduler had asked for: it is not known to what it belongs."""
        self._given_up[name] = None
