"""Policies that change while workers train, over real sockets: nothing lost, nothing twice, and the new rule holds."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import BarrierTimeoutError, PolicyError
from aiokv.policy import get_policy

if TYPE_CHECKING:
    import aiokv
    from tests.net.conftest import MakeCluster

WORKERS, STEPS = 3, 4

TEXTS = ["bsp", "asp", "ssp:1", "k_sync:2", "k_batch_async:4", "k_async:2", "bsp"]


def zeros() -> dict[str, Any]:
    """Two small keys, which begin as a bundle, and one that is cut over both servers."""
    return {
        "small": np.zeros(3, np.float32),
        "other": np.zeros(2, np.float32),
        "cut": np.zeros((64, 4096), np.float32),
    }


def ones(rank: int) -> dict[str, Any]:
    """A contribution that says in a sum who has made it: ones, hundreds, tens of thousands."""
    return {key: value + 100.0**rank for key, value in zeros().items()}


def counts_in(values: list[Any]) -> list[int]:
    """Return how many contributions of each rank are in the values, which must be the same in all elements."""
    [total] = {float(number) for value in values for number in np.unique(value)}
    return [int(total) // 100**rank % 100 for rank in range(WORKERS)]


async def test_what_was_pushed_is_in_the_value_or_was_dropped_whatever_the_policies_were(cluster: MakeCluster) -> None:
    async with cluster(workers=WORKERS, servers=2, policy=TEXTS[0], chunk_bytes=64 * 1024) as running:
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await running.each(lambda kv: kv.init(zeros()))

        async def train(kv: aiokv.Client) -> None:
            for text in TEXTS:
                await kv.set_policy(text)
                assert {record.options.policy for record in kv._session.records} == {str(get_policy(text))}
                # Workers that have called it are waited for no longer, so the others may have more steps.
                for _ in range(STEPS + kv.rank):
                    await kv.pushpull(ones(kv.rank))
            await kv.set_policy("asp")

        await running.each(train)
        counts = counts_in(await running.workers[0].pull(list(zeros())))
        dropped = [kv.dropped.get("late", 0) for kv in running.workers]
        assert all(number % len(zeros()) == 0 for number in dropped), "all keys of a step are dropped together"
        lost = [number // len(zeros()) for number in dropped]
        pushed = [len(TEXTS) * (STEPS + rank) for rank in range(WORKERS)]
        assert [sum(pair) for pair in zip(counts, lost, strict=True)] == pushed
        assert sum(lost) < sum(STEPS + rank for rank in range(WORKERS)), "some of one policy's pushes at most"


async def test_who_is_too_far_ahead_waits_from_the_change_on(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2, policy="asp") as running:
        fast, slow = running.workers
        await running.each(lambda kv: kv.init(zeros()))
        for _ in range(5):
            await fast.pushpull(ones(0))
        await asyncio.gather(fast.set_policy("ssp:1"), slow.set_policy("ssp:1"))
        await fast.pushpull(ones(0))
        second = asyncio.create_task(fast.pushpull(ones(0)))
        await fast.tallies()
        assert not second.done()
        await slow.push(ones(1))
        await second


async def test_worker_that_does_not_call_is_named_and_may_come_later(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2, policy="bsp") as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init(zeros()))
        with pytest.raises(BarrierTimeoutError, match=r"'asp'.*rank 1 \(worker-1\) did not call it within") as caught:
            await first.set_policy("asp", timeout=1.0)
        assert caught.value.details["ranks"] == [1]
        with pytest.raises(PolicyError, match="asked for in vain: call set_policy again"):
            await first.push("small", np.ones(3, np.float32))
        await asyncio.gather(first.set_policy("asp"), second.set_policy("asp"))
        await first.push("small", np.ones(3, np.float32))


async def test_workers_that_ask_for_different_policies_are_told_and_agree_later(cluster: MakeCluster) -> None:
    async with cluster(workers=2, policy="bsp") as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", np.zeros(3, np.float32)))
        waiting = asyncio.create_task(first.set_policy("asp", "w"))
        await first.tallies()
        with pytest.raises(PolicyError, match=r"rank 1 .* asks for policy ssp:2, but rank 0 \(worker-0\) for asp"):
            await second.set_policy("ssp:2", "w")
        assert not waiting.done()
        await second.set_policy("asp", "w")
        await waiting
