"""Situations that users of such systems ran into, over real sockets; others stand where their subject is tested."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import KeyUseError, SpecMismatchError, SumOverflowError

if TYPE_CHECKING:
    from tests.net.conftest import Cluster, MakeCluster


def full(shape: tuple[int, ...], value: float, dtype: str = "float32") -> Any:
    return np.full(shape, value, dtype)


async def test_scenario_24_negative_keys_are_refused(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        with pytest.raises(KeyUseError, match="-1"):
            await running.workers[0].init(-1, full((1,), 0))


async def test_scenario_25_texts_and_numbers_never_mix(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        with pytest.raises(KeyUseError, match="never mix"):
            await kv.init(["a", 1], [full((1,), 0)] * 2)
        await kv.init("a", full((1,), 0))
        with pytest.raises(KeyUseError, match="never mix"):
            await kv.init(1, full((1,), 0))


async def test_scenario_27_the_shape_is_kept(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", full((2, 3), 1))
        with pytest.raises(SpecMismatchError, match=r"'w' has float32\[2, 3\], got float32\[6\]") as caught:
            await kv.push("w", full((6,), 1))
        assert caught.value.details == {"key": "w", "expected": "float32[2, 3]", "got": "float32[6]"}
        assert (await kv.pull("w")).shape == (2, 3)


async def test_scenario_28_dtypes_are_kept_and_whole_numbers_are_exact(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        values = {"f": full((2,), 0), "i": full((2,), 0, "int32"), "b": full((2,), 0, "uint8")}
        await running.each(lambda kv: kv.init(values))
        with pytest.raises(SpecMismatchError, match="float64"):
            await running.workers[0].push("f", full((2,), 1, "float64"))
        # More than a float32 can tell apart.
        for value in await running.each(lambda kv: kv.pushpull("i", full((2,), 2**24 + kv.rank, "int32"))):
            np.testing.assert_array_equal(value, full((2,), 2**25 + 1, "int32"))
        pushes = (kv.push("b", full((2,), (200, 100)[kv.rank], "uint8")) for kv in running.workers)
        for error in await asyncio.gather(*pushes, return_exceptions=True):
            assert isinstance(error, SumOverflowError)
        np.testing.assert_array_equal(await running.workers[0].pull("b"), full((2,), 0, "uint8"))


@pytest.mark.parametrize("servers", [3, 5, 7])
async def test_scenario_31_the_largest_keys_have_an_owner(cluster: MakeCluster, servers: int) -> None:
    """2^64 - 1 is no key here; the largest two that are do not fall out of the servers' ranges."""
    keys = [2**63 - 1, 2**63 - 2]
    async with cluster(workers=1, servers=servers) as running:
        (kv,) = running.workers
        await kv.init(keys, [full((2,), 1), full((2,), 2)])
        await kv.push(keys, [full((2,), 3), full((2,), 4)])
        np.testing.assert_array_equal(await kv.pull(keys), [full((2,), 3), full((2,), 4)])
        assert sum(server.counters["updates"] for server in running.servers) in {1, 2}
        with pytest.raises(KeyUseError, match=str(2**64 - 1)):
            await kv.init(2**64 - 1, full((2,), 1))


async def test_scenario_32_shapes_of_all_kinds_in_one_call(cluster: MakeCluster) -> None:
    shapes = [(0, 5), (), (1,), (2, 3)]
    keys = [f"k{i}" for i in range(4)]
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.init(keys, [full(shape, 0) for shape in shapes]))
        for values in await running.each(lambda kv: kv.pushpull(keys, [full(shape, 1) for shape in shapes])):
            for value, shape in zip(values, shapes, strict=True):
                np.testing.assert_array_equal(value, full(shape, 2))


@pytest.mark.parametrize("servers", [1, 3, 8])
async def test_scenario_34_every_element_comes_back(cluster: MakeCluster, servers: int) -> None:
    sizes = [*range(1, 51), 999_999, 1_000_000, 1_000_001]
    async with cluster(workers=1, servers=servers, split_bytes=1) as running:
        (kv,) = running.workers
        values = {f"of {size}": np.arange(size, dtype=np.float32) for size in sizes}
        await kv.init({key: np.zeros_like(value) for key, value in values.items()})
        for got, value in zip(await kv.pushpull(values), values.values(), strict=True):
            np.testing.assert_array_equal(got, value)


