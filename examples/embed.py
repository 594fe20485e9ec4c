"""Run a whole cluster inside an asyncio program: one process, one event loop, beside the program's own work.

    python examples/embed.py

Every part of a cluster is an async context manager, so it starts and stops with the block that needs it. The same parts
spread over machines without a change: only the scheduler's address has to be known.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np

import aiokv

WORKERS = 2
SERVERS = 2
ROUNDS = 50


async def tick(times: list[float]) -> None:
    """Stand for whatever else the program does: it goes on while the cluster works."""
    while True:
        times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.001)


async def worker(scheduler: str) -> float:
    """Add one number per worker, round after round, and return the last sum."""
    async with aiokv.connect(scheduler=scheduler) as kv:
        total = np.zeros(100_000, np.float32)
        await kv.init("total", total)
        for _ in range(ROUNDS):
            # Without an optimizer the new value is the sum of what the workers pushed.
            await kv.pushpull("total", np.full_like(total, kv.rank + 1), out=total)
        return float(total[0])


async def main() -> None:
    """Start the cluster, let it work, and stop it."""
    times: list[float] = []
    ticker = asyncio.create_task(tick(times))
    async with (
        aiokv.Scheduler(num_workers=WORKERS, num_servers=SERVERS, bind_port=0) as scheduler,
        aiokv.Server(scheduler=scheduler.address),
        aiokv.Server(scheduler=scheduler.address),
        asyncio.TaskGroup() as group,
    ):
        workers = [group.create_task(worker(scheduler.address)) for _ in range(WORKERS)]
    ticker.cancel()
    with suppress(asyncio.CancelledError):
        await ticker
    print(f"the sum of 1 and 2, as each worker got it: {[task.result() for task in workers]}")
    print(f"ticks meanwhile: {len(times)}")


if __name__ == "__main__":
    asyncio.run(main())
