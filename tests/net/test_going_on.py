"""A worker that dies in the middle of a step, and the next one of its name: the weights are those without that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import AiokvError, StaleEpochError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.net.conftest import Cluster, MakeCluster

SHAPES = {"large": (40_000,), "middle": (300, 20), "small": (7,), "tiny": ()}
STEPS = 5
DEATH = 3
"""The step in which a worker dies."""

SETTINGS: dict[str, Any] = {"workers": 2, "servers": 2, "on_worker_loss": "respawn", "respawn_timeout": 10.0}


async def begin(kv: aiokv.Client) -> tuple[int, dict[str, Any]]:
    """Do what every process of a worker begins with; return its first step and the weights for it."""
    values = {key: np.ones(shape, np.float32) for key, shape in SHAPES.items()}
    await kv.init(values)
    await kv.set_optimizer("adam", learning_rate=0.01)
    step = await kv.resume_step()
    await kv.pull(list(values), out=list(values.values()))
    return step, values


def gradients(values: dict[str, Any], step: int, rank: int) -> dict[str, Any]:
    """Return what a worker pushes in a step."""
    return {
        key: np.asarray(value * np.float32(0.3 + rank) + np.float32(step), np.float32) for key, value in values.items()
    }


async def train(kv: aiokv.Client) -> dict[str, Any]:
    """Train from the first step that is not complete; return the weights."""
    start, values = await begin(kv)
    for step in range(start, STEPS):
        await kv.pushpull(gradients(values, step, kv.rank), out=values)
    return values


async def die(kv: aiokv.Client, keys: list[str]) -> None:
    """Train up to a step, push some of its keys, and die before the others are pushed."""
    _, values = await begin(kv)
    for step in range(DEATH):
        await kv.pushpull(gradients(values, step, kv.rank), out=values)
    pushed = gradients(values, DEATH, kv.rank)
    # Each key is another call.
    calls = [asyncio.create_task(kv.push(key, pushed[key])) for key in keys]
    for _ in range(20):
        await asyncio.sleep(0)
    await kv.abort()
    for call in calls:
        with contextlib.suppress(AiokvError):
            await call


@contextlib.asynccontextmanager
async def respawned(running: Cluster, name: str, **settings: Any) -> AsyncIterator[aiokv.Client]:
    """Run the next process of a worker's name."""
    kv = running.client(name, **settings)
    await kv.start()
    running.workers.append(kv)
    yield kv


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Compare bits."""
    for key, array in mine.items():
        np.testing.assert_array_equal(array, theirs[key], err_msg=key)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("pushed", [0, 1, 2, 4])
async def test_scenario_17_weights_are_those_of_an_undisturbed_run(
    cluster: MakeCluster, rank: int, pushed: int
) -> None:
    async with cluster(**SETTINGS) as running:
        expected = (await running.each(train))[0]
    async with cluster(**SETTINGS) as running:
        survivor = asyncio.create_task(train(running.workers[1 - rank]))
        await die(running.workers[rank], list(SHAPES)[:pushed])
        async with respawned(running, f"worker-{rank}") as kv:
            assert kv.rank == rank
            assert_same(await train(kv), expected)
        assert_same(await survivor, expected)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("died", ["before", "within", "after"])
async def test_tables_are_those_of_an_undisturbed_run(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, died: str, lazy: bool
) -> None:
    """A worker dies in a step of whose rows servers have nothing, a part, or all, so that the round was made.

    Its rows overlap with those of the other one. Each push comes in several messages.
    """
    monkeypatch.setattr("aiokv.core.worker.row_parts.SENT_BYTES", 2048)
    shape = (400, 8)

    async def work(kv: aiokv.Client, dies: str = "") -> Any:
        await kv.init_rows("t", shape, initializer={"name": "uniform", "seed": 1}, lazy=lazy)
        await kv.set_optimizer("adam", learning_rate=0.1)
        ids = np.arange(kv.rank * 100, 300 + kv.rank * 100)
        for step in range(await kv.resume_step(), STEPS):
            values = (await kv.row_sparse_pull("t", row_ids=ids)).values
            pushed = aiokv.RowSparse(ids, values * np.float32(0.5) + np.float32(step), shape)
            if dies and step == DEATH:
                push = asyncio.create_task(kv.push("t", pushed))
                for _ in range({"before": 0, "within": 3}.get(dies, 0)):
                    await asyncio.sleep(0)
                if dies == "after":
                    await push
                await kv.abort()
                with contextlib.suppress(AiokvError):
                    await push
                return None
            await kv.push("t", pushed)
        await kv.barrier()
        return (await kv.row_sparse_pull("t", row_ids=np.arange(shape[0]))).values

    async with cluster(**SETTINGS) as running:
        expected = (await running.each(work))[0]
    async with cluster(**SETTINGS) as running:
        survivor = asyncio.create_task(work(running.workers[0]))
        await work(running.workers[1], died)
        async with respawned(running, "worker-1") as kv:
            np.testing.assert_array_equal(await work(kv), expected)
        np.testing.assert_array_equal(await survivor, expected)


async def test_nothing_was_done_in_a_new_job(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(3, np.float32))
        assert await kv.resume_step() == 0


async def test_async_updates_of_a_worker_that_dies_neither_vanish_nor_repeat(cluster: MakeCluster) -> None:
    async with cluster(policy="asp", **SETTINGS) as running:
        first, other = running.workers

        async def count(kv: aiokv.Client, steps: int) -> None:
            await kv.init("w", np.zeros(100_000, np.float32))
            await kv.set_optimizer("accumulate")
            for _ in range(await kv.resume_step(), steps):
                await kv.push("w", np.ones(100_000, np.float32))

        await asyncio.gather(count(first, 3), count(other, 5))
        push = asyncio.create_task(first.push("w", np.ones(100_000, np.float32)))
        await asyncio.sleep(0)
        await first.abort()
        with contextlib.suppress(AiokvError):
            await push
        async with respawned(running, "worker-0", policy="asp") as kv:
            await count(kv, 6)
        np.testing.assert_array_equal(await other.pull("w"), 11)


WORKER = """
    import asyncio, sys, numpy, aiokv

    async def main():
        kv = aiokv.connect(sys.argv[1], name="worker-1", token="a shared secret", cluster="test", heartbeat=0.1)
        async with kv:
            await kv.init("w", numpy.zeros(1, "float32"))
            await kv.push("w", numpy.ones(1, "float32"))
            print("pushed", flush=True)
            sys.stdin.readline()
            try:
                await kv.push("w", numpy.full(1, 1000, "float32"))
            except aiokv.AiokvError as error:
                print(type(error).__name__, error, flush=True)
            await kv.abort()

    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP")
