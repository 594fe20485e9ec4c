"""Row-sparse keys on a cluster over TCP; numbers of scenarios are those of the project's list of situations."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.core.worker import row_parts
from aiokv.errors import RoundTimeoutError, SpecMismatchError, UnknownKeyError, UpdateRefusedError

if TYPE_CHECKING:
    from aiokv.store.table import Table
    from tests.net.conftest import Cluster, MakeCluster

Rows = aiokv.RowSparse


def ones(*ids: int, shape: tuple[int, ...], number: float = 1.0) -> Rows:
    """Return rows with one number in all elements."""
    return Rows(ids, np.full((len(ids), *shape[1:]), number, np.float32), shape)


async def read(worker: aiokv.Client, key: str, *ids: int) -> list[float]:
    """Return the first element of each row, in the order of increasing ids."""
    rows = await worker.row_sparse_pull(key, row_ids=ids)
    return [float(row.reshape(-1)[0]) for row in rows.values]


async def test_scenario_44_row_ids(cluster: MakeCluster) -> None:
    """Row 16,777,217 is one that float32 can't tell from its neighbour."""
    shape = (20_000_000, 1)
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda worker: worker.init("t", Rows.empty(shape)))
        await running.each(lambda worker: worker.set_optimizer("accumulate"))
        pushes = [ones(16_777_217, 5, 16_777_217, shape=shape), Rows.empty(shape)]
        await asyncio.gather(*(worker.push("t", rows) for worker, rows in zip(running.workers, pushes, strict=True)))
        for worker in running.workers:
            assert await read(worker, "t", 16_777_216, 5, 16_777_217, 16_777_218) == [1, 0, 2, 0]
        for row in (-1, 20_000_000):
            with pytest.raises(SpecMismatchError, match=f"row {row}"):
                Rows([row], np.zeros((1, 1), np.float32), shape)
            with pytest.raises(SpecMismatchError, match=f"row {row}"):
                await running.workers[1].row_sparse_pull("t", row_ids=[row])
        assert sum(table.num_rows for table in tables_of(running, shape)) == 2


def tables_of(running: Cluster, shape: tuple[int, ...]) -> list[Table]:
    """Return the parts of the table "t", one on each server."""
    session = running.workers[0]._session
    chunks = session._directory.layout.place_rows("t", Rows.empty(shape).spec)
    assert len({chunk.server for chunk in chunks}) == len(running.servers)
    servers = {server.advertised: server for server in running.servers}
    entries = [(session._links.servers[chunk.server], chunk.start) for chunk in chunks]
    return [servers[entry.host, entry.port].store.table("t", start) for entry, start in entries]


@pytest.mark.parametrize("row", [-1, 20_000_000])
async def test_scenario_44_row_ids_are_checked_by_the_server_too(cluster: MakeCluster, row: int) -> None:
    shape = (20_000_000, 1)
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await worker.init("t", Rows.empty(shape))
        rows = ones(3, shape=shape)
        # The client has checked them when the value was made.
        rows.indices[0] = row
        with pytest.raises(SpecMismatchError, match=f"row {row} is not one of 0 to 19999999"):
            await worker.push("t", rows)
        await worker.push("t", ones(3, shape=shape))
        assert await read(worker, "t", 3) == [1]


async def test_scenario_45_lazy_and_dense_rules(cluster: MakeCluster) -> None:
    """sgd, momentum .9, lr .1; row 0 gets 1 in round 1 only: dense -.1, -.19, lazy -.1, -.1 (by hand)."""
    shape = (4, 2)
    async with cluster(workers=2) as running:
        await running.each(lambda worker: worker.init_rows("lazy", shape))
        await running.each(lambda worker: worker.init_rows("dense", shape, lazy=False))
        await running.each(lambda worker: worker.set_optimizer("sgd", learning_rate=0.1, momentum=0.9))
        seen: dict[str, list[float]] = {"lazy": [], "dense": []}
        for rows in (ones(0, shape=shape, number=0.5), Rows.empty(shape)):
            await asyncio.gather(*(worker.push({"lazy": rows, "dense": rows}) for worker in running.workers))
            for key, values in seen.items():
                values.extend(await read(running.workers[0], key, 0))
        assert seen["lazy"] == pytest.approx([-0.1, -0.1])
        assert seen["dense"] == pytest.approx([-0.1, -0.19])


async def test_scenario_75_bytes_are_in_proportion_to_the_rows(cluster: MakeCluster) -> None:
    """1 % of the rows of a table, pushed and read, are about 1 % of the bytes; a row id is 8 bytes beside 256."""
    shape = (10_000, 64)
    async with cluster(workers=1, servers=2) as running:
        (worker,) = running.workers
        await worker.init("w", np.zeros(shape, np.float32))
        await worker.init("t", Rows.empty(shape))
        sent = count_bytes(running)
        await worker.push("w", np.ones(shape, np.float32))
        await worker.pull("w")
        dense = sum(sent)
        sent.clear()
        ids = np.arange(100) * 100
        await worker.push("t", Rows(ids, np.ones((100, 64), np.float32), shape))
        await worker.row_sparse_pull("t", row_ids=ids)
        assert 0.010 <= sum(sent) / dense <= 0.012


