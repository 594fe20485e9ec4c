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
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Scheduler

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
        self.said = 0
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

    @rule(index=INDEX)
    def standby_registers(self, index: int) -> None:
        """Let a process start the standby that it was told to."""
        standby = self.server(index).standby
        told = [
            one.message.name
            for one in self.scheduler.effects
            if isinstance(one, ef.Send) and isinstance(one.message, m.HostStandby)
        ]
        if standby is None or standby.process not in self.nodes or standby.name in self.nodes[standby.process]:
            return
        assert standby.name in told
        self.nodes[standby.process].append(standby.name)
        asked = self.scheduler.register(standby.name, Role.SERVER, number=-1, standby=index)
        assert asked.answer is None or isinstance(asked.answer, Exception)

    @rule(index=INDEX, is_ready=hs.booleans())
    def server_says(self, index: int, is_ready: bool) -> None:
        """Let a server say something about its standby, which may be news no more."""
        server = self.server(index)
        here = server.name in self.nodes.get(server.process or server.name, [])
        if server.standby is None or not here or server.state != "alive":
            return
        if is_ready and server.standby.state == "expected":
            return
        kind = m.StandbyReady if is_ready else m.DropStandby
        peer = self.scheduler.peers[server.name]
        self.scheduler.handle(st.Received(peer, 0, kind(index, server.standby.name)))

    @rule(seconds=hs.sampled_from([0.5, 1.0]))
    def time_passes(self, seconds: float) -> None:
        """Let time pass; who is there says so."""
        here = [node for nodes in self.nodes.values() for node in nodes]
        known = [name for name in here if name in self.scheduler.peers]
        self.scheduler.beat("worker-0", *known)
        self.scheduler.tick(self.scheduler.now + seconds)

    @precondition(lambda self: len(self.views) > 1)
    @invariant()
    def only_ready_ones_take_places(self) -> None:
        """Another node is a server only when it was its standby, and ready, in the view before."""
        for before, after in pairwise(self.views):
            for old, new in zip(before.servers, after.servers, strict=True):
                if new.name != old.name:
                    assert old.standby is not None
                    assert (old.standby.name, old.standby.state) == (new.name, "ready")
                    assert new.process == old.standby.process
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


@pytest.mark.parametrize("grace", [0.0, 1.0])
def test_standbys(make_scheduler: type[Scheduler], grace: float) -> None:
    class Machine(Ring):
        def __init__(self) -> None:
            super().__init__(make_scheduler(workers=1, servers=SERVERS, replication=2, reconnect_grace=grace))

    run_state_machine_as_test(Machine, settings=settings(max_examples=100, stateful_step_count=30))
