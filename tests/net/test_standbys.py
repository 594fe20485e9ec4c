"""Standbys of servers over TCP: nodes in the process of another server, which take its place when it is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.config import load_config
from aiokv.core import stimuli as st
from aiokv.net.inquiry import ask_waiting
from aiokv.types import SCHEDULER, Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.net.conftest import Cluster, MakeCluster

SHAPES = {"cut": (300, 200), "whole": (40, 30), "small": (7,), "other": (3, 3)}
STEPS = 12
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
    "lamb": {"learning_rate": 0.01},
    "lans": {"learning_rate": 0.01},
}


async def test_a_sibling_that_ends_leaves_its_process_as_it_is(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with cluster(workers=1, servers=1) as running:
        (server,), (worker,) = running.servers, running.workers
        server.feed(st.Received(SCHEDULER, 0, m.HostStandby(0, "server-0/0.1")))
        await worker.init({"w": np.ones(3, "f4")})
        while list(server.siblings):
            assert (await worker.pull("w")).tolist() == [1, 1, 1]
        assert (await worker.pull("w")).tolist() == [1, 1, 1]
        assert "server-0/0.1, in the process of server-0, ends" in caplog.text


async def test_siblings_are_closed_with_the_node_that_has_started_them(cluster: MakeCluster) -> None:
    async with cluster(workers=1, servers=3, replication=2) as running:
        await copied(running)
        siblings = [server.siblings[name] for server in running.servers for name in server.siblings]
        assert len(siblings) == 3
    for sibling in siblings:
        await sibling.wait_stopped()


async def wait_for(running: Cluster, is_it: Callable[[dict[str, str]], bool]) -> None:
    """Wait until the states of all nodes of servers, by name, are as they should be."""
    config = load_config(environ={}, scheduler=running.scheduler.address, **running.settings)
    for _ in range(1000):
        answer = (await ask_waiting(config, timeout=5.0))["scheduler"]
        assert isinstance(answer, m.Waiting)
        states = {member.name: member.state for member in answer.members if member.role is Role.SERVER}
        if is_it(states):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"this is all that has come of it: {states}")


async def copied(running: Cluster) -> None:
    """Wait until every server has a standby that is ready."""

    def are_ready(states: dict[str, str]) -> bool:
        return 3 == sum(state == "alive" for state in states.values()) == sum("ready" in one for one in states.values())

    await wait_for(running, are_ready)


async def crash(server: aiokv.Server) -> None:
    """End a server as kill -9 would: nothing more leaves it, nor any of its siblings."""
    nodes = [server, *(server.siblings[name] for name in server.siblings)]
    for node in nodes:
        node._closed = True
        for link in [*node._links.values(), *node._others]:
            link.abort()
    await server.close()


def first_weights() -> dict[str, NDArray[np.float32]]:
    """Return the weights with which training begins."""
    return {key: np.linspace(-1, 1, int(np.prod(shape)), dtype="f4").reshape(shape) for key, shape in SHAPES.items()}


async def train(running: Cluster, rule: str, at: dict[int, Any]) -> dict[str, NDArray[np.float32]]:
    """Train for some steps, doing something before some of them; return the weights."""

    async def work(worker: aiokv.Client) -> dict[str, NDArray[np.float32]]:
        await worker.set_optimizer(rule, **RULES[rule])
        weights = first_weights()
        await worker.init(weights)
        for step in range(STEPS):
            if step in at and worker.rank == 0:
                await at[step]()
            scale = np.float32(1 + worker.rank + step / 7)
            await worker.pushpull({key: weight * scale for key, weight in weights.items()}, out=weights)
        return weights

    ended: list[dict[str, NDArray[np.float32]]] = await running.each(work)
    for other in ended[1:]:
        assert all(np.array_equal(other[key], ended[0][key]) for key in SHAPES)
    return ended[0]


@pytest.mark.parametrize("rule", list(RULES))
async def test_servers_that_die_change_no_bit_of_what_is_trained(cluster: MakeCluster, rule: str) -> None:
    async with cluster(workers=2, servers=3) as running:
        expected = await train(running, rule, {})
    async with cluster(workers=2, servers=3, replication=2) as running:

        async def first() -> None:
            await copied(running)
            await crash(running.servers[1])

        async def second() -> None:
            await copied(running)
            await crash(running.servers[0])

        weights = await train(running, rule, {3: first, 8: second})
        assert all(np.array_equal(weights[key], expected[key]) for key in SHAPES)


async def test_gradients_of_an_open_round_outlive_two_servers_although_their_workers_have_gone_on(
    cluster: MakeCluster,
) -> None:
    """The second one decides the rounds."""
    async with cluster(workers=2, servers=3, replication=2, policy="k_batch_async:4") as running:
        first, second = running.workers
        await running.each(lambda worker: worker.set_optimizer("accumulate"))
        await running.each(lambda worker: worker.init({key: np.zeros(shape) for key, shape in SHAPES.items()}))
        ones = {key: np.ones(shape) for key, shape in SHAPES.items()}
        await copied(running)
        await first.push(ones)
        await crash(running.servers[1])
        await first.push({key: 10 * one for key, one in ones.items()})
        await copied(running)
        await crash(running.servers[0])
        await second.push({key: 100 * one for key, one in ones.items()})
        values = await second.pushpull({key: 1000 * one for key, one in ones.items()})
        assert {float(each) for value in values for each in np.unique(value)} == {1111.0}


async def test_a_server_that_leaves_changes_no_bit_and_fails_no_call(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=3) as running:
        expected = await train(running, "adam", {})
    async with cluster(workers=2, servers=3) as running:

        async def leave() -> None:
            assert running.servers[1].leave()
            assert not (await running.servers[1].wait_stopped()).failed

        weights = await train(running, "adam", {4: leave})
        assert all(np.array_equal(weights[key], expected[key]) for key in SHAPES)


async def test_a_server_that_joins_takes_a_place_of_one_that_has_two(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=3) as running:
        expected = await train(running, "sgd", {})
    async with cluster(workers=2, servers=3, elastic_servers=True) as running:
        address = running.scheduler.address
        joined = aiokv.Server(scheduler=address, name="server-9", **running.settings)

        async def leave() -> None:
            running.servers[1].leave()
            await running.servers[1].wait_stopped()

        async def join() -> None:
            await joined.start()
            await wait_for(running, lambda states: any(states.get(name) == "alive" for name in joined.siblings))

        try:
            weights = await train(running, "sgd", {3: leave, 7: join})
        finally:
            await joined.close()
        assert all(np.array_equal(weights[key], expected[key]) for key in SHAPES)


async def test_a_job_of_two_servers_goes_on_with_four(cluster: MakeCluster) -> None:
    """It has begun with more places than servers; those that join get one each, while workers train."""
    async with cluster(workers=2, servers=2) as running:
        expected = await train(running, "adam", {})
    async with cluster(workers=2, servers=2, num_places=4) as running:
        address = running.scheduler.address
        joined = [aiokv.Server(scheduler=address, name=f"server-{number}", **running.settings) for number in (2, 3)]

        async def join() -> None:
            for server in joined:
                await server.start()

            def serve(states: dict[str, str]) -> bool:
                return all(any(states.get(name) == "alive" for name in server.siblings) for server in joined)

            await wait_for(running, serve)

        try:
            weights = await train(running, "adam", {4: join})
        finally:
            for server in joined:
                await server.close()
        assert all(np.array_equal(weights[key], expected[key]) for key in SHAPES)


async def test_checkpoints_go_on_when_a_server_is_another_node(cluster: MakeCluster, tmp_path: Path) -> None:
    """One of round 10, with a server that was lost at round 5, has what one without losses has."""
    loaded = []
    for replication in (1, 2):
        how: dict[str, Any] = {"checkpoint_folder": str(tmp_path / str(replication))}
        async with cluster(workers=2, servers=3, checkpoint_every=10, replication=replication, **how) as running:
            await train(running, "sgd", {5: lambda running=running: die(running)} if replication == 2 else {})
            await running.each(lambda worker: worker.close())
            # It waits for the checkpoint that is under way.
            await running.scheduler.wait_stopped()
        async with cluster(workers=2, servers=2, resume="latest", **how) as running:
            weights = first_weights()
            await running.each(lambda worker: worker.init(first_weights()))
            await running.workers[0].pull(weights)
            loaded.append(weights)
    assert all(np.array_equal(loaded[0][key], loaded[1][key]) for key in SHAPES)
    assert not np.array_equal(loaded[0]["cut"], first_weights()["cut"])


async def die(running: Cluster) -> None:
    """Let a server crash as soon as it has a standby."""
    await copied(running)
    await crash(running.servers[1])


async def test_a_worker_joins_where_everything_is_on_two_servers_and_none_of_its_rounds_is_lost_with_one(
    cluster: MakeCluster,
) -> None:
    """Values are the sums of rounds: 11 of two workers, 111 of three; a server dies two steps after the third came."""
    shapes = {"large": 60_000, "small": 3}
    end, sums = [1 << 30], {0: list[float](), 1: list[float](), 2: list[float]()}

    async def step(worker: aiokv.Client) -> None:
        pushed = {key: np.full(size, 10.0**worker.rank) for key, size in shapes.items()}
        values = await worker.pushpull(pushed)
        (total,) = {float(each) for value in values for each in np.unique(value)}
        sums[worker.rank].append(total)

    async def work(worker: aiokv.Client, number: int) -> None:
        while number < end[0]:
            if worker.rank == 0 and number == end[0] - 3:
                await copied(running)
                await crash(running.servers[1])
            await step(worker)
            number += 1

    async with cluster(workers=2, servers=3, replication=2, max_workers=3) as running:
        third = running.client("worker-2")
        for worker in running.workers:
            await worker.init({key: np.zeros(size) for key, size in shapes.items()})
        training = asyncio.gather(*(work(worker, 0) for worker in running.workers))
        await third.start()
        running.workers.append(third)
        await third.init({key: np.zeros(size) for key, size in shapes.items()})
        start = await third.resume_step()
        # The others can't be beyond the first of its steps.
        end[0] = start + 5
        await asyncio.gather(training, work(third, start))
    assert sums[2] == [111.0] * 5
    assert sums[0] == sums[1] == [11.0] * start + [111.0] * 5
