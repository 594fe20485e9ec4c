"""A save or load is a call of all workers: all hear how it went, and it happens as a whole or not at all."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.checkpoint import files
from aiokv.checkpoint.calls import _told
from aiokv.errors import (
    AiokvError,
    BarrierTimeoutError,
    CallTimeoutError,
    ConfigError,
    DataError,
    MembershipError,
    OptimizerError,
    PolicyError,
    SpecMismatchError,
    UnknownKeyError,
    from_code,
)

if TYPE_CHECKING:
    from pathlib import Path

MakeCluster = Callable[..., AbstractAsyncContextManager[Any]]

LONG = 600.0
"""Longer than a test may take: nobody has waited so long."""

ONES = np.ones(4, "float32")


async def outcomes(running: Any, call: Callable[[aiokv.Client], Any]) -> list[Any]:
    """Make one call on every worker, and return results or errors."""
    return await asyncio.gather(*(call(worker) for worker in running.workers), return_exceptions=True)


async def refused(running: Any, url: Any, error: type[Exception]) -> list[str]:
    """Let all workers load; return how each was refused, after a look that nothing has changed."""

    async def held() -> Any:
        (worker, *_) = running.workers
        return [array.tolist() for array in await worker.pull({"w": None})], await worker.update_counts()

    before = await held()
    got = await outcomes(running, lambda worker: worker.load(str(url), timeout=LONG))
    assert [type(each) for each in got] == [error] * len(got)
    assert await held() == before
    return [each.message for each in got]


async def start(running: Any, *keys: str) -> None:
    await running.each(lambda worker: worker.init({key: np.zeros(4, "float32") for key in keys or ("w",)}))


async def test_all_workers_hear_at_once_why_a_file_can_not_be_loaded(cluster: MakeCluster, tmp_path: Path) -> None:
    async with cluster(workers=3, servers=2) as running:
        await start(running)
        await running.each(lambda worker: worker.save(str(tmp_path / "good")))
        await running.each(lambda worker: worker.push("w", ONES))
        whole = await asyncio.to_thread((tmp_path / "good").read_bytes)
        await asyncio.to_thread((tmp_path / "torn").write_bytes, whole[:-1])
        await asyncio.to_thread((tmp_path / "foreign").write_bytes, b"PK\x03\x04")
        for name in ("torn", "foreign", "missing"):
            reasons = await refused(running, tmp_path / name, DataError)
            assert str(tmp_path / name) in reasons[0]
            assert reasons[1:] == reasons[:1] * 2
        await running.each(lambda worker: worker.load(str(tmp_path / "good")))


async def test_all_workers_hear_that_the_model_or_the_rule_is_another(cluster: MakeCluster, tmp_path: Path) -> None:
    def make() -> None:
        for name, value, rule in (("spec", np.ones(5, "float32"), "adam"), ("rule", ONES, "sgd")):
            with aiokv.create("local") as kv:
                kv.init("w", value)
                kv.set_optimizer(rule)
                kv.save(str(tmp_path / name))

    await asyncio.to_thread(make)
    async with cluster(workers=2, servers=2) as running:
        await start(running)
        await running.each(lambda worker: worker.set_optimizer("adam"))
        assert "'w'" in (await refused(running, tmp_path / "spec", SpecMismatchError))[1]
        await refused(running, tmp_path / "rule", OptimizerError)


@pytest.mark.parametrize("call", ["save", "save_optimizer_states"])
async def test_all_workers_hear_that_a_file_can_not_be_written(cluster: MakeCluster, tmp_path: Path, call: str) -> None:
    url = str(tmp_path / "no such folder" / "a")
    async with cluster(workers=2) as running:
        await start(running)
        got = await outcomes(running, lambda worker: getattr(worker, call)(url, timeout=LONG))
        assert [type(each) for each in got] == [DataError, DataError]
        assert got[0].message == got[1].message


async def test_an_error_that_nobody_foresaw_reaches_all_too(
    cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(url: str, _folder: str) -> bytes:
        raise ZeroDivisionError(url)

    monkeypatch.setattr(files, "open_reader", broken)
    async with cluster(workers=2) as running:
        await start(running)
        got = await outcomes(running, lambda worker: worker.load("memory://any", timeout=LONG))
        assert [type(each) for each in got] == [ZeroDivisionError, DataError]
        assert "rank 0 could not go on: ZeroDivisionError" in got[1].message


async def test_a_worker_that_does_not_come_is_named_and_nothing_is_written(
    cluster: MakeCluster, tmp_path: Path
) -> None:
    async with cluster(workers=2) as running:
        await start(running)
        with pytest.raises(BarrierTimeoutError, match="worker-1"):
            await running.workers[0].save(str(tmp_path / "a"), timeout=1.0)
        assert os.listdir(tmp_path) == []


async def test_without_rank_0_nobody_saves(cluster: MakeCluster, tmp_path: Path) -> None:
    """It has said that it is done: no barrier waits for it."""
    async with cluster(workers=3) as running:
        await start(running)
        await running.workers[0].finish()
        for call in (aiokv.Client.save, aiokv.Client.load):
            late = [call(worker, tmp_path / "a") for worker in running.workers[1:]]
            got = await asyncio.gather(*late, return_exceptions=True)
            assert [type(each) for each in got] == [MembershipError] * 2


async def test_a_save_that_is_cancelled_leaves_the_old_file_and_tells_the_others(
    cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is at the disk when its caller stops waiting: it must not give the file its name afterwards."""
    url = str(tmp_path / "a")
    begun, cleaned, go_on = asyncio.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    async with cluster(workers=2) as running:
        await start(running)
        await running.each(lambda worker: worker.save(url))
        before = await asyncio.to_thread((tmp_path / "a").read_bytes)
        await running.each(lambda worker: worker.push("w", ONES))

        def slow(descriptor: int) -> None:
            loop.call_soon_threadsafe(begun.set)
            go_on.wait()

        whole = files.Aside._clean

        def clean(self: files.Aside) -> None:
            whole(self)
            if go_on.is_set():
                loop.call_soon_threadsafe(cleaned.set)

        monkeypatch.setattr("aiokv.checkpoint.files.os.fsync", slow)
        monkeypatch.setattr(files.Aside, "_clean", clean)
        task = asyncio.create_task(running.workers[0].save(url, timeout=LONG))
        other = asyncio.create_task(running.workers[1].save(url, timeout=LONG))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(CallTimeoutError, match="rank 0 has given up"):
            await other
        go_on.set()
        await cleaned.wait()
        assert await asyncio.to_thread((tmp_path / "a").read_bytes) == before
        assert os.listdir(tmp_path) == ["a"]
        monkeypatch.undo()
        await running.each(lambda worker: worker.save(url))


