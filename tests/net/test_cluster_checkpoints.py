"""Checkpoints of a cluster over TCP: a job that is cut off goes on, and ends with the bits of one that was not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv import RowSparse
from aiokv.checkpoint.folder import find_checkpoints
from aiokv.errors import DataError
from aiokv.net.memory import TURN_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from aiokv.checkpoint.folder import Found
    from tests.net.conftest import Cluster, MakeCluster

STEPS = 12
SHAPES: dict[str, tuple[int, ...]] = {"large": (300, 100), "bias": (7,), "scale": (3, 2), "half": (50,)}
DTYPES = {"half": "float16"}
RULES = [
    ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    ("adam", {"learning_rate": 0.1}),
    ("lamb", {"learning_rate": 0.1}),
]


def initial() -> dict[str, Any]:
    """Return the values at the beginning."""
    rng = np.random.default_rng(1)
    return {key: rng.normal(size=shape).astype(DTYPES.get(key, "float32")) for key, shape in SHAPES.items()}


def gradients(values: dict[str, Any], rank: int, step: int) -> dict[str, Any]:
    """Return gradients that depend on the values, so that a wrong bit shows in all that follows."""
    rng = np.random.default_rng([rank, step])
    return {key: (value * 0.1 + rng.normal(size=value.shape)).astype(value.dtype) for key, value in values.items()}


async def go_on(cluster: Cluster, step: int) -> None:
    """Let all workers go on where those before them were, after so many steps."""
    assert await cluster.each(lambda worker: worker.resume_step()) == [step] * len(cluster.workers)


async def begin(cluster: Cluster, rule: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Do what every script does first, and return the values that the servers have."""
    await cluster.each(lambda worker: worker.init(initial()))
    await cluster.each(lambda worker: worker.set_optimizer(rule[0], **rule[1]))
    values = await cluster.workers[0].pull(list(SHAPES), [np.empty_like(value) for value in initial().values()])
    return dict(zip(SHAPES, values, strict=True))


async def train(worker: aiokv.Client, values: dict[str, Any], start: int, stop: int = STEPS) -> dict[str, Any]:
    """Take the steps from one on; return the values after them."""
    values = {key: value.copy() for key, value in values.items()}
    for step in range(start, stop):
        await worker.pushpull(gradients(values, worker.rank, step), out=values)
    return values


async def train_all(cluster: Cluster, values: dict[str, Any], start: int, stop: int = STEPS) -> dict[str, Any]:
    """Let all workers take some steps; return the values after them."""
    results = await cluster.each(lambda worker: train(worker, values, start, stop))
    first: dict[str, Any] = results[0]
    return first


async def whole_run(make: MakeCluster, rule: tuple[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Return the values after a job that nothing has disturbed."""
    async with make(**options) as cluster:
        return await train_all(cluster, await begin(cluster, rule), 0)


@contextlib.asynccontextmanager
async def cut_off(make: MakeCluster, **options: Any) -> AsyncIterator[Cluster]:
    """Run a cluster whose workers do not leave in good order at the end."""
    async with make(**options) as cluster:
        yield cluster
        await cluster.each(lambda worker: worker.abort())


async def complete_ones(folder: Path) -> list[Found]:
    """Return the complete checkpoints in a folder, the oldest first."""
    return [found for found in await asyncio.to_thread(find_checkpoints, str(folder)) if found.is_complete]


async def settled(folder: Path, clock: int = 0) -> None:
    """Wait until there is a complete checkpoint of at least a clock."""
    async with asyncio.timeout(20):
        while not any(found.clock >= clock for found in await complete_ones(folder)):
            pass


async def tear(folder: Path, *clocks: int) -> None:
    """Cut a part of each checkpoint of these clocks, of all if none is given."""
    for found in await complete_ones(folder):
        if found.clock in clocks or not clocks:
            await asyncio.to_thread(os.truncate, f"{found.place}/part-0.safetensors", 1000)


def assert_same(values: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare bits."""
    for key, value in expected.items():
        assert values[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[0])
async def test_job_goes_on_with_the_same_bits_on_another_number_of_servers(
    cluster: MakeCluster, tmp_path: Path, rule: tuple[str, dict[str, Any]]
) -> None:
    expected = await whole_run(cluster, rule, servers=2)
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 3}
    async with cut_off(cluster, servers=2, **settings) as first:
        await train_all(first, await begin(first, rule), 0, 5)
        await settled(tmp_path, 3)
    async with cut_off(cluster, servers=1, **settings, resume="latest") as second:
        values = await begin(second, rule)
        await go_on(second, 3)
        await train_all(second, values, 3, 8)
        await settled(tmp_path, 6)
    async with cluster(servers=3, **settings, resume="latest") as third:
        values = await begin(third, rule)
        await go_on(third, 6)
        assert_same(await train_all(third, values, 6), expected)


@pytest.mark.parametrize("seed", range(4))
async def test_job_that_is_cut_off_at_any_time_ends_with_the_same_bits(
    cluster: MakeCluster, tmp_path: Path, seed: int
) -> None:
    rule = RULES[seed % 2]
    expected = await whole_run(cluster, rule, servers=2)
    chance = random.Random(seed)
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": chance.choice([1, 2, 3]), "resume": "latest"}
    results: list[dict[str, Any]] = []
    for life in range(4 * STEPS):
        async with cut_off(cluster, servers=1 + life % 3, **settings) as running:
            values = await begin(running, rule)
            found = await complete_ones(tmp_path)
            start = found[-1].clock if found else 0
            await go_on(running, start)
            # The worker of rank 1 is cut off in a step of its own.
            last = start + chance.randint(1, 4)
            stops = [STEPS, min(STEPS, last)]
            training = [
                asyncio.create_task(train(worker, values, start, stops[worker.rank])) for worker in running.workers
            ]
            await training[1]
            if last >= STEPS:
                results = await asyncio.gather(*training)
                break
            for _ in range(chance.randint(0, 30)):
                await asyncio.sleep(0)
            training[0].cancel()
            await asyncio.gather(*training, return_exceptions=True)
    assert_same(results[0], expected)


async def test_init_and_rule_of_the_script_change_nothing(cluster: MakeCluster, tmp_path: Path) -> None:
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 3}
    async with cut_off(cluster, **settings) as first:
        trained = await train_all(first, await begin(first, RULES[1]), 0, 3)
        await train_all(first, trained, 3, 4)
        await settled(tmp_path, 3)
    async with cluster(**settings, resume=str(tmp_path)) as second:
        assert_same(await begin(second, RULES[1]), trained)
        assert await second.workers[0].update_counts() == dict.fromkeys(SHAPES, 3)
        (server,) = second.servers
        chunks = server._machine._catalog.chunks  # type: ignore[attr-defined]
        assert list(chunks) == [("bias", -1), ("large", 0), ("half", 0)], "small keys still go together"