def count_bytes(running: Cluster) -> list[int]:
    """Return a list to which every payload adds its length when it is sent."""
    sent: list[int] = []
    for node in (*running.workers, *running.servers):
        memory = node._memory

        def measured(payload: Any, memory: Any = memory) -> Any:
            view, done = memory(payload)
            sent.append(view.nbytes)
            return view, done

        node._memory = measured  # type: ignore[method-assign]
    return sent


async def test_scenario_76_a_table_of_a_billion_rows(cluster: MakeCluster) -> None:
    """Rows have the same values on any number of servers, and only rows that were pushed take memory."""
    shape, ids = (10**9, 16), [0, 499_999_999, 500_000_000, 999_999_999]
    seen = []
    for servers in (1, 3):
        async with cluster(workers=2, servers=servers) as running:
            await running.each(lambda worker: worker.init_rows("t", shape, initializer={"name": "normal", "seed": 5}))
            await running.each(lambda worker: worker.set_optimizer("sgd", learning_rate=1.0))
            values = await running.each(lambda worker: worker.row_sparse_pull("t", row_ids=ids))
            np.testing.assert_array_equal(values[0].values, values[1].values)
            seen.append(values[0].values)
            tables = tables_of(running, shape)
            assert [table.nbytes for table in tables] == [0] * servers
            await running.each(lambda worker: worker.push("t", ones(ids[1], ids[3], shape=shape)))
            after = (await running.workers[1].row_sparse_pull("t", row_ids=ids)).values
            np.testing.assert_array_equal(after[[0, 2]], seen[0][[0, 2]])
            np.testing.assert_array_equal(after[[1, 3]], seen[0][[1, 3]] - 2)
            assert sum(table.num_rows for table in tables) == 2
            assert sum(table.nbytes for table in tables) < 1000
    np.testing.assert_array_equal(seen[0], seen[1])
    assert np.abs(seen[0]).max() < 0.1


@pytest.mark.parametrize("shape", [(2, 3), (1200, 1200)], ids=["small", "big"])
async def test_row_sparse_sums_of_seven_workers_and_seven_servers(cluster: MakeCluster, shape: tuple[int, int]) -> None:
    """MXNet's check: worker r pushes r + 1 to row r mod 2, rate 2; asked rows are 1 + the sum of 2 (r + 1) (i + 1)."""
    async with cluster(workers=7, servers=7) as running:
        await running.each(lambda worker: worker.init("t", Rows.from_dense(np.ones(shape, np.float32))))
        await running.each(lambda worker: worker.set_optimizer("accumulate", rescale_grad=2.0))
        random = np.random.default_rng(3)
        for step in range(3):
            await running.each(
                lambda worker: worker.push("t", ones(worker.rank % 2, shape=shape, number=worker.rank + 1))
            )
            wanted = random.integers(0, shape[0], (3, 4))
            out = np.full(shape, -1, np.float32)
            await running.workers[step].row_sparse_pull("t", out, row_ids=wanted)
            expected = np.zeros(shape, np.float32)
            for row in np.unique(wanted):
                expected[row] = 1 + sum(2 * (rank + 1) * (step + 1) for rank in range(7) if rank % 2 == row)
            np.testing.assert_array_equal(out, expected)


async def test_empty_pushes_of_seven_workers(cluster: MakeCluster) -> None:
    """MXNet's check: all push no rows of a small and a big key; all rows are 1, and no rows asked for are all 0."""
    shapes = {"small": (4, 4), "big": (1200, 1200)}
    async with cluster(workers=7, servers=7) as running:
        values = {key: Rows.from_dense(np.ones(shape, np.float32)) for key, shape in shapes.items()}
        await running.each(lambda worker: worker.init(values))
        await running.each(lambda worker: worker.set_optimizer("accumulate"))
        empty = {key: Rows.empty(shape) for key, shape in shapes.items()}
        await running.each(lambda worker: worker.push(empty))
        for key, shape in shapes.items():
            out = np.full(shape, -1, np.float32)
            await running.workers[3].row_sparse_pull(key, out, row_ids=np.arange(shape[0]))
            np.testing.assert_array_equal(out, 1)
            await running.workers[3].row_sparse_pull(key, out, row_ids=[])
            np.testing.assert_array_equal(out, 0)


