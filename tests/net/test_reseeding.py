"""All servers are lost, and workers still have the weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import BarrierTimeoutError, ClusterFullError, ServerLostError, SpecMismatchError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.net.conftest import Cluster, ClusterInAThread, MakeCluster

SHAPES = {"large": (40_000,), "middle": (300, 20), "small": (7,), "tiny": ()}
RULE: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9}


def begin() -> dict[str, Any]:
    return {key: np.full(shape, 1.0, np.float32) for key, shape in SHAPES.items()}


def gradients(values: dict[str, Any], rank: int, step: int) -> dict[str, Any]:
    return {
        key: np.asarray(value * np.float32(0.1 + rank) + np.float32(step), np.float32) for key, value in values.items()
    }


async def train(kv: aiokv.Client, values: dict[str, Any], steps: range) -> None:
    for step in steps:
        await kv.pushpull(gradients(values, kv.rank, step), out=values)


@contextlib.asynccontextmanager
async def another_life(running: Cluster, servers: int) -> AsyncIterator[None]:
    """Start scheduler and servers again at the same address, when the scheduler of before has ended."""
    host, _, port = running.scheduler.address.rpartition(":")
    await running.scheduler.wait_stopped()
    await running.scheduler.close()
    shared = running.settings
    async with contextlib.AsyncExitStack() as stack:
        scheduler = aiokv.Scheduler(num_workers=2, num_servers=servers, bind_host=host, bind_port=int(port), **shared)
        await stack.enter_async_context(scheduler)
        for index in range(servers):
            await stack.enter_async_context(aiokv.Server(scheduler=scheduler.address, name=f"server-{index}", **shared))
        yield


@pytest.mark.parametrize("ahead", [0, 1])
async def test_scenario_72_servers_begin_again_with_the_weights_of_the_worker_with_the_highest_round(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture, ahead: int
) -> None:
    async with cluster(workers=2, servers=2) as running:
        held = [begin(), begin()]
        await running.each(lambda kv: kv.init(begin()))
        await running.each(lambda kv: kv.set_optimizer("sgd", **RULE))
        await asyncio.gather(*(train(kv, held[kv.rank], range(3)) for kv in running.workers))
        # One of them has not read what the last round has made.
        steps = [3, 3]
        steps[1 - ahead] = 2
        held[1 - ahead] = {key: np.asarray(value - 5) for key, value in held[ahead].items()}
        expected = {key: value.copy() for key, value in held[ahead].items()}
        for server in running.servers:
            await server.close()
        for kv in running.workers:
            with pytest.raises(ServerLostError):
                await kv.pushpull(gradients(held[kv.rank], kv.rank, 3), out=held[kv.rank])
        rejoined = [asyncio.create_task(kv.rejoin()) for kv in running.workers]
        async with another_life(running, servers=3):
            running.workers = list(await asyncio.gather(*rejoined))
            with caplog.at_level(logging.WARNING, logger="aiokv"):
                said = await running.each(lambda kv: kv.reseed(held[kv.rank], steps[kv.rank]))
            assert [(one.step, one.rank) for one in said] == [(3, ahead)] * 2
            assert sum("the state of the update rule begins anew" in line.getMessage() for line in caplog.records) == 2
            for values in held:
                for key, value in values.items():
                    np.testing.assert_array_equal(value, expected[key])
            await running.each(lambda kv: kv.set_optimizer("sgd", **RULE))
            await asyncio.gather(*(train(kv, held[kv.rank], range(3, 4)) for kv in running.workers))
            # The momentum begins with 0.
            for key, value in expected.items():
                total = gradients(expected, 0, 3)[key] + gradients(expected, 1, 3)[key]
                np.testing.assert_allclose(held[0][key], value - np.float32(0.1) * total, rtol=1e-6)
                np.testing.assert_array_equal(held[0][key], held[1][key])
            await running.each(lambda kv: kv.close())


async def test_who_comes_to_the_next_cluster_waits_until_the_others_have_left_this_one(cluster: MakeCluster) -> None:
    settings = {"call_timeout": 1.5, "join_timeout": 1.5, "death_timeout": 1.0, "heartbeat": 0.2}
    async with cluster(workers=2, **settings) as running:
        with pytest.raises(ClusterFullError, match="'worker-0' is taken by a member that is left"):
            await running.workers[0].rejoin()


async def test_a_scheduler_that_ends_before_it_has_let_a_worker_in_is_not_the_next_one(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """As the one of before does, when the last worker leaves that while another one is there again already."""
    async with cluster(workers=1) as running:
        host, _, port = running.scheduler.address.rpartition(":")
        there: dict[str, Any] = {"num_workers": 1, "num_servers": 1, "bind_host": host, "bind_port": int(port)}
        rejoined = asyncio.create_task(running.workers[0].rejoin())
        await running.scheduler.wait_stopped()
        await running.scheduler.close()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="aiokv"):
            async with aiokv.Scheduler(**there, **running.settings):
                while "worker worker-0 is here" not in caplog.text:
                    assert not rejoined.done()
                    await asyncio.sleep(0.01)
        async with (
            aiokv.Scheduler(**there, **running.settings) as scheduler,
            aiokv.Server(scheduler=scheduler.address, name="server-0", **running.settings),
        ):
            running.workers = [await rejoined]
            await running.workers[0].init("w", np.ones(3, np.float32))
            await running.workers[0].close()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("when", ["before the next one is there", "when it has come back to the next one"])
async def test_a_worker_whose_scheduler_is_gone_does_not_tell_the_next_one_of_its_cluster(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture, when: str, servers: int
) -> None:
    """The next one would wait for the rest of the cluster before, and have no place for the servers of its own."""
    caplog.set_level(logging.INFO, logger="aiokv")
    async with cluster(workers=1, death_timeout=19.0) as running:
        (kv,) = running.workers
        host, _, port = running.scheduler.address.rpartition(":")
        there: dict[str, Any] = {"num_workers": 1, "num_servers": servers, "bind_host": host, "bind_port": int(port)}
        await running.servers[0].close()
        await running.scheduler.close()
        rejoined = asyncio.create_task(kv.rejoin()) if when.startswith("before") else None
        async with contextlib.AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(aiokv.Scheduler(**there, **running.settings))
            while rejoined is None:
                if "worker-0 comes back from epoch 1" in caplog.text:
                    rejoined = asyncio.create_task(kv.rejoin())
                await asyncio.sleep(0.01)
            for index in range(servers):
                server = aiokv.Server(scheduler=scheduler.address, name=f"next-{index}", **running.settings)
                await stack.enter_async_context(server)
            running.workers = [await rejoined]
            await running.workers[0].init("w", np.ones(3, np.float32))
            await running.workers[0].close()
        assert "was started again" not in caplog.text
        assert not any(vars(record).get("event") == "not_rebuilt" for record in caplog.records)


async def test_weights_of_another_shape_than_a_key_that_is_there_are_refused_on_all_workers(
    cluster: MakeCluster,
) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(3, np.float32)))

        async def bring(kv: aiokv.Client) -> None:
            with pytest.raises(SpecMismatchError, match="'w'"):
                await kv.reseed({"w": np.zeros(3 + kv.rank, np.float32)}, kv.rank)

        await running.each(bring)


async def test_nobody_goes_on_before_all_workers_have_said_what_they_have(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        with pytest.raises(BarrierTimeoutError, match="rank 1"):
            await running.workers[0].reseed(begin(), 3, timeout=1.0)


def test_store_for_ordinary_code_goes_on_in_the_next_cluster(
    cluster_in_a_thread: ClusterInAThread, free_port: int
) -> None:
    values = {"w": np.arange(3, dtype=np.float32)}
    kv = aiokv.blocking.connect(f"127.0.0.1:{free_port}", heartbeat=0.2, death_timeout=1.0)
    with ThreadPoolExecutor(1) as thread:
        with cluster_in_a_thread(1, 1, free_port):
            kv.start()
            rejoined = thread.submit(kv.rejoin)
        with cluster_in_a_thread(1, 2, free_port), kv:
            rejoined.result()
            assert kv.reseed(values, 7).step == 7
            np.testing.assert_array_equal(kv.pushpull("w", np.ones(3, np.float32)), np.ones(3))