@pytest.mark.parametrize(
    ("codec", "params", "stop"),
    [
        pytest.param("2bit", {"threshold": 0.3}, 5, id="2bit"),
        pytest.param("topk", {"fraction": 0.1}, 5, id="topk"),
        pytest.param("randomk", {"fraction": 0.5}, 5, id="randomk"),
        pytest.param("2bit", {"threshold": 0.3}, 3, id="after the last round"),
    ],
)
async def test_what_compression_has_left_goes_on_too(
    cluster: MakeCluster, tmp_path: Path, codec: str, params: dict[str, Any], stop: int
) -> None:
    async def begin_compressed(running: Cluster) -> dict[str, Any]:
        await running.each(lambda worker: worker.set_gradient_compression(codec, **params))
        return await begin(running, RULES[0])

    async with cluster(servers=2) as undisturbed:
        expected = await train_all(undisturbed, await begin_compressed(undisturbed), 0)
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 3}
    async with cluster(servers=2, **settings) as first:
        await train_all(first, await begin_compressed(first), 0, stop)
        await first.each(lambda worker: worker.close())
        # It waits for the checkpoint that is under way.
        await first.scheduler.wait_stopped()
    async with cluster(servers=3, **settings, resume="latest") as second:
        values = await begin_compressed(second)
        await go_on(second, 3)
        assert_same(await train_all(second, values, 3), expected)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1)])
async def test_another_number_of_workers_goes_on(cluster: MakeCluster, tmp_path: Path, before: int, after: int) -> None:
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 2}

    async def begin_sums(running: Cluster) -> None:
        await running.each(lambda worker: worker.init({"large": np.zeros(30_000, np.float32), "small": np.zeros(3)}))
        await running.each(lambda worker: worker.set_optimizer("sgd", learning_rate=1.0))

    async def push(worker: aiokv.Client, steps: int) -> None:
        for _ in range(steps):
            await worker.push({"large": np.full(30_000, -1.0, np.float32), "small": np.full(3, -1.0)})

    async with cut_off(cluster, workers=before, servers=2, **settings) as first:
        await begin_sums(first)
        await first.each(lambda worker: push(worker, 3))
        await settled(tmp_path, 2)
    async with cluster(workers=after, servers=1, **settings, resume="latest") as second:
        await begin_sums(second)
        await go_on(second, 2)
        await second.each(lambda worker: push(worker, 2))
        values = await second.workers[0].pull(["large", "small"], [np.zeros(30_000, np.float32), np.zeros(3)])
    assert all((value == 2 * before + 2 * after).all() for value in values)


