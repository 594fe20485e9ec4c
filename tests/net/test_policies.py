"""Every policy over real sockets: the same workers in the same rounds on all servers, nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import PolicyError, RoundTimeoutError
from aiokv.policy import policy_names

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster

WORKERS, STEPS = 3, 8

TEXTS = [
    *("bsp", "asp", "ssp:1", "essp:0", "dssp:1:3", "pssp:1:1", "pbsp:2", "sync_switch:0.5:8", "round_robin"),
    *("backup:1", "k_sync:2", "k_async:2", "k_batch_sync:2", "k_batch_async:4", "adasync:2", "ringmaster:2"),
    *("quorum:2:0.01:2",),
]


def test_every_policy_is_here() -> None:
    assert {text.split(":")[0] for text in TEXTS} == {*policy_names()} - {"sum"}


def zeros() -> dict[str, Any]:
    """A small key, and one that is cut over both servers."""
    return {"small": np.zeros(3, np.float32), "cut": np.zeros((64, 4096), np.float32)}


def ones(rank: int) -> dict[str, Any]:
    """A contribution that says in a sum who has made it: ones, hundreds, tens of thousands."""
    return {key: value + 100.0**rank for key, value in zeros().items()}


def counts_in(values: list[Any]) -> list[int]:
    """Return how many contributions of each rank are in the values, which must be the same in all elements."""
    [total] = {float(number) for value in values for number in np.unique(value)}
    return [int(total) // 100**rank % 100 for rank in range(WORKERS)]


@pytest.mark.parametrize("text", TEXTS)
async def test_all_keys_hold_the_same_contributions(cluster: MakeCluster, text: str) -> None:
    """However the workers race: what is in the value and what was dropped is what was pushed."""
    pushes = [STEPS, STEPS - 1, STEPS + 2] if text != "bsp" else [STEPS] * 3
    async with cluster(workers=WORKERS, servers=2, policy=text, chunk_bytes=64 * 1024) as running:
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await running.each(lambda kv: kv.init(zeros()))

        async def train(kv: aiokv.Client) -> None:
            for _ in range(pushes[kv.rank]):
                await kv.pushpull(ones(kv.rank))
            await kv.finish()

        await running.each(train)
        await running.each(lambda kv: kv.barrier())
        counts = counts_in(await running.workers[0].pull(list(zeros())))
        dropped = [sum(kv.dropped.values()) for kv in running.workers]
        policy = aiokv.policy.get_policy(text)
        # Both keys of a step are dropped together.
        assert all(number % 2 == 0 for number in dropped)
        left = [pushed - number // 2 - count for pushed, number, count in zip(pushes, dropped, counts, strict=True)]
        if policy.waits:
            assert left == [0, 0, 0]
        else:
            # The last round may not be full; it is made when the servers hear that all have finished.
            k = int(text.split(":")[1])
            assert sum(left) == 0 or sum(counts) % k == 0
            assert 0 <= sum(left) < k
            assert min(left) >= 0
        if not policy.in_step:
            tallies = await running.workers[0].tallies()
            chunks = 1 + 64 * 4096 * 4 // (64 * 1024)
            assert [tallies[rank].applied for rank in range(WORKERS)] == [count * chunks for count in counts]
            for rank in range(WORKERS):
                assert sum(tallies[rank].staleness.values()) == tallies[rank].applied
                assert sum(tallies[rank].dropped.values()) == dropped[rank] // 2 * chunks


async def test_late_worker_is_told_and_reads_on(cluster: MakeCluster) -> None:
    async with cluster(workers=3, servers=2, policy="backup:1") as running:
        first, second, late = running.workers
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await running.each(lambda kv: kv.init(zeros()))
        assert list(await asyncio.gather(first.push(ones(0)), second.push(ones(1)))) == [{}, {}]
        assert await late.push(ones(2)) == {"small": "late", "cut": "late"}
        assert late.dropped == {"late": 2}
        assert counts_in(await late.pull(list(zeros()))) == [1, 1, 0]
        # With the new values it is in time; who has not read them is late, whenever it comes.
        assert await second.push(ones(1)) == {"small": "late", "cut": "late"}
        await first.pull(list(zeros()))
        await asyncio.gather(late.pushpull(ones(2)), first.pushpull(ones(0)))
        assert counts_in(await late.pull(list(zeros()))) == [2, 1, 1]
        assert first.dropped == {}


async def test_stale_gradient_is_dropped(cluster: MakeCluster) -> None:
    async with cluster(workers=3, policy="ringmaster:2") as running:
        first, second, third = running.workers
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await running.each(lambda kv: kv.init(zeros()))
        assert await first.push(ones(0)) == {}
        assert await second.push(ones(1)) == {}, "one update behind"
        assert await third.push(ones(2)) == {"small": "stale", "cut": "stale"}


async def test_who_is_too_far_ahead_waits_for_the_slowest(cluster: MakeCluster) -> None:
    async with cluster(workers=3, servers=2, policy="ssp:1") as running:
        fast, *others = running.workers
        await running.each(lambda kv: kv.init(zeros()))
        await fast.pushpull(ones(0))
        await fast.push(ones(0))
        reading = asyncio.create_task(fast.pull(list(zeros())))
        # What is asked later is answered earlier.
        await fast.tallies()
        assert not reading.done()
        await others[0].push(ones(1))
        await fast.tallies()
        assert not reading.done()
        await others[1].push(ones(2))
        await reading
        assert (await fast.tallies())[0].waited > 0.0


async def test_read_that_waits_too_long_says_for_whom(cluster: MakeCluster) -> None:
    async with cluster(workers=2, policy="ssp:0") as running:
        first, _ = running.workers
        await running.each(lambda kv: kv.init("w", np.zeros(3, np.float32)))
        text = r"key 'w'.* rank 0 may not read on before rank 1 \(worker-1\) has pushed more within"
        with pytest.raises(RoundTimeoutError, match=text) as caught:
            await first.pushpull("w", np.ones(3, np.float32), timeout=1.0)
        assert caught.value.details["ranks"] == [1]


async def test_round_that_is_not_closed_says_what_it_needs(cluster: MakeCluster) -> None:
    async with cluster(workers=3, policy="k_sync:2") as running:
        await running.each(lambda kv: kv.init("w", np.zeros(3, np.float32)))
        with pytest.raises(RoundTimeoutError, match=r"the round needs 1 more of rank 1 \(worker-1\), 2 \(worker-2\)"):
            await running.workers[0].push("w", np.ones(3, np.float32), timeout=1.0)


async def test_policy_of_each_key(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("sync", np.zeros(3, np.float32)))
        await running.each(lambda kv: kv.init("async", np.zeros(3, np.float32), policy="k_async:k=1"))
        await first.push("async", np.ones(3, np.float32))
        assert float((await second.pull("async"))[0]) == 1.0
        with pytest.raises(PolicyError, match="is kept under policy k_async:1, not asp"):
            await first.init("async", np.zeros(3, np.float32), policy="asp")
        await running.each(lambda kv: kv.push("sync", np.ones(3, np.float32)))


async def test_wrong_policy_is_refused_where_it_is_given(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        with pytest.raises(PolicyError, match="it is written backup:spare="):
            await running.workers[0].init("w", np.zeros(3, np.float32), policy="backup")
        with pytest.raises(PolicyError, match="unknown policy 'nope'"):
            running.client("worker-9", policy="nope")


@pytest.mark.parametrize(("rate", "value"), [("1", 80), ("1/max(1,tau)", 64), ("1/(1+tau)", 46)])
async def test_each_push_is_scaled_by_its_staleness(cluster: MakeCluster, rate: str, value: float) -> None:
    async with cluster(workers=2, servers=2, policy="asp", chunk_bytes=64 * 1024) as running:
        fast, slow = running.workers
        await running.each(lambda kv: kv.set_optimizer("accumulate", staleness_rate=rate))
        await running.each(lambda kv: kv.init(zeros()))
        for _ in range(3):
            await fast.pushpull({key: each + 8 for key, each in zeros().items()})
        # Three updates were made since this worker has read.
        await slow.push({key: each + 24 for key, each in zeros().items()})
        # And one since this one has.
        await fast.push({key: each + 32 for key, each in zeros().items()})
        for key, each in zeros().items():
            np.testing.assert_array_equal(await fast.pull(key), each + value)
        tallies = await fast.tallies()
        assert {*tallies[1].staleness} == {3}


@pytest.mark.parametrize(("rate", "value"), [("1", 80), ("1/max(1,tau)", 64), ("1/(1+tau)", 46)])
async def test_each_push_of_rows_is_scaled_by_its_staleness(cluster: MakeCluster, rate: str, value: float) -> None:
    """As above, with rows 0 and 9 of 10, one on each server."""

    def rows(number: float) -> aiokv.RowSparse:
        return aiokv.RowSparse(np.array([0, 9]), np.full((2, 3), number, np.float32), (10, 3))

    async with cluster(workers=2, servers=2, policy="asp", split_bytes=1) as running:
        fast, slow = running.workers
        await running.each(lambda kv: kv.set_optimizer("accumulate", staleness_rate=rate))
        await running.each(lambda kv: kv.init_rows("t", (10, 3)))
        for _ in range(3):
            await fast.push("t", rows(8))
            await fast.row_sparse_pull("t", row_ids=[0, 9])
        await slow.push("t", rows(24))
        await fast.push("t", rows(32))
        got = await fast.row_sparse_pull("t", row_ids=[0, 5, 9])
        np.testing.assert_array_equal(got.values[:, 0], [value, 0, value])


@pytest.mark.parametrize(("rate", "value"), [("1/max(1,tau)", 3 + 100 + 600 / 2), ("1/(1+tau)", 3 + 100 + 600 / 3)])
async def test_contributions_of_a_round_are_scaled_one_by_one(cluster: MakeCluster, rate: str, value: float) -> None:
    async with cluster(workers=3, servers=2, policy="k_async:2", chunk_bytes=64 * 1024) as running:
        first, second, slow = running.workers
        await running.each(lambda kv: kv.set_optimizer("accumulate", staleness_rate=rate))
        await running.each(lambda kv: kv.init(zeros()))
        for number in (1.0, 0.5):
            gradients = {key: each + number for key, each in zeros().items()}
            await asyncio.gather(first.pushpull(gradients), second.pushpull(gradients))
        await asyncio.gather(
            first.push({key: each + 100 for key, each in zeros().items()}),
            slow.push({key: each + 600 for key, each in zeros().items()}),
        )
        for key, each in zeros().items():
            np.testing.assert_array_equal(await first.pull(key), each + value)


PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


async def test_slow_worker_abandons_a_gradient_that_nobody_waits_for(cluster: MakeCluster) -> None:
    """By the function of the page."""
    [code] = re.findall(r"^```python\n(async def step\(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"asyncio": asyncio}
    exec(code, namespace)
    one = np.ones((64, 4096), np.float32)
    async with cluster(workers=3, servers=2, policy="backup:1", chunk_bytes=64 * 1024) as running:
        first, second, slow = running.workers
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await running.each(lambda kv: kv.init("w", 0 * one))

        async def compute(number: float = 1.0) -> Any:
            return number * one

        async def compute_for_ever() -> Any:
            await asyncio.Event().wait()

        for number in range(1, 4):
            abandoned = asyncio.create_task(namespace["step"](slow, compute_for_ever))
            await asyncio.gather(first.pushpull("w", one), second.pushpull("w", one))
            np.testing.assert_array_equal(await abandoned, 2 * number * one)
        # What it computes from these values is in time, and nothing of it was dropped.
        values = await asyncio.gather(
            namespace["step"](slow, lambda: compute(100.0)), namespace["step"](first, lambda: compute(10.0))
        )
        for value in values:
            np.testing.assert_array_equal(value, 116 * one)
        assert slow.dropped == first.dropped == {}
        assert slow.torn_reads == 0


async def test_wait_for_a_round_ends_at_its_time_and_says_for_what(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2, policy="k_sync:2") as running:
        await running.each(lambda kv: kv.init(zeros()))
        with pytest.raises(RoundTimeoutError, match=r"key 'small'.*round 1: nobody has closed it within"):
            await running.workers[0].wait_for_round("small", timeout=1.0)


@pytest.mark.parametrize("text", ["bsp", "asp"])
async def test_wait_for_a_version_of_a_key_that_goes_with_others(cluster: MakeCluster, text: str) -> None:
    async with cluster(workers=2, servers=1, policy=text) as running:
        first, second = running.workers
        values = {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}
        await running.each(lambda kv: kv.init(values))
        waiting = asyncio.create_task(first.wait_for_round("b"))
        # What is asked later is answered earlier.
        await first.tallies()
        await running.each(lambda kv: kv.push({"a": values["a"]}))
        await first.tallies()
        assert not waiting.done()
        await running.each(lambda kv: kv.push({"b": values["b"]}))
        assert await waiting >= 1
        assert await second.wait_for_round("b", 0) >= 1


async def test_more_workers_make_a_round_when_they_report_a_smaller_loss(cluster: MakeCluster) -> None:
    """A round of one sets the mean of one contribution; one of all three the mean of 1, 2 and 6."""
    async with cluster(workers=3, servers=2, policy="adasync:1") as running:
        await running.each(lambda kv: kv.set_optimizer("accumulate", reduction="mean"))
        await running.each(lambda kv: kv.init("w", np.zeros(1)))
        await running.each(lambda kv: kv.report_loss(8.0))
        assert await running.workers[0].pushpull("w", np.ones(1)) == 1.0
        await running.each(lambda kv: kv.report_loss(0.5))
        values = await running.each(lambda kv: kv.pushpull("w", np.full(1, [1.0, 2.0, 6.0][kv.rank])))
        assert [float(value[0]) for value in values] == [4.0] * 3
