"""Workers that host the servers: the same values, without the network where it is not needed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import BindError, ClosedError, JoinTimeoutError, RoundTimeoutError, ServerLostError, WorkerLostError
from aiokv.net.memory import MemoryLink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.net.conftest import MakeCluster

    Colocated = Callable[..., contextlib.AbstractAsyncContextManager[list[aiokv.Client]]]


@pytest.fixture
def colocated(settings: dict[str, Any]) -> Colocated:
    """Return the factory of clusters in which every worker hosts a server."""

    @contextlib.asynccontextmanager
    async def running(workers: int, policy: str = "bsp", **changes: Any) -> AsyncIterator[list[aiokv.Client]]:
        shared = {**settings, **changes}
        async with aiokv.Scheduler(num_workers=workers, num_servers=workers, bind_port=0, **shared) as scheduler:
            clients = [
                aiokv.connect(scheduler.address, name=f"worker-{rank}", colocate=True, policy=policy, **shared)
                for rank in range(workers)
            ]
            await asyncio.gather(*(client.start() for client in clients))
            try:
                yield clients
            finally:
                await asyncio.gather(*(client.close() for client in clients))

    return running


async def init(workers: list[aiokv.Client], size: int) -> None:
    await asyncio.gather(*(kv.init("w", np.zeros(size, np.float32)) for kv in workers))


def gradients(rank: int) -> dict[str, Any]:
    generator = np.random.default_rng(rank)
    shapes: dict[str, tuple[int, ...]] = {"big": (700, 501), "small": (3,), "scalar": (1,), "empty": (0, 2)}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


async def train(kv: aiokv.Client) -> bytes:
    await kv.init({name: np.zeros_like(value) for name, value in gradients(0).items()})
    await kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
    values: list[Any] = []
    for _ in range(4):
        values = await kv.pushpull(gradients(kv.rank))
    return b"".join(value.tobytes() for value in values)


async def test_the_weights_have_the_bits_of_a_cluster_with_servers_of_its_own(
    colocated: Colocated, cluster: MakeCluster
) -> None:
    async with colocated(3, chunk_bytes=65536) as workers:
        here = await asyncio.gather(*(train(kv) for kv in workers))
    async with cluster(workers=3, servers=3, chunk_bytes=65536) as running:
        there = await running.each(train)
    assert len({*here, *there}) == 1


async def test_a_worker_reaches_its_own_shard_in_memory_and_the_others_over_tcp(colocated: Colocated) -> None:
    async with colocated(2) as workers:
        for rank, kv in enumerate(workers):
            kinds = {peer: isinstance(link, MemoryLink) for peer, link in kv._links.items()}
            assert kinds == {-1: False, rank: True, 1 - rank: False}


async def test_async_too(colocated: Colocated) -> None:
    async with colocated(2, "asp") as workers:
        await init(workers, 100_000)
        for kv in workers:
            value = await kv.pushpull("w", np.full(100_000, kv.rank + 1, np.float32))
            np.testing.assert_array_equal(value, np.full(100_000, kv.rank + 1))


async def test_a_worker_that_is_done_serves_the_others_until_they_are(colocated: Colocated) -> None:
    async with colocated(2) as workers:
        first, second = workers
        await init(workers, 100_000)
        closing = asyncio.create_task(first.close())
        # Half of the elements are on the shard of the worker that leaves.
        await second.barrier()
        np.testing.assert_array_equal(await second.pushpull("w", np.ones(100_000, np.float32)), np.ones(100_000))
        assert not closing.done()
        await second.close()
        await closing


async def test_a_cancelled_call_gives_its_arrays_back(colocated: Colocated) -> None:
    async with colocated(2) as workers:
        first, second = workers
        await init(workers, 2_000_000)
        gradient, out = np.ones(2_000_000, np.float32), np.full(2_000_000, -1, np.float32)
        call = asyncio.create_task(first.pushpull("w", gradient, out=out))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gradient[:] = 1000
        value = await second.pushpull("w", np.full(2_000_000, 2, np.float32))
        np.testing.assert_array_equal(value, np.full(2_000_000, 3))
        np.testing.assert_array_equal(out, np.full(2_000_000, -1))


async def test_errors_are_those_of_any_cluster(colocated: Colocated) -> None:
    async with colocated(2) as workers:
        first, second = workers
        await init(workers, 100_000)
        with pytest.raises(RoundTimeoutError, match=r"rank 1 \(worker-1\)"):
            await first.push("w", np.ones(100_000, np.float32), timeout=1.0)
        await second.abort()
        with pytest.raises((WorkerLostError, ServerLostError), match="worker-1"):
            await first.push("w", np.ones(100_000, np.float32))


async def test_joining_in_vain_leaves_nothing_behind(free_port: int) -> None:
    short: dict[str, Any] = {"join_timeout": 0.4, "call_timeout": 0.3, "death_timeout": 0.2, "heartbeat": 0.1}
    with pytest.raises(JoinTimeoutError):
        await aiokv.connect(f"127.0.0.1:{free_port}", colocate=True, **short).start()


async def test_a_shard_that_cannot_listen_leaves_nothing_behind(free_port: int) -> None:
    async with aiokv.Scheduler(bind_port=free_port):
        client = aiokv.connect(f"127.0.0.1:{free_port}", colocate=True, bind_port=free_port)
        with pytest.raises(BindError, match=str(free_port)):
            await client.start()
        with pytest.raises(ClosedError):
            await client.barrier()