@pytest.mark.parametrize("after", [1, 3])
async def test_another_number_of_workers_has_all_that_compression_had_left(
    cluster: MakeCluster, tmp_path: Path, after: int
) -> None:
    """What is sent at last is the sum of all gradients, whoever had which part of it."""
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 1}

    async def begin_sums(running: Cluster) -> None:
        await running.each(lambda worker: worker.init("w", np.zeros(4000, np.float32)))
        await running.each(lambda worker: worker.set_optimizer("sgd", learning_rate=1.0))

    async with cluster(workers=2, servers=1, **settings) as first:
        await first.each(lambda worker: worker.set_gradient_compression("2bit", threshold=8.0))
        await begin_sums(first)
        await first.each(lambda worker: worker.push("w", np.full(4000, -1.0 - worker.rank, np.float32)))
        await first.each(lambda worker: worker.close())
        await first.scheduler.wait_stopped()
    async with cluster(workers=after, servers=1, **settings, resume="latest") as second:
        await begin_sums(second)
        await go_on(second, 1)
        await second.each(lambda worker: worker.push("w", np.zeros(4000, np.float32)))
        values = await second.workers[0].pull("w", np.zeros(4000, np.float32))
    assert (values == 3.0).all()


@pytest.mark.parametrize("turn_bytes", [TURN_BYTES, 4000], ids=["whole tables at a time", "a row at a time"])
async def test_row_sparse_tables_go_on_too(
    cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn_bytes: int
) -> None:
    monkeypatch.setattr("aiokv.net.checkpointing.TURN_BYTES", turn_bytes)
    initializer = {"name": "normal", "scale": 1.0, "seed": 3}

    async def begin_table(running: Cluster) -> None:
        await running.each(lambda worker: worker.init_rows("t", (40, 1000), "float32", initializer=initializer))
        await running.each(lambda worker: worker.set_optimizer("adagrad", learning_rate=0.5))

    async def push(worker: aiokv.Client, step: int) -> None:
        rows = np.array([step, 10 + worker.rank, 39], np.int64)
        await worker.push("t", RowSparse(rows, np.full((3, 1000), step + 1, np.float32), (40, 1000)))

    rows = np.arange(40, dtype=np.int64)
    async with cluster(servers=2) as undisturbed:
        await begin_table(undisturbed)
        for step in range(6):
            await undisturbed.each(lambda worker, step=step: push(worker, step))  # type: ignore[misc]
        expected = await undisturbed.workers[0].row_sparse_pull("t", row_ids=rows)
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 3}
    async with cut_off(cluster, servers=2, **settings) as first:
        await begin_table(first)
        for step in range(5):
            await first.each(lambda worker, step=step: push(worker, step))  # type: ignore[misc]
        await settled(tmp_path, 3)
    async with cluster(servers=3, **settings, resume="latest") as second:
        await begin_table(second)
        await go_on(second, 3)
        for step in range(3, 6):
            await second.each(lambda worker, step=step: push(worker, step))  # type: ignore[misc]
        values = await second.workers[0].row_sparse_pull("t", row_ids=rows)
    assert values.values.tobytes() == expected.values.tobytes()


async def test_async_pushes_are_counted_once_or_not_at_all(cluster: MakeCluster, tmp_path: Path) -> None:
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 10, "policy": "asp"}
    async with cut_off(cluster, servers=2, **settings) as first:
        await first.each(lambda worker: worker.init({"w": np.zeros(40_000, np.float32), "v": np.zeros(3, np.float32)}))
        await first.each(lambda worker: worker.set_optimizer("sgd", learning_rate=1.0))

        async def push(worker: aiokv.Client) -> None:
            for _ in range(12 if worker.rank else 25):
                ones = {"w": np.full(40_000, -(1000.0**worker.rank), np.float32)}
                await worker.push(ones | {"v": np.full(3, -(1000.0**worker.rank), np.float32)})

        await first.each(push)
        await settled(tmp_path, 10)
    async with cluster(servers=2, **settings, resume="latest") as second:
        for coordinator in (server._machine for server in second.servers):
            for (key, start), chunk in coordinator._catalog.chunks.items():  # type: ignore[attr-defined]
                expected = chunk.pushed.get(0, 0) + 1000 * chunk.pushed.get(1, 0)
                store = next(server.store for server in second.servers if server._machine is coordinator)
                value = store.acquire(key, start, chunk.version)
                assert (value.buffer.view(np.float32) == expected).all()
                store.release(value)


async def take_turns(worker: aiokv.Client, start: int, stop: int) -> dict[str, Any]:
    """Take steps in each of which another worker comes when the round is closed without it; return the values then."""
    values = initial()
    await worker.pull(list(values), list(values.values()))
    for step in range(start, stop):
        is_late = worker.rank == step % 3
        if is_late:
            await worker.barrier()
        await worker.pushpull(gradients(values, worker.rank, step), out=values)
        if not is_late:
            await worker.barrier()
        await worker.barrier()
    return values


