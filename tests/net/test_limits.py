"""What a node takes from strangers and from its own peers: counted, bounded, refused by name, and gone afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import OverloadedError, ServerLostError
from aiokv.kernels import get_backend
from aiokv.net.holdings import FEW, Holdings
from aiokv.store.memory import ParameterStore
from aiokv.wire.frames import HEADER_BYTES, decode_header, decode_message
from aiokv.wire.messages import Goodbye

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokv.net.node import Node
    from tests.net.conftest import MakeCluster

KIB = 1024


@contextlib.asynccontextmanager
async def strangers(node: Node, count: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Open connections, one after the other, that say nothing."""
    opened = [await asyncio.open_connection(node.host, node.port) for _ in range(count)]
    try:
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def settled(node: Node, handshakes: int) -> None:
    """Wait until a node has so many strangers at its door."""
    while node.admission.handshakes != handshakes:  # noqa: ASYNC110 - a connection at the door is no event
        await asyncio.sleep(0.001)


def reason(data: bytes) -> Goodbye:
    message = decode_message(decode_header(data)[0], data[HEADER_BYTES:])
    assert isinstance(message, Goodbye)
    return message


async def test_strangers_that_say_nothing_take_a_bounded_number_of_places(cluster: MakeCluster) -> None:
    async with cluster(workers=2, max_handshakes=5) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(4, np.float32)))
        for node in (running.scheduler, *running.servers):
            open_before = node.admission.open
            async with strangers(node, 12) as readers:
                told = [reason(await reader.read()) for reader in readers[5:]]
                assert {goodbye.code for goodbye in told} == {OverloadedError.code}
                assert "max_handshakes = 5" in told[0].reason
                assert node.counters["connections_refused.max_handshakes"] == 7
                assert node.admission.handshakes == 5
                # Who is in already does not notice.
                values = await running.each(lambda kv: kv.pushpull("w", np.ones(4, np.float32)))
                np.testing.assert_array_equal(values, np.full((2, 4), 2))
            await settled(node, 0)
            assert node.admission.open == open_before


async def test_a_worker_that_finds_all_places_taken_tries_again(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(workers=1, start_workers=False, max_handshakes=1) as running:
        client = running.client("worker-0")
        async with strangers(running.scheduler, 1):
            await settled(running.scheduler, 1)
            start = asyncio.create_task(client.start())
            while not running.scheduler.counters["connections_refused.max_handshakes"]:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
        await start
        await client.barrier()
        await client.close()
    assert "refused a connection from 127.0.0.1:" in caplog.text
    assert "this node has 1 connections that are not authenticated" in caplog.text


async def test_the_number_of_connections_has_a_limit_for_members_too(cluster: MakeCluster) -> None:
    async with cluster(workers=1, max_connections=2) as running:
        # The scheduler has a server and a worker.
        async with strangers(running.scheduler, 1) as (reader,):
            assert "max_connections = 2" in reason(await reader.read()).reason
        assert running.scheduler.counters["connections_refused.max_connections"] == 1


async def test_an_address_that_connects_too_fast_is_refused_for_a_while(cluster: MakeCluster) -> None:
    async with cluster(workers=1, connection_rate=0.5) as running:
        # Five at once; the server and the worker were two.
        async with strangers(running.scheduler, 4) as readers:
            assert "more than 0.5 connections a second from 127.0.0.1" in reason(await readers[3].read()).reason
        assert running.scheduler.counters["connections_refused.connection_rate"] == 1


async def test_thousands_of_connections_with_junk_leave_nothing(cluster: MakeCluster) -> None:
    """Measured by what the node itself counts: places at the door, addresses, links, slots and tasks."""
    junk = [b"", b"AIO", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)), b"AIOK\x01\x01" + bytes(200)]
    async with cluster(workers=1, connection_rate=1e6) as running:
        (kv,) = running.workers
        server = running.servers[0]
        await kv.init("w", np.zeros(100, np.float32))
        links, is_open = len(server._links), server.admission.open

        async def intrude(number: int) -> None:
            for turn in range(20):
                _, writer = await asyncio.open_connection(server.host, server.port)
                writer.write(junk[(number + turn) % len(junk)])
                writer.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

        training = asyncio.create_task(push_often(kv, 200))
        await asyncio.gather(*(intrude(number) for number in range(50)))
        assert await training == 200
        await settled(server, 0)
        assert (len(server._links), server.admission.open, len(server._others)) == (links, is_open, 0)
        assert (server.admission.addresses, server.store.open_slots, len(server._connecting)) == (1, 0, 0)
        failed = server.counters["handshakes_failed"]
        refused = sum(count for name, count in server.counters.items() if name.startswith("connections_refused"))
        assert failed + refused == 1000


