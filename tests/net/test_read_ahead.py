"""Values that servers send before a worker pulls, over real sockets: the same as those it would have asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.net.driver import Log
from aiokv.store.pool import Pool

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster

STEPS = 3


def zeros() -> dict[str, Any]:
    """A small key, and one that is cut over both servers, and takes long enough to copy for a thread to do it."""
    return {"small": np.zeros(3, np.float32), "cut": np.zeros((192, 4096), np.float32)}


def asked_by_pulls(log: Log) -> list[int]:
    """Return how many messages each pull of a worker has sent."""
    calls = [(event.stimulus, event.effects) for event in log.events if isinstance(event.stimulus, st.Transfer)]
    pulls = [effects for call, effects in calls if call.operation is st.Operation.PULL]
    return [sum(isinstance(effect, ef.Send) for effect in effects) for effects in pulls]


async def exchange(cluster: MakeCluster, policy: str) -> tuple[list[float], list[list[int]], list[int]]:
    """Let two workers push and then pull in turns; return what they read, what their pulls asked, and `reads_ahead`."""
    logs = [Log(), Log()]
    values = []
    async with cluster(workers=2, servers=2, chunk_bytes=256 * 1024, start_workers=False) as running:
        running.workers = [running.client(f"w{rank}", policy=policy, log=log) for rank, log in enumerate(logs)]
        await running.each(lambda kv: kv.start())
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await running.each(lambda kv: kv.init(zeros()))
        await running.each(lambda kv: kv.pull(list(zeros())))
        for step in range(STEPS):
            for kv in running.workers:
                await kv.push({key: value + 10.0**step * (1 + kv.rank) for key, value in zeros().items()})
            for kv in running.workers:
                arrays = await kv.pull(list(zeros()))
                [value] = {float(number) for array in arrays for number in np.unique(array)}
                values.append(value)
        return values, [asked_by_pulls(log) for log in logs], [kv.reads_ahead for kv in running.workers]


async def test_pull_is_served_from_what_came_with_the_same_values(cluster: MakeCluster) -> None:
    asked, sent = await exchange(cluster, "ssp:0"), await exchange(cluster, "essp:0")
    # Step s of rank r brings 10^s (1 + r), and both have pushed when one of them reads.
    assert asked[0] == sent[0] == [3.0, 3.0, 33.0, 33.0, 333.0, 333.0]
    assert asked[2] == [0, 0]
    assert sent[2] == [2 * STEPS] * 2
    # The small key is one message, the other one twelve.
    assert asked[1] == [[13] * (1 + STEPS)] * 2
    assert sent[1] == [[13, *[0] * STEPS]] * 2


async def test_memory_for_what_comes_ahead_is_used_again(cluster: MakeCluster) -> None:
    """Whether a pull has got the value, or another push has made it outdated before there was one."""
    async with cluster(workers=1, policy="essp:2") as running:
        (kv,) = running.workers
        made: list[int] = []

        def make(nbytes: int) -> Any:
            made.append(nbytes)
            return np.full(nbytes, 255, np.uint8)

        kv._pool = Pool(make=make)
        await kv.set_optimizer("accumulate")
        await kv.init(zeros())
        for step in range(3 * STEPS):
            await kv.pull(list(zeros()))
            await kv.push({key: value + 1 for key, value in zeros().items()})
            if step % 3 == 2:
                await kv.push({key: value + 1 for key, value in zeros().items()})
        small, cut = await kv.pull(list(zeros()))
        assert set(np.unique(small)) | set(np.unique(cut)) == {4.0 * STEPS}
        assert kv.reads_ahead > 0
        assert sorted(made) == [12, 192 * 4096 * 4]
