"""How much memory rank 0 needs to save and to load a model, besides what it had before.

    python benchmarks/saving.py --mb 256

A scheduler and two servers run in this process, the worker in one of its own that has no copy of the model. Printed is
by how much its largest resident set grew, in MB (1e6 bytes), and how long the call took. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

import aiokv

KEY_BYTES = 4 << 20
TOKEN = "benchmark"


def peak() -> float:
    """Return the largest resident set of this process so far, in MB."""
    # What getrusage says may be that of the process from which this one was started.
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (kibibytes,) = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return kibibytes * 1024 / 1e6


async def measure(address: str, url: str, keys: int, *, saves: bool) -> tuple[float, float]:
    """Return by how many MB the peak grew during one call, and its seconds."""
    async with aiokv.connect(address, token=TOKEN) as kv:
        if saves:
            value = np.ones(KEY_BYTES // 4, np.float32)
            await kv.set_optimizer("sgd", momentum=0.9)
            for number in range(keys):
                await kv.init(f"w{number}", value)
                await kv.push(f"w{number}", value)
        before, begin = peak(), time.perf_counter()
        await (kv.save(url) if saves else kv.load(url))
        return peak() - before, time.perf_counter() - begin


def measured(address: str, url: str, keys: int, saves: bool) -> tuple[float, float]:
    """Measure in this process."""
    return asyncio.run(measure(address, url, keys, saves=saves))


async def on_cluster(url: str, keys: int, *, saves: bool) -> tuple[float, float]:
    """Run a cluster and measure its worker."""
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            aiokv.Scheduler(num_workers=1, num_servers=2, bind_port=0, token=TOKEN)
        )
        for _ in range(2):
            await stack.enter_async_context(aiokv.Server(scheduler=scheduler.address, token=TOKEN))
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, measured, scheduler.address, url, keys, saves)


def main() -> None:
    """Measure a save, and a load into a cluster that has no keys."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="MiB of weights; the rule keeps as much again")
    keys = parser.parse_args().mb * (1 << 20) // KEY_BYTES
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "model.safetensors")
        for name, saves in (("save", True), ("load", False)):
            grown, seconds = asyncio.run(on_cluster(url, keys, saves=saves))
            size = Path(url).stat().st_size / 1e6
            sys.stdout.write(f"{name}: a file of {size:.0f} MB, +{grown:.0f} MB at the peak, {seconds:.1f} s\n")


if __name__ == "__main__":
    main()
