"""Which nodes have a copy of what each server has, one behind the other, and in whose process they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record
from aiokv.core.roster import standbys_of
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiokv.core.scheduler.members import Member


class Standby(Record, eq=False):
    """The node that has, or is to have, a copy of a server's parameters. The fields are those of a `StandbyEntry`.

    `tail` is its own standby.
    """

    name: str
    process: str
    state: str = "expected"
    tail: Standby | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it may take the place before it."""
        return self.state == "ready"


class Chains:
    """The standbys of all servers, by the index that a server has.

    Args:
        members: all nodes of the cluster, by name.
    """

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self.of: dict[int, Standby] = {}
        self.processes: dict[str, str] = {}
        """The name of the node in whose process a node is, by its name; those in their own are not here."""

    def __iter__(self) -> Iterator[tuple[int, Standby]]:
        """Iterate over all standbys, each behind the one whose it is, with the index that they are for."""
        for index, standby in list(self.of.items()):
            yield index, standby
            if standby.tail is not None:
                yield index, standby.tail

    def process_of(self, name: str) -> str:
        """Return the name of the node in whose process a node is."""
        return self.processes.get(name, name)

    def find(self, name: str) -> tuple[int, Standby] | None:
        """Return a standby by its name, and the index that it is for."""
        return next(((index, standby) for index, standby in self if standby.name == name), None)

    # --- how they change ---

    def add(self, index: int, standby: Standby) -> None:
        """Put a standby at the end of those of an index."""
        last = self.of.get(index)
        if last is None:
            self.of[index] = standby
        else:
            last.tail = standby
        self.processes[standby.name] = standby.process

    def cut(self, index: int, standby: Standby) -> list[Standby]:
        """Take out a standby, and the one that has everything from it; return them."""
        if self.of[index] is standby:
            del self.of[index]
        else:
            self.of[index].tail = None
        gone = [standby] if standby.tail is None else [standby, standby.tail]
        for one in gone:
            del self.processes[one.name]
        return gone

    def advance(self, index: int) -> Standby:
        """Take out the first standby, which serves the index from now on, and return it."""
        first = self.of.pop(index)
        if first.tail is not None:
            self.of[index] = first.tail
        return first

    # --- what others are told, and know ---

    def entry(self, server: Member) -> m.ServerEntry:
        """Return what a view says of a server, and of its standbys."""
        facts = (server.number, server.name, server.incarnation, server.host, server.port, server.state, server.reason)
        first = self.of.get(server.number)
        return m.ServerEntry(*facts, None if first is None else self._entry(first), self.processes.get(server.name, ""))

    def _entry(self, standby: Standby) -> m.StandbyEntry:
        entry, node = m.StandbyEntry(standby.name, standby.process), self._members.get(standby.name)
        if node is not None:
            entry.incarnation, entry.host, entry.port = node.incarnation, node.host, node.port
            entry.state = standby.state
        if standby.tail is not None:
            entry.standby = self._entry(standby.tail)
        return entry

    def restore(self, server: m.ServerEntry) -> None:
        """Take over what a view says."""
        if server.process:
            self.processes[server.name] = server.process
        for entry in standbys_of(server):
            self.add(server.index, Standby(entry.name, entry.process, entry.state))

    # --- for tests ---

    def validate(self, servers: Mapping[str, Member]) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        by_index = {server.number: server for server in servers.values()}
        for index, standby in self.of.items():
            assert by_index[index].is_here
            assert standby.process != self.process_of(by_index[index].name)
            assert standby.tail is None or (standby.is_ready or standby.tail.state != "ready")
            assert standby.tail is None or standby.tail.process != standby.process
            assert standby.tail is None or standby.tail.tail is None
        for _, standby in self:
            assert (self._members.get(standby.name) is None) == (standby.state == "expected")
        assert self.processes.keys() <= {standby.name for _, standby in self} | servers.keys()