async def test_rounds_that_one_server_decides_go_on_with_the_same_bits(cluster: MakeCluster, tmp_path: Path) -> None:
    options = {"workers": 3, "policy": "backup:1"}
    settings = options | {"checkpoint_folder": str(tmp_path), "checkpoint_every": 4}
    async with cluster(servers=2, **options) as undisturbed:
        await begin(undisturbed, RULES[1])
        expected = (await undisturbed.each(lambda worker: take_turns(worker, 0, 7)))[0]
    async with cut_off(cluster, servers=2, **settings) as first:
        await begin(first, RULES[1])
        await first.each(lambda worker: take_turns(worker, 0, 5))
        await settled(tmp_path, 4)
    async with cluster(servers=3, **settings, resume="latest") as second:
        await begin(second, RULES[1])
        await go_on(second, 4)
        results = await second.each(lambda worker: take_turns(worker, 4, 7))
    assert_same(results[0], expected)


async def train_until(cluster: Cluster, folder: Path, values: dict[str, Any], step: int, count: int) -> dict[int, Any]:
    """Take step after step until there are so many complete checkpoints; return the values after each."""
    after = {step: values}
    async with asyncio.timeout(20):
        while len(await complete_ones(folder)) < count:
            after[step + 1] = await train_all(cluster, after[step], step, step + 1)
            step += 1
    return after


async def test_the_last_few_are_kept_and_a_new_run_has_its_own_number(cluster: MakeCluster, tmp_path: Path) -> None:
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 1}
    async with cut_off(cluster, **settings, checkpoint_keep=3) as running:
        await train_until(running, tmp_path, await begin(running, RULES[0]), 0, 3)
    async with cluster(**settings, checkpoint_keep=2) as running:
        values, step = await begin(running, RULES[0]), 0
        async with asyncio.timeout(20):
            while [found.run for found in await complete_ones(tmp_path)] != [2, 2]:
                values, step = await train_all(running, values, step, step + 1), step + 1


async def test_one_every_so_often(cluster: MakeCluster, tmp_path: Path) -> None:
    async with cluster(checkpoint_folder=str(tmp_path), checkpoint_seconds=0.05) as running:
        await train_until(running, tmp_path, await begin(running, RULES[0]), 0, 2)


async def test_torn_one_is_passed_over(cluster: MakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 2}
    async with cut_off(cluster, **settings) as first:
        after = await train_until(first, tmp_path, await begin(first, RULES[0]), 0, 2)
    before, newest = [found.clock for found in await complete_ones(tmp_path)][-2:]
    await tear(tmp_path, newest)
    async with cluster(**settings, resume="latest") as second:
        assert_same(await begin(second, RULES[0]), after[before])
        assert second.scheduler.counters["checkpoint_damaged"] == 1
    assert "is torn" in caplog.text


async def test_scheduler_does_not_start_when_all_are_torn(cluster: MakeCluster, tmp_path: Path) -> None:
    settings = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 2}
    async with cut_off(cluster, **settings) as first:
        await train_all(first, await begin(first, RULES[0]), 0, 3)
        await settled(tmp_path, 2)
    await tear(tmp_path)
    with pytest.raises(DataError, match="no checkpoint in"):
        async with cluster(**settings, resume="latest"):
            pass


async def test_disk_that_is_full_stops_nobody_and_is_said(
    cluster: MakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # No folder can be made where a file is.
    await asyncio.to_thread((tmp_path / "file").write_bytes, b"")
    settings = {"checkpoint_folder": str(tmp_path / "file"), "checkpoint_every": 2}
    async with cluster(**settings) as running:
        await train_all(running, await begin(running, RULES[0]), 0, 8)
    assert "there is no checkpoint of round 2: server 0:" in caplog.text


async def test_part_that_is_damaged_between_start_and_load_is_not_loaded(
    cluster: MakeCluster, tmp_path: Path, settings: dict[str, Any]
) -> None:
    checkpoints = {"checkpoint_folder": str(tmp_path), "checkpoint_every": 2}
    async with cut_off(cluster, **checkpoints) as first:
        await train_all(first, await begin(first, RULES[0]), 0, 3)
        await settled(tmp_path, 2)
    options = settings | checkpoints
    scheduler = aiokv.Scheduler(num_workers=2, num_servers=1, bind_port=0, resume="latest", **options)
    async with scheduler, aiokv.Server(scheduler=scheduler.address, **options) as server:
        await tear(tmp_path)
        workers = [aiokv.connect(scheduler.address, name=f"worker-{rank}", **settings) for rank in range(2)]
        ends = await asyncio.gather(*(worker.start() for worker in workers), return_exceptions=True)
        assert [type(end) for end in ends] == [DataError, DataError], ends
        stop = await server.wait_stopped()
        assert stop.failed
