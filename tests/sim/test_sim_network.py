"""Connections: order, times, and what happens when there is no other side."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from aiokv.wire.messages import Heartbeat
from sim.clock import Clock
from sim.faults import Link
from sim.network import HEAD_BYTES, Closing, Network, Packet, Pipe
from sim.sections import NetworkSection
from sim.timeline import Disturbance

if TYPE_CHECKING:
    from simpy.events import ProcessGenerator

ADDRESS = ("there", 1)


class Endpoint:
    """A node that writes down what arrives, and when."""

    def __init__(self, env: Clock, name: str) -> None:
        self.name = name
        self.alive = True
        self.arrived: list[tuple[float, int]] = []
        self.closed: list[tuple[float, str]] = []
        self._env = env

    def accept(self, pipe: Pipe) -> int:
        return 7

    def arrive(self, pipe: Pipe, item: Packet | Closing) -> None:
        if isinstance(item, Closing):
            self.closed.append((self._env.now, item.reason))
        else:
            self.arrived.append((self._env.now, item.request))


def connected(latency: float, bandwidth: float) -> tuple[Clock, Pipe, Endpoint, Endpoint]:
    env = Clock()
    network = Network(env, NetworkSection(latency=latency, bandwidth=bandwidth), metered=True)
    here, there = Endpoint(env, "here"), Endpoint(env, "there")
    network.listen(ADDRESS, there)
    pipes: list[Pipe | None] = []
    network.connect(here, 3, ADDRESS, pipes.append)
    env.run()
    [pipe] = pipes
    assert pipe is not None
    return env, pipe, here, there


def packet(request: int, nbytes: int = 0) -> Packet:
    return Packet(request, Heartbeat(), nbytes)


def test_connecting_takes_a_round_trip() -> None:
    env, *_ = connected(latency=0.25, bandwidth=1000.0)
    assert env.now == 0.5


def test_a_message_takes_latency_and_bytes_by_bandwidth() -> None:
    env, pipe, _, there = connected(latency=0.5, bandwidth=1000.0)
    begin = env.now
    pipe.send(packet(1, nbytes=1000 - HEAD_BYTES))
    env.run()
    assert there.arrived == [(begin + 1.5, 1)]


def test_messages_queue_behind_each_other() -> None:
    env, pipe, _, there = connected(latency=0.5, bandwidth=1000.0)
    begin = env.now
    pipe.send(packet(1, nbytes=1000 - HEAD_BYTES))
    pipe.send(packet(2))
    env.run()
    assert there.arrived == [(begin + 1.5, 1), (begin + 1.0 + 0.064 + 0.5, 2)]


def test_the_two_directions_do_not_disturb_each_other() -> None:
    env, pipe, here, there = connected(latency=0.0, bandwidth=1000.0)
    begin = env.now
    pipe.send(packet(1, nbytes=5000))
    pipe.back.send(packet(2, nbytes=1000 - HEAD_BYTES))
    env.run()
    assert here.arrived == [(begin + 1.0, 2)]
    assert [request for _, request in there.arrived] == [1]


def test_a_connection_keeps_the_order_whatever_the_sizes_and_times() -> None:
    env, pipe, _, there = connected(latency=0.1, bandwidth=300.0)
    stream = random.Random("order")

    def send_all() -> ProcessGenerator:
        for number in range(500):
            pipe.send(packet(number, nbytes=stream.choice([0, 1, 10, 1000])))
            yield env.timeout(stream.choice([0.0, 0.0, 0.1, 1.0]))

    env.process(send_all())
    env.run()
    assert [request for _, request in there.arrived] == list(range(500))


def test_scenario_36_what_is_urgent_overtakes_100_mb_and_a_thousand_of_it_starve_nobody() -> None:
    """At 100 MB/s: the small one waits for the part that is under way, and parts of the big one for sixteen others."""
    part, parts = 512 * 1024, 200
    env, pipe, _, there = connected(latency=0.0, bandwidth=1e8)
    begin = env.now
    for number in range(parts):
        pipe.send(packet(number, part), -9)
    for number in range(1000):
        pipe.send(packet(parts + number, 1024), 0)
    env.run()
    order = [request for _, request in there.arrived]
    assert order.index(parts) == 1
    assert [request for request in order if request < parts] == list(range(parts))
    bigs = [place for place, request in enumerate(order) if request < parts]
    assert max(after - before for before, after in itertools.pairwise(bigs)) == 17
    assert there.arrived[1][0] - begin < 0.01


def test_closing_comes_after_what_was_sent() -> None:
    env, pipe, _, there = connected(latency=0.5, bandwidth=1000.0)
    begin = env.now
    pipe.send(packet(1, nbytes=1000 - HEAD_BYTES))
    pipe.close("done")
    pipe.send(packet(2))
    env.run()
    assert there.arrived == [(begin + 1.5, 1)]
    assert there.closed == [(begin + 1.5, "done")]


@pytest.mark.parametrize("dead", [False, True])
def test_nobody_answers_where_nobody_listens(dead: bool) -> None:
    env = Clock()
    network = Network(env)
    if dead:
        listener = Endpoint(env, "there")
        listener.alive = False
        network.listen(ADDRESS, listener)
    pipes: list[Pipe | None] = []
    network.connect(Endpoint(env, "here"), 0, ADDRESS, pipes.append)
    env.run()
    assert pipes == [None]


def test_each_side_knows_the_other_by_its_own_number() -> None:
    _, pipe, *_ = connected(latency=0.0, bandwidth=1000.0)
    assert (pipe.peer, pipe.back.peer) == (7, 3)


def test_nobody_is_reached_over_a_cut_link_until_it_heals() -> None:
    env = Clock()
    cut = Link(node="here", to="there", at=0.0, duration=3.0, cut=True)
    network = Network(env, disturbances=[Disturbance("here", "there", 0.0, 3.0, cut)])
    network.listen(ADDRESS, Endpoint(env, "there"))
    pipes: list[Pipe | None] = []
    network.connect(Endpoint(env, "here"), 0, ADDRESS, pipes.append)
    env.run(until=env.timeout(3.0))
    network.connect(Endpoint(env, "here"), 0, ADDRESS, pipes.append)
    env.run()
    assert [pipe is None for pipe in pipes] == [True, False]