async def push_often(kv: aiokv.Client, times: int) -> int:
    """Return in how many rounds the right value came back."""
    right = 0
    for turn in range(times):
        value = await kv.pushpull("w", np.full(100, turn, np.float32))
        right += bool((value == turn).all())
    return right


# --- memory ---


def make_holdings(most: int, most_each: int = 0) -> tuple[ParameterStore, Holdings]:
    store = ParameterStore(get_backend("reference"))
    return store, Holdings(store, most, most_each)


def test_no_more_is_held_than_allowed_and_what_is_used_up_makes_room() -> None:
    store, holdings = make_holdings(10 * KIB)
    slots = [holdings.land(peer, 4 * KIB)[0] for peer in (1, 2)]
    with pytest.raises(OverloadedError, match=r"4096 bytes more than the 8192 .* \(max_held_bytes = 10240\)"):
        holdings.land(3, 4 * KIB)
    store.free(slots[0])
    assert len(holdings.land(3, 4 * KIB)[1]) == 4 * KIB
    assert store.landed_bytes == 8 * KIB


def test_one_connection_may_hold_no_more_than_its_part() -> None:
    store, holdings = make_holdings(100 * KIB, 10 * KIB)
    slot, _ = holdings.land(1, 8 * KIB)
    with pytest.raises(OverloadedError, match="max_held_bytes_each = 10240"):
        holdings.land(1, 4 * KIB)
    holdings.land(2, 8 * KIB)
    store.free(slot)
    holdings.land(1, 4 * KIB)


def test_the_table_of_a_server_that_lives_long_stays_small() -> None:
    store, holdings = make_holdings(100 * KIB)
    for _ in range(10_000):
        store.free(holdings.land(1, 1 * KIB)[0])
    assert sum(len(slots) for slots in holdings._landed.values()) <= 100


def test_the_table_stays_small_where_payloads_are_so_small_that_no_limit_is_ever_near() -> None:
    store, holdings = make_holdings(0)
    held = [holdings.land(1, 8)[0] for _ in range(3_000)]
    for _ in range(20_000):
        store.free(holdings.land(2, 8)[0])
    assert sum(len(slots) for slots in holdings._landed.values()) <= 2 * len(held) + FEW
    assert set(held) <= holdings._landed[1].keys()


def test_the_default_is_half_of_the_machine() -> None:
    _, holdings = make_holdings(0)
    assert 1 << 26 < holdings.most == holdings.most_each < 1 << 50


async def test_a_worker_that_makes_a_server_hold_too_much_is_refused_and_the_others_go_on(
    cluster: MakeCluster,
) -> None:
    async with cluster(workers=2, max_held_bytes_each=1 << 20, shared_memory="off") as running:
        first, second = running.workers
        big = np.ones(1 << 20, np.float32)
        await running.each(lambda kv: kv.init("w", np.zeros_like(big)))
        with pytest.raises(ServerLostError, match="max_held_bytes_each = 1048576"):
            await first.push("w", big)
        np.testing.assert_array_equal(await second.pull("w"), np.zeros_like(big))
        server = running.servers[0]
        assert server.counters["connections_ended.OverloadedError"] == 1
        assert server.store.landed_bytes <= 1 << 20


async def test_a_shard_in_the_worker_s_own_process_has_the_same_limit() -> None:
    settings: dict[str, Any] = {"colocate": True, "max_held_bytes": 1 << 20, "token": "t"}
    async with (
        aiokv.Scheduler(num_workers=1, num_servers=1, bind_port=0, token="t") as scheduler,
        aiokv.connect(scheduler.address, **settings) as kv,
    ):
        with pytest.raises(ServerLostError, match="max_held_bytes"):
            await kv.init("big", np.zeros(1 << 20, np.float32))
