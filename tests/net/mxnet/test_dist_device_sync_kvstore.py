"""MXNet's tests/nightly/dist_device_sync_kvstore.py and its custom twin: four workers, two arrays each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import aiokv
    from tests.net.conftest import MakeCluster

WORKERS, DEVICES = 4, 2
SHAPES = {"3": (2, 3), "5": (2, 3), "7": (2, 3), "99": (600, 601)}


def arrays(shape: tuple[int, ...], value: float) -> list[Any]:
    return [np.full(shape, value, np.float32) for _ in range(DEVICES)]


@pytest.mark.parametrize("one_call", [False, True])
async def test_lists_of_two_arrays_are_summed_on_each_worker_first(cluster: MakeCluster, one_call: bool) -> None:
    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("accumulate", rescale_grad=2.0)
        await kv.init({key: np.ones(shape, np.float32) for key, shape in SHAPES.items()})
        for i in range(3):
            expected = 1 + 2 * WORKERS * (WORKERS + 1) // 2 * DEVICES * (i + 1)
            for key, shape in SHAPES.items():
                gradients, values = arrays(shape, kv.rank + 1), arrays(shape, 0)
                if one_call:
                    assert await kv.pushpull(key, gradients, out=values) is values
                else:
                    await kv.push(key, gradients)
                    assert await kv.pull(key, values) is values
                for value in values:
                    np.testing.assert_array_equal(value, np.full(shape, expected))
                for gradient in gradients:
                    np.testing.assert_array_equal(gradient, np.full(shape, kv.rank + 1))

    async with cluster(workers=WORKERS, servers=2) as running:
        await running.each(work)


async def test_broadcast_reaches_every_array(cluster: MakeCluster) -> None:
    async def work(kv: aiokv.Client) -> None:
        for i, (key, shape) in enumerate(SHAPES.items()):
            values = arrays(shape, -1)
            await kv.broadcast(key, np.full(shape, i if kv.rank == 0 else 99, np.float32), values)
            for value in values:
                np.testing.assert_array_equal(value, np.full(shape, i))

    async with cluster(workers=WORKERS, servers=2) as running:
        await running.each(work)


async def test_without_a_rule_pushpull_in_place_sums_and_does_not_accumulate(cluster: MakeCluster) -> None:
    async def work(kv: aiokv.Client) -> None:
        await kv.init({key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()})
        for _ in range(3):
            for key, shape in SHAPES.items():
                values = arrays(shape, kv.rank + 1)
                await kv.pushpull(key, values, out=values)
                for value in values:
                    np.testing.assert_array_equal(value, np.full(shape, WORKERS * (WORKERS + 1) // 2 * DEVICES))

    async with cluster(workers=WORKERS, servers=2) as running:
        await running.each(work)
