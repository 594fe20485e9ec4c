"""The checks notice what is wrong: each test spoils a good run in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.wire.messages import Heartbeat
from sim.checks import Checks, InvariantError, find_violations
from sim.clock import Clock
from sim.cluster import simulate
from sim.compute import Constant
from sim.dialogue import Dialogue
from sim.network import Closing, Network, Packet, Pipe
from sim.record import Run
from sim.scenario import Scenario
from sim.sections import ClusterSection, NetworkSection
from sim.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def bsp(make_scenario: Callable[..., Scenario]) -> Run:
    return simulate(make_scenario(2, 3), "bsp", 1)


@pytest.fixture
def asp(make_scenario: Callable[..., Scenario]) -> Run:
    return simulate(make_scenario(2, 3), "asp", 1)


def test_a_lost_gradient(bsp: Run) -> None:
    bsp.updates[1].tokens = bsp.updates[1].tokens[:-1]
    bsp.updates[1].ranks.pop()
    found = find_violations(bsp)
    assert "key 'weights' from element 0: push 2 of worker-1 was answered, but is in no update" in found
    assert "key 'weights' from element 0: version 2 was made without worker-1" in found


def test_a_gradient_that_was_applied_twice(bsp: Run) -> None:
    first, second = bsp.updates[:2]
    second.tokens = [second.tokens[0], first.tokens[1]]
    assert "key 'weights' from element 0: push 1 of worker-1 was applied twice" in find_violations(bsp)


def test_a_gradient_of_another_round(bsp: Run) -> None:
    first, second = bsp.updates[:2]
    first.tokens, second.tokens = [second.tokens[0], first.tokens[1]], [first.tokens[0], second.tokens[1]]
    assert find_violations(bsp)[0].endswith("version 1 holds pushes of other rounds, by ['worker-0']")


def test_a_stale_gradient_in_a_round(bsp: Run) -> None:
    bsp.updates[2].staleness[0] = 1
    [found] = find_violations(bsp)
    assert found.endswith("version 3 has gradients of staleness [1, 0]")


def test_a_sum_that_was_not_made_in_rank_order(bsp: Run) -> None:
    bsp.updates[0].tokens = bsp.updates[0].tokens[::-1]
    bsp.updates[0].ranks.reverse()
    [found] = find_violations(bsp)
    assert found.endswith("version 1 was summed in the order [1, 0]")


def test_a_rank_that_did_not_send_what_is_said_to_be_its_own(bsp: Run) -> None:
    bsp.updates[0].tokens = bsp.updates[0].tokens[::-1]
    assert "but names the ranks [0, 1]" in find_violations(bsp)[0]


def test_a_version_that_was_left_out(bsp: Run) -> None:
    bsp.updates[2].version = 4
    assert find_violations(bsp)[0].endswith("update 3 made version 4")


def test_a_wrong_staleness(asp: Run) -> None:
    asp.updates[3].staleness[0] += 1
    [found] = find_violations(asp)
    assert "version 4 says staleness" in found


def test_a_push_that_was_never_made(asp: Run) -> None:
    asp.workers[0].steps = Steps(asp.workers[0].steps[:-1])
    assert any("was applied, but never made" in text for text in find_violations(asp))


def test_time_that_is_neither_busy_nor_waiting(asp: Run) -> None:
    asp.workers[0].ended += 1.0
    [found] = find_violations(asp)
    assert found.startswith("worker-0: ")
    assert found.endswith("s elapsed")


def test_answers_without_any_update(asp: Run) -> None:
    asp.updates.clear()
    assert find_violations(asp) == ["pushes were answered, but no update was made"]


# --- physics ---


class Endpoint:
    """A node to which nothing matters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True

    def accept(self, pipe: Pipe) -> int:
        return 0

    def arrive(self, pipe: Pipe, item: Packet | Closing) -> None:
        pass


@pytest.fixture
def used() -> Network:
    """Return a network over which a message has gone."""
    env = Clock()
    network = Network(env, NetworkSection(latency=0.5, bandwidth=1000.0), metered=True)
    listener, caller = Endpoint("there"), Endpoint("here")
    network.listen(("there", 1), listener)
    network.connect(caller, 0, ("there", 1), lambda pipe: pipe.send(Packet(1, Heartbeat(), 936)) if pipe else None)
    env.run()
    assert find_physics(network) == []
    return network


