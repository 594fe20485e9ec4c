"""What becomes of the others when a worker is killed, by `on_worker_loss`: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiokv
    from tests.net.conftest import Cluster, MakeCluster

SIZES = {"big": 600_000, "small": 3, "middle": 40_000}
"""Elements of float64: the first is cut into many chunks over all servers, the second lives on one."""

STEPS = 12

VICTIM = """
    import asyncio, sys, numpy, aiokv
    sizes = {sizes!r}
    async def main():
        async with aiokv.connect(sys.argv[1], name="worker-2", token="a shared secret", cluster="test") as kv:
            await kv.init({{key: numpy.zeros(size) for key, size in sizes.items()}})
            values = {{key: numpy.full(size, 1e6) for key, size in sizes.items()}}
            for step in range({steps}):
                print(step, flush=True)
                await kv.push(values)
    try:
        asyncio.run(main())
    except aiokv.AiokvError as error:
        print(type(error).__name__, error, flush=True)
"""


def arrays(value: float) -> dict[str, Any]:
    return {key: np.full(size, value) for key, size in SIZES.items()}


@asynccontextmanager
async def victim(running: Cluster) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run worker 2 in a process of its own."""
    code = textwrap.dedent(VICTIM).format(sizes=SIZES, steps=STEPS)
    arguments = [sys.executable, "-c", code, running.scheduler.address]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def stop_at(process: asyncio.subprocess.Process, step: int) -> None:
    """Stop the process when it is about to push a step."""
    assert process.stdout is not None
    while int(await process.stdout.readline()) < step:
        pass
    os.kill(process.pid, signal.SIGSTOP)


async def kill_at(process: asyncio.subprocess.Process, step: int) -> None:
    """Kill the process when it is about to push a step."""
    assert process.stdout is not None
    while int(await process.stdout.readline()) < step:
        pass
    process.kill()


async def train(kv: aiokv.Client) -> list[set[float]]:
    """Join and take all steps; return the numbers that are in the values after each."""
    numbers = []
    await kv.start()
    await kv.init(arrays(0.0))
    for _ in range(STEPS):
        values = await kv.pushpull(arrays(1000.0**kv.rank))
        numbers.append({float(number) for value in values for number in np.unique(value)})
    return numbers


@pytest.mark.parametrize("step", [1, 2, 5, 9])
async def test_scenario_1_with_shrink_the_others_take_all_their_steps_and_no_key_has_what_another_lacks(
    cluster: MakeCluster, step: int
) -> None:
    """The worker is killed in the middle of what it sends; each number says whose pushes are in it."""
    async with (
        cluster(workers=3, servers=3, start_workers=False, on_worker_loss="shrink") as running,
        victim(running) as process,
    ):
        killing = asyncio.create_task(kill_at(process, step))
        running.workers = [running.client(f"worker-{rank}") for rank in range(2)]
        first, second = await running.each(train)
        await killing
        assert first == second, "two workers have read different values"
        # A value is the sum of its round.
        assert first[:step] == [{1001001.0}] * step
        assert {1001.0} in first
        rounds = [numbers for numbers in first if numbers != {1001001.0}]
        assert rounds == [{1001.0}] * len(rounds), "some keys have what others lack"
        assert first[-len(rounds) :] == rounds


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP")
async def test_scenario_2_with_shrink_a_worker_that_comes_to_again_is_told_that_the_others_have_gone_on(
    cluster: MakeCluster,
) -> None:
    """Scenario 2: it is stopped until it is counted as lost, and then goes on; what it sends has no effect."""
    settings: dict[str, Any] = {"on_worker_loss": "shrink", "heartbeat": 0.1, "death_timeout": 0.5}
    async with (
        cluster(workers=3, servers=2, start_workers=False, **settings) as running,
        victim(running) as process,
    ):
        stopping = asyncio.create_task(stop_at(process, 3))
        running.workers = [running.client(f"worker-{rank}") for rank in range(2)]
        first, second = await running.each(train)
        await stopping
        assert first == second
        assert first[-1] == {1001.0}
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout is not None
        last = (await process.stdout.read()).decode().splitlines()[-1]
        assert last.startswith("StaleEpochError"), last
        np.testing.assert_array_equal(await running.workers[0].pull("small"), np.full(3, 1001.0))
