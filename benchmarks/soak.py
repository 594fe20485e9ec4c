"""Many connections and many small pushes for a long time: `python benchmarks/soak.py --minutes 30`.

One server has many connections that only live, and some over which small pushes go all the time. Prints one JSON
object: latencies of pushes minute by minute, how much memory the server has, and what waits for an answer at the end.
The exit code is 1 when the last minutes are more than twice as slow as the first ones, the server's memory has grown
by more than 10 MB, or something still waits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil

import aiokv
from aiokv.launch.base import node_command
from aiokv.net import runner
from aiokv.net.inquiry import ask_waiting
from aiokv.types import Role
from aiokv.wire.messages import Waiting

SETTINGS: dict[str, Any] = {
    "cluster": "soak",
    "token": "of the soak alone",
    "heartbeat": 5.0,
    "death_timeout": 60.0,
    "call_timeout": 120.0,
    "join_timeout": 300.0,
    "max_handshakes": 1000,
}
SIZE = 16
"""Elements of a push."""

ENDS = 5
"""So many windows at the beginning and at the end are compared."""

MOST_SLOWER = 2.0
MOST_GROWTH_MB = 10.0
WARM_WINDOWS = 1
"""Memory counts from the end of this window on: by then everything has been used once."""


class Window:
    """What was seen in a part of the run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rss_mb = 0.0

    def facts(self) -> dict[str, float]:
        """Return it for a report."""
        p50, p99 = np.percentile(self.seconds, (50, 99)) * 1e3
        return {
            "pushes": len(self.seconds),
            "p50_ms": round(float(p50), 3),
            "p99_ms": round(float(p99), 3),
            "rss_mb": round(self.rss_mb, 2),
        }


async def push(kv: aiokv.Client, pause: float, windows: list[Window]) -> None:
    """Push until cancelled, and note how long each took."""
    gradient = np.ones(SIZE, np.float32)
    while True:
        began = time.perf_counter()
        await kv.push("w", gradient)
        windows[-1].seconds.append(time.perf_counter() - began)
        await asyncio.sleep(pause)


async def watch(windows: list[Window], window: float, total: float, server: psutil.Process) -> None:
    """Begin a new window now and then, until the time is over."""
    for _ in range(max(1, round(total / window))):
        windows.append(Window())
        await asyncio.sleep(window)
        windows[-1].rss_mb = server.memory_info().rss / 1e6


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the report."""
    workers = options.idle + options.busy
    async with aiokv.Scheduler(num_workers=workers, num_servers=1, bind_port=0, **SETTINGS) as scheduler:
        environ = {"AIOKV_SCHEDULER": scheduler.address} | {
            f"AIOKV_{name.upper()}": str(value) for name, value in SETTINGS.items()
        }
        command = node_command(Role.SERVER)
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | environ, stdout=subprocess.DEVNULL)
        clients = [
            aiokv.connect(scheduler.address, name=f"worker-{number}", policy="asp", **SETTINGS)
            for number in range(workers)
        ]
        try:
            await asyncio.gather(*(client.start() for client in clients))
            return await _measure(options, clients, psutil.Process(process.pid))
        finally:
            # One after the other they would leave a cluster that tells all others each time.
            await scheduler.close()
            await asyncio.gather(*(client.abort() for client in clients))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _measure(options: argparse.Namespace, clients: list[aiokv.Client], server: psutil.Process) -> dict[str, Any]:
    busy, idle = clients[: options.busy], clients[options.busy :]
    value = np.zeros(SIZE, np.float32)
    await asyncio.gather(*(client.init("w", value) for client in clients))
    await busy[0].set_optimizer("accumulate")
    windows: list[Window] = [Window()]
    pushing = [asyncio.create_task(push(client, options.pause, windows)) for client in busy]
    await watch(windows, options.window, options.minutes * 60, server)
    for task in pushing:
        # What is under way comes to its end, so that the tables can be looked at.
        task.cancel()
    ended = await asyncio.gather(*pushing, return_exceptions=True)
    errors = [repr(error) for error in ended if not isinstance(error, asyncio.CancelledError)]
    await asyncio.gather(*(client.pull("w") for client in clients))
    answers = await ask_waiting(busy[0].config, timeout=30.0)
    waiting = sum(len(answer.calls) for answer in answers.values() if isinstance(answer, Waiting))
    pending = sum(client.pending for client in clients)
    return _report(options, [window.facts() for window in windows[1:]], len(idle), waiting + pending, errors)


def _report(
    options: argparse.Namespace, windows: list[dict[str, float]], idle: int, waiting: int, errors: list[str]
) -> dict[str, Any]:
    first = statistics.median(each["p99_ms"] for each in windows[:ENDS])
    last = statistics.median(each["p99_ms"] for each in windows[-ENDS:])
    growth = windows[-1]["rss_mb"] - windows[min(WARM_WINDOWS, len(windows) - 1)]["rss_mb"]
    return {
        "minutes": options.minutes,
        "idle": idle,
        "busy": options.busy,
        "pushes": sum(int(each["pushes"]) for each in windows),
        "p99_first_ms": round(first, 3),
        "p99_last_ms": round(last, 3),
        "rss_growth_mb": round(growth, 2),
        "waiting": waiting,
        "errors": errors,
        "ok": last <= MOST_SLOWER * first and growth < MOST_GROWTH_MB and not waiting and not errors,
        "windows": windows,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run it as the command line says."""
    # At the end all clients say that the scheduler is gone.
    logging.getLogger("aiokv").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description="Many connections and small pushes for a long time.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--idle", type=int, default=500, help="connections that only live")
    parser.add_argument("--busy", type=int, default=64, help="connections that push")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between the pushes of one of them")
    parser.add_argument("--window", type=float, default=60.0, help="seconds for which latencies are put together")
    return runner.run(soak(parser.parse_args(arguments)))


if __name__ == "__main__":
    report = main()
    print(json.dumps(report))
    sys.exit(0 if report["ok"] else 1)
