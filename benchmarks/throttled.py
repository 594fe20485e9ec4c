"""How long a round takes over a slow link, with plain gradients and with compressed ones.

    sudo python benchmarks/throttled.py
    sudo python benchmarks/throttled.py --rate 100mbit --mib 16 --codecs 2bit qsgd --json

One worker and one server live in two network namespaces that are joined by a link which lets `--rate` bits a second
through in each direction (`tc tbf`). A round is a push of float32 gradients, and a pull of the weights where `--pull`
says so. Each way to push takes its turn, so that a disturbance hits all of them; a figure is the median of all its
rounds, and `speedup` is the ratio of the medians. Linux only, as root; at the end the namespaces are deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SERVER, WORKER, PREFIX = "198.18.0.1", "198.18.0.2", 30
"""Addresses of the range that is reserved for benchmarks (RFC 2544)."""
PORT = 9091
MIB = 1 << 20
WARM_UP = 2
SECONDS = 300
PLAIN = "plain"
PARAMS: dict[str, dict[str, Any]] = {"topk": {"fraction": 0.01}, "randomk": {"fraction": 0.01}}


def run(*command: str) -> None:
    """Run a command of the system."""
    subprocess.run(command, check=True, timeout=30)


@contextlib.contextmanager
def link(rate: str) -> Iterator[tuple[str, str]]:
    """Make two joined namespaces and yield their names."""
    name = f"aiokv-{secrets.token_hex(3)}"
    spaces = f"{name}-s", f"{name}-w"
    ends = f"{name[-6:]}s", f"{name[-6:]}w"
    try:
        for space in spaces:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", ends[0], "netns", spaces[0], "type", "veth", "peer", ends[1], "netns", spaces[1])
        for space, end, address in zip(spaces, ends, (SERVER, WORKER), strict=True):
            inside = ("ip", "netns", "exec", space)
            run(*inside, "ip", "address", "add", f"{address}/{PREFIX}", "dev", end)
            run(*inside, "ip", "link", "set", end, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, *f"tc qdisc add dev {end} root tbf rate {rate} burst 256kb latency 50ms".split())
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, timeout=30)


async def serve() -> None:
    """Run the scheduler and the server until the worker has left."""
    scheduler = aiokv.Scheduler(num_workers=1, num_servers=1, bind_host=SERVER, bind_port=PORT)
    async with scheduler, aiokv.Server(scheduler=f"{SERVER}:{PORT}", bind_host=SERVER) as server:
        await server.wait_stopped()


async def work(options: argparse.Namespace) -> None:
    """Measure, and print one JSON object: the seconds of each round, by how gradients were compressed."""
    size = options.mib * MIB // 4
    gradient = np.random.default_rng(0).standard_normal(size, np.float32)
    ways = [PLAIN, *options.codecs]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    async with aiokv.connect(f"{SERVER}:{PORT}", join_timeout=float(SECONDS)) as kv:
        await kv.init("w", np.zeros(size, np.float32))
        await kv.set_optimizer("sgd", learning_rate=0.01)
        out = np.empty(size, np.float32)
        for number in range(WARM_UP + options.rounds):
            for way in ways:
                values = None if PLAIN in (way, options.pull) else options.pull
                codec = None if way == PLAIN else way
                await kv.set_gradient_compression(codec, pull_compression=values, **PARAMS.get(way, {}))
                # What is left of the way before goes along once.
                await kv.pushpull("w", gradient, out=out)
                start = time.perf_counter()
                if options.pull:
                    await kv.pushpull("w", gradient, out=out)
                else:
                    await kv.push("w", gradient)
                if number >= WARM_UP:
                    seconds[way].append(time.perf_counter() - start)
    json.dump(seconds, sys.stdout)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run both nodes and return a row for each way."""
    environment = {**os.environ, "AIOKV_TOKEN": secrets.token_hex(16), "AIOKV_SHARED_MEMORY": "off"}
    arguments = ["--rounds", str(options.rounds), "--mib", str(options.mib), "--codecs", *options.codecs]
    arguments += ["--pull", options.pull] if options.pull else []
    program = [sys.executable, os.path.abspath(__file__), *arguments]
    with link(options.rate) as (of_server, of_worker):
        server = subprocess.Popen(["ip", "netns", "exec", of_server, *program, "--node", "server"], env=environment)
        try:
            worker = ["ip", "netns", "exec", of_worker, *program, "--node", "worker"]
            done = subprocess.run(
                worker, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=2 * SECONDS
            )
            server.wait(30)
        finally:
            server.kill()
            server.wait()
    seconds: dict[str, list[float]] = json.loads(done.stdout)
    plain = statistics.median(seconds[PLAIN])
    return [
        {
            "gradients": way,
            "rate": options.rate,
            "mib": options.mib,
            "pull": options.pull,
            "seconds": round(statistics.median(times), 4),
            "speedup": round(plain / statistics.median(times), 2),
            "rounds": [round(each, 4) for each in times],
        }
        for way, times in seconds.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for and print a table, or one JSON array."""
    parser = argparse.ArgumentParser(description="Measure compressed gradients over a slow link.")
    parser.add_argument("--rate", default="1gbit", help="as `tc` has it")
    parser.add_argument("--mib", default=64, type=int, help="MiB of gradients")
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--codecs", nargs="+", default=["2bit"], help="names of codecs")
    parser.add_argument("--pull", metavar="CODEC", help="pull the weights too: plain, or by compressed ways with CODEC")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--node", choices=["server", "worker"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.node:
        asyncio.run(serve() if options.node == "server" else work(options))
        return
    rows = measure(options)
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
        return
    for row in rows:
        rounds = " ".join(f"{each:.3f}" for each in row["rounds"])
        print(f"{row['gradients']:<8} {row['seconds']:.4f} s  {row['speedup']:>6.2f} times as fast  rounds {rounds}")


if __name__ == "__main__":
    main()
