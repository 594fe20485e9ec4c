"""A parameter server made of Ray actors, on this machine: gradients and sums go through Ray's shared memory.

Each server has an equal part of the tensors. Modes: `gather` is Ray's own way, one program tells the workers to compute
and the servers to sum what they returned; in `call` every worker calls the servers, which answer when all have called.
"""

# ruff: noqa: PLC0415 - only those who use Ray and NumPy wait for their import

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.cases import MODES

if TYPE_CHECKING:
    import argparse

STORE_BYTES = 3 << 30
"""Shared memory for Ray's object store."""


class Actor:
    """What servers and workers have in common."""

    def peak_rss_mib(self) -> float:
        """Return the most memory that this actor has had resident, shared memory included."""
        return common.peak_rss_mib(os.getpid())


class Server(Actor):
    """Sums its part of the tensors."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._sums: list[Any] = []

    def fold(self, *gradients: list[Any]) -> list[Any]:
        """Return the sums of all workers' gradients."""
        import numpy as np

        if len(gradients) == 1:
            return gradients[0]
        self._sums = self._sums or [np.empty_like(array) for array in gradients[0]]
        for number, total in enumerate(self._sums):
            np.add(gradients[0][number], gradients[1][number], out=total)
            for gradient in gradients[2:]:
                np.add(total, gradient[number], out=total)
        return self._sums


class CalledServer(Server):
    """Is called by each worker; an asyncio actor, so that calls can wait for each other."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._gradients: dict[int, list[Any]] = {}
        self._closed: asyncio.Future[list[Any]] | None = None

    async def call(self, rank: int, gradient: list[Any]) -> list[Any]:
        """Wait for all workers' gradients; return a reference to the sums, so that they are copied only once."""
        import ray

        closed = self._closed = self._closed or asyncio.get_running_loop().create_future()
        self._gradients[rank] = gradient
        if len(self._gradients) == self._workers:
            sums = self.fold(*(self._gradients[key] for key in sorted(self._gradients)))
            self._gradients, self._closed = {}, None
            closed.set_result([ray.put(sums)])
        return await closed


class Worker(Actor):
    """Has gradients, and looks at the sums that it gets."""

    def __init__(self, rank: int, parts: list[list[common.Shape]]) -> None:
        import numpy as np

        self._rank = rank
        self._gradients = [[np.zeros(shape, np.float32) for shape in part] for part in parts]
        self._sums: tuple[list[Any], ...] = ()

    def fill(self, index: int) -> None:
        """Write the gradients of a round."""
        for part in self._gradients:
            for array in part:
                array.fill(common.gradient(self._rank, index))

    def gradient(self, part: int) -> list[Any]:
        """Return the gradients of a server's part."""
        return self._gradients[part]

    def take(self, *sums: list[Any]) -> None:
        """Keep the sums of all parts."""
        self._sums = sums

    def call(self, servers: list[Any]) -> None:
        """Call the servers, and keep the sums."""
        import ray

        calls = [server.call.remote(self._rank, self._gradients[part]) for part, server in enumerate(servers)]
        self._sums = tuple(ray.get([ref for [ref] in ray.get(calls)]))

    def check(self, wanted: float) -> bool:
        """Say whether all sums are right."""
        return all(bool((array == wanted).all()) for part in self._sums for array in part)


def split(shapes: list[common.Shape], servers: int) -> list[list[common.Shape]]:
    """Deal the tensors out to the servers; fewer tensors than servers are cut."""
    if len(shapes) >= servers:
        return [shapes[number::servers] for number in range(servers)]
    size = sum(map(common.size_of, shapes))
    return [[(size * (number + 1) // servers - size * number // servers,)] for number in range(servers)]


def work(options: argparse.Namespace) -> None:
    """Start the actors, measure, and print the result."""
    import ray

    calls = options.mode == "call"
    parts = split(options.shapes, options.servers)
    server_kind, worker_kind = ray.remote(CalledServer if calls else Server), ray.remote(Worker)
    servers = [server_kind.remote(options.workers) for _ in parts]
    workers = [worker_kind.remote(rank, parts) for rank in range(options.workers)]

    def gather() -> None:
        sums = [
            server.fold.remote(*(worker.gradient.remote(number) for worker in workers))
            for number, server in enumerate(servers)
        ]
        ray.get([worker.take.remote(*sums) for worker in workers])

    def call() -> None:
        ray.get([worker.call.remote(servers) for worker in workers])

    def check(index: int) -> bool:
        wanted = common.expected_sum(options.workers, index)
        return all(ray.get([worker.check.remote(wanted) for worker in workers]))

    record = common.timed_rounds(
        options,
        fill=lambda index: ray.get([worker.fill.remote(index) for worker in workers]),
        work=call if calls else gather,
        check=check,
        barrier=lambda: None,  # one program leads all workers
        cpu=lambda: common.tree_cpu_seconds(os.getpid()),
    )
    record["cpu_s"] = {"all": record["cpu_s"]["worker0"]}
    record["peak_rss_mib"] = {
        f"{name}{number}": ray.get(actor.peak_rss_mib.remote())
        for name, actors in (("server", servers), ("worker", workers))
        for number, actor in enumerate(actors)
    }
    common.emit(common.result(options, f"ray {ray.__version__}", [record]))


def lead(options: argparse.Namespace) -> None:
    """Start Ray in the folder that `--meet` names, measure, and end it."""
    import ray

    common.end_on_sigterm()
    ray.init(
        num_cpus=options.servers + options.workers,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        _temp_dir=options.meet,
    )
    try:
        work(options)
    finally:
        ray.shutdown()


def drive(options: argparse.Namespace) -> None:
    """Start the program that leads the actors, wait for it, and print its result."""
    path = os.pathsep.join([common.ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        leader = ("leader", common.node(__file__, options, "leader", meet=folder), environ)
        [printed] = common.run_nodes([leader], timeout=options.timeout).values()
    common.emit(printed[-1])


def main() -> None:
    """Drive, or lead if `--role` says so."""
    options = common.arguments("Measure a parameter server of Ray actors.", MODES["ray"])
    if options.role:
        lead(options)
    else:
        common.drive_or_say_why(drive, options)


if __name__ == "__main__":
    main()
