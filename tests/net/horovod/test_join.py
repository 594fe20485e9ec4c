"""Horovod's join: ranks whose batches are over say `finish`, and the others go on without waiting for them.

Horovod's `join` returns when all have joined, and says who was last. Here `finish` returns at once, so nothing is said
of the last rank.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import MembershipError

if TYPE_CHECKING:
    import aiokv
    from tests.net.conftest import MakeCluster

CUT = {"servers": 2, "split_bytes": 4096, "chunk_bytes": 4096}
SHAPES = {"one": (17,), "two": (17, 17), "three": (17, 17, 17)}
WORKERS = 3


def full(value: float, dtype: str = "float32") -> dict[str, Any]:
    return {key: np.full(shape, value, dtype) for key, shape in SHAPES.items()}


def assert_full(arrays: Any, value: float) -> None:
    for array, expected in zip(arrays, full(value).values(), strict=True):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("joined", range(WORKERS))
@pytest.mark.parametrize(
    ("reduction", "of_twelve"), [("sum", 24), ("mean", 12), ("mean_of_world", 8), ("median", 12), ("trimmed_mean", 12)]
)
async def test_one_rank_has_joined(cluster: MakeCluster, reduction: str, of_twelve: int, joined: int) -> None:
    """Each of the n = 3 ranks would give t = 12; Horovod's mean is t (n - 1) / n = 8."""

    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("assign", reduction=reduction)
        await kv.init(full(0))
        assert_full(await kv.pushpull(full(12)), 36 if reduction == "sum" else 12)
        if kv.rank == joined:
            await kv.finish()
            return
        for _ in range(2):
            assert_full(await kv.pushpull(full(12)), of_twelve)
        await kv.barrier("done")

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)
        for values in await running.each(lambda kv: kv.pull(full(-1))):
            assert_full(values, of_twelve)


@pytest.mark.parametrize("batches", [(1, 2, 3), (3, 2, 1), (0, 4, 1), (2, 2, 2), (0, 0, 3)])
@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "all at once"])
async def test_uneven_numbers_of_batches(cluster: MakeCluster, batches: tuple[int, ...], ahead: bool) -> None:
    """Rank r adds 10^r as often as it has batches, so the digits of the value count everybody's batches."""

    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("accumulate")
        await kv.init(full(0))
        pushes = []
        for _ in range(batches[kv.rank]):
            pushes.append(asyncio.create_task(kv.push(full(10**kv.rank))))
            await (asyncio.sleep(0) if ahead else pushes[-1])
        await kv.finish()
        await asyncio.gather(*pushes)

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)
        expected = sum(number * 10**rank for rank, number in enumerate(batches))
        for values in await running.each(lambda kv: kv.pull(full(-1))):
            assert_full(values, expected)
        assert all(server.store.open_slots == 0 for server in running.servers)


@pytest.mark.parametrize("codec", [None, "fp16"])
@pytest.mark.parametrize(("size", "count"), [(17, 40), (50_000, 40), (2_000_000, 3)])
async def test_pushes_that_are_under_way_when_a_rank_finishes_all_count(
    cluster: MakeCluster, size: int, count: int, codec: str | None
) -> None:
    """Also those that wait for their turn, are still compressed, or are of another priority. Rank 0 has one only."""

    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("accumulate")
        await kv.set_gradient_compression(codec)
        await kv.init("w", np.zeros(size, "float32"))
        ones = np.ones(size, "float32")
        batches = range(count if kv.rank else 1)
        pushes = [asyncio.create_task(kv.push("w", ones, priority=i % 3 - 1)) for i in batches]
        await asyncio.sleep(0)
        await kv.finish()
        await asyncio.gather(*pushes)

    async with cluster(workers=WORKERS, servers=2, shared_memory="off") as running:
        await running.each(work)
        for value in await running.each(lambda kv: kv.pull("w", np.empty(size, "float32"))):
            np.testing.assert_array_equal(value, np.full(size, 1 + 2 * count))


async def test_who_has_joined_reads_and_waits_at_no_barrier_for_anyone(cluster: MakeCluster) -> None:
    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(lambda kv: kv.init(full(1)))
        joined, *others = running.workers
        await joined.finish()
        await joined.finish()
        for call in (joined.push(full(1)), joined.pushpull(full(1)), joined.push("one", full(1)["one"])):
            with pytest.raises(MembershipError, match="this worker has finished"):
                await call
        await asyncio.gather(*(kv.barrier("of the others") for kv in others))
        await asyncio.gather(*(kv.push(full(5)) for kv in others))
        assert_full(await joined.pull(full(-1)), 10)


async def test_when_all_have_joined_values_stay_and_can_be_read(cluster: MakeCluster) -> None:
    async def work(kv: aiokv.Client) -> None:
        await kv.init(full(1))
        await kv.push(full(2))
        await kv.finish()

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)
        for values in await running.each(lambda kv: kv.pull(list(SHAPES))):
            assert_full(values, 6)


async def test_a_joined_root_s_keys_are_not_waited_for_silently(cluster: MakeCluster) -> None:
    """Horovod refuses broadcasts once a rank has joined. Here the root may still give values."""
    async with cluster(workers=WORKERS, **CUT) as running:
        root, *others = running.workers
        await root.finish()
        waiting = [asyncio.create_task(kv.init(full(0))) for kv in others]
        await root.init(full(3))
        await asyncio.gather(*waiting)
        values = await asyncio.gather(*(kv.pushpull(full(2)) for kv in others))
        for arrays in values:
            assert_full(arrays, 4)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16", "bfloat16", "float64"])
async def test_sums_of_every_kind_of_dtype_without_the_first_and_then_the_second(
    cluster: MakeCluster, dtype: str
) -> None:
    async def work(kv: aiokv.Client) -> None:
        await kv.init(full(0, dtype))
        for step in range(WORKERS):
            # In step s the ranks s, s + 1, ... are there.
            for value in await kv.pushpull(full(kv.rank + 1, dtype)):
                np.testing.assert_array_equal(value, np.full(value.shape, (6, 5, 3)[step], dtype), strict=True)
            if kv.rank == step:
                await kv.finish()
                return

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)
