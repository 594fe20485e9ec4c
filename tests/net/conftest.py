"""A whole cluster in the test's own loop, on loopback, with free ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest

import aiokv
import aiokv.core.joiner
import aiokv.policy  # what packages bring is looked up when it is imported, which would hold up a test's event loop

SETTINGS: dict[str, Any] = {
    "token": "a shared secret",
    # What is compiled in a thread is not what these tests are about.
    "backend": "reference",
    "cluster": "test",
    "heartbeat": 0.5,
    "death_timeout": 10.0,
    "reconnect_grace": 0.1,
    "settle_time": 0.0,
    "call_timeout": 20.0,
    "join_timeout": 20.0,
}


@dataclass
class Cluster:
    """The nodes of a running cluster. `workers[r]` has rank r."""

    scheduler: aiokv.Scheduler
    servers: list[aiokv.Server]
    settings: dict[str, Any]
    workers: list[aiokv.Client] = field(default_factory=list)

    def client(self, name: str, **settings: Any) -> aiokv.Client:
        """Return another worker, not started."""
        return aiokv.connect(self.scheduler.address, name=name, **{**self.settings, **settings})

    async def each(self, call: Callable[[aiokv.Client], Any]) -> list[Any]:
        """Make one call on every worker at the same time and return the results by rank."""
        return await asyncio.gather(*(call(worker) for worker in self.workers))


MakeCluster = Callable[..., AbstractAsyncContextManager[Cluster]]


@contextlib.asynccontextmanager
async def running_cluster(
    *,
    workers: int = 2,
    servers: int = 1,
    places: int = 0,
    policy: str = "bsp",
    start_workers: bool = True,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Run a cluster; at the end all workers leave, then everything is closed. With `places` that is how many servers it
    has, and the first ones come from elsewhere.
    """
    shared = {**SETTINGS, **settings}
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(
            aiokv.Scheduler(num_workers=workers, num_servers=places or servers, bind_port=0, **shared)
        )
        nodes = [
            await stack.enter_async_context(aiokv.Server(scheduler=scheduler.address, name=f"server-{i}", **shared))
            for i in range(max(0, places - servers), max(servers, places))
        ]
        cluster = Cluster(scheduler, nodes, shared)
        if start_workers:
            cluster.workers = [cluster.client(f"worker-{rank}", policy=policy) for rank in range(workers)]
            await cluster.each(lambda worker: worker.start())
        try:
            yield cluster
        finally:
            await asyncio.gather(*(worker.close() for worker in cluster.workers))


@pytest.fixture(autouse=True)
def _early_answers() -> Iterator[None]:
    """Let nodes say at half of a short time-out why a call is in vain, so that its own end does not come first.

    With the tenth that they have to say so otherwise, a loop that stands still for 0.1 s, as on a busy machine, is too
    late for a call of 1 s.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aiokv.core.joiner, "SHARE", 0.5)
        yield


@pytest.fixture
def free_port() -> int:
    """Return a port of 127.0.0.1 at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def cluster() -> MakeCluster:
    """Return the factory of clusters: `async with cluster(workers=2, servers=1, policy="bsp") as running`."""
    return running_cluster


@pytest.fixture
def settings() -> dict[str, Any]:
    """Return the settings that all nodes of a test's cluster share."""
    return dict(SETTINGS)


@contextlib.contextmanager
def threaded_cluster(workers: int, servers: int = 1, port: int = 0) -> Iterator[str]:
    """Run scheduler and servers in a loop of another thread; yields the scheduler's address."""
    started: Any = threading.Event()
    address: list[str] = []
    stop: list[Any] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(
                aiokv.Scheduler(num_workers=workers, num_servers=servers, bind_port=port)
            )
            for _ in range(servers):
                await stack.enter_async_context(aiokv.Server(scheduler=scheduler.address))
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            address.append(scheduler.address)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert started.wait(20)
        yield address[0]
    finally:
        stop[0]()
        thread.join()


ClusterInAThread = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def cluster_in_a_thread() -> ClusterInAThread:
    """Return what runs scheduler and servers for blocking clients: `with cluster_in_a_thread(2, 1) as address`."""
    return threaded_cluster
