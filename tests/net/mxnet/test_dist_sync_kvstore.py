"""MXNet's tests/nightly/dist_sync_kvstore.py and dist_async_kvstore.py: seven workers and seven servers on one host.

The numbers are those of the rule w += 2 * sum, which that test was written for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import KeyUseError, SpecMismatchError, UnknownKeyError

if TYPE_CHECKING:
    import aiokv
    from tests.net.conftest import MakeCluster

NODES = {"workers": 7, "servers": 7}
SMALL, BIG = (2, 3), (1200, 1200)
SHAPES = {"3": SMALL, "5": SMALL, "7": SMALL, "99": BIG}
ROUNDS = [57, 113, 169, 225, 281, 337, 393]
"""1 + n(n + 1)(i + 1) for n = 7 workers, after round i."""


@pytest.mark.one_loop("it is about what is computed")
@pytest.mark.parametrize(
    ("dtype", "multi_precision"), [("float32", False), ("float32", True), ("float16", False), ("float16", True)]
)
async def test_dense_push_and_pull(cluster: MakeCluster, dtype: str, multi_precision: bool) -> None:
    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("accumulate", rescale_grad=2.0, multi_precision=multi_precision)
        await kv.init({key: np.ones(shape, dtype) for key, shape in SHAPES.items()})
        gradients = {key: np.full(shape, kv.rank + 1, dtype) for key, shape in SHAPES.items()}
        values = {key: np.zeros(shape, dtype) for key, shape in SHAPES.items()}
        for expected in ROUNDS:
            for key, value in values.items():
                await kv.push(key, gradients[key])
                await kv.pull(key, value)
                np.testing.assert_array_equal(value, np.full_like(value, expected))

    async with cluster(**NODES) as running:
        await running.each(work)


@pytest.mark.parametrize(
    ("workers", "rounds"),
    [
        (1, [3, 5, 7, 9, 11, 13, 15]),
        (2, [7, 13, 19, 25, 31, 37, 43]),
        (3, [13, 25, 37, 49, 61, 73, 85]),
        (4, [21, 41, 61, 81, 101, 121, 141]),
    ],
)
async def test_rounds_of_fewer_workers(cluster: MakeCluster, workers: int, rounds: list[int]) -> None:
    async with cluster(workers=workers, servers=2) as running:
        await running.each(lambda kv: kv.set_optimizer("accumulate", rescale_grad=2.0))
        await running.each(lambda kv: kv.init("3", np.ones(SMALL, np.float32)))
        for expected in rounds:
            for value in await running.each(lambda kv: kv.pushpull("3", np.full(SMALL, kv.rank + 1, np.float32))):
                np.testing.assert_array_equal(value, np.full(SMALL, expected, np.float32))


@pytest.mark.one_loop("it is about what is computed")
async def test_init_of_many_keys(cluster: MakeCluster) -> None:
    """Key i holds i: 100 small and 100 big keys, half of each float32, half float16."""

    async def work(kv: aiokv.Client) -> None:
        values: dict[str, Any] = {}
        for i in range(100):
            dtype = "float32" if i < 50 else "float16"
            values[f"small {i}"] = np.full(SMALL, i, dtype)
            values[f"big {i}"] = np.full((300, 301), i, dtype)
        await kv.init(values)
        for key, value in zip(values, await kv.pull(dict.fromkeys(values)), strict=True):
            assert value.dtype == values[key].dtype
            np.testing.assert_array_equal(value, values[key])

    async with cluster(**NODES) as running:
        await running.each(work)


async def test_every_worker_waits_for_the_last_one(cluster: MakeCluster) -> None:
    async with cluster(**NODES) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(SMALL, np.float32)))
        *early, last = running.workers
        pushes = [asyncio.create_task(kv.pushpull("w", np.ones(SMALL, np.float32))) for kv in early]
        await asyncio.gather(*(kv.barrier("sent", group=range(6)) for kv in early))
        assert not any(push.done() for push in pushes)
        values = [await last.pushpull("w", np.ones(SMALL, np.float32)), *await asyncio.gather(*pushes)]
        for value in values:
            np.testing.assert_array_equal(value, np.full(SMALL, 7, np.float32))


async def test_invalid_calls_are_errors_and_change_nothing(cluster: MakeCluster) -> None:
    """In MXNet a pull of a key that nobody initialised ended the server's process."""
    ones = np.ones(SMALL, np.float32)
    async with cluster(**NODES) as running:
        await running.each(lambda kv: kv.init("3", ones))
        kv = running.workers[3]
        with pytest.raises(UnknownKeyError, match="'unknown'"):
            await kv.pull("unknown", ones.copy(), timeout=1.0)
        with pytest.raises(UnknownKeyError, match="'unknown'"):
            await kv.push("unknown", ones, timeout=1.0)
        with pytest.raises(KeyUseError, match="never mix"):
            await kv.push(3, ones)
        with pytest.raises(SpecMismatchError, match="'3'"):
            await kv.push("3", np.ones((3, 2), np.float32))
        with pytest.raises(SpecMismatchError, match="'3'"):
            await kv.push("3", ones.astype(np.float64))
        with pytest.raises(KeyUseError, match="2 keys need a list of 2 arrays, one for each, got 1"):
            await kv.push(["3", "5"], [ones])
        for value in await running.each(lambda kv: kv.pushpull("3", ones)):
            np.testing.assert_array_equal(value, 7 * ones)


async def test_async_store_updates_with_each_push(cluster: MakeCluster) -> None:
    """dist_async: rank r pushes r + 1 once a round, and nobody waits; after all are done it is as in sync."""

    async def work(kv: aiokv.Client) -> None:
        await kv.set_optimizer("accumulate", rescale_grad=2.0)
        await kv.init({key: np.ones(shape, np.float32) for key, shape in SHAPES.items()})
        for _ in range(2):
            await kv.push({key: np.full(shape, kv.rank + 1, np.float32) for key, shape in SHAPES.items()})
        await kv.barrier("pushed")
        for key, value in zip(SHAPES, await kv.pull(list(SHAPES)), strict=True):
            np.testing.assert_array_equal(value, np.full(SHAPES[key], ROUNDS[1], np.float32))

    async with cluster(**NODES, policy="asp") as running:
        await running.each(work)
