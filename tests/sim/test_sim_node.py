"""The driver of a state machine: timers, arithmetic that takes time, and gradients that are used once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.core import effects as fx
from aiokv.core import stimuli as st
from aiokv.optim import LAMB, Assign
from sim.clock import Clock
from sim.compute import Constant
from sim.disk import Disk
from sim.ledger import Ledger
from sim.network import Network
from sim.node import Node
from sim.record import Run
from sim.saving import States
from sim.scenario import Scenario
from sim.sections import ClusterSection, ServerSection
from sim.service import Service
from sim.timeline import Timeline
from sim.trace import Trace
from sim.world import World

if TYPE_CHECKING:
    from aiokv.core.effects import Effect
    from aiokv.core.stimuli import Stimulus

CHUNK = ("weights", 0)


class Script:
    """A state machine that wants ticks at given times and answers its first stimulus with given effects."""

    def __init__(self, deadlines: list[float], effects: list[Effect]) -> None:
        self.deadlines = deadlines
        self.effects = effects
        self.seen: list[tuple[float, str]] = []

    def handle(self, stimulus: Stimulus, *, now: float) -> list[Effect]:
        self.seen.append((now, type(stimulus).__name__))
        self.deadlines = [time for time in self.deadlines if time > now]
        effects, self.effects = self.effects, []
        return effects

    def deadline(self) -> float | None:
        return min(self.deadlines, default=None)

    def validate(self) -> None:
        pass


def run(script: Script, service: ServerSection | None = None) -> tuple[Node, Run]:
    env = Clock()
    scenario = Scenario(steps=1, cluster=ClusterSection(workers=1), compute=Constant(mean=1.0))
    record = Run(scenario, "bsp", 0)
    service_times, disk = Service(service or ServerSection()), Disk(record, 0.0)
    world = World(env, Network(env), Trace(), record, service_times, Timeline(), States(scenario), disk)
    node = Node(world, "node", script)
    node.store.ledger.land(("worker-0", 1))
    node.store.ledger.land(("worker-1", 1))
    node.deliver(st.PeerLost(0, "a first stimulus"))
    env.run()
    return node, record


def test_a_tick_comes_when_it_is_wanted() -> None:
    script = Script([0.3, 2.0, 7.5], [])
    run(script)
    assert script.seen[1:] == [(0.3, "Tick"), (2.0, "Tick"), (7.5, "Tick")]


def test_a_tick_never_comes_early_through_rounding() -> None:
    wanted = [0.1 * i for i in range(1, 200)]
    script = Script(list(wanted), [])
    run(script)
    assert script.seen[1:] == [(time, "Tick") for time in wanted]


def test_an_update_is_applied_when_the_arithmetic_before_it_is_done() -> None:
    script = Script([], [fx.Fold(1, 2, "float32"), fx.Apply(*CHUNK, 1, 1, [0, 1], [0, 0], 1, Assign(), 1)])
    _, record = run(script, ServerSection(fold=0.5, apply=2.0))
    assert script.seen[1:] == [(2.5, "Applied")]
    assert [(update.time, update.tokens) for update in record.updates] == [(2.5, [("worker-0", 1), ("worker-1", 1)])]


@pytest.mark.parametrize(("fold", "then"), [(0.5, 0.5), (0.0, 0.0)])
def test_norms_take_a_pass_over_the_memory(fold: float, then: float) -> None:
    script = Script([], [fx.Norms(*CHUNK, 1, 1, 0, [], 1, LAMB(), 1)])
    run(script, ServerSection(fold=fold))
    assert script.seen[1:] == [(then, "Normed")]


def test_a_log_line_is_written_down_with_its_time_and_node() -> None:
    _, record = run(Script([], [fx.Log("warning", "careful")]))
    assert [(log.time, log.node, log.level, log.text) for log in record.logs] == [(0.0, "node", "warning", "careful")]


def test_a_node_that_stops_takes_in_nothing_more() -> None:
    script = Script([1.0], [fx.Stop("done")])
    node, _ = run(script)
    assert not node.alive
    assert len(script.seen) == 1


def test_using_a_gradient_twice_is_noticed() -> None:
    with pytest.raises(AssertionError, match="slot 2 is not in use"):
        run(Script([], [fx.Free(2), fx.Fold(1, 2, "float32")]))


def test_a_ledger_knows_what_is_left() -> None:
    ledger = Ledger()
    first, second = ledger.land(("worker-0", 1)), ledger.land(("worker-1", 1))
    ledger.fold(first, second)
    third = ledger.land(("worker-2", 1))
    assert ledger.take(first) == [("worker-0", 1), ("worker-1", 1)]
    assert ledger.remaining == [("worker-2", 1)]
    ledger.take(third)
    assert ledger.remaining == []


@pytest.mark.parametrize("wanted", [fx.Disconnect(0, "not needed"), fx.Connect(0, "nobody", 1, 3.0)])
@pytest.mark.parametrize("delay", [0.0, 5.0])
def test_connection_that_is_being_opened_is_given_up(wanted: Effect, delay: float) -> None:
    script = Script([], [fx.Connect(0, "nobody", 1, delay), wanted])
    run(script)
    heard = [name for _, name in script.seen[1:]]
    assert heard == ([] if isinstance(wanted, fx.Disconnect) else ["ConnectFailed"])
