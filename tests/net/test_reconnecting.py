"""Connections to servers that end at any byte: all comes out as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

import aiokv
from aiokv.chaos.proxy import Proxy
from aiokv.commands import registry as commands
from aiokv.core.joiner import FIRST_DELAY, LAST_DELAY, Joiner
from aiokv.net.tcp import Link

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.net.conftest import Cluster, MakeCluster

SHAPES = {"large": (60_000,), "middle": (300, 20), "small": (7,), "tiny": ()}
STEPS = 6


@contextlib.asynccontextmanager
async def flaky_cluster(
    cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: int,
    cuts: int,
    most: int = 400_000,
    spared: int = 0,
    **settings: Any,
) -> AsyncIterator[tuple[Cluster, list[Proxy]]]:
    """Run a cluster whose servers are reached through proxies that cut connections, but the first ones are spared.

    The pauses before connections are made again are a tenth of what they are elsewhere.
    """
    monkeypatch.setattr("aiokv.core.joiner.FIRST_DELAY", FIRST_DELAY / 10)
    monkeypatch.setattr("aiokv.core.joiner.LAST_DELAY", LAST_DELAY / 10)
    async with contextlib.AsyncExitStack() as stack:
        draw = random.Random(seed)
        cut_after = [
            [math.inf] * spared + [draw.randrange(most) for _ in range(cuts)] for _ in range(settings.get("servers", 1))
        ]
        made = [Proxy(each) for each in cut_after]
        for proxy in made:
            await stack.enter_async_context(proxy)
        left = list(made)

        def join(**fields: Any) -> Joiner:
            proxy = left.pop()
            proxy.target, fields["advertised"] = fields["advertised"], (proxy.host, proxy.port)
            return Joiner(**fields)

        monkeypatch.setattr("aiokv.net.server.Joiner", join)
        async with cluster(**settings) as running:
            yield running, made


async def train(running: Cluster, rule: str = "adam") -> list[dict[str, Any]]:
    """Train a few steps that depend on what was read before; return what each worker reads at the end."""

    async def work(kv: aiokv.Client) -> dict[str, Any]:
        values = {key: np.ones(shape, np.float32) for key, shape in SHAPES.items()}
        await kv.init(values)
        await kv.set_optimizer(rule, learning_rate=0.01)
        for step in range(STEPS):
            gradients = {
                key: (value * np.float32(0.3 + kv.rank) + np.float32(step)).astype(np.float32)
                for key, value in values.items()
            }
            await kv.pushpull(gradients, out=values)
        return values

    return await running.each(work)


def assert_same(values: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare bits."""
    for mine, theirs in zip(values, expected, strict=True):
        for key, array in mine.items():
            np.testing.assert_array_equal(array, theirs[key], err_msg=key)


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_weights_are_those_of_an_undisturbed_run(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, shared_memory: str
) -> None:
    settings: dict[str, Any] = {"workers": 2, "servers": 2, "shared_memory": shared_memory}
    async with cluster(**settings) as running:
        expected = await train(running)
    async with flaky_cluster(cluster, monkeypatch, seed=7, cuts=12, most=200_000, **settings) as (running, proxies):
        assert_same(await train(running), expected)
        assert sum(proxy.cuts for proxy in proxies) >= 4
        assert sum(kv.reconnects for kv in running.workers) >= 4


@contextlib.asynccontextmanager
async def parting_servers(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Cluster]:
    """Run two workers and three servers whose connections to each other end; those of workers live on."""
    settings: dict[str, Any] = {"seed": 7, "cuts": 20, "most": 1_000, "spared": 2, "workers": 2, "servers": 3}
    with caplog.at_level(logging.WARNING, logger="aiokv"):
        async with flaky_cluster(cluster, monkeypatch, **settings) as (running, _):
            yield running
    assert sum("the link to server" in record.getMessage() for record in caplog.records) >= 3


@pytest.mark.parametrize("rule", ["lars", "lamb", "lans"])
async def test_norms_of_tensors_that_are_cut_are_those_of_an_undisturbed_run(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rule: str
) -> None:
    async with cluster(workers=2, servers=3) as running:
        expected = await train(running, rule)
    async with parting_servers(cluster, monkeypatch, caplog) as running:
        assert_same(await train(running, rule), expected)


