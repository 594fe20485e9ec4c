"""A process of servers is killed while everything has a copy: the one that decides, and a worker at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.config import load_config
from aiokv.net.inquiry import ask_waiting
from aiokv.types import Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiokv
    from tests.net.conftest import Cluster, MakeCluster

STEPS = 8
KILLED = 3
"""Before which step a process is killed."""
SIZES = {"big": 40_000, "small": 3}
"""The first is cut over all servers, the second lives on one."""

SERVER = """
    import asyncio, sys, aiokv
    async def main():
        async with aiokv.Server(scheduler=sys.argv[1], name="server-0", **{settings!r}) as server:
            await server.wait_stopped()
    asyncio.run(main())
"""

WORKER = """
    import asyncio, sys, numpy, aiokv
    sizes = {sizes!r}
    async def main():
        async with aiokv.connect(sys.argv[1], name="worker-2", **{settings!r}) as kv:
            await kv.init({{key: numpy.zeros(size) for key, size in sizes.items()}})
            while True:
                await kv.push({{key: numpy.full(size, 1e6) for key, size in sizes.items()}})
    asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def process(code: str, running: Cluster) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a node in a process of its own."""
    text = textwrap.dedent(code).format(settings=running.settings, sizes=SIZES)
    arguments = [sys.executable, "-c", text, running.scheduler.address]
    made = await asyncio.create_subprocess_exec(*arguments)
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
        await made.wait()


@contextlib.asynccontextmanager
async def three_servers(cluster: MakeCluster, workers: int, **settings: Any) -> AsyncIterator[tuple[Cluster, Any]]:
    """Run a cluster whose server 0 is a process of its own."""
    settings |= {"replication": 2}
    async with (
        cluster(workers=workers, servers=2, places=3, start_workers=False, **settings) as running,
        process(SERVER, running) as first,
    ):
        yield running, first


async def copied(running: Cluster) -> None:
    """Wait until every server has a standby that is ready."""
    config = load_config(environ={}, scheduler=running.scheduler.address, **running.settings)
    ready = 0
    while ready < 3:
        answer = (await ask_waiting(config, timeout=5.0))["scheduler"]
        assert isinstance(answer, m.Waiting)
        ready = sum("ready" in member.state for member in answer.members if member.role is Role.SERVER)
        await asyncio.sleep(0.01)


def arrays(value: float) -> dict[str, Any]:
    return {key: np.full(size, value) for key, size in SIZES.items()}


async def train(kv: aiokv.Client, running: Cluster, *victims: asyncio.subprocess.Process) -> list[set[float]]:
    """Take all steps, and kill processes on the way; return the numbers that are in the values after each."""
    numbers = []
    await kv.init(arrays(0.0))
    for step in range(STEPS):
        if step == KILLED and kv.rank == 0:
            await copied(running)
            for victim in victims:
                victim.kill()
        values = await kv.pushpull(arrays(1000.0**kv.rank))
        numbers.append({float(number) for value in values for number in np.unique(value)})
    return numbers


async def test_the_server_that_decides_the_rounds_is_killed(cluster: MakeCluster) -> None:
    async with three_servers(cluster, 2) as (running, first):
        running.workers = [running.client(f"worker-{rank}", policy="round_robin") for rank in range(2)]

        async def work(kv: aiokv.Client) -> set[float]:
            await kv.start()
            if kv.rank == 0:
                await kv.set_optimizer("sgd", learning_rate=1.0)
            await kv.barrier()
            await train(kv, running, first)
            await kv.barrier()
            return {float(number) for value in (await kv.pull(list(SIZES))) for number in np.unique(value)}

        # Each step of each worker counts once, in every key.
        assert await running.each(work) == [{-1001.0 * STEPS}] * 2


async def test_scenario_1_a_worker_and_the_server_that_decides_what_counts_of_it_are_killed(
    cluster: MakeCluster,
) -> None:
    """Its last call has come to all servers, or to some; each number says whose pushes are in it."""
    async with (
        three_servers(cluster, 3, on_worker_loss="shrink") as (running, first),
        process(WORKER, running) as worker,
    ):
        running.workers = [running.client(f"worker-{rank}") for rank in range(2)]

        async def work(kv: aiokv.Client) -> list[set[float]]:
            await kv.start()
            return await train(kv, running, worker, first)

        one, two = await running.each(work)
        assert one == two, "two workers have read different values"
        assert one[:KILLED] == [{1001001.0}] * KILLED
        assert one[KILLED] in ({1001001.0}, {1001.0}), "some keys have what others lack"
        assert one[KILLED + 1 :] == [{1001.0}] * (STEPS - KILLED - 1)