async def test_process_that_goes_on_after_another_one_has_its_place_changes_nothing(cluster: MakeCluster) -> None:
    """Scenario 2: it is stopped, missed, replaced, and goes on."""
    settings = {**SETTINGS, "servers": 1, "heartbeat": 0.1, "death_timeout": 0.5}
    async with cluster(start_workers=False, **settings) as running:
        arguments = [sys.executable, "-c", textwrap.dedent(WORKER), running.scheduler.address]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with running.client("worker-0") as kv:
                await kv.init("w", np.zeros(1, np.float32))
                await kv.push("w", np.ones(1, np.float32))
                assert await process.stdout.readline() == b"pushed\n"
                os.kill(process.pid, signal.SIGSTOP)
                async with running.client("worker-1") as other:
                    await other.init("w", np.zeros(1, np.float32))
                    assert await other.resume_step() == 1
                    os.kill(process.pid, signal.SIGCONT)
                    process.stdin.write(b"\n")
                    assert (await process.stdout.readline()).startswith(StaleEpochError.__name__.encode())
                    second = asyncio.create_task(kv.push("w", np.ones(1, np.float32)))
                    await other.push("w", np.ones(1, np.float32))
                    await second
                    np.testing.assert_array_equal(await other.pull("w"), 2)
        finally:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize(
    ("codec", "params"), [("2bit", {"threshold": 3.0}), ("randomk", {"fraction": 0.25}), ("topk", {"fraction": 0.25})]
)
@pytest.mark.parametrize("pushed", [0, 2, 4])
async def test_what_compression_had_left_goes_on_in_the_next_process(
    cluster: MakeCluster, tmp_path: Path, codec: str, params: dict[str, Any], pushed: int
) -> None:
    settings = {**SETTINGS, "residual_folder": str(tmp_path)}

    async def compress(kv: aiokv.Client) -> None:
        await kv.set_gradient_compression(codec, **params)

    async with cluster(**SETTINGS) as running:
        await running.each(compress)
        expected = (await running.each(train))[0]
    async with cluster(**settings) as running:
        await running.each(compress)
        survivor = asyncio.create_task(train(running.workers[0]))
        await die(running.workers[1], list(SHAPES)[:pushed])
        async with respawned(running, "worker-1", residual_folder=str(tmp_path)) as kv:
            await compress(kv)
            assert_same(await train(kv), expected)
        assert_same(await survivor, expected)
