"""How long the event loop is held by what is large: `python benchmarks/holds.py`.

Scheduler, servers and worker share one loop, on loopback, with a ticker of 1 ms. For each call it prints by how much
the latest tick was late: the longest time for which the loop was held, by whichever of them.

    rows pulled    100,000 rows of 64 numbers are read that nobody has pushed: their first values are drawn
    rows pushed    100,000 rows of 64 numbers are pushed for the first time
    packed         100 MB of rows, in any order, are pushed
    residual       100 MB of gradient are pushed after `2bit` was turned off: the residual goes with them
    checkpoint     one of 100,000 rows of 256 numbers with momentum is made, while some of them are pushed
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.net import runner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

PERIOD = 0.001
ROWS, WIDTH = 100_000, 64
WIDE = 256
SIZE = 25_000_000
REPEATS = 3
CHECKPOINT_EVERY = 20
SETTINGS: dict[str, Any] = {"token": "benchmark", "cluster": "benchmark"}


async def longest_hold(call: Callable[[], Coroutine[Any, Any, Any]]) -> float:
    """Return by how many milliseconds the latest tick was late during a call."""
    task = asyncio.create_task(call())
    worst, before = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(PERIOD)
        now = time.perf_counter()
        worst, before = max(worst, now - before - PERIOD), now
    await task
    return round(worst * 1e3, 1)


async def measure(kv: aiokv.Client, number: int) -> dict[str, float]:
    """Make each call once, on keys of its own."""
    rng = np.random.default_rng(number)
    ids, found = np.arange(ROWS), {}
    table, wide, dense = f"table {number}", f"wide {number}", f"dense {number}"
    normal = {"name": "normal", "scale": 0.01}
    await kv.init_rows(table, (ROWS, WIDTH), initializer=normal)
    await kv.init_rows(wide, (ROWS, WIDE))
    found["rows pulled"] = await longest_hold(lambda: kv.row_sparse_pull(table, row_ids=ids))
    rows = aiokv.RowSparse(ids, np.ones((ROWS, WIDTH), np.float32), (ROWS, WIDTH))
    found["rows pushed"] = await longest_hold(lambda: kv.push(table, rows))
    rows = aiokv.RowSparse(rng.permutation(ROWS), np.ones((ROWS, WIDE), np.float32), (ROWS, WIDE))
    found["packed"] = await longest_hold(lambda: kv.push(wide, rows))
    gradient = rng.standard_normal(SIZE, np.float32)
    await kv.init(dense, gradient)
    await kv.set_gradient_compression("2bit")
    await kv.push(dense, gradient)
    await kv.set_gradient_compression(None)
    found["residual"] = await longest_hold(lambda: kv.push(dense, gradient))
    await kv.delete(table, wide, dense)
    return found


def complete(folder: str) -> int:
    """Return how many complete checkpoints there are."""
    return len(list(Path(folder).glob("*/manifest.json")))


async def checkpointed(kv: aiokv.Client, number: int, folder: str) -> float:
    """Push all rows of a table once, and then a few of them until the next checkpoint is complete."""
    table, ids = f"table {number}", np.arange(ROWS)
    await kv.init_rows(table, (ROWS, WIDE))
    await kv.push(table, aiokv.RowSparse(ids, np.ones((ROWS, WIDE), np.float32), (ROWS, WIDE)))
    few = aiokv.RowSparse(ids[:10], np.ones((10, WIDE), np.float32), (ROWS, WIDE))
    before = complete(folder)

    async def go_on() -> None:
        while complete(folder) == before:
            await kv.push(table, few)
            await asyncio.sleep(PERIOD)

    held = await longest_hold(go_on)
    await kv.delete(table)
    return held


@contextlib.asynccontextmanager
async def cluster(servers: int, momentum: float = 0.0, **settings: Any) -> AsyncIterator[aiokv.Client]:
    """Start a cluster with one worker in this loop."""
    settings = SETTINGS | settings
    async with contextlib.AsyncExitStack() as stack:
        scheduler = aiokv.Scheduler(num_workers=1, num_servers=servers, bind_port=0, **settings)
        await stack.enter_async_context(scheduler)
        for _ in range(servers):
            await stack.enter_async_context(aiokv.Server(scheduler=scheduler.address, **settings))
        async with aiokv.connect(scheduler.address, **settings) as kv:
            await kv.set_optimizer("sgd", learning_rate=0.01, momentum=momentum)
            yield kv


async def run(servers: int, *, as_json: bool) -> None:
    """Start clusters in this loop, measure, and print."""
    async with cluster(servers) as kv:
        # The first time code is loaded, memory is touched, and a thread compiles.
        results = [await measure(kv, number) for number in range(REPEATS + 1)][1:]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"checkpoint_folder": folder, "checkpoint_every": CHECKPOINT_EVERY, "backend": "reference"}
        async with cluster(servers, 0.9, **settings) as kv:
            holds = [await checkpointed(kv, number, folder) for number in range(REPEATS + 1)][1:]
    worst = {name: [each[name] for each in results] for name in results[0]} | {"checkpoint": holds}
    if as_json:
        json.dump(worst, sys.stdout)
        print()
        return
    for name, holds in worst.items():
        print(f"{name:<12} held for {', '.join(f'{hold:.1f}' for hold in holds)} ms")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description="Measure how long the event loop is held.")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object: milliseconds of each repeat")
    options = parser.parse_args(arguments)
    runner.run(run(options.servers, as_json=options.json))


if __name__ == "__main__":
    main()
