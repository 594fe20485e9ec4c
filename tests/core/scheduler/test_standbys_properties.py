"""Standbys under any sequence of events: what must hold of any two views that follow one another."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as hs
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.roster import standbys_of
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Scheduler

SERVERS = 3
PROCESSES = [f"server-{number}" for number in range(SERVERS + 1)]
PROCESS = hs.sampled_from(PROCESSES)
INDEX = hs.integers(0, SERVERS - 1)


class Ring(RuleBasedStateMachine):
    """Processes of servers that come and go with all their nodes; three of them serve at first, one is more."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.lives = dict.fromkeys(PROCESSES, 0)
        self.nodes: dict[str, list[str]] = {}
        """The nodes of the processes that are there."""
        self.ready: list[str] = []
        """The names of all standbys of which their servers have said that they are ready."""
        self.leaving: dict[str, Asked] = {}
        for name in PROCESSES:
            self.start(name)
        scheduler.form("worker-0")

    @property
    def views(self) -> list[m.View]:
        """All views so far, as the worker has seen them."""
        return self.scheduler.views["worker-0"]

    def server(self, index: int) -> m.ServerEntry:
        """Return what is known of a server."""
        return self.views[-1].servers[index]

    def start(self, name: str) -> None:
        """Start a process."""
        self.lives[name] += 1
        self.nodes[name] = [name]
        again = name in self.scheduler.peers
        asked = self.scheduler.register(name, incarnation=self.lives[name], again=again, number=-1)
        if isinstance(asked.answer, Exception):
            del self.nodes[name]

    @rule(name=PROCESS)
    def restart(self, name: str) -> None:
        """Start a process again, which may not be known to be gone."""
        self.kill(name, notices=False)
        self.start(name)

    @rule(name=PROCESS, notices=hs.booleans())
    def kill(self, name: str, notices: bool) -> None:
        """End a process; the scheduler hears of the connections that have ended, or nothing at all."""
        for node in self.nodes.pop(name, []):
            if notices:
                self.scheduler.drop(node)

    @rule(index=INDEX, place=hs.integers(0, 1))
    def standby_registers(self, index: int, place: int) -> None:
        """Let a process start a standby that it was told to, or one of a standby."""
        told = [
            one.message.name
            for one in self.scheduler.effects
            if isinstance(one, ef.Send) and isinstance(one.message, m.HostStandby)
        ]
        for standby in list(standbys_of(self.server(index)))[place : place + 1]:
            if standby.process not in self.nodes or standby.name in self.nodes[standby.process]:
                return
            assert standby.name in told
            self.nodes[standby.process].append(standby.name)
            asked = self.scheduler.register(standby.name, Role.SERVER, number=-1, standby=index)
            assert asked.answer is None or isinstance(asked.answer, Exception)

    @rule(index=INDEX, place=hs.integers(0, 1), is_ready=hs.booleans())
    def server_says(self, index: int, place: int, is_ready: bool) -> None:
        """Let a server say something about its standby, or that one's own, which may be news no more."""
        server = self.server(index)
        here = server.name in self.nodes.get(server.process or server.name, [])
        if not here or server.state != "alive":
            return
        for standby in list(standbys_of(server))[place : place + 1]:
            if is_ready and standby.state == "expected":
                return
            kind = m.StandbyReady if is_ready else m.DropStandby
            peer = self.scheduler.peers[server.name]
            if is_ready:
                self.ready.append(standby.name)
            self.scheduler.handle(st.Received(peer, 0, kind(index, standby.name)))

    @rule(name=PROCESS)
    def leave(self, name: str) -> None:
        """Let a process ask whether it may end."""
        if name in self.nodes and name in self.scheduler.peers:
            self.leaving[name] = self.scheduler.ask(name, m.LeaveServer())

    @rule(seconds=hs.sampled_from([0.5, 1.0]))
    def time_passes(self, seconds: float) -> None:
        """Let time pass; who is there says so."""
        here = [node for nodes in self.nodes.values() for node in nodes]
        known = [name for name in here if name in self.scheduler.peers]
        self.scheduler.beat("worker-0", *known)
        self.scheduler.tick(self.scheduler.now + seconds)

    @invariant()
    def who_may_go_goes(self) -> None:
        """End the processes that may go, and the nodes that have given their place to others."""
        for name, asked in list(self.leaving.items()):
            if asked.answer is not None:
                del self.leaving[name]
            if asked.answer == m.Done() and name in self.nodes:
                self.kill(name, notices=True)
        named = [name for entry in self.views[-1].servers for name in _names(entry)]
        for process, nodes in self.nodes.items():
            for node in [node for node in nodes if node != process and node not in named]:
                nodes.remove(node)
                self.scheduler.drop(node)

    @precondition(lambda self: len(self.views) > 1)
    @invariant()
    def only_ready_ones_take_places(self) -> None:
        """Another node is a server only when it was its standby in the view before, and is ready."""
        for before, after in pairwise(self.views):
            for old, new in zip(before.servers, after.servers, strict=True):
                if new.name != old.name:
                    assert old.standby is not None
                    assert (old.standby.name, old.standby.process) == (new.name, new.process)
                    assert new.name in self.ready
                assert old.state == "alive" or new == old, "what is lost does not come back"
        del self.views[:-1]

    @invariant()
    def copies_are_elsewhere(self) -> None:
        """No process has a server and its standby, and no name stands for two nodes."""
        names = []
        for entry in self.views[-1].servers:
            names.append(entry.name)
            if entry.standby is not None:
                names.append(entry.standby.name)
                assert entry.standby.process != (entry.process or entry.name)
        assert len(set(names)) == len(names)

    @invariant()
    def it_comes_to_rest(self) -> None:
        """A server has a standby if there is another process for it, unless the last one was no success."""
        assert not self.scheduler.machine._standbys.is_wanting


def _names(entry: m.ServerEntry) -> list[str]:
    return [entry.name, *(standby.name for standby in standbys_of(entry))]


@pytest.mark.parametrize("grace", [0.0, 1.0])
@pytest.mark.parametrize("replication", [1, 2])
def test_standbys(make_scheduler: type[Scheduler], grace: float, replication: int) -> None:
    how = {"replication": replication, "reconnect_grace": grace, "elastic_servers": True}

    class Machine(Ring):
        def __init__(self) -> None:
            super().__init__(make_scheduler(workers=1, servers=SERVERS, **how))

    run_state_machine_as_test(Machine, settings=settings(max_examples=100, stateful_step_count=30))