async def test_big_row_sparse_of_seven_workers(cluster: MakeCluster) -> None:
    """MXNet's check: of some 30 % of 1,200 rows rank r adds r + 1 to every 2 (r + 1)-th; each asks for 1,200."""
    shape = (1200, 1200)
    chosen = np.flatnonzero(np.random.default_rng(9).random(1200) < 0.3)
    expected = np.ones(shape, np.float32)
    for rank in range(7):
        expected[chosen[:: 2 * (rank + 1)]] += rank + 1
    async with cluster(workers=7, servers=7) as running:
        await running.each(lambda worker: worker.init("t", Rows.from_dense(np.ones(shape, np.float32))))
        await running.each(lambda worker: worker.set_optimizer("accumulate"))
        await running.each(
            lambda worker: worker.push(
                "t", ones(*chosen[:: 2 * (worker.rank + 1)], shape=shape, number=worker.rank + 1)
            )
        )

        async def check(worker: aiokv.Client) -> None:
            wanted = np.random.default_rng(worker.rank).integers(0, 1200, 1200)
            rows = await worker.row_sparse_pull("t", row_ids=wanted)
            np.testing.assert_array_equal(rows.indices, np.unique(wanted))
            np.testing.assert_array_equal(rows.values, expected[rows.indices])

        await running.each(check)


async def test_async_pushes_are_in_what_their_worker_reads_next(cluster: MakeCluster) -> None:
    async with cluster(workers=2, policy="asp") as running:
        await running.each(lambda worker: worker.init("t", Rows.empty((9, 2))))
        await running.each(lambda worker: worker.set_optimizer("accumulate"))
        for step in range(1, 4):
            await running.workers[0].push("t", ones(1, shape=(9, 2)))
            assert await read(running.workers[0], "t", 1) == [step]
        await running.workers[1].push("t", Rows.empty((9, 2)))
        assert await read(running.workers[1], "t", 1) == [3]


async def test_a_push_larger_than_a_message_arrives_whole(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_parts, "SENT_BYTES", 64 * 1024)
    shape = (5000, 32)
    random = np.random.default_rng(1)
    initial, pushed = (random.integers(1, 9, shape).astype(np.float32) for _ in range(2))
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda worker: worker.init("t", Rows.from_dense(initial)))
        await running.each(lambda worker: worker.set_optimizer("accumulate"))
        await running.each(lambda worker: worker.push("t", Rows.from_dense(pushed)))
        out = np.empty(shape, np.float32)
        await running.workers[1].row_sparse_pull("t", out, row_ids=np.arange(shape[0]))
        np.testing.assert_array_equal(out, initial + 2 * pushed)


async def test_a_late_round_says_who_is_missing(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda worker: worker.init("t", Rows.empty((90, 2))))
        with pytest.raises(RoundTimeoutError, match=r"key 't', round 1: no contribution from rank 1"):
            await running.workers[0].push("t", ones(1, shape=(90, 2)), timeout=1.0)
        await running.workers[1].push("t", ones(1, shape=(90, 2)))
        assert await read(running.workers[0], "t", 1) == [2]


async def test_a_sum_that_does_not_fit_is_refused_to_all(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        rows = Rows([1], np.array([[100]], np.int8), (3, 1))
        await running.each(lambda worker: worker.init("t", Rows.empty((3, 1), np.int8)))
        errors = await asyncio.gather(*(worker.push("t", rows) for worker in running.workers), return_exceptions=True)
        assert [type(error).__mro__[1] for error in errors] == [UpdateRefusedError] * 2
        assert await read(running.workers[0], "t", 1) == [0]


async def test_what_a_worker_does_not_know_the_server_refuses(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        await first.init("t", Rows.empty((9, 2)))
        out = np.empty((9, 2), np.float32)
        with pytest.raises(SpecMismatchError, match="row_sparse_pull"):
            await second.pull("t", out)
        with pytest.raises(UnknownKeyError):
            await second.row_sparse_pull("u", out, row_ids=[1], timeout=1.0)
        assert await second.row_sparse_pull("t", out, row_ids=[1]) is out
        np.testing.assert_array_equal(out, 0)


async def test_workers_that_host_the_servers(settings: dict[str, Any]) -> None:
    shape, ids = (20_000, 8), np.arange(0, 20_000, 3)
    async with aiokv.Scheduler(num_workers=2, num_servers=2, bind_port=0, **settings) as scheduler:
        names = ["worker-0", "worker-1"]
        workers = [aiokv.connect(scheduler.address, name=name, colocate=True, **settings) for name in names]
        await asyncio.gather(*(worker.start() for worker in workers))
        try:
            await asyncio.gather(*(worker.init("t", Rows.empty(shape)) for worker in workers))
            await asyncio.gather(*(worker.push("t", ones(*ids, shape=shape)) for worker in workers))
            rows = await workers[1].row_sparse_pull("t", row_ids=np.arange(shape[0]))
            np.testing.assert_array_equal(rows.values[::3], 2)
            assert rows.values.sum() == 2 * ids.size * shape[1]
        finally:
            await asyncio.gather(*(worker.close() for worker in workers))
