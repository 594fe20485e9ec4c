"""Workers that join a running job and leave it: real processes over TCP, values by hand arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.data import ShardedSampler
from aiokv.errors import ClosedError, ClusterFullError, MembershipError, PolicyError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiokv
    from tests.net.conftest import Cluster, MakeCluster

SIZES = {"big": 600_000, "small": 3, "middle": 40_000}
"""Elements of float64: the first is cut into many chunks over all servers, the others live on one each."""

SETTINGS: dict[str, Any] = {"workers": 2, "servers": 2, "max_workers": 4, "respawn_timeout": 10.0}


def arrays(value: float) -> dict[str, Any]:
    return {key: np.full(size, value) for key, size in SIZES.items()}


def number(values: Any) -> float:
    """Return the number that all elements of all keys are."""
    (only,) = {float(each) for value in values for each in np.unique(value)}
    return only


async def begin(kv: aiokv.Client) -> int:
    """Do what every worker begins with; return its first step. Values become the sums of the rounds."""
    await kv.init(arrays(0.0))
    return await kv.resume_step()


async def step_of(kv: aiokv.Client) -> float:
    """Push 1000 ** rank; return the sum of the round."""
    return number(await kv.pushpull(arrays(1000.0**kv.rank)))


@contextlib.asynccontextmanager
async def joining(running: Cluster, name: str, **settings: Any) -> AsyncIterator[aiokv.Client]:
    """Let another worker come."""
    kv = running.client(name, **settings)
    async with kv:
        yield kv


WORKER = """
    import asyncio, sys, numpy, aiokv
    sizes = {sizes!r}

    async def main():
        async with aiokv.connect(sys.argv[1], name=sys.argv[2], token="a shared secret", cluster="test") as kv:
            await kv.init({{key: numpy.zeros(size) for key, size in sizes.items()}})
            step = await kv.resume_step()
            values = {{key: numpy.full(size, 1000.0**kv.rank) for key, size in sizes.items()}}
            print(kv.rank, step, flush=True)
            for _ in range(int(sys.argv[3])):
                await kv.push(values)
            await kv.leave()
    asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def process(running: Cluster, name: str, steps: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a worker in a process of its own, which leaves after so many steps."""
    code = textwrap.dedent(WORKER).format(sizes=SIZES)
    arguments = [sys.executable, "-c", code, running.scheduler.address, name, str(steps)]
    worker = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.communicate()


@pytest.mark.parametrize("mode", ["fail", "shrink", "respawn"])
async def test_scenario_65_a_worker_joins_between_two_rounds_and_leaves_between_two_and_none_is_lost(
    cluster: MakeCluster, mode: str
) -> None:
    """Values are sums of rounds: 1001 of the first two workers, 1001001 with the third."""
    steps = 3
    async with cluster(on_worker_loss=mode, **SETTINGS) as running:
        assert await running.each(begin) == [0, 0]
        assert await running.each(step_of) == [1001.0, 1001.0]
        sums: list[list[float]] = [[1001.0], [1001.0]]

        async def train(kv: aiokv.Client) -> None:
            mine = sums[kv.rank]
            # Two more steps when the third has gone again; both are told of the same steps.
            while mine[-2:] != [1001.0] * 2 or 1001001.0 not in mine:
                mine.append(await step_of(kv))

        training = asyncio.gather(*(train(kv) for kv in running.workers))
        async with process(running, "worker-2", steps) as third:
            assert third.stdout is not None
            rank, start = map(int, (await third.stdout.readline()).split())
            await third.wait()
        await training
        assert (rank, third.returncode) == (2, 0)
        assert sums[0] == sums[1]
        assert sums[0][:start] == [1001.0] * start
        assert sums[0][start : start + steps] == [1001001.0] * steps
        assert sums[0][start + steps :] == [1001.0] * 2


async def test_what_it_reads_first_is_what_its_first_step_is_computed_from(cluster: MakeCluster) -> None:
    async with cluster(**SETTINGS) as running:
        await running.each(begin)
        await running.workers[0].set_optimizer("accumulate")
        end = [1 << 30]

        async def train(kv: aiokv.Client) -> list[float]:
            read = []
            for step in itertools.count():
                if step == end[0]:
                    break
                read.append(await step_of(kv))
            return read

        training = asyncio.gather(*(train(kv) for kv in running.workers))
        async with joining(running, "worker-2") as kv:
            start = await begin(kv)
            # The others can't be beyond the first of its steps.
            end[0] = start + 2
            assert number(await kv.pull(list(SIZES))) == 1001.0 * start
            assert [await step_of(kv) for _ in range(2)] == [1001.0 * start + 1001001.0 * more for more in (1, 2)]
            first, second = await training
        assert first == second
        assert first[start - 1 :] == [1001.0 * start + 1001001.0 * more for more in range(3)]


async def test_each_example_is_used_once_in_an_epoch_although_a_worker_joins_in_the_middle_of_it(
    cluster: MakeCluster,
) -> None:
    """Before each step all are told the same members; when these have changed, what nobody has used is dealt anew."""
    examples, used = 40, []

    async def train(kv: aiokv.Client, start: int, sampler: ShardedSampler) -> None:
        members = [0, 1]
        for step in itertools.count(start):
            now = await kv.members(step)
            if now != members:
                members = now
                sampler.re_deal(members.index(kv.rank), len(members))
            batch = next(iter(sampler), None)
            if batch is None:
                break
            used.extend(batch.tolist())
            await kv.push(arrays(1.0))
            sampler.record_batch()
            # Others come to their turn.
            await asyncio.sleep(0.01)

    async with cluster(**SETTINGS) as running:
        await running.each(begin)
        samplers = [ShardedSampler(examples, rank, 2, batch_size=1, shuffle=False) for rank in range(2)]
        training = asyncio.gather(*(train(kv, 0, samplers[kv.rank]) for kv in running.workers))
        async with joining(running, "worker-2") as kv:
            start = await begin(kv)
            sampler = ShardedSampler(examples, 0, 2, batch_size=1, shuffle=False)
            sampler.record_batch(start)
            await asyncio.gather(training, train(kv, start, sampler))
        assert 0 < start < examples // 2
        assert sorted(set(used)) == list(range(examples))
        # What is left at the end is filled up, so that all have as many steps.
        assert len(used) == 2 * start + -(-(examples - 2 * start) // 3) * 3


async def test_who_joins_does_not_count_before_it_asks_where_to_begin(cluster: MakeCluster) -> None:
    async with cluster(**SETTINGS) as running:
        await running.each(begin)
        async with joining(running, "worker-2") as kv:
            await kv.init(arrays(0.0))
            await kv.barrier("start")
            with pytest.raises(MembershipError, match="call resume_step before the first push"):
                await kv.push(arrays(1.0))
            assert await running.each(step_of) == [1001.0, 1001.0]
            assert await running.workers[0].members(1) == [0, 1]


async def test_as_many_as_may_be_and_places_that_are_free_again(cluster: MakeCluster) -> None:
    settings = {**SETTINGS, "max_workers": 3, "policy": "asp"}
    async with cluster(**settings) as running:
        await running.each(begin)
        async with joining(running, "worker-2", policy="asp") as third:
            with pytest.raises(ClusterFullError, match="3 workers are there, as many as may be"):
                await running.client("worker-3").start()
            assert third.rank == 2
        async with joining(running, "worker-2", policy="asp") as again:
            assert again.rank == 2
        async with joining(running, "another", policy="asp") as other:
            assert other.rank == 3


async def test_async_updates_count_at_once(cluster: MakeCluster) -> None:
    async with cluster(policy="asp", **SETTINGS) as running:
        await running.each(begin)
        await running.workers[0].set_optimizer("accumulate")
        ended = asyncio.Event()

        async def train(kv: aiokv.Client) -> int:
            steps = 0
            while not ended.is_set():
                await kv.push("small", np.ones(3))
                steps += 1
            return steps

        training = asyncio.gather(*(train(kv) for kv in running.workers))
        async with joining(running, "worker-2", policy="asp") as kv:
            await begin(kv)
            for _ in range(5):
                await kv.push("small", np.full(3, 1000.0))
        ended.set()
        steps = sum(await training)
        np.testing.assert_array_equal(await running.workers[0].pull("small"), 5000.0 + steps)


async def test_rounds_that_one_server_decides_wait_for_who_joins_and_for_who_leaves_no_longer(
    cluster: MakeCluster,
) -> None:
    """Each round is one of all workers that are there, so that its sum says who they were."""
    policy = "k_async:9"
    async with cluster(policy=policy, **SETTINGS) as running:
        await running.each(begin)
        sums: list[list[float]] = [[], []]

        async def train(kv: aiokv.Client) -> None:
            mine = sums[kv.rank]
            # Two more steps when the third has gone again; both are told of the same steps.
            while mine[-2:] != [1001.0] * 2 or 1001001.0 not in mine:
                mine.append(await step_of(kv))

        training = asyncio.gather(*(train(kv) for kv in running.workers))
        async with joining(running, "worker-2", policy=policy) as kv:
            start = await begin(kv)
            joined = [await step_of(kv) for _ in range(3)]
            await kv.plan_leave()
            assert 2 not in await kv.members(start + 3)
            await kv.leave()
        await training
        assert joined == [1001001.0] * 3
        assert sums[0] == sums[1]
        assert [one for one in sums[0] if one != 1001.0] == joined


@pytest.mark.parametrize(("fraction", "sums"), [(1.0, [1001001.0] * 2), (0.0, [1000000.0] * 2)])
async def test_it_joins_in_the_phase_that_is_in_force(cluster: MakeCluster, fraction: float, sums: list[float]) -> None:
    """In step every round has all of them; later each push is a value of its own, here of the last one who pushed."""
    policy = f"sync_switch:{fraction}:1000"
    async with cluster(policy=policy, **SETTINGS) as running:
        await running.each(begin)
        await running.each(lambda kv: kv.push(arrays(1000.0**kv.rank)))
        ended = asyncio.Event()

        async def train(kv: aiokv.Client) -> None:
            while not ended.is_set() and kv.rank in await kv.members(steps[kv.rank]):
                steps[kv.rank] += 1
                await step_of(kv)

        steps = [1, 1]
        training = asyncio.gather(*(train(kv) for kv in running.workers)) if fraction else None
        async with joining(running, "worker-2", policy=policy) as kv:
            await begin(kv)
            assert [await step_of(kv) for _ in range(2)] == sums
            await kv.plan_leave()
            ended.set()
            await kv.leave()
        if training is not None:
            await training


async def test_it_learns_the_policy_that_keys_have_got_and_changes_it_with_the_others(cluster: MakeCluster) -> None:
    """The others go over to asp before it comes, and all of them back to bsp before the eighth step at the earliest."""
    async with cluster(**SETTINGS) as running:
        await running.each(begin)
        await running.each(step_of)
        await running.each(lambda kv: kv.set_policy("asp"))
        await running.each(step_of)
        joined = asyncio.Event()

        async def train(kv: aiokv.Client, step: int) -> list[float]:
            # So many steps that all have them before them.
            while step < 50:
                await step_of(kv)
                step += 1
                if step == 5:
                    await joined.wait()
            await kv.set_policy("bsp")
            return [await step_of(kv) for _ in range(2)]

        training = [asyncio.create_task(train(kv, 2)) for kv in running.workers]
        async with joining(running, "worker-2") as kv:
            start = await begin(kv)
            joined.set()
            training.append(asyncio.create_task(train(kv, max(start, 5))))
            assert await asyncio.gather(*training) == [[1001001.0] * 2] * 3


async def test_a_policy_with_which_nobody_can_join_is_named(cluster: MakeCluster, closed_policy: str) -> None:
    policy = closed_policy
    async with cluster(policy=policy, **SETTINGS) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(3)))
        async with joining(running, "worker-2", policy=policy) as kv:
            await kv.init("w", np.zeros(3))
            with pytest.raises(PolicyError, match=f"worker-2 can't join: key 'w' has policy {policy}"):
                await kv.resume_step()


@pytest.mark.parametrize(("name", "rank"), [("worker-1", 1), ("another", 2)])
async def test_below_the_minimum_the_job_waits_until_somebody_takes_the_place(
    cluster: MakeCluster, name: str, rank: int
) -> None:
    """The one that leaves has drained, so its successor makes the next step; nothing is lost or counted twice."""
    async with cluster(min_workers=2, **SETTINGS) as running:
        await running.each(begin)
        assert await running.each(step_of) == [1001.0, 1001.0]
        first, second = running.workers
        await second.leave()
        step = asyncio.create_task(step_of(first))
        done, _ = await asyncio.wait([step], timeout=0.3)
        assert not done
        async with joining(running, name) as kv:
            assert (kv.rank, await begin(kv)) == (rank, 1)
            assert set(await asyncio.gather(step, step_of(kv))) == {1.0 + 1000.0**rank}


async def test_nobody_takes_the_place_in_time(cluster: MakeCluster) -> None:
    async with cluster(min_workers=2, **{**SETTINGS, "respawn_timeout": 0.5}) as running:
        await running.each(begin)
        await running.workers[1].leave()
        text = r"1 \(worker-1\): left in good order; the job needs at least 2 workers; nobody has taken its place"
        with pytest.raises(WorkerLostError, match=text):
            await step_of(running.workers[0])


async def test_a_worker_that_has_left_comes_again_in_a_later_round(cluster: MakeCluster) -> None:
    async with cluster(**SETTINGS) as running:
        await running.each(begin)
        assert await running.each(step_of) == [1001.0, 1001.0]
        first, second = running.workers
        await second.leave()
        assert [await step_of(first) for _ in range(2)] == [1.0, 1.0]
        async with joining(running, "worker-1") as kv:
            asked = asyncio.create_task(begin(kv))
            alone = 0
            while not asked.done():
                step = asyncio.create_task(step_of(first))
                await asyncio.wait([asked, step], return_when=asyncio.FIRST_COMPLETED)
                if step.done():
                    assert await step == 1.0
                    alone += 1
            assert (kv.rank, await asked) == (1, 3 + alone)
            assert set(await asyncio.gather(step, step_of(kv))) == {1001.0}


async def test_leaving_drains_what_was_pushed(cluster: MakeCluster) -> None:
    """The worker leaves while its round is open; the round has its part, the next one does not wait for it."""
    async with cluster(**SETTINGS) as running:
        await running.each(begin)
        first, second = running.workers
        pushing = asyncio.create_task(second.push(arrays(1000.0)))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(second.leave())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError, match="this worker is leaving"):
            await second.pull("small")
        assert await step_of(first) == 1001.0
        await asyncio.gather(pushing, leaving)
        assert await step_of(first) == 1.0


async def test_each_example_is_used_once_in_an_epoch_although_a_worker_leaves_in_the_middle_of_it(
    cluster: MakeCluster,
) -> None:
    """All are told at the same step that it is not there, so what nobody has used is dealt anew in the same way."""
    examples, used = 60, []
    told: dict[int, list[int]] = {}

    async def train(kv: aiokv.Client) -> None:
        sampler = ShardedSampler(examples, kv.rank, 3, batch_size=1, shuffle=False)
        members = [0, 1, 2]
        for step in itertools.count():
            if step == 5 and kv.rank == 1:
                await kv.plan_leave()
            now = await kv.members(step)
            assert told.setdefault(step, now) == now
            if kv.rank not in now:
                break
            if now != members:
                members = now
                sampler.re_deal(members.index(kv.rank), len(members))
            batch = next(iter(sampler), None)
            if batch is None:
                break
            used.extend(batch.tolist())
            await kv.push(arrays(1.0))
            sampler.record_batch()
            # Others come to their turn.
            await asyncio.sleep(0)
        await kv.leave()

    async with cluster(workers=3, servers=2) as running:
        await running.each(begin)
        await running.each(train)
        steps = [len(now) for now in told.values()]
        gone = steps.index(2)
        assert 5 < gone < examples // 3
        assert steps == [3] * gone + [2] * (len(steps) - gone)
        assert sorted(set(used)) == list(range(examples))
