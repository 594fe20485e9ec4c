"""How transfers share network cards, with rates that are worked out by hand."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.clock import Clock
from sim.fabric import FairFabric, FifoFabric, Flow, fair_rates

if TYPE_CHECKING:
    from sim.fabric import Fabric, Port


def flow(source: str, target: str, limit: float = math.inf) -> Flow:
    return Flow(((source, "out"), (target, "in")), 1.0, limit, lambda: None, 1)


def rates(*flows: Flow, capacity: float = 12.0) -> list[float]:
    fair_rates(list(flows), lambda port: capacity)
    return [flow.rate for flow in flows]


def test_transfers_into_one_card_get_equal_shares() -> None:
    assert rates(flow("a", "x"), flow("b", "x"), flow("c", "x")) == [4.0, 4.0, 4.0]


def test_what_one_card_leaves_another_transfer_takes() -> None:
    # Into x go three; b also sends to y, and gives it what x does not take.
    assert rates(flow("a", "x"), flow("b", "x"), flow("c", "x"), flow("b", "y")) == [4.0, 4.0, 4.0, 8.0]


def test_a_limited_transfer_leaves_the_rest_to_others() -> None:
    assert rates(flow("a", "x", limit=2.0), flow("b", "x")) == [2.0, 10.0]


def test_the_two_directions_of_a_card_are_apart() -> None:
    assert rates(flow("a", "x"), flow("x", "a")) == [12.0, 12.0]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("wxyz")), min_size=1, max_size=12))
def test_no_port_is_over_its_capacity_and_every_transfer_has_a_full_one(pairs: list[tuple[str, str]]) -> None:
    flows = [flow(*pair) for pair in pairs]
    fair_rates(flows, lambda port: 1.0)
    used: dict[Port, float] = {}
    for each in flows:
        for port in each.ports:
            used[port] = used.get(port, 0.0) + each.rate
    assert max(used.values()) <= 1.0 + 1e-9
    assert all(max(used[port] for port in each.ports) >= 1.0 - 1e-9 for each in flows)


@pytest.mark.parametrize("kind", [FairFabric, FifoFabric])
def test_a_busy_card_carries_as_much_as_it_can(kind: type[FairFabric] | type[FifoFabric]) -> None:
    env = Clock()
    fabric: Fabric = kind(env, lambda port: 1000.0)
    done: list[float] = []
    stream = random.Random("sizes")
    sizes = [stream.randrange(1, 5000) for _ in range(50)]
    for number, size in enumerate(sizes):
        fabric.start(f"worker-{number}", "server", size, math.inf, lambda: done.append(env.now))
    env.run()
    assert max(done) == pytest.approx(sum(sizes) / 1000.0)
    assert fabric.carried["server", "in"] == sum(sizes)


def test_a_later_transfer_slows_an_earlier_one() -> None:
    env = Clock()
    fabric = FairFabric(env, lambda port: 10.0)
    done: dict[str, float] = {}
    fabric.start("a", "x", 100, math.inf, lambda: done.update(a=env.now))
    env.run(until=env.timeout(4.0))
    fabric.start("b", "x", 30, math.inf, lambda: done.update(b=env.now))
    env.run()
    # a has 60 left at 4; both go at 5 until b is done at 10, and a has 30 left.
    assert done == pytest.approx({"b": 10.0, "a": 13.0})