async def test_each_step_is_in_one_round_of_all_keys_or_in_none(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(kv: aiokv.Client) -> tuple[int, list[Any]]:
        values = {key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()}
        await kv.init(values, policy="k_sync:1")
        await kv.set_optimizer("accumulate")
        for _ in range(20):
            await kv.pushpull({key: np.ones(shape, np.float32) for key, shape in SHAPES.items()}, out=values)
        await kv.barrier()
        return sum(kv.dropped.values()), await kv.pull(list(values))

    async with parting_servers(cluster, monkeypatch, caplog) as running:
        results = await running.each(work)
    dropped = sum(number for number, _ in results)
    for _, values in results:
        for array in values:
            np.testing.assert_array_equal(array, 40 - dropped / len(SHAPES))


async def test_compressed_gradients_and_values_are_those_of_an_undisturbed_run(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(running: Cluster) -> list[dict[str, Any]]:
        await running.each(lambda kv: kv.set_gradient_compression("2bit", threshold=0.5))
        return await train(running)

    async with cluster(workers=2) as running:
        expected = await run(running)
    settings: dict[str, Any] = {"workers": 2, "shared_memory": "off"}
    async with flaky_cluster(cluster, monkeypatch, seed=3, cuts=8, most=30_000, **settings) as (running, proxies):
        assert_same(await run(running), expected)
        assert proxies[0].cuts >= 3


async def test_rows_are_those_of_an_undisturbed_run(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each push comes in several messages."""
    monkeypatch.setattr("aiokv.core.worker.row_parts.SENT_BYTES", 4096)

    async def work(kv: aiokv.Client) -> Any:
        await kv.init_rows("t", (500, 16), initializer={"name": "uniform", "seed": 1})
        ids = np.arange(kv.rank, 500, 2)
        for step in range(STEPS):
            values = await kv.row_sparse_pull("t", row_ids=ids)
            await kv.push("t", aiokv.RowSparse(ids, values.values * np.float32(0.5) + np.float32(step), (500, 16)))
        await kv.barrier()
        return (await kv.row_sparse_pull("t", row_ids=np.arange(500))).values

    async with cluster(workers=2, servers=2) as running:
        expected = await running.each(work)
    async with flaky_cluster(
        cluster, monkeypatch, seed=11, cuts=10, most=30_000, workers=2, servers=2, shared_memory="off"
    ) as (running, proxies):
        for mine, theirs in zip(await running.each(work), expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert sum(proxy.cuts for proxy in proxies) >= 4


async def test_each_async_push_counts_once(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(kv: aiokv.Client) -> None:
        await kv.init("w", np.zeros(30_000, np.float32))
        await kv.set_optimizer("accumulate")
        for _ in range(10):
            await kv.push("w", np.ones(30_000, np.float32))

    async with flaky_cluster(
        cluster, monkeypatch, seed=5, cuts=10, most=300_000, workers=2, policy="asp", shared_memory="off"
    ) as (running, proxies):
        await running.each(work)
        np.testing.assert_array_equal(await running.workers[0].pull("w"), 20)
        assert proxies[0].cuts >= 4
        tallies = await running.workers[0].tallies()
        assert sum(tally.applied for tally in tallies.values()) == 20


async def test_connection_that_ends_is_logged_once(cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(3, np.float32))
        with caplog.at_level(logging.WARNING, logger="aiokv"):
            next(iter(link for link in running.servers[0]._links.values() if not link.initiator)).abort()
            np.testing.assert_array_equal(await kv.pushpull("w", np.ones(3, np.float32)), 1)
        lines = [record.getMessage() for record in caplog.records if "server-0" in record.getMessage()]
        assert [("has ended" in line, "is connected" in line) for line in lines] == [(True, False), (False, True)]
        assert kv.reconnects == 1


async def test_command_whose_connection_ends_while_it_runs_is_run_once(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    goes_on = threading.Event()

    def wait(server: Any, params: Any) -> dict[str, Any]:
        ran.append(server.index)
        goes_on.wait(20)
        return {"times": len(ran)}

    class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        """No parameters."""

    monkeypatch.setattr(commands, "_commands", dict(commands._commands))
    commands.register("wait-here", Nothing)(wait)
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        command = asyncio.create_task(kv.send_command_to_servers("wait-here"))
        while not ran:  # noqa: ASYNC110 - it is another thread that does it
            await asyncio.sleep(0.001)
        next(link for link in running.servers[0]._links.values() if not link.initiator).abort()
        while not kv.reconnects:  # noqa: ASYNC110 - a connection that is made again is no event
            await asyncio.sleep(0.001)
        goes_on.set()
        assert await command == [{"times": 1}]


async def test_push_whose_caller_has_gone_away_still_counts(cluster: MakeCluster) -> None:
    """The array is the caller's again, and is changed, before the connection is there again."""
    async with cluster(workers=1, policy="asp", shared_memory="off") as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(300_000, np.float32))
        server = running.servers[0]
        (link,) = [link for link in server._links.values() if not link.initiator]
        assert isinstance(link, Link)
        assert link._transport is not None
        link._transport.pause_reading()
        gradient = np.ones(300_000, np.float32)
        push = asyncio.create_task(kv.push("w", gradient))
        await asyncio.sleep(0)
        push.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await push
        gradient[:] = 1000
        link.abort()
        np.testing.assert_array_equal(await kv.pull("w"), 1)
        assert kv._kept == {}
