"""What every worker of the benchmark runs: `python -m aiokv.bench.worker HOST:PORT PLAN`, started by `cluster`.

A round is one `pushpull` of all tensors. Only that call is timed: the gradient is made before it, and every value that
came back is checked after it. Where these take long, barriers keep one worker's checks out of the others' rounds.
"""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from aiokv.addresses import parse_address
from aiokv.bench.checks import OPTIMIZERS, make_check
from aiokv.bench.pattern import Floats, Gradient
from aiokv.bench.plan import Done, Message, Plan, Progress, Ready, encode
from aiokv.bench.workloads import Workload, parse_workload
from aiokv.config import load_config
from aiokv.net import runner
from aiokv.net.worker import Client, connect
from aiokv.policy import get_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.config import Config

PAUSE_BYTES = 4 << 20
"""A workload of fewer bytes is checked so quickly that nobody needs to wait for it."""
_PROGRESS_SECONDS = 0.5
_MAX_PROBLEMS = 5

Tensors = dict[str, Floats]


class Rounds:
    """Runs rounds on one client: gradient, call, check.

    Args:
        client: connected.
        workload: what a round moves.
        plan: the measurement.
    """

    def __init__(self, client: Client, workload: Workload, plan: Plan) -> None:
        self.times: list[float] = []
        self.cpu_s = 0.0
        self.problems: list[str] = []
        self._client, self._optimizer = client, plan.optimizer
        self._gradient = Gradient(client.rank, plan.workers, workload.size)
        self._received: Floats = np.zeros(workload.size, np.float32)
        self._pushes, self._pulls = _cut(self._gradient.flat, workload), _cut(self._received, workload)
        in_rounds = get_policy(plan.policy).decides
        policy = "bsp" if in_rounds else plan.policy
        self._check = make_check(client.rank, plan.workers, workload.size, policy=policy, optimizer=plan.optimizer)
        self._pauses = plan.workers > 1 and workload.nbytes >= PAUSE_BYTES
        self._next = 0

    async def prepare(self) -> None:
        """Create the keys, as zeros, and set the update rule."""
        if self._optimizer is not None:
            await self._client.set_optimizer(self._optimizer, **OPTIMIZERS.get(self._optimizer, {}))
        await self._client.init(self._pulls)
        await self._client.barrier()

    def forget_times(self) -> None:
        """Begin to measure: what was timed so far was the warm-up."""
        self.times, self.cpu_s = [], 0.0

    async def run(self) -> None:
        """Run one round."""
        self._gradient.fill(self._next)
        await self._pause()
        cpu, start = time.process_time(), time.perf_counter()
        await self._client.pushpull(self._pushes, out=self._pulls)
        end = time.perf_counter()
        self.cpu_s += time.process_time() - cpu
        self.times.append(end - start)
        await self._pause()
        problem = self._check(self._received, self._next)
        if problem and len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)
        self._next += 1

    async def _pause(self) -> None:
        if self._pauses:
            await self._client.barrier()

    def digest(self) -> int:
        """Return a checksum of what came last, for a comparison between workers; 0 where they may differ."""
        return zlib.crc32(self._received.data) if self._check.same_on_all else 0


async def measure(parent: Parent, config: Config, plan: Plan) -> None:
    """Join the cluster, run the rounds when the parent says so, and tell it what came out."""
    workload = parse_workload(plan.workload)
    async with connect(config=config, policy=plan.policy) as client:
        rounds = Rounds(client, workload, plan)
        await rounds.prepare()
        for _ in range(plan.warmup):
            await rounds.run()
        await parent.ask(Ready(config.token, config.name))
        rounds.forget_times()
        reports = plan.shows_progress and client.rank == 0
        told = time.monotonic()
        for number in range(plan.rounds):
            await rounds.run()
            if reports and time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                parent.tell(Progress(number + 1))
        await parent.ask(Done(client.rank, rounds.times, rounds.cpu_s, rounds.digest(), rounds.problems))


class Parent:
    """The connection to the process that started the benchmark."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def tell(self, message: Message) -> None:
        """Send a message."""
        self._writer.write(encode(message) + b"\n")

    async def ask(self, message: Message) -> None:
        """Send a message and wait for a line.

        Raises:
            ConnectionError: the parent is gone.
        """
        self.tell(message)
        if not await self._reader.readline():
            raise ConnectionError("the process that started the benchmark is gone")


async def _main(address: str, plan: Plan, config: Config) -> None:
    reader, writer = await asyncio.open_connection(*parse_address(address))
    try:
        await measure(Parent(reader, writer), config, plan)
    finally:
        writer.close()


def main(arguments: Sequence[str]) -> None:
    """Run a worker; its place in the cluster is in the environment."""
    address, text = arguments
    config = load_config()
    runner.run(_main(address, msgspec.json.decode(text, type=Plan), config), loop=config.loop)


def _cut(flat: Floats, workload: Workload) -> Tensors:
    """Return the tensors as views of one array, one after the other."""
    tensors: Tensors = {}
    start = 0
    for key, shape in workload.shapes.items():
        size = int(np.prod(shape))
        tensors[key] = flat[start : start + size].reshape(shape)
        start += size
    return tensors


if __name__ == "__main__":
    main(sys.argv[1:])
