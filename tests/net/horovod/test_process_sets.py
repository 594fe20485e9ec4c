"""Horovod's process sets: groups of ranks with sums, broadcasts and barriers of their own.

They need no registration: a group is the ranks that a key or a barrier names. So there is nothing to add or remove, and
no error for a set that is not registered.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import BarrierTimeoutError, MembershipError

if TYPE_CHECKING:
    import aiokv
    from tests.net.conftest import MakeCluster

WORKERS = 4
CUT = {"servers": 2, "split_bytes": 4096, "chunk_bytes": 4096}
EVEN, ODD = (0, 2), (1, 3)
SHAPES = {"one": (17,), "two": (17, 17), "three": (17, 17, 17)}


def full(prefix: str, value: float, dtype: str = "float32") -> dict[str, Any]:
    return {f"{prefix} {key}": np.full(shape, value, dtype) for key, shape in SHAPES.items()}


def assert_full(arrays: Any, value: float) -> None:
    for array, shape in zip(arrays, SHAPES.values(), strict=True):
        np.testing.assert_array_equal(array, np.full(shape, value, array.dtype), strict=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int8", "int64", "uint8"])
async def test_even_and_odd_ranks_sum_for_themselves(cluster: MakeCluster, dtype: str) -> None:
    """Rank r gives r + 1: 1 + 3 of the even ones, 2 + 4 of the odd ones. They have a different number of rounds."""

    async def work(kv: aiokv.Client) -> None:
        mine, name = (ODD, "odd") if kv.rank % 2 else (EVEN, "even")
        group = kv.group(mine)
        await group.init(full(name, 0, dtype))
        for _ in range(2 + kv.rank % 2):
            assert_full(await kv.pushpull(full(name, kv.rank + 1, dtype)), 6 if kv.rank % 2 else 4)

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)


@pytest.mark.parametrize(("reduction", "alone"), [("mean", 4), ("mean_of_world", 2)])
async def test_a_mean_is_over_the_set(cluster: MakeCluster, reduction: str, alone: float) -> None:
    """Ranks 1 and 3 give 2 and 4; all together give 1, 2, 3 and 4. Then rank 3 goes on alone in its set of two."""

    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("assign", reduction=reduction)
        await kv.init(full("all", 0))
        assert_full(await kv.pushpull(full("all", kv.rank + 1)), 2.5)
        if kv.rank in ODD:
            await kv.group(ODD).init(full("odd", 0))
            assert_full(await kv.pushpull(full("odd", kv.rank + 1)), 3)
            if kv.rank == 1:
                await kv.finish()
            else:
                assert_full(await kv.pushpull(full("odd", kv.rank + 1)), alone)

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)


async def test_all_sets_at_once_in_another_order_on_every_rank(cluster: MakeCluster) -> None:
    """All fifteen sets of four ranks, which overlap; rank r gives 10^r, so the digits say who was summed."""
    sets = [[rank for rank in range(WORKERS) if number >> rank & 1] for number in range(1, 2**WORKERS)]

    async def of_set(kv: aiokv.Client, ranks: list[int]) -> None:
        group = kv.group(ranks)
        assert group.rank == ranks.index(kv.rank)
        name = f"set {ranks}"
        await group.init(full(name, 0, "int64"))
        for step in range(1, 3):
            values = await kv.pushpull(full(name, step * 10**kv.rank, "int64"))
            assert_full(values, step * sum(10**rank for rank in ranks))
        await group.barrier(name)

    async def work(kv: aiokv.Client) -> None:
        mine = [ranks for ranks in sets if kv.rank in ranks]
        random.Random(kv.rank).shuffle(mine)
        await asyncio.gather(*(of_set(kv, ranks) for ranks in mine))

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)
        assert all(server.store.open_slots == 0 for server in running.servers)


@pytest.mark.parametrize("ranks", [(0, 2), (1, 3), (2, 3), (3,), (1, 2, 3), (0, 1, 2, 3)])
async def test_the_first_of_a_set_is_its_root_and_all_may_read(cluster: MakeCluster, ranks: tuple[int, ...]) -> None:
    async def work(kv: aiokv.Client) -> None:
        if kv.rank in ranks:
            await kv.group(ranks).init(full("w", kv.rank + 7))
        assert_full(await kv.pull(full("w", -1)), ranks[0] + 7)

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)


async def test_a_barrier_waits_for_its_own_ranks_and_for_no_others(cluster: MakeCluster) -> None:
    """The odd ones pass while the even ones have not come; the even ones wait until the last of them is there."""
    async with cluster(workers=WORKERS, **CUT) as running:
        first, *_ = running.workers
        waiting = asyncio.create_task(first.group(EVEN).barrier("b"))
        for _ in range(3):
            await asyncio.gather(*(running.workers[rank].group(ODD).barrier("b") for rank in ODD))
        # A round trip on the same connection: its barrier has arrived, and is not over.
        await first.group([0]).barrier("alone")
        assert not waiting.done()
        await running.workers[2].group(EVEN).barrier("b")
        await waiting
        with pytest.raises(BarrierTimeoutError) as caught:
            await first.group(EVEN).barrier("b", timeout=1.0)
        assert caught.value.details["ranks"] == [2]


async def test_a_join_of_one_set_s_rank_is_one_of_all_its_sets(cluster: MakeCluster) -> None:
    async def work(kv: aiokv.Client) -> None:
        name, mine = ("odd", ODD) if kv.rank % 2 else ("even", EVEN)
        await kv.group(mine).init(full(name, 0))
        await kv.init(full("all", 0))
        if kv.rank == 1:
            await kv.finish()
            return
        assert_full(await kv.pushpull(full(name, kv.rank + 1)), 4)
        assert_full(await kv.pushpull(full("all", kv.rank + 1)), 1 + 3 + 4)

    async with cluster(workers=WORKERS, **CUT) as running:
        await running.each(work)


async def test_who_is_not_in_a_set_is_told_so_at_once_and_changes_nothing(cluster: MakeCluster) -> None:
    async with cluster(workers=WORKERS, **CUT) as running:
        await asyncio.gather(*(running.workers[rank].group(EVEN).init(full("w", 1)) for rank in EVEN))
        outsider = running.workers[1]
        calls = {
            "push": outsider.push(full("w", 5)),
            "pushpull": outsider.pushpull(full("w", 5)),
            "init": outsider.group(EVEN).init(full("w", 5)),
            "barrier": outsider.group(EVEN).barrier("b"),
            "another set": outsider.group(ODD).init(full("w", 1)),
        }
        errors = await asyncio.gather(*calls.values(), return_exceptions=True)
        assert [(what, type(error)) for what, error in zip(calls, errors, strict=True)] == [
            (what, MembershipError) for what in calls
        ]
        values = await asyncio.gather(*(running.workers[rank].pushpull(full("w", 2)) for rank in EVEN))
        for arrays in (*values, await outsider.pull(full("w", -1))):
            assert_full(arrays, 4)
