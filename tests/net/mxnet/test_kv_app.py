"""ps-lite's tests: test_kv_app, test_kv_app_multi_workers and test_simple_app, each with two servers."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from aiokv.commands import ServerInfo, register, registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiokv
    from tests.net.conftest import MakeCluster

KEYS = 1000
REPEAT = 50
MOST_OPEN = 10


async def push_and_pull(kv: aiokv.Client, number: int) -> None:
    """The body of test_kv_app: keys spread over the whole range, 50 pushes of which ten are open, 50 push-pulls."""
    rng = random.Random(number + 7)
    keys = [(2**63 - 1) // KEYS * i + number for i in range(KEYS)]
    values = [np.float32(rng.randrange(1000)) for _ in keys]
    zero, given = dict.fromkeys(keys, np.zeros((), np.float32)), dict(zip(keys, values, strict=True))
    await kv.init(zero, policy="asp", group=[kv.rank])
    room = asyncio.Semaphore(MOST_OPEN)

    async def push() -> None:
        async with room:
            await kv.push(given)

    await asyncio.gather(*(push() for _ in range(REPEAT)))
    pulled = np.array(await kv.pull(dict.fromkeys(keys)))
    assert np.abs(pulled - REPEAT * np.array(values)).sum() / REPEAT < 1e-5
    for _ in range(REPEAT):
        last = await kv.pushpull(given)
    assert np.abs(np.array(last) - 2 * REPEAT * np.array(values)).sum() / REPEAT < 1e-5


async def test_kv_app(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2, policy="asp") as running:
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        await running.each(lambda kv: push_and_pull(kv, kv.rank))


async def test_two_clients_of_one_process_do_not_disturb_each_other(cluster: MakeCluster) -> None:
    """test_kv_app_multi_workers: two clients of different clusters, with the same keys, in one loop."""
    async with cluster(workers=1, servers=2, policy="asp") as one, cluster(workers=1, servers=2, policy="asp") as other:
        first, second = one.workers[0], other.workers[0]
        await asyncio.gather(first.set_optimizer("accumulate"), second.set_optimizer("accumulate", rescale_grad=1.0))
        await asyncio.gather(push_and_pull(first, 0), push_and_pull(second, 0))


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What test_simple_app sends."""

    body: str


@pytest.fixture
def counted() -> Iterator[dict[str, int]]:
    """A command that counts its calls, by the server's name, while a test runs."""
    before = dict(registry._commands)
    calls: dict[str, int] = {}

    @register("count", Text)
    def count(server: ServerInfo, params: Text) -> dict[str, Any]:
        assert params.body == "test"
        calls[server.name] = calls.get(server.name, 0) + 1
        return {"count": calls[server.name], "index": server.index}

    yield calls
    registry._commands.clear()
    registry._commands.update(before)


async def test_simple_app_counts_a_hundred_requests_on_every_server(
    cluster: MakeCluster, counted: dict[str, int]
) -> None:
    async with cluster(workers=2, servers=3) as running:
        for i in range(50):
            for answers in await running.each(lambda kv: kv.send_command_to_servers("count", {"body": "test"})):
                assert [answer["index"] for answer in answers] == [0, 1, 2]
                assert all(2 * i < answer["count"] <= 2 * i + 2 for answer in answers)
        assert counted == {"server-0": 100, "server-1": 100, "server-2": 100}


async def test_starting_and_ending_four_times(cluster: MakeCluster) -> None:
    """test_connection."""
    for _ in range(4):
        async with cluster(workers=2, servers=2) as running:
            await running.each(lambda kv: kv.barrier())
