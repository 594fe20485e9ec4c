"""The life of keys, groups and rules over real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import AlreadyInitializedError, KeyDeletedError, MembershipError, NormLimitError, NotFiniteError

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster


SIZES = {"w": 3, "big": 100_000}


def full(value: float, size: int = 3) -> Any:
    return np.full(size, value, np.float32)


@pytest.mark.parametrize(("reduction", "expected"), [("mean", -11.0), ("mean_of_world", -10.5)])
async def test_scenario_4_a_worker_with_more_batches_goes_on_alone(
    cluster: MakeCluster, reduction: str, expected: float
) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=1.0, reduction=reduction))
        await running.each(lambda kv: kv.init("w", full(0)))
        first, second = running.workers

        async def train(kv: Any, batches: int) -> None:
            for _ in range(batches):
                await kv.push("w", full(1))
            await kv.finish()

        await asyncio.gather(train(first, 10), train(second, 11))
        np.testing.assert_array_equal(await first.pull("w"), full(expected))


async def test_scenario_19_learning_rate_changes_at_a_round(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=0.1, reduction="mean"))
        await running.each(lambda kv: kv.init({"w": full(0), "big": full(0, 100_000)}))
        values = []
        for step in range(2):
            if step == 1:
                assert await running.each(lambda kv: kv.set_learning_rate(0.01)) == [2, 2]
            values = await running.each(lambda kv: kv.pushpull({"w": full(1), "big": full(1, 100_000)}))
        for w, big in values:
            np.testing.assert_allclose(w, -0.11, rtol=1e-6)
            np.testing.assert_allclose(big, -0.11, rtol=1e-6)


async def test_scenario_29_keys_can_be_made_again(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        sizes = {"small": 3, "other": 3, "big": 100_000}
        await running.each(lambda kv: kv.init({key: full(1, size) for key, size in sizes.items()}))
        await running.each(lambda kv: kv.init({key: full(1, size) for key, size in sizes.items()}))
        with pytest.raises(AlreadyInitializedError, match="'big' was initialised with another value"):
            await running.workers[0].init("big", full(2, 100_000))
        reading = asyncio.create_task(running.workers[1].pushpull("small", full(1)))
        await running.workers[1].barrier("sent", group=[1])
        await running.each(lambda kv: kv.delete("small", "big"))
        with pytest.raises(KeyDeletedError, match="'small'"):
            await reading
        await running.each(lambda kv: kv.init({"small": full(5, 7), "big": full(6, 4)}))
        values = await running.each(lambda kv: kv.pushpull({"small": full(1, 7), "big": full(1, 4)}))
        for small, big in values:
            np.testing.assert_array_equal(small, full(2, 7))
            np.testing.assert_array_equal(big, full(2, 4))
        np.testing.assert_array_equal(await running.workers[1].pull("other"), full(1))
        assert all(server.store.open_slots == 0 for server in running.servers)


async def test_scenario_71_keys_with_policies_of_their_own(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=1.0))
        await running.each(lambda kv: kv.init("d/w", full(0)))
        await running.each(lambda kv: kv.init("e/w", full(0), policy="asp"))
        first, second = running.workers
        for _ in range(3):
            await first.push("e/w", full(1))
        sync = asyncio.create_task(first.push("d/w", full(1)))
        np.testing.assert_array_equal(await second.pull("e/w"), full(-3))
        np.testing.assert_array_equal(await second.pull("d/w"), full(0))
        await second.push("d/w", full(1))
        await sync
        np.testing.assert_array_equal(await first.pull("d/w"), full(-2))


async def test_groups_have_rounds_and_barriers_of_their_own(cluster: MakeCluster) -> None:
    async with cluster(workers=4, servers=2) as running:

        async def pair(kv: Any) -> Any:
            group = kv.group([1, 0] if kv.rank < 2 else [2, 3])
            assert (group.rank, group.num_workers) == (kv.rank % 2, 2)
            key = f"of {group.ranks}"
            await group.init(key, full(0))
            for _ in range(kv.rank // 2 + 1):
                value = await kv.pushpull(key, full(kv.rank + 1))
            await group.barrier("done")
            return value

        values = await running.each(pair)
        for value, expected in zip(values, (3, 3, 7, 7), strict=True):
            np.testing.assert_array_equal(value, full(expected))
        with pytest.raises(MembershipError, match=r"rank 3 .* is none of them"):
            await running.workers[3].push("of (0, 1)", full(1))


@pytest.mark.parametrize("ranks", [[], [0, 0]])
async def test_group_has_each_rank_once(cluster: MakeCluster, ranks: list[int]) -> None:
    async with cluster(workers=1) as running:
        with pytest.raises(MembershipError, match="each once"):
            running.workers[0].group(ranks)
        with pytest.raises(MembershipError, match=r"rank 0 is none of \[1\]"):
            _ = running.workers[0].group([1]).rank


async def test_scenario_57_one_that_is_far_off_does_no_harm(cluster: MakeCluster) -> None:
    async with cluster(workers=4, servers=2) as running:
        await running.each(lambda kv: kv.set_optimizer("sgd", learning_rate=1.0, reduction="median"))
        await running.each(lambda kv: kv.init({"w": full(0), "big": full(0, 100_000)}))
        values = await running.each(
            lambda kv: kv.pushpull({name: full(1e30 if kv.rank == 3 else 1, size) for name, size in SIZES.items()})
        )
        for value in values:
            for array in value:
                np.testing.assert_array_equal(array, -1)


async def test_scenario_57_nan_is_refused_to_its_worker_alone(cluster: MakeCluster) -> None:
    async with cluster(workers=2, check_finite=True) as running:
        await running.each(lambda kv: kv.init({"w": full(0), "big": full(0, 1_000_000)}))
        first, second = running.workers
        waiting = asyncio.create_task(second.pushpull("w", full(1)))
        for value, key, size in ((np.nan, "w", 3), (-np.inf, "big", 1_000_000)):
            spoilt = full(1, size)
            spoilt[1] = value
            with pytest.raises(NotFiniteError, match=f"{value} at element 1, and 0 more") as caught:
                await first.push({"w": full(1), key: spoilt})
            assert caught.value.details["key"] == key
        np.testing.assert_array_equal(await first.pushpull("w", full(1)), full(2))
        np.testing.assert_array_equal(await waiting, full(2))


async def test_norm_over_the_limit_is_refused_to_its_worker_alone(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2, max_norm=1000.0, max_norm_ratio=3.0) as running:
        await running.each(lambda kv: kv.init({"w": full(0), "big": full(0, 1_000_000)}))
        first, second = running.workers
        text = "'w', 'big' has a norm of 1500, but the limit is max_norm = 1000;"
        with pytest.raises(NormLimitError, match=text):
            await first.push({"w": full(0), "big": full(1.5, 1_000_000)})
        for _ in range(16):
            await running.each(lambda kv: kv.pushpull({"w": full(0), "big": full(0.1, 1_000_000)}))
        waiting = asyncio.create_task(second.pushpull({"w": full(1), "big": full(0.1, 1_000_000)}))
        text = "'w', 'big' has a norm of 500, but the limit is max_norm_ratio = 3 times 100,"
        with pytest.raises(NormLimitError, match=text):
            await first.pushpull({"w": full(0), "big": full(0.5, 1_000_000)})
        # Nothing of it was counted, so another one can come in its place.
        await first.pushpull({"w": full(1), "big": full(0.2, 1_000_000)})
        small, big = await waiting
        np.testing.assert_array_equal(small, full(2))
        np.testing.assert_allclose(big, full(0.3, 1_000_000))


async def test_root_s_values_arrive_everywhere_by_broadcast(cluster: MakeCluster) -> None:
    async with cluster(workers=3) as running:
        values = await running.each(lambda kv: kv.broadcast({"a": full(kv.rank), "b": full(10 + kv.rank)}))
        for a, b in values:
            np.testing.assert_array_equal([a, b], [full(0), full(10)])
