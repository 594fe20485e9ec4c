"""Servers that are lost while each has a standby: training goes on, and every gradient counts once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sim.cluster import simulate
from sim.compute import Constant
from sim.faults import Crash, Pause, Reset
from sim.record import DivideRecord, UpdateRecord
from sim.sections import ClusterSection, NetworkSection, ServerSection, TensorSection
from sim.standing import Standing

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.record import Run
    from sim.scenario import Scenario

WORKERS = 3
STEPS = 12


@pytest.fixture
def run_with(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    def run(*faults: Any, policy: str = "bsp", seed: int = 1) -> Run:
        cluster = ClusterSection(
            workers=WORKERS,
            servers=3,
            heartbeat=1.0,
            death_timeout=4.0,
            call_timeout=60.0,
            join_timeout=30.0,
            chunk_bytes=64,
            split_bytes=64,
            replication=2,
        )
        tensors = tuple(TensorSection(key=f"key-{number}", shape=(30,)) for number in range(2))
        fields = {
            "cluster": cluster,
            "network": NetworkSection(latency=0.05),
            "server": ServerSection(apply=0.02),
            "tensor": tensors,
        }
        return simulate(make_scenario(WORKERS, STEPS, Constant(mean=1.0), fault=faults, **fields), policy, seed)

    return run


def counts(run: Run) -> dict[tuple[str, int], list[int]]:
    """Return how often each gradient is in the updates of each chunk."""
    made: dict[tuple[str, int], list[int]] = {}
    for place in dict.fromkeys((update.key, update.start) for update in run.updates):
        tokens = [token for update in run.updates if (update.key, update.start) == place for token in update.tokens]
        for token in dict.fromkeys(tokens):
            made.setdefault(token, []).append(tokens.count(token))
    return made


@pytest.mark.parametrize("policy", ["bsp", "asp", "ssp:1", "k_async:2", "k_batch_async:2", "round_robin"])
@pytest.mark.parametrize("at", [4.31, 5.07, 5.13, 5.21, 6.02])
def test_server_that_crashes_takes_nothing_with_it(run_with: Callable[..., Run], policy: str, at: float) -> None:
    run = run_with(Crash(at=at, node="server-1"), policy=policy)
    assert [worker.error for worker in run.workers] == [None] * WORKERS
    found = counts(run)
    assert len(found) == WORKERS * STEPS
    assert {tuple(each) for each in found.values()} == {(1,) * 6}


def test_every_server_may_be_lost_and_come_back(run_with: Callable[..., Run]) -> None:
    faults = [Crash(at=8.0 * number + 4.1, node=f"server-{number}", restart=2.0) for number in range(3)]
    run = run_with(*faults)
    assert [worker.error for worker in run.workers] == [None] * WORKERS
    assert set(map(tuple, counts(run).values())) == {(1,) * 6}


def test_link_to_a_standby_that_ends_loses_nothing(run_with: Callable[..., Run]) -> None:
    """The next one's process has it."""
    run = run_with(Reset(at=5.0, node="server-0", to="server-1", times=20, every=0.11))
    assert set(map(tuple, counts(run).values())) == {(1,) * 6}


def test_standby_that_is_stopped_holds_answers_back_until_it_is_lost(run_with: Callable[..., Run]) -> None:
    run = run_with(Pause(at=5.5, node="server-2", duration=60.0))
    assert [worker.error for worker in run.workers] == [None] * WORKERS
    longest = max(step.end - step.computed for worker in run.workers for step in worker.steps)
    assert 4.0 < longest < 6.0


def made(version: int, node: str, start: int = 0) -> UpdateRecord:
    return UpdateRecord(0.0, "w", start, version, [0], [0], [("worker-0", version)], node)


def test_updates_stand_when_the_standby_has_them() -> None:
    stand: list[UpdateRecord] = []
    divisions: list[DivideRecord] = []
    standing = Standing(stand.append, divisions.append)
    for version in (1, 2, 3):
        standing.make(made(version, "server-0"), waits=True)
    standing.arrived(("w", 0), 2, 1.0)
    assert [(update.version, update.time) for update in stand] == [(1, 1.0), (2, 1.0)]
    # Another server makes the third one again.
    standing.make(made(3, "standby"), waits=False)
    assert [(update.version, update.node) for update in stand[2:]] == [(3, "standby")]
    standing.make(made(3, "server-0"), waits=True)
    standing.alone("server-0", 2.0)
    assert len(stand) == 3


def test_update_stands_that_the_standby_has_before_its_server_waits_for_that() -> None:
    stand: list[UpdateRecord] = []
    divisions: list[DivideRecord] = []
    standing = Standing(stand.append, divisions.append)
    standing.arrived(("w", 0), 1, 1.0)
    assert not stand, "the server has not made it yet"
    standing.make(made(1, "server-0"), waits=True)
    assert [update.version for update in stand] == [1]


def test_chunk_is_divided_when_all_that_was_made_of_it_before_stands() -> None:
    order: list[UpdateRecord | DivideRecord] = []
    standing = Standing(order.append, order.append)
    updates = [made(version, "server-0", -1) for version in (1, 2)]
    for update in updates:
        standing.make(update, waits=True)
    division = DivideRecord(0, "w", -1, ["w", "v"])
    standing.divide(division, "server-0")
    standing.arrived(("w", -1), 1, 1.0)
    assert order == updates[:1]
    standing.arrived(("w", -1), 2, 2.0)
    assert order == [*updates, division]
    standing.divide(division, "standby")
    assert order == [*updates, division], "who takes its place says so again"


def test_what_was_made_of_a_chunk_stands_when_its_parts_do() -> None:
    order: list[UpdateRecord | DivideRecord] = []
    standing = Standing(order.append, order.append)
    whole, part = made(1, "server-0", -1), made(2, "server-0")
    standing.make(whole, waits=True)
    standing.divide(DivideRecord(0, "w", -1, ["w", "v"]), "server-0")
    standing.make(part, waits=True)
    assert not order
    standing.arrived(("w", 0), 2, 1.0)
    assert [type(each) for each in order] == [UpdateRecord, DivideRecord, UpdateRecord]
    assert (order[0], order[2]) == (whole, part)
