"""How long the event loop is held while 100 MB go through: `aiokv run -s 1 -w 2 -- python benchmarks/ticker.py`.

Each worker has a ticker of 10 ms in its loop while it pushes and pulls, with a call that is cancelled now and then, and
prints by how much the ticks were late. The loop of a server is that of the worker with `aiokv run -w 2 --colocate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np

import aiokv
from aiokv.net import runner

PERIOD = 0.01
SIZE = 25_000_000
ROUNDS = 30
CANCEL_EVERY = 10


async def tick(late: list[float]) -> None:
    """Keep the seconds by which each tick was late."""
    before = time.perf_counter()
    while True:
        await asyncio.sleep(PERIOD)
        now = time.perf_counter()
        late.append(now - before - PERIOD)
        before = now


async def main() -> None:
    """Train with large arrays, and report."""
    gradient, out = np.ones(SIZE, np.float32), np.empty(SIZE, np.float32)
    async with aiokv.connect() as kv:
        await kv.init("w", gradient)
        late: list[float] = []
        ticker = asyncio.create_task(tick(late))
        for number in range(ROUNDS):
            call = asyncio.create_task(kv.pushpull("w", gradient, out=out))
            if number % CANCEL_EVERY == CANCEL_EVERY - 1:
                await asyncio.sleep(0)
                call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await call
        ticker.cancel()
        await kv.barrier()
        worst = max(late) * 1e3
        print(f"worker {kv.rank}: {len(late)} ticks, median {np.median(late) * 1e3:.2f} ms late, worst {worst:.1f} ms")


if __name__ == "__main__":
    runner.run(main())