def find_physics(network: Network) -> list[str]:
    scenario = Scenario(steps=1, cluster=ClusterSection(workers=1), compute=Constant(mean=1.0))
    checks = Checks(Run(scenario, "bsp", 0), strict=False)
    checks.finish(network)
    return checks.found


def test_bytes_that_vanish(used: Network) -> None:
    used.pipes[0].delivered -= 100
    assert find_physics(used) == ["('here', 'there'): 1000 bytes sent are not 900 delivered and 0 under way"]


def test_messages_that_take_other_times_than_their_number_says(used: Network) -> None:
    assert used.meter is not None
    used.meter.enter(used.env.now)
    used.meter.leave(used.env.now, used.env.now - 1.0)
    [found] = find_physics(used)
    assert found.startswith("Little's law: 1.5 message seconds in the network, but messages took 2.5 s")


def test_a_card_that_carries_too_much(used: Network) -> None:
    assert used.fabric is not None
    used.fabric.carried["there", "in"] = 5000.0
    assert find_physics(used) == ["('there', 'in') carried 5000 bytes in 2.5 s"]


def test_a_strict_check_ends_the_run(bsp: Run) -> None:
    checks = Checks(bsp, strict=True)
    with pytest.raises(InvariantError, match="update 1 made version 3"):
        checks.on_update(bsp.updates[2])


def test_workers_that_are_told_of_other_members_of_a_step(bsp: Run) -> None:
    checks = Checks(bsp, strict=False)
    ranks = [worker.rank for worker in bsp.workers]
    first, second, *_ = bsp.workers
    checks.on_members(first, 1, ranks, 0.0)
    checks.on_members(second, 1, ranks, 0.0)
    assert checks.found == []
    bsp.workers[-1].steps = Steps(bsp.workers[-1].steps[:-1])
    checks.on_members(first, 1, ranks[:-1], 0.0)
    told = f"others were told {ranks}; {bsp.workers[-1].name} is not lost"
    assert checks.found == [f"{first.name} was told that ranks {ranks[:-1]} make step 1, {told}"]


def test_nobody_relies_on_what_one_is_told_who_has_not_heard_that_it_is_lost(
    make_scenario: Callable[..., Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulate(make_scenario(3, 3), "asp", 1)
    first, second, last = run.workers
    last.steps = Steps(last.steps[:-1])
    for lost in ("", second.name):
        monkeypatch.setattr(Dialogue, "is_given_up", lambda _, name, lost=lost: name == lost)
        checks = Checks(run, strict=False)
        checks.on_members(first, 1, [0, 1, 2], 0.0)
        checks.on_members(second, 1, [0, 1], 0.0)
        assert bool(checks.found) == (not lost)


def test_who_joins_where_there_are_too_few_may_make_a_step_instead_of_who_is_gone(
    make_scenario: Callable[..., Scenario],
) -> None:
    for least, found in ((2, False), (1, True)):
        cluster = ClusterSection(workers=4, on_worker_loss="shrink", min_workers=least)
        run = simulate(make_scenario(4, 3, cluster=cluster), "asp", 1)
        first, second, lost, comer = run.workers
        comer.steps = Steps(comer.steps[:-1])
        lost.struck = True
        run.since[comer.name] = [1]
        checks = Checks(run, strict=False)
        checks.on_members(first, 1, [0, 1, 2], 0.0)
        checks.on_members(second, 1, [0, 1, 3], 0.0)
        assert bool(checks.found) == found


def test_what_a_worker_was_told_of_a_step_that_it_did_not_live_to_make_binds_nobody(
    make_scenario: Callable[..., Scenario],
) -> None:
    """Its successor makes the step again, maybe together with somebody who has joined meanwhile."""
    run = simulate(make_scenario(3, 3), "asp", 1)
    first, second, last = run.workers
    last.steps = Steps(last.steps[:-1])
    first.outages = [(first.steps[1].start, first.steps[1].end)]
    for makes_it in (False, True):
        checks = Checks(run, strict=False)
        checks.on_members(first, 1, [0, 1], 0.0)
        step = first.steps[1]
        step.answered = makes_it
        first.steps[1] = step
        checks.on_members(second, 1, [0, 1, 2], 0.0)
        assert bool(checks.found) == makes_it
