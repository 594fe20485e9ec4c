"""What is said of messages that should not be; bugs which show in whole runs are in `test_sim_planted_faults`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from aiokv.core.effects import StoredChunk
from aiokv.errors import ProtocolError, RoundTimeoutError
from aiokv.wire import messages as m
from sim.dialogue import Dialogue
from sim.faults import Pause
from sim.readings import Holdings
from sim.record import Run

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.scenario import Scenario

PUSH = m.Push("w", (4,), "float32", 0, 4, 1, 0, True, 10.0)
PULL = m.Pull("w", (4,), "float32", 0, 4, 0, 10.0)


class Heard:
    """A dialogue of a worker with a server and the scheduler, and what it finds."""

    def __init__(self, scenario: Scenario) -> None:
        self.found: list[str] = []
        self.chunk = Holdings()
        self.looks = Dialogue(Run(scenario, "bsp", 0), self.found.extend, {("w", 0): self.chunk})

    def ask(self, message: m.Message, request: int = 5, now: float = 0.0, of: str = "server-0") -> None:
        self.looks.sent("worker-0", 0, of, request, message, None, now)
        self.looks.arrived(of, 3, "worker-0", request, message, now)

    def answer(
        self, message: m.Message, version: int | None = None, request: int = 5, now: float = 1.0, by: str = "server-0"
    ) -> None:
        payload = None if version is None else StoredChunk("w", 0, version, 16)
        self.looks.sent(by, 3, "worker-0", request, message, payload, now)

    def make(self, version: int, *numbers: int) -> None:
        self.chunk.version = version
        self.chunk.holds |= {("worker-0", number): version for number in numbers}


@pytest.fixture
def heard(make_scenario: Callable[..., Scenario]) -> Heard:
    return Heard(make_scenario(2, 5, fault=(Pause(node="server-0", at=1.0, duration=2.0),)))


def view(epoch: int, *states: str) -> m.View:
    workers = tuple(m.WorkerEntry(rank, f"worker-{rank}", 1, state, "") for rank, state in enumerate(states))
    return m.View(epoch, workers, (), 1.0, 64, 64, 10.0)


def test_a_dialogue_as_it_should_be(heard: Heard) -> None:
    heard.ask(PUSH)
    heard.make(1, 1)
    heard.answer(m.Value(1), 1)
    heard.ask(PULL, request=6)
    heard.answer(m.Value(1), 1, request=6)
    heard.looks.finish(2.0)
    assert heard.found == []


def test_a_push_is_computed_from_what_its_own_process_has_read(heard: Heard) -> None:
    """The one before it under the name was lost with a push of the same number, which counts nowhere."""
    second = structs.replace(PUSH, sequence=2)
    heard.ask(second)
    heard.looks.ended("worker-0", 1.0)
    heard.make(1, 1)
    heard.ask(PULL, request=6)
    heard.answer(m.Value(1), 1, request=6)
    heard.looks.arrived("worker-0", 0, "server-0", 6, m.Value(1), 2.0)
    heard.ask(second, request=7)
    assert heard.looks.readings.computed_at("worker-0", ("w", 0), 2) == 1
    assert heard.found == []


def test_a_version_that_is_not_made(heard: Heard) -> None:
    heard.ask(PULL)
    heard.answer(m.Value(2), 2)
    assert heard.found == ["server-0 to worker-0: key 'w' from element 0: version 2 is sent, but not made"]


def test_an_older_version_after_a_newer_one(heard: Heard) -> None:
    heard.make(2)
    for request, version in ((5, 2), (6, 1)):
        heard.ask(PULL, request=request)
        heard.answer(m.Value(version), version, request=request)
    assert heard.found == ["server-0 to worker-0: key 'w' from element 0: version 1 is sent after 2"]


def test_fault_that_a_node_finds_with_the_protocol(heard: Heard) -> None:
    heard.ask(PUSH)
    heard.answer(m.Error(ProtocolError.code, "expected push 2, got 1", {}))
    assert heard.found == ["server-0 to worker-0: refuses Push: expected push 2, got 1"]


def test_a_time_out_before_its_time(heard: Heard) -> None:
    late = m.Error(RoundTimeoutError.code, "nobody came", {})
    heard.ask(PUSH)
    heard.answer(late, now=9.0)
    assert heard.found == ["server-0 to worker-0: gives Push up 3 s too early"]
    heard.found.clear()
    heard.ask(PUSH, request=6)
    heard.answer(late, request=6, now=10.0)
    assert heard.found == []


def test_an_answer_after_its_time(heard: Heard) -> None:
    heard.ask(PULL)
    # While the server is stopped, nothing is expected of it.
    heard.answer(m.Value(0), 0, now=12.5)
    assert heard.found == ["server-0 to worker-0: answers Pull 0.5 s too late"]


def test_no_answer_at_all(heard: Heard) -> None:
    heard.ask(PULL)
    heard.looks.finish(11.0)
    assert heard.found == []
    heard.ask(PULL, request=6)
    heard.looks.finish(13.0)
    assert heard.found == ["server-0 to worker-0: Pull was never answered"]


def test_answer_over_a_connection_that_the_other_side_has_closed_is_one(heard: Heard) -> None:
    heard.ask(PULL)
    heard.looks.unheard("server-0", 3, "worker-0", 5, m.Value(9), 1.0)
    heard.looks.unheard("server-0", 3, "worker-0", 6, m.Value(9), 1.0)
    heard.looks.finish(100.0)
    assert heard.found == []


def test_answer_that_waits_for_a_standby_is_in_time_when_its_server_has_it_in_time(heard: Heard) -> None:
    for request, now in ((5, 4.0), (6, 12.5)):
        heard.ask(PULL, request=request)
        heard.looks.held("server-0", 3, request, now)
        heard.answer(m.Value(0), 0, request=request, now=20.0)
    assert heard.found == ["server-0 to worker-0: answers Pull 0.5 s too late"]


def test_answer_that_still_waits_for_a_standby_in_the_end_was_there(heard: Heard) -> None:
    heard.ask(PULL)
    heard.looks.held("server-0", 3, 5, 4.0)
    heard.looks.finish(100.0)
    assert heard.found == []


def test_an_answer_to_nothing(heard: Heard) -> None:
    heard.answer(m.Value(0), 0)
    assert heard.found == ["server-0 to worker-0: Value answers nothing that is open"]


def test_an_epoch_that_is_left_out(heard: Heard) -> None:
    heard.looks.sent("scheduler", 0, "worker-0", 0, view(1, "alive", "alive"), None, 0.0)
    heard.looks.sent("scheduler", 0, "worker-0", 0, view(3, "alive", "left"), None, 0.0)
    assert heard.found == ["epoch 3 follows epoch 1"]


@pytest.mark.parametrize("left", [False, True], ids=["nobody is left", "a worker is left"])
def test_another_cluster_begins_when_nobody_is_left_of_the_one_before(heard: Heard, *, left: bool) -> None:
    others: list[str] = []
    heard.looks.on_another = lambda: others.append("another")
    heard.looks.sent("scheduler", 0, "worker-0", 0, view(1, "alive"), None, 1.0)
    heard.looks.arrived("worker-0", -1, "scheduler", 0, view(1, "alive"), 1.0)
    heard.looks.ended("scheduler", 2.0)
    if not left:
        heard.looks.ended("worker-0", 3.0)
    for peer in (0, 1):
        heard.looks.sent("scheduler", peer, "worker-1", 0, view(1, "alive", "alive"), None, 9.0)
    assert (heard.found, others) == (["two views of epoch 1"] * 2, []) if left else ([], ["another"])


def test_epoch_that_nobody_could_hear_of_is_not_left_out(heard: Heard) -> None:
    """The connections had ended, which the scheduler did not know yet."""
    heard.looks.sent("scheduler", 0, "worker-0", 0, view(1, "alive", "alive"), None, 0.0)
    heard.looks.unheard("scheduler", 0, "worker-0", 0, view(2, "alive", "left"), 0.0)
    heard.looks.sent("scheduler", 1, "worker-1", 0, view(3, "left", "left"), None, 0.0)
    assert heard.found == []


def test_views_are_published_for_nobody_while_nobody_is_connected(heard: Heard) -> None:
    heard.looks.sent("scheduler", 0, "worker-0", 0, view(1, "alive", "alive"), None, 0.0)
    heard.looks.sent("scheduler", 1, "worker-1", 0, view(1, "alive", "alive"), None, 0.0)
    for peer in (0, 1):
        heard.looks.closed("scheduler", peer, f"worker-{peer}", 0.0, by_itself=True)
    heard.looks.sent("scheduler", 2, "worker-0", 0, view(3, "alive", "left"), None, 0.0)
    heard.looks.sent("scheduler", 2, "worker-0", 0, view(5, "alive", "left"), None, 0.0)
    assert heard.found == ["epoch 5 follows epoch 3"]


def test_standby_may_be_lost_with_its_process_which_was_silent_for_longer(heard: Heard) -> None:
    beat = m.Heartbeat()
    names = ("server-1", "server-1/0.1", "server-2")
    for name, now in zip(names, (0.0, 5.0, 5.0), strict=True):
        heard.looks.arrived("scheduler", 3, name, 0, beat, now)
    for epoch, state in ((1, "alive"), (2, "lost")):
        servers = tuple(m.ServerEntry(index, name, 1, "", 0, state, "") for index, name in enumerate(names[1:]))
        heard.looks.sent("scheduler", 0, "worker-0", 0, structs.replace(view(epoch), servers=servers), None, 10.0)
    assert heard.found == ["server-2 is called lost, but was heard 5 s before"]


def test_a_push_that_comes_after_its_worker_was_lost(heard: Heard) -> None:
    heard.looks.arrived("server-0", -1, "scheduler", 0, view(1, "lost", "alive"), 0.0)
    heard.ask(PUSH)
    heard.make(1, 1)
    heard.answer(m.Value(1), 1)
    assert heard.found == ["server-0 to worker-0: push 1 is accepted, although the worker is known to be lost"]


def test_a_barrier_that_opens_without_a_member(heard: Heard) -> None:
    heard.looks.sent("scheduler", 0, "worker-0", 0, view(1, "alive", "alive"), None, 0.0)
    heard.ask(m.Barrier("end", 10.0), of="scheduler")
    heard.answer(m.Done(), by="scheduler")
    assert heard.found == ["scheduler to worker-0: the barrier 'end' opens without worker-1"]


def test_who_was_let_through_and_asks_again_is_let_through_alone(heard: Heard) -> None:
    """Its connection had ended before it heard of that."""
    heard.looks.sent("scheduler", 0, "worker-0", 0, view(1, "alive", "left"), None, 0.0)
    for now in (1.0, 2.0):
        heard.ask(m.Barrier("end", 10.0), of="scheduler")
        heard.answer(m.Done(), by="scheduler", now=now)
        heard.looks.sent("scheduler", 0, "worker-0", 0, view(2, "alive", "alive"), None, 0.0)
    assert heard.found == []


def test_calls_that_take_too_long(heard: Heard) -> None:
    heard.looks.called("worker-0", 1, "Transfer", 5.0, 0.0)
    heard.looks.returned("worker-0", 1, 6.0)
    heard.looks.called("worker-0", 2, "Transfer", 5.0, 0.0)
    heard.looks.ended("worker-0", 6.0)
    heard.looks.called("worker-1", 1, "Join", 5.0, 0.0)
    heard.looks.finish(6.0)
    assert heard.found == [
        "worker-0: Transfer took 1 s longer than it may",
        "worker-0: Transfer did not end in time",
        "worker-1: Join did not end in time",
    ]
