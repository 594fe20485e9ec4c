"""A scheduler and a server under any sequence of events, against a model that knows only the rules.

The model keeps, for the key `w`, the number that each rank pushed to each round. From the last view that the server has
seen follows which rounds are closed, and so the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as hs
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aiokv.core import stimuli as st
from aiokv.errors import AiokvError, MembershipError, ProtocolError, WorkerLostError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Scheduler, Server

WORKERS = 3
EXAMPLES = 100
RANKS = hs.integers(0, WORKERS - 1)
NUMBERS = hs.integers(-100, 100)


class Cluster(RuleBasedStateMachine):
    """Workers that come, push, pull, repeat themselves, fall silent, leave and die."""

    def __init__(self, scheduler: Scheduler, server: Server) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.server = server
        self.policy = server.policy
        self.views: list[m.View] = []
        self.seen: dict[int, str] = {}
        self.attached: dict[int, bool] = {}
        self.rounds: dict[int, dict[int, int]] = {}
        self.made = 0
        self.asked: list[Asked] = []
        self.arrivals: list[Asked] = []
        self.silent: dict[int, bool] = {}
        scheduler.form("server-0")
        server.handle(st.Join(0, 60.0))
        server.handle(st.Connected(SCHEDULER))

    def form(self) -> None:
        """Let everybody join and attach, and create the key."""
        for rank in range(WORKERS):
            self.join(rank)
        self.view_arrives()
        for rank in range(WORKERS):
            self.attach(rank)
        self.init()

    # --- members ---

    def state(self, rank: int) -> str:
        """Return what the scheduler thinks of a worker."""
        member = self.scheduler.machine._members.by_name.get(f"worker-{rank}")
        return member.state if member else "absent"

    @property
    def complete(self) -> bool:
        """Whether the server has seen a view."""
        return bool(self.seen)

    @rule(rank=RANKS)
    def join(self, rank: int) -> None:
        """Let a worker register; all places are taken at the end."""
        known = f"worker-{rank}" in self.scheduler.peers
        asked = self.scheduler.register(f"worker-{rank}", timeout=60.0)
        assert asked.pending or known
        self.take_views()

    def take_views(self) -> None:
        """Let what the scheduler published be on its way to the server."""
        self.views += self.scheduler.views["server-0"]
        self.scheduler.views["server-0"].clear()

    @precondition(lambda self: self.views)
    @rule()
    def view_arrives(self) -> None:
        """Deliver the next view to the server."""
        view = self.views.pop(0)
        self.seen = {worker.rank: worker.state for worker in view.workers}
        self.server.handle(st.Received(SCHEDULER, 0, view))
        self.close_rounds()

    @precondition(lambda self: self.complete)
    @rule(rank=RANKS)
    def attach(self, rank: int) -> None:
        """Let a worker say who it is."""
        answer = self.server.attach(rank, epoch=1).answer
        assert (answer == m.Done()) == (self.seen[rank] == "alive")
        self.attached[rank] = self.attached.get(rank, False) or answer == m.Done()

    @precondition(lambda self: self.scheduler.machine.missing == "")
    @rule(rank=RANKS)
    def leave(self, rank: int) -> None:
        """Let a worker leave in good order."""
        was = self.state(rank)
        asked = self.scheduler.ask(f"worker-{rank}", m.Leave())
        assert (asked.answer == m.Done()) == (was == "alive")
        self.take_views()

    @rule(rank=RANKS, here_too=hs.booleans())
    def die(self, rank: int, here_too: bool) -> None:
        """End a worker's connection to the scheduler, and perhaps the one to the server."""
        if f"worker-{rank}" not in self.scheduler.peers:
            return
        before = self.state(rank)
        complete = self.scheduler.machine.missing == ""
        self.scheduler.drop(f"worker-{rank}")
        if not complete:
            # It may come again, over a new connection.
            del self.scheduler.peers[f"worker-{rank}"]
        after = "lost" if complete else "absent"
        assert self.state(rank) == (after if before == "alive" else before)
        if here_too:
            self.server.handle(st.PeerLost(10 + rank, "connection reset"))
            self.attached[rank] = False
            self.asked = [asked for asked in self.asked if asked.peer != 10 + rank]
        self.take_views()

    @rule(rank=RANKS)
    def fall_silent(self, rank: int) -> None:
        """Let a worker stop sending heartbeats."""
        self.silent[rank] = True

    @rule(rank=RANKS)
    def barrier(self, rank: int) -> None:
        """Let a worker arrive at a barrier."""
        if f"worker-{rank}" in self.scheduler.peers:
            self.arrivals.append(self.scheduler.barrier(f"worker-{rank}", timeout=3.0))

    # --- pushes and pulls ---

    @precondition(lambda self: self.attached.get(0))
    @rule()
    def init(self) -> None:
        """Let rank 0 create the key; the same value a second time changes nothing."""
        answer = self.server.init().answer
        assert isinstance(answer, m.Done) == (self.seen[0] != "lost")

    @rule(rank=RANKS, number=NUMBERS, want=hs.booleans())
    def push(self, rank: int, number: int, want: bool) -> None:
        """Let a worker push, as far ahead as it likes."""
        sequence = self.server.pushed.get((rank, "w"), 0) + 1
        newest = max(self.rounds, default=0)
        asked = self.server.push(rank, number, want_value=want, timeout=4.0)
        taken = not isinstance(asked.answer, AiokvError) or isinstance(asked.answer, WorkerLostError)
        assert taken or not self.may_push(rank), asked.answer
        if taken:
            self.asked.append(asked)
            self.rounds.setdefault(sequence if self.policy == "bsp" else newest + 1, {})[rank] = number
        self.close_rounds()

    @rule(order=hs.permutations(range(WORKERS)), number=NUMBERS, but=hs.integers(0, 2 * WORKERS))
    def push_all(self, order: list[int], number: int, but: int) -> None:
        """Let all workers push, sometimes all but one."""
        for rank in order:
            if rank != but:
                self.push(rank, number + rank, want=False)

    def may_push(self, rank: int) -> bool:
        """Return whether a push with the right number has to be taken."""
        return bool(self.attached.get(rank) and self.server.values and self.seen[rank] == "alive")

    @precondition(lambda self: self.server.values)
    @rule(rank=RANKS)
    def push_again(self, rank: int) -> None:
        """Send the last push a second time: it changes nothing, and is answered as the first one is."""
        sequence = self.server.pushed.get((rank, "w"), 0)
        asked = self.server.push(rank, 1000, sequence=sequence, timeout=4.0)
        if not sequence or not self.attached.get(rank) or self.seen[rank] == "lost":
            assert isinstance(asked.answer, ProtocolError | MembershipError)
        else:
            assert asked.pending or isinstance(asked.answer, m.Done | WorkerLostError)
            self.asked.append(asked)

    @precondition(lambda self: self.server.values)
    @rule(rank=RANKS)
    def pull(self, rank: int) -> None:
        """Let a worker read: at once, or when its last push is in."""
        asked = self.server.pull(rank, timeout=4.0)
        if not self.attached.get(rank) or self.seen[rank] == "lost":
            assert isinstance(asked.answer, MembershipError)
        else:
            self.asked.append(asked)

    @precondition(lambda self: self.server.applying)
    @rule()
    def update_is_done(self) -> None:
        """Let the store finish an update."""
        self.server.finish()

    @rule(hold=hs.booleans())
    def store_is_slow(self, hold: bool) -> None:
        """Let updates take time, or not."""
        self.server.hold = hold
        while self.server.applying and not hold:
            self.server.finish()

    # --- time ---

    @rule(seconds=hs.sampled_from([0.5, 1.0, 1.5]))
    def time_passes(self, seconds: float) -> None:
        """Let time pass; those who are not silent send heartbeats."""
        now = self.server.now + seconds
        self.scheduler.now = now
        self.scheduler.beat("server-0", *(name for name in self.scheduler.peers if not self.is_silent(name)))
        self.scheduler.tick(now)
        self.take_views()
        self.server.tick(now)

    def is_silent(self, name: str) -> bool:
        """Return whether a worker sends no heartbeats."""
        return self.silent.get(int(name[-1]), False) if name.startswith("worker") else False

    # --- what must hold ---

    def close_rounds(self) -> None:
        """Close in the model what is complete for those who have not left."""
        members = [rank for rank, state in self.seen.items() if state != "left"] if self.policy == "bsp" else []
        while self.made + 1 in self.rounds and all(rank in self.rounds[self.made + 1] for rank in members):
            self.made += 1

    @invariant()
    def value_is_the_sum_of_the_closed_rounds(self) -> None:
        """Compare every version of the key with the model."""
        versions = self.server.values.get(("w", 0), {})
        assert max(versions, default=0) <= self.made
        if not self.server.applying:
            assert max(versions, default=0) == self.made
        for version, value in versions.items():
            assert value == sum(sum(self.rounds[number].values()) for number in range(1, version + 1))

    @invariant()
    def answers_hold_what_was_pushed(self) -> None:
        """Check that errors name ranks that are really missing."""
        for asked in self.asked:
            if isinstance(asked.answer, WorkerLostError) and "round" in asked.error.details:
                number = asked.error.details["round"]
                assert number > self.made
                assert all(rank not in self.rounds[number] for rank in asked.error.details["ranks"])

    @invariant()
    def nothing_waits_for_the_lost(self) -> None:
        """Check that no push waits for a round that can't close."""
        lost = [rank for rank, state in self.seen.items() if state == "lost"]
        for waiter in self.server.machine._answers._waiters.values():
            if self.policy == "bsp" and not waiter.at_least:
                assert all(rank in self.rounds[waiter.updates[0].version] for rank in lost)

    def teardown(self) -> None:
        """Let time pass: nobody waits for ever."""
        self.server.hold = False
        while self.server.applying:
            self.server.finish()
        for _ in range(6):
            self.time_passes(1.0)
            while self.views:
                self.view_arrives()
        assert not any(asked.pending for asked in self.asked)
        # Who has left or died is not answered any more.
        present = self.scheduler.machine._members.by_peer
        assert not any(asked.pending and asked.peer in present for asked in self.arrivals)
        assert not self.server.machine._answers._waiters
        assert not self.scheduler.machine._barriers._arrivals


@pytest.mark.parametrize("policy", ["bsp", "asp"])
@pytest.mark.parametrize("formed", [True, False], ids=["complete from the start", "from nothing"])
def test_scheduler_and_server_keep_their_promises(
    policy: str, formed: bool, make_scheduler: type[Scheduler], make_server: type[Server]
) -> None:
    class Machine(Cluster):
        """The machine with its rigs."""

        def __init__(self) -> None:
            super().__init__(make_scheduler(WORKERS, 1), make_server(WORKERS, policy, attach=False))
            if formed:
                self.form()

    run_state_machine_as_test(Machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=50))