async def test_scenario_50_the_order_of_a_dict_does_not_matter(cluster: MakeCluster) -> None:
    names = [f"layer{i}" for i in range(20)]
    async with cluster(workers=2, servers=2) as running:

        async def work(kv: Any) -> None:
            order = names if kv.rank == 0 else names[::-1]
            await kv.init({name: full((i + 1,), i) for i, name in enumerate(names)})
            gradients = {name: full((names.index(name) + 1,), names.index(name)) for name in order}
            for name, value in zip(order, await kv.pushpull(gradients), strict=True):
                np.testing.assert_array_equal(value, full((names.index(name) + 1,), 2 * names.index(name)))

        await running.each(work)


async def test_scenario_58_async_without_a_rule_assigns(cluster: MakeCluster) -> None:
    async with cluster(workers=2, policy="asp") as running:
        await running.each(lambda kv: kv.init("w", full((2,), 1)))
        for value in (5, 6):
            await running.workers[value - 5].push("w", full((2,), value))
            np.testing.assert_array_equal(await running.workers[0].pull("w"), full((2,), value))


async def test_scenario_70_a_mean_of_halves_does_not_overflow(cluster: MakeCluster) -> None:
    async with cluster(workers=7) as running:
        await running.each(lambda kv: kv.set_optimizer("assign", reduction="mean"))
        await running.each(lambda kv: kv.init("w", full((2,), 0, "float16")))
        for value in await running.each(lambda kv: kv.pushpull("w", full((2,), 10_000, "float16"))):
            np.testing.assert_array_equal(value, full((2,), 10_000, "float16"))


async def test_scenario_73_a_list_is_summed_in_its_order(cluster: MakeCluster) -> None:
    """(1e8 + 1) - 1e8 is 0 in float32, (1e8 - 1e8) + 1 is 1."""
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", full((2,), 0))
        for order, expected in (((1e8, 1, -1e8), 0), ((1e8, -1e8, 1), 1)):
            value = await kv.pushpull("w", [full((2,), part) for part in order])
            np.testing.assert_array_equal(value, full((2,), expected))


async def test_scenario_83_a_list_of_arrays_is_one_step(cluster: MakeCluster) -> None:
    """Adam's first step moves each weight by the learning rate; with t = 2 it would not."""
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        schedule = {"name": "factor", "step": 1, "factor": 0.5}
        await kv.set_optimizer("adam", learning_rate=0.25, epsilon=1e-12, schedule=schedule)
        await kv.init("w", full((2,), 1))
        outs = [full((2,), 0), full((2,), 0)]
        await kv.pushpull("w", [full((2,), 1), full((2,), 3)], out=outs)
        for out in outs:
            np.testing.assert_allclose(out, full((2,), 0.75), rtol=1e-6)
        np.testing.assert_allclose(await kv.pushpull("w", [full((2,), 4), full((2,), 0)]), 0.625, rtol=1e-6)


async def quorum_round(running: Cluster, expected: int) -> None:
    """Let three of four workers push 1, 2 and 3, and the fourth one 100 when their round is closed."""
    *early, late = running.workers
    pushes = [asyncio.create_task(kv.push("w", full((1,), kv.rank + 1))) for kv in early]
    assert await asyncio.gather(*pushes) == [{}, {}, {}]
    assert await late.push("w", full((1,), 100)) == {"w": "late"}
    assert late.dropped == {"late": expected}
    values = await running.each(lambda kv: kv.pull("w"))
    # The mean of those who were in time is 2.
    np.testing.assert_array_equal(values, full((4, 1), 6))


async def test_scenario_11_round_of_three_of_four_leaves_the_late_one_out_and_tells_it(cluster: MakeCluster) -> None:
    async with cluster(workers=4, policy="quorum:k=3:deadline=0") as running:
        await running.each(lambda kv: kv.init("w", full((1,), 0)))
        await quorum_round(running, 1)


async def test_scenario_67_late_contributions_are_counted_for_each_worker(cluster: MakeCluster) -> None:
    async with cluster(workers=4, policy="quorum:k=3:deadline=0") as running:
        await running.each(lambda kv: kv.init("w", full((1,), 0)))
        for number in range(100):
            await quorum_round(running, number + 1)
        tallies = await running.workers[0].tallies()
        assert {rank: tally.dropped for rank, tally in tallies.items()} == {0: {}, 1: {}, 2: {}, 3: {"late": 100}}
        assert {rank: tally.applied for rank, tally in tallies.items()} == {0: 100, 1: 100, 2: 100, 3: 0}