@pytest.mark.parametrize("call", ["save", "load"])
async def test_a_worker_whose_caller_gives_up_lets_the_others_know(
    cluster: MakeCluster, tmp_path: Path, call: str
) -> None:
    """It was there already, so the others need not wait until its time is over; and all can try again."""
    url = str(tmp_path / "a")
    async with cluster(workers=2) as running:
        await start(running)
        await running.each(lambda worker: worker.save(url))
        before = await asyncio.to_thread((tmp_path / "a").read_bytes)
        first, second = running.workers
        task = asyncio.create_task(getattr(second, call)(url, timeout=LONG))
        # A round trip to the scheduler: the call waits there.
        await second.barrier("alone", group=[1])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(CallTimeoutError, match="rank 1 has given up"):
            await getattr(first, call)(url, timeout=LONG)
        assert await asyncio.to_thread((tmp_path / "a").read_bytes) == before
        await running.each(lambda worker: getattr(worker, call)(url))


async def test_a_push_while_a_save_is_under_way_makes_it_fail(
    cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await start(running)
        whole = aiokv.checkpoint.snapshot.stream

        async def disturbed(*arguments: Any) -> None:
            await worker.push("w", ONES)
            await whole(*arguments)

        monkeypatch.setattr("aiokv.checkpoint.snapshot.stream", disturbed)
        with pytest.raises(DataError, match="'w' was pushed while it was saved"):
            await worker.save(str(tmp_path / "a"))
        assert os.listdir(tmp_path) == []


# --- some of the keys, facts ---


async def test_some_keys_are_saved_and_some_are_loaded(cluster: MakeCluster, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    async with cluster(workers=2, servers=2) as running:
        await start(running, "a", "b", "c")
        await running.each(lambda worker: worker.push(dict.fromkeys("abc", ONES)))
        await running.each(lambda worker: worker.save(url, keys=["a", "b"]))
        await running.each(lambda worker: worker.push(dict.fromkeys("abc", 5 * ONES)))
        await running.each(lambda worker: worker.load(url, keys="b"))
        assert [array[0] for array in await running.workers[1].pull(dict.fromkeys("abc"))] == [10, 2, 10]
        for call in (aiokv.Client.save, aiokv.Client.load):
            got = await outcomes(running, partial(call, url=url, keys=["a", "z"]))
            assert [type(each) for each in got] == [UnknownKeyError] * 2
            assert all("'z'" in each.message for each in got)


async def test_every_worker_gets_the_facts_of_rank_0_and_may_refuse_them(cluster: MakeCluster, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    async with cluster(workers=2) as running:
        await start(running)
        await running.each(lambda worker: worker.save(url, facts={"epoch": 7 + worker.rank, "of": ["x", None]}))
        assert await running.each(lambda worker: worker.load(url)) == [{"epoch": 7, "of": ["x", None]}] * 2
        await running.each(lambda worker: worker.push("w", ONES))

        def check(facts: dict[str, Any]) -> None:
            raise ConfigError(f"epoch {facts['epoch']} is not what is wanted here")

        async def load(worker: aiokv.Client) -> Any:
            return await worker.load(url, check=check if worker.rank == 1 else None, timeout=LONG)

        got = await outcomes(running, load)
        assert [type(each) for each in got] == [ConfigError] * 2
        assert (await running.workers[0].pull("w")).tolist() == [2] * 4
        got = await outcomes(running, lambda worker: worker.save(url, facts={"much": "x" * 70_000}))
        assert [type(each) for each in got] == [ConfigError] * 2


# --- keys that are not there yet ---


async def test_a_load_makes_the_keys_with_policy_group_and_storage(cluster: MakeCluster, tmp_path: Path) -> None:
    """A key of ranks 1 and 2 is saved by rank 0, which has no part in it."""
    url = str(tmp_path / "a")
    big = np.arange(1 << 15, dtype="float32")
    rows = aiokv.RowSparse(np.array([3]), np.full((1, 2), 5, "float32"), (9, 2))
    initializer = {"name": "normal", "scale": 0.5, "seed": 4}

    async def make(running: Any) -> None:
        await running.each(lambda worker: worker.init({"big": big, "b": ONES, "half": ONES.astype("float16")}))
        await running.each(lambda worker: worker.init("sum", ONES, policy="sum"))
        await asyncio.gather(*(worker.init("pair", ONES, group=(1, 2)) for worker in running.workers[1:]))
        await running.each(lambda worker: worker.init_rows("t", (9, 2), rows=rows, initializer=initializer, lazy=False))

    async def go_on(running: Any) -> list[Any]:
        dense = {"big": big, "b": ONES, "half": ONES.astype("float16"), "sum": ONES}
        await running.each(lambda worker: worker.push(dense))
        await asyncio.gather(*(worker.push("pair", ONES) for worker in running.workers[1:]))
        await running.each(lambda worker: worker.push("t", rows))
        last = running.workers[2]
        got = await last.pull(dict.fromkeys((*dense, "pair")))
        return [
            *(array.tobytes() for array in got),
            (await last.row_sparse_pull("t", row_ids=range(9))).values.tobytes(),
        ]

    async with cluster(workers=3, servers=2) as running:
        await make(running)
        await running.each(lambda worker: worker.set_optimizer("sgd", learning_rate=0.5, momentum=0.5))
        await go_on(running)
        await running.each(lambda worker: worker.save(url))
        expected = await go_on(running)
        counts = await running.workers[0].update_counts()
    async with cluster(workers=3, servers=3) as running:
        await running.each(lambda worker: worker.load(url))
        assert await go_on(running) == expected
        assert await running.workers[0].update_counts() == counts
        assert "pair" in await running.workers[1].update_counts()
        with pytest.raises(PolicyError):
            await running.workers[0].init("b", ONES, policy="sum")


async def test_who_waits_for_a_key_reads_what_was_loaded(cluster: MakeCluster, tmp_path: Path) -> None:
    """A pull that came before the load, and an init of a worker that is not the root."""
    url = str(tmp_path / "a")
    async with cluster(workers=2) as running:
        await running.each(lambda worker: worker.init("w", 3 * ONES))
        await running.each(lambda worker: worker.save(url))
    async with cluster(workers=2) as running:
        early = asyncio.create_task(running.workers[1].pull("w", np.empty(4, "float32")))
        init = asyncio.create_task(running.workers[1].init("w", ONES))
        await running.each(lambda worker: worker.load(url))
        await init
        assert (await early).tolist() == [3] * 4


async def test_keys_of_ranks_that_there_are_not_can_not_be_made(cluster: MakeCluster, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    async with cluster(workers=3) as running:
        await asyncio.gather(*(worker.init("pair", ONES, group=(1, 2)) for worker in running.workers[1:]))
        await running.each(lambda worker: worker.save(url))
    async with cluster(workers=2) as running:
        got = await outcomes(running, lambda worker: worker.load(url, timeout=LONG))
        assert [type(each) for each in got] == [MembershipError] * 2
        assert all("'pair'" in each.message for each in got)


async def test_keys_can_not_be_made_without_values(cluster: MakeCluster, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    async with cluster(workers=2) as running:
        await start(running, "a", "b")
        await running.each(lambda worker: worker.save_optimizer_states(url))
    async with cluster(workers=2) as running:
        await start(running, "a")
        got = await outcomes(running, lambda worker: worker.load(url, timeout=LONG))
        assert [type(each) for each in got] == [UnknownKeyError] * 2
        assert all("'b'" in each.message for each in got)


async def test_a_key_that_its_rule_can_not_update_is_refused(cluster: MakeCluster, tmp_path: Path) -> None:
    """The rule is the cluster's, the key comes from a file without one."""
    url = str(tmp_path / "a")
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await worker.init("n", np.ones(3, "int32"))
        await worker.save(url)
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await worker.set_optimizer("adam")
        with pytest.raises(OptimizerError, match="'n'"):
            await worker.load(url)


async def test_more_keys_than_go_in_one_message(
    cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiokv.checkpoint.calls.MOST_KEYS", 3)
    monkeypatch.setattr("aiokv.checkpoint.snapshot.MOST_PARTS", 2)
    url = str(tmp_path / "a")
    values = {f"k{number}": np.full(3, number, "float32") for number in range(10)}
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda worker: worker.init(values))
        await running.each(lambda worker: worker.save(url))
    async with cluster(workers=2) as running:
        await running.each(lambda worker: worker.load(url))
        for array, value in zip(await running.workers[1].pull(list(values)), values.values(), strict=True):
            np.testing.assert_array_equal(array, value)


async def test_states_are_loaded_without_the_weights_of_their_file(cluster: MakeCluster, tmp_path: Path) -> None:
    """Momentum 0.5 and rate 1: pushes of 1 change the weight by -1, then by -1.5."""
    url = str(tmp_path / "a")
    async with cluster(workers=1) as running:
        (worker,) = running.workers
        await start(running)
        await worker.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        await worker.push("w", ONES)
        await worker.save(url)
        await worker.push("w", ONES)
        await worker.load_optimizer_states(url)
        assert (await worker.pull("w")).tolist() == [-2.5] * 4
        await worker.push("w", ONES)
        assert (await worker.pull("w")).tolist() == [-4] * 4


def test_errors_that_travel_keep_their_class() -> None:
    """What the others raise is what the first one has raised."""
    error = from_code(*_told(SpecMismatchError("so", key="w"), 0)["error"])
    assert (type(error), error.details) == (SpecMismatchError, {"key": "w"})
    assert isinstance(error, AiokvError)
