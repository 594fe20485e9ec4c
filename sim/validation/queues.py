"""Cases of servers, network cards and queues."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING, Final

from sim import closed_forms as known
from sim.clock import Clock
from sim.compute import Constant, Exponential, Hyperexponential
from sim.fabric import FifoFabric
from sim.network import HEAD_BYTES, Closing, Network, Packet
from sim.sections import NetworkSection, ServerSection
from sim.validation.case import Case, batched, exact
from sim.validation.runs import run_ideal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.types import Peer
    from sim.laws import Distribution
    from sim.network import Pipe
    from sim.waiting import Waiting

THINK, SERVICE = 0.1, 0.005
LOAD: Final = 0.8
GIGABIT_10: Final = 1.25e9
MODEL: Final = 100_000_000


def saturation() -> Iterator[Case]:
    """Case 13: workers at one server are a closed queue; the exact solution is mean value analysis."""
    server = ServerSection(apply=SERVICE, law="exponential")
    for workers, steps in ((1, 4000), (5, 1200), (10, 700), (20, 500), (21, 500), (30, 400), (50, 300)):
        run = run_ideal("asp", workers, steps, Exponential(mean=THINK), server=server)
        begin, end = run.updates[20 * workers].time, min(worker.ended for worker in run.workers)
        times = [update.time for update in run.updates if begin < update.time <= end]
        rate, response = known.closed_queue(workers, THINK, SERVICE)
        bounds = [begin + (end - begin) * i / 20 for i in range(21)]
        rates = [sum(low < time <= high for time in times) / (high - low) for low, high in itertools.pairwise(bounds)]
        yield batched(f"13 updates a second, N={workers}, Z=100 ms, S=5 ms", rates, rate)
        steps_done = sorted(
            (step.end, step.end - step.computed) for worker in run.workers for step in worker.steps if step.end > begin
        )
        waits = [wait for at, wait in steps_done if at <= end]
        yield batched(f"13 response time (s), N={workers}, Z=100 ms, S=5 ms", waits, response)


def open_queues() -> Iterator[Case]:
    """Case 14: a network card with random arrivals is M/M/1, M/D/1 or M/G/1, by the law of the sizes."""
    laws: tuple[tuple[str, Distribution, float], ...] = (
        ("M/M/1", Exponential(mean=1.0), 1.0),
        ("M/D/1", Constant(mean=1.0), 0.0),
        ("M/G/1, squared variation 4,", Hyperexponential(mean=1.0, scv=4.0), 4.0),
    )
    for name, law, scv in laws:
        yield batched(f"14 {name} load 0.8, mean time in it", _sojourns(law, 60_000), known.open_queue(LOAD, scv))


def _sojourns(law: Distribution, count: int) -> list[float]:
    """Return how long transfers take that come at random to a card; sizes follow a law, in transfer seconds."""
    env = Clock()
    speed = 1e9
    fabric = FifoFabric(env, lambda port: speed)
    stream = random.Random("1:queue")
    found: list[float] = []

    def arrive() -> None:
        start = env.now
        size = round(law.sample(stream) * speed)
        fabric.start("from", "to", size, math.inf, lambda: found.append(env.now - start))
        env.after(stream.expovariate(LOAD), arrive)

    env.after(0.0, arrive)
    while len(found) < count:
        env.step()
    return found[1000:]


class _Sink:
    """A node that calls something for whatever arrives."""

    def __init__(self, name: str, arrived: Callable[[int], None]) -> None:
        self.name = name
        self.alive = True
        self._arrived = arrived

    def accept(self, pipe: Pipe) -> Peer:
        return 0

    def arrive(self, pipe: Pipe, item: Packet | Closing) -> None:
        if isinstance(item, Packet):
            self._arrived(item.request)


def _arrivals(sharing: str, workers: int, servers: int) -> list[float]:
    """Return when the parts of a model arrive that all workers send at once to all servers."""
    env = Clock()
    network = Network(env, NetworkSection(bandwidth=GIGABIT_10, sharing=sharing))  # type: ignore[arg-type]
    times: list[float] = []
    sinks = [_Sink(f"server-{i}", lambda request: times.append(env.now)) for i in range(servers)]
    for sink in sinks:
        network.listen((sink.name, 1), sink)
    part = MODEL // servers - HEAD_BYTES

    def send(pipe: Pipe | None) -> None:
        assert pipe is not None, "all servers listen"
        pipe.send(Packet(1, None, part))  # type: ignore[arg-type]

    for i in range(workers):
        worker = _Sink(f"worker-{i}", lambda request: None)
        for number, sink in enumerate(sinks):
            network.connect(worker, number, (sink.name, 1), send)
    env.run()
    return times


def incast() -> Iterator[Case]:
    """Case 15: all workers push 100 MB at once over 10 Gb/s."""
    for servers in (1, 2, 8):
        expected = known.push_time(MODEL, GIGABIT_10, 8, servers)
        yield exact(
            f"15 push of 8 workers to {servers} servers, fair, last (s)", max(_arrivals("fair", 8, servers)), expected
        )
    fair, fifo = _arrivals("fair", 8, 1), _arrivals("fifo", 8, 1)
    yield exact("15 incast, fair, first (s)", min(fair), 0.64)
    for i, time in enumerate(fifo, start=1):
        yield exact(f"15 incast, fifo, number {i} (s)", time, 0.08 * i)
    yield exact("15 incast, fifo, mean (s)", sum(fifo) / 8, 0.36)


def _iteration(costs: tuple[int, ...], mode: str) -> float:
    """Return the time of a backward and a forward pass of layers whose gradients go over a real pipe.

    A layer takes 2 backward and 1 forward; `costs` are the times of its transfer, which is cut into parts of time 1.
    """
    env = Clock()
    part = 1024
    network = Network(env, NetworkSection(bandwidth=float(part), sharing="fifo"))
    left = list(costs)
    here = [env.event() for _ in costs]

    def arrived(layer: int) -> None:
        left[layer] -= 1
        if not left[layer]:
            here[layer].succeed()

    network.listen(("server", 1), _Sink("server", arrived))
    pipes: list[Pipe | None] = []
    network.connect(_Sink("worker", arrived), 0, ("server", 1), pipes.append)
    env.run()
    [pipe] = pipes
    assert pipe is not None, "the server listens"

    def push(layer: int) -> None:
        for _ in range(costs[layer]):
            pipe.send(Packet(layer, None, part - HEAD_BYTES), -layer if mode == "priority" else 0)  # type: ignore[arg-type]

    def train() -> Waiting:
        layers = range(len(costs))
        for layer in reversed(layers):
            yield env.timeout(2.0)
            if mode != "none":
                push(layer)
        if mode == "none":
            for layer in layers:
                push(layer)
            yield env.all_of(here)
        for layer in layers:
            yield here[layer]
            yield env.timeout(1.0)

    env.run(until=env.process(train()))
    return env.now


OVERLAP: Final = {
    (1, 1, 1, 9): {"none": 24, "fifo": 18, "priority": 15},
    (5, 5, 5, 5): {"none": 32, "fifo": 26, "priority": 23},
    (2, 2, 2, 2): {"none": 20, "fifo": 14, "priority": 14},
    (9, 1, 1, 1): {"none": 24, "fifo": 21, "priority": 21},
}
"""Times of an iteration by hand, by the times of the layers' transfers."""


def overlap() -> Iterator[Case]:
    """Case 16: transfers while other layers are computed, by the order in which they leave."""
    for costs, times in OVERLAP.items():
        for mode, expected in times.items():
            yield exact(f"16 overlap, transfers {costs}, {mode}", _iteration(costs, mode), expected)
