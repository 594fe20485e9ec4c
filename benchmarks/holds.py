"""How long the event loop is held by what is large: `python benchmarks/holds.py`.

Scheduler, servers and worker share one loop, on loopback, with a ticker of 1 ms. For each call it prints by how much
the latest tick was late: the longest time for which the loop was held, by whichever of them.

    rows pulled    100,000 rows of 64 numbers are read that nobody has pushed: their first values are drawn
    rows pushed    100,000 rows of 64 numbers are pushed for the first time
    packed         100 MB of rows, in any order, are pushed
    residual       100 MB of gradient are pushed after `2bit` was turned off: the residual goes with them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.net import runner

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

PERIOD = 0.001
ROWS, WIDTH = 100_000, 64
WIDE = 256
SIZE = 25_000_000
REPEATS = 3
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


async def run(servers: int, *, as_json: bool) -> None:
    """Start a cluster in this loop, measure, and print."""
    async with aiokv.Scheduler(num_workers=1, num_servers=servers, bind_port=0, **SETTINGS) as scheduler:
        nodes = [aiokv.Server(scheduler=scheduler.address, **SETTINGS) for _ in range(servers)]
        for node in nodes:
            await node.start()
        try:
            async with aiokv.connect(scheduler.address, **SETTINGS) as kv:
                await kv.set_optimizer("sgd", learning_rate=0.01)
                # The first time code is loaded, memory is touched, and a thread compiles.
                results = [await measure(kv, number) for number in range(REPEATS + 1)][1:]
        finally:
            for node in nodes:
                await node.close()
    worst = {name: [each[name] for each in results] for name in results[0]}
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
