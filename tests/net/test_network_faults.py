"""Connections that are held up or half open, and clocks that jump: everything counts once, nothing waits silently."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import CallTimeoutError
from aiokv.net.silence import end_when_silent
from aiokv.net.tcp import Link
from tests.net.test_reconnecting import assert_same, flaky_cluster, train

if TYPE_CHECKING:
    from aiokv.chaos.proxy import Proxy
    from tests.net.conftest import MakeCluster

DAY = 86_400.0


async def hold_up(proxies: list[Proxy]) -> None:
    """Hold up the connections to one server after the other, until cancelled."""
    for proxy in itertools.cycle(proxies):
        await proxy.hold(0.05)
        await asyncio.sleep(0.005)


async def test_connections_that_are_held_up_change_no_bit(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"workers": 2, "servers": 2, "shared_memory": "off"}
    async with cluster(**settings) as running:
        expected = await train(running)
    async with flaky_cluster(cluster, monkeypatch, seed=1, cuts=0, **settings) as (running, proxies):
        holding = asyncio.create_task(hold_up(proxies))
        assert_same(await train(running), expected)
        holding.cancel()


async def test_call_over_a_connection_that_is_half_open_ends_in_time_and_counts_once_when_it_comes_through(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"workers": 1, "policy": "asp", "shared_memory": "off"}
    async with flaky_cluster(cluster, monkeypatch, seed=1, cuts=0, **settings) as (running, [proxy]):
        (kv,) = running.workers
        await kv.init("w", np.zeros(3, np.float32))
        await kv.set_optimizer("accumulate")
        holding = asyncio.create_task(proxy.hold(60.0))
        await asyncio.sleep(0)
        with pytest.raises(CallTimeoutError, match="push of 'w': no answer from server 0"):
            await kv.push("w", np.ones(3, np.float32), timeout=1.0)
        holding.cancel()
        np.testing.assert_array_equal(await kv.pull("w"), np.ones(3))
        await kv.push("w", np.ones(3, np.float32))
        np.testing.assert_array_equal(await kv.pull("w"), np.full(3, 2))


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_connections_that_are_open_but_lose_everything_are_made_again_long_before_calls_give_up(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, shared_memory: str
) -> None:
    """Nobody says that the way between a worker and a server is gone, and the scheduler hears from both."""
    waits = {"heartbeat": 0.1, "death_timeout": 1.5, "call_timeout": 100.0, "join_timeout": 100.0}
    settings: dict[str, Any] = {"workers": 2, "servers": 2, "shared_memory": shared_memory, **waits}
    async with flaky_cluster(cluster, monkeypatch, seed=1, cuts=0, **settings) as (running, proxies):
        await running.each(lambda kv: kv.init("w", np.zeros(100_000, np.float32)))
        await running.each(lambda kv: kv.set_optimizer("accumulate"))
        for step in (1, 2):
            # In the second step while the push is under way.
            pushes = asyncio.create_task(running.each(lambda kv: kv.push("w", np.ones(100_000, np.float32))))
            if step == 2:
                await asyncio.sleep(0)
            assert sum(proxy.lose() for proxy in proxies) > 0
            # The time-out of the test is shorter than that of calls.
            await pushes
            for value in await running.each(lambda kv: kv.pull("w")):
                np.testing.assert_array_equal(np.unique(value), [2 * step])
        assert all(kv.reconnects for kv in running.workers)
        assert all(server.store.open_slots == 0 for server in running.servers)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such option")
async def test_the_system_ends_connections_to_machines_that_have_vanished(cluster: MakeCluster) -> None:
    """What it sends is not confirmed any longer; here that can only be asked for, since no machine can vanish."""
    async with cluster(workers=1, call_timeout=12.0, join_timeout=12.0) as running:
        await running.workers[0].init("w", np.zeros(3, np.float32))
        nodes = [running.scheduler, *running.servers, *running.workers]
        for link in (link for node in nodes for link in node._links.values()):
            assert isinstance(link, Link)
            assert link._transport is not None
            endpoint = link._transport.get_extra_info("socket")
            assert endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 3
            assert endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 12_000


@pytest.mark.parametrize("seconds", [0.01, 1e9])
def test_the_system_takes_all_times_that_can_be_set(seconds: float) -> None:
    with socket.socket() as endpoint:
        end_when_silent(endpoint, seconds)
        assert endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_a_clock_that_jumps_changes_nothing(cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock on the wall, as a user or a time server sets it: by a day, back and forth, whenever it is looked at."""
    settings = {"workers": 2, "servers": 2, "heartbeat": 0.1, "death_timeout": 2.0}
    async with cluster(**settings) as running:
        expected = await train(running)
    wall, jumps = time.time, itertools.cycle((DAY, -DAY, 0.0))  # noqa: TID251 - to change it
    monkeypatch.setattr(time, "time", lambda: wall() + next(jumps))
    async with cluster(**settings) as running:
        assert_same(await train(running), expected)
        await running.each(lambda kv: kv.barrier())
        assert [kv.num_dead_nodes for kv in running.workers] == [0, 0]
