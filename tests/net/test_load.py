"""Many rounds of tensors of any size, every value checked; and values that no 32-bit length can hold."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.core.placement import place
from aiokv.net.tcp import Link
from aiokv.types import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import aiokv
    from tests.net.conftest import MakeCluster

MIB = 1 << 20
ROUNDS = [pytest.param(20, id="20-rounds"), pytest.param(200, id="200-rounds", marks=pytest.mark.slow)]


def tensors(seed: int, count: int, most: int) -> dict[str, int]:
    """Return names and sizes in float32 elements, from nothing to `most` bytes, many small ones among them."""
    chance = random.Random(seed)
    sizes = [0, 1, *(int(most // 4 * chance.random() ** 6) for _ in range(count))]
    return {f"t{i}": size for i, size in enumerate(sizes)}


def gradient(rank: int, step: int, size: int) -> Any:
    """Return whole numbers, so that every order of a sum is exact."""
    return ((np.arange(size, dtype=np.int64) * (rank + 3) + step) % 1009).astype(np.float32)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_sync_rounds_of_random_sizes(cluster: MakeCluster, rounds: int) -> None:
    sizes = tensors(1, 60, 5 * MIB)
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.init({name: np.zeros(size, np.float32) for name, size in sizes.items()}))

        async def work(kv: aiokv.Client) -> None:
            chance = random.Random(kv.rank)
            for step in range(rounds):
                # The same keys for both, each in an order of its own.
                names = random.Random(step).sample(list(sizes), 12)
                chance.shuffle(names)
                values = await kv.pushpull({name: gradient(kv.rank, step, sizes[name]) for name in names})
                for name, value in zip(names, values, strict=True):
                    expected = gradient(0, step, sizes[name]) + gradient(1, step, sizes[name])
                    np.testing.assert_array_equal(value, expected)

        await running.each(work)
        assert all(server.store.open_slots == 0 for server in running.servers)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_async_values_are_never_torn(cluster: MakeCluster, rounds: int) -> None:
    """Each push is one number in every element: a chunk that was read while it changed would hold two of them."""
    size = 5 * MIB // 4
    async with cluster(workers=2, servers=2, policy="asp") as running:
        config = running.scheduler.config
        cuts = {"servers": 2, "chunk_bytes": config.chunk_bytes, "split_bytes": config.split_bytes}
        chunks = place("w", TensorSpec((size,), "float32"), **cuts)
        assert len(chunks) == 10
        await running.each(lambda kv: kv.init("w", np.zeros(size, np.float32)))

        async def work(kv: aiokv.Client) -> None:
            for step in range(rounds):
                value = await kv.pushpull("w", np.full(size, 2 * step + kv.rank, np.float32))
                # Different chunks may be of different pushes.
                for chunk in chunks:
                    (seen,) = np.unique(value[chunk.start : chunk.stop])
                    assert seen <= 2 * rounds

        await running.each(work)


async def test_a_value_that_a_slow_reader_has_half_received_is_not_torn(cluster: MakeCluster) -> None:
    size = 16 * MIB
    async with cluster(workers=2, policy="asp") as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", np.zeros(size, np.float32)))
        config = running.scheduler.config
        chunks = place(
            "w",
            TensorSpec((size,), "float32"),
            servers=1,
            chunk_bytes=config.chunk_bytes,
            split_bytes=config.split_bytes,
        )
        link = first._links[0]
        assert isinstance(link, Link)
        assert link._transport is not None
        link._transport.pause_reading()
        pull = asyncio.create_task(first.pull("w"))
        await asyncio.sleep(0)
        # The sockets are full of the old value by now, and its rest waits; meanwhile the servers' value changes.
        for number in (1, 2, 3):
            await second.push("w", np.full(size, number, np.float32))
        link._transport.resume_reading()
        value = await pull
        for chunk in chunks:
            assert len(np.unique(value[chunk.start : chunk.stop])) == 1


@pytest.mark.timeout(300)
async def test_ten_runs_give_the_same_bits(cluster: MakeCluster) -> None:
    digests = set()
    for run in range(10):
        async with cluster(workers=3, servers=2) as running:
            chance = random.Random(run)
            await running.each(lambda kv: kv.init({"w": np.zeros(300_000, np.float32), "b": np.zeros(7, np.float32)}))
            await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9, wd=0.01))

            async def work(kv: aiokv.Client, turns: list[int]) -> bytes:
                generator = np.random.default_rng(kv.rank)
                for turn in turns:
                    for _ in range(turn):
                        await asyncio.sleep(0)
                    gradients = {
                        "w": generator.standard_normal(300_000, np.float32),
                        "b": generator.standard_normal(7, np.float32),
                    }
                    w, b = await kv.pushpull(gradients)
                return bytes(w.tobytes() + b.tobytes())

            # Each run, each worker is late at other times.
            late = [[chance.randrange(30) for _ in range(5)] for _ in range(3)]
            for weights in await asyncio.gather(*(work(kv, late[kv.rank]) for kv in running.workers)):
                digests.add(hashlib.sha256(weights).hexdigest())
    assert len(digests) == 1


async def run_beside(call: Coroutine[Any, Any, object], pause: float) -> list[float]:
    """Return how many seconds there were from one tick to the next while a call was under way."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(call)
    gaps: list[float] = []
    before = loop.time()
    while not task.done():
        await asyncio.sleep(pause)
        now = loop.time()
        gaps.append(now - before)
        before = now
    await task
    return gaps


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_scenario_62_the_loop_turns_while_100_mb_are_pushed(cluster: MakeCluster, shared_memory: str) -> None:
    """In a turn no more is done than can be copied in some ms, by the worker and by the server, which share it."""
    size = 25_000_000
    async with cluster(workers=1, shared_memory=shared_memory) as running:
        (kv,) = running.workers
        gradient = np.ones(size, np.float32)
        await kv.init("w", gradient)
        turns = await run_beside(kv.push("w", gradient), 0)
        assert len(turns) >= gradient.nbytes / (4 * MIB)


@pytest.mark.slow
async def test_scenario_62_a_ticker_is_never_50_ms_late(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        gradient = np.ones(25_000_000, np.float32)
        await kv.init("w", gradient)
        for _ in range(5):
            assert max(await run_beside(kv.push("w", gradient), 0.01)) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_scenario_33_values_over_2_gib(cluster: MakeCluster) -> None:
    """Scenario 33: lengths never wrap. Takes 7 GB of memory."""
    size = 2_200_000_000
    async with cluster(workers=1, call_timeout=200.0, join_timeout=200.0) as running:
        (kv,) = running.workers
        value = np.ones(size, np.uint8)
        await kv.init("big", value)
        value[:] = 2
        value[-1] = 9
        await kv.pushpull("big", value, out=value)
        assert (value[0], value[1 << 31], value[-1]) == (2, 2, 9)
