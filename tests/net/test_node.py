"""Listening: real ports, busy ports, addresses, and a node's life."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import BindError, ClosedError, ConfigError

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster


async def test_scenario_38_a_busy_port_is_an_error_with_address_and_errno() -> None:
    async with aiokv.Scheduler(bind_port=0) as first:
        for node in (aiokv.Scheduler, aiokv.Server):
            with pytest.raises(BindError, match=rf"{first.address}: Address already in use \(EADDRINUSE\)") as caught:
                await node(bind_port=first.port).start()
            assert caught.value.details == {"address": first.address, "errno": errno.EADDRINUSE}
            assert isinstance(caught.value, OSError)


async def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(BindError, match=r"192\.0\.2\.1:0: .*EADDRNOTAVAIL"):
        await aiokv.Scheduler(bind_host="192.0.2.1", bind_port=0, token="t").start()


async def test_scenario_38_port_0_reports_the_real_port() -> None:
    async with aiokv.Scheduler(bind_port=0) as scheduler:
        assert scheduler.port > 0
        assert scheduler.address == f"127.0.0.1:{scheduler.port}"
        _, writer = await asyncio.open_connection("127.0.0.1", scheduler.port)
        writer.close()
        await writer.wait_closed()


async def test_listening_on_a_network_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="token"):
        await aiokv.Scheduler(bind_host="0.0.0.0", bind_port=0).start()


async def trains(kv: aiokv.Client) -> Any:
    await kv.init("w", np.zeros(4, np.float32))
    return await kv.pushpull("w", np.ones(4, np.float32))


@pytest.mark.parametrize(
    ("bind", "advertise", "reached_at"),
    [("0.0.0.0", "127.0.0.1", "127.0.0.1"), ("0.0.0.0", None, "127.0.0.1"), ("localhost", None, "localhost")],
)
async def test_scenario_39_bind_and_advertised_address_are_separate(
    bind: str, advertise: str | None, reached_at: str
) -> None:
    async with aiokv.Scheduler(bind_host=bind, bind_port=0, token="t") as scheduler:
        address = f"{reached_at}:{scheduler.port}"
        server = aiokv.Server(scheduler=address, bind_host=bind, advertise_host=advertise, token="t")
        async with server, aiokv.connect(address, token="t") as kv:
            np.testing.assert_array_equal(await trains(kv), np.ones(4))


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
async def test_scenario_39_ipv6(cluster: MakeCluster) -> None:
    try:
        scheduler = aiokv.Scheduler(bind_host="::1", bind_port=0)
        await scheduler.start()
    except BindError:
        pytest.skip("this machine's loopback has no IPv6 address")
    async with aiokv.Server(scheduler=scheduler.address, bind_host="::1"), aiokv.connect(scheduler.address) as kv:
        assert scheduler.address.startswith("[::1]:")
        np.testing.assert_array_equal(await trains(kv), np.ones(4))
    await scheduler.close()


async def test_all_nodes_stop_when_all_workers_have_left(cluster: MakeCluster) -> None:
    async with cluster(workers=2, servers=2) as running:
        waiting = [asyncio.create_task(node.wait_stopped()) for node in (running.scheduler, *running.servers)]
        await running.workers[0].close()
        assert not any(wait.done() for wait in waiting)
        await running.workers[1].close()
        stops = await asyncio.gather(*waiting)
    assert [(stop.reason, stop.failed) for stop in stops] == [("all workers have left", False)] * 3


async def test_a_server_that_cannot_join_stops_with_the_reason(free_port: int) -> None:
    short: dict[str, Any] = {"join_timeout": 0.4, "call_timeout": 0.3, "death_timeout": 0.2, "heartbeat": 0.1}
    async with aiokv.Server(scheduler=f"127.0.0.1:{free_port}", **short) as server:
        stop = await server.wait_stopped()
    assert stop.failed
    assert f"127.0.0.1:{free_port}" in stop.reason


async def test_a_node_can_be_closed_twice_and_waits_for_nothing_before_its_start() -> None:
    scheduler = aiokv.Scheduler(bind_port=0)
    with pytest.raises(ClosedError, match="not started"):
        await scheduler.wait_stopped()
    await scheduler.close()
    await scheduler.start()
    await scheduler.close()
    await scheduler.close()
    assert (await scheduler.wait_stopped()).reason == "closed"


async def test_two_clusters_in_one_loop_do_not_mix(cluster: MakeCluster) -> None:
    async with cluster(workers=1, cluster="a") as first, cluster(workers=1, cluster="b") as second:
        for running, value in ((first, 1), (second, 2)):
            await running.workers[0].init("w", np.full(3, value, np.float32))
        for running, value in ((first, 1), (second, 2)):
            np.testing.assert_array_equal(await running.workers[0].pull("w"), np.full(3, value))


@pytest.mark.timeout(120)
async def test_a_server_compiles_its_arithmetic_when_a_rule_is_set_and_goes_on_meanwhile(cluster: MakeCluster) -> None:
    pytest.importorskip("numba", reason="Numba is an extra")
    async with cluster(workers=1, backend="auto") as running:
        (kv,) = running.workers
        store = running.servers[0].store
        await kv.init("w", np.ones(1000, np.float32))
        await kv.push("w", np.ones(1000, np.float32))
        assert store.backend.name == "reference"
        await kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        expected = 1.0
        momentum = 0.0
        steps = 0
        while store.backend.name == "reference" or steps < 5:
            value = await kv.pushpull("w", np.ones(1000, np.float32))
            momentum = 0.5 * momentum - 0.5
            expected += momentum
            steps += 1
            np.testing.assert_allclose(value, np.full(1000, expected), rtol=1e-4)
            await asyncio.sleep(0.01)
        assert store.backend.name == "cpu"


async def test_keys_of_whole_numbers_that_are_only_summed_keep_no_server_from_compiling(cluster: MakeCluster) -> None:
    pytest.importorskip("numba", reason="Numba is an extra")
    async with cluster(workers=1, backend="auto") as running:
        (kv,) = running.workers
        store = running.servers[0].store
        await kv.init("w", np.ones(3, np.float32))
        await kv.init("counts", np.zeros(3, np.int64), policy="sum")
        await kv.set_optimizer("sgd", learning_rate=0.5)
        while store.backend.name == "reference":  # noqa: ASYNC110 - it comes from a thread
            await asyncio.sleep(0.01)
        np.testing.assert_array_equal(await kv.pushpull("w", np.ones(3, np.float32)), np.full(3, 0.5))
        np.testing.assert_array_equal(await kv.pushpull("counts", np.arange(3)), np.arange(3))


async def test_without_numba_a_server_updates_with_numpy(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "aiokv.kernels.cpu", raising=False)
    monkeypatch.delattr("aiokv.kernels.cpu", raising=False)
    async with cluster(workers=1, backend="auto") as running:
        (kv,) = running.workers
        await kv.init("w", np.ones(3, np.float32))
        await kv.set_optimizer("sgd", learning_rate=0.5)
        while "updates with NumPy" not in caplog.text:  # noqa: ASYNC110 - a log record is no event
            await asyncio.sleep(0.01)
        np.testing.assert_array_equal(await kv.pushpull("w", np.ones(3, np.float32)), np.full(3, 0.5))
