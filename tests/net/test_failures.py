"""What goes wrong in a cluster ends in an error that says who, which key and which round; never in a silent wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.addresses import format_address
from aiokv.config import load_config
from aiokv.core.placement import home_of
from aiokv.errors import (
    BarrierTimeoutError,
    CallTimeoutError,
    ClosedError,
    ClusterFullError,
    HandshakeError,
    JoinTimeoutError,
    OtherSettingsError,
    RoundTimeoutError,
    ServerLostError,
    WorkerLostError,
)
from aiokv.net.inquiry import ask_waiting
from aiokv.why import as_facts

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster


def full(value: float, size: int = 1) -> Any:
    return np.full((size,), value, "float32")


async def test_scenario_1_a_worker_that_dies_fails_the_round_that_needs_it(cluster: MakeCluster) -> None:
    """Scenario 1: round 1 closes; in round 2 a worker dies; the others get one error each that names it."""
    async with cluster(workers=3, servers=2) as running:
        await running.each(lambda kv: kv.init("w", full(0)))
        await running.each(lambda kv: kv.push("w", full(1)))
        pushes = [asyncio.create_task(kv.push("w", full(1))) for kv in running.workers[:2]]
        await running.workers[2].abort()
        for push in pushes:
            with pytest.raises(WorkerLostError, match=r"'w', round 2 .*rank 2 \(worker-2\).*closed") as caught:
                await push
            assert caught.value.details == {"ranks": [2], "key": "w", "round": 2}
        with pytest.raises(WorkerLostError):
            await running.workers[0].push("w", full(1))
        with pytest.raises(WorkerLostError, match="rank 2"):
            await running.workers[1].barrier()


async def test_the_value_of_the_last_closed_round_can_still_be_read(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full(0)))
        await running.each(lambda kv: kv.push("w", full(1)))
        await running.workers[1].abort()
        with pytest.raises(WorkerLostError):
            await running.workers[0].barrier()
        np.testing.assert_array_equal(await running.workers[0].pull("w"), full(2))


async def test_in_async_the_survivors_go_on(cluster: MakeCluster) -> None:
    async with cluster(workers=2, policy="asp") as running:
        await running.each(lambda kv: kv.init("w", full(0)))
        await running.workers[1].abort()
        with pytest.raises(WorkerLostError):
            await running.workers[0].barrier()
        np.testing.assert_array_equal(await running.workers[0].pushpull("w", full(4)), full(4))
        await running.workers[0].close()
        assert "lost: worker-1" in (await running.scheduler.wait_stopped()).reason
        for server in running.servers:
            await server.wait_stopped()


async def test_init_by_a_lost_rank_0_fails_the_workers_that_wait_for_it(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        root, other = running.workers
        waiting = asyncio.create_task(other.init("w", full(0)))
        await other.set_optimizer("assign")
        await root.abort()
        with pytest.raises(WorkerLostError, match=r"init of key 'w'.*rank 0 \(worker-0\)"):
            await waiting


STOPPED_WORKER = """
    import asyncio, os, sys, numpy, aiokv
    async def main():
        async with aiokv.connect(sys.argv[1], name="worker-1", token="a shared secret", cluster="test") as kv:
            await kv.init("w", numpy.zeros(1, "float32"))
            print("ready", flush=True)
            await asyncio.sleep(60)
    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGSTOP")
async def test_scenario_2_a_worker_that_is_silent_is_lost_after_the_death_timeout(cluster: MakeCluster) -> None:
    """Scenario 2, first half: the process is stopped, so its connections stay open but no heartbeat comes."""
    async with cluster(workers=2, start_workers=False, heartbeat=0.3, death_timeout=1.5) as running:
        arguments = [sys.executable, "-c", textwrap.dedent(STOPPED_WORKER), running.scheduler.address]
        process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            async with running.client("worker-0") as kv:
                await kv.init("w", full(0))
                assert await process.stdout.readline() == b"ready\n"
                os.kill(process.pid, signal.SIGSTOP)
                start = asyncio.get_running_loop().time()
                with pytest.raises(WorkerLostError, match=r"rank 1 \(worker-1\): no heartbeat for [12]\.\d s"):
                    await kv.push("w", full(1))
                # The promise: the death time-out and one heartbeat, here with much room for a busy machine.
                assert asyncio.get_running_loop().time() - start < 10
        finally:
            process.kill()
            await process.communicate()


async def test_scenario_80_a_round_that_stays_open_names_the_ranks_it_waits_for(cluster: MakeCluster) -> None:
    """Scenario 80: the value is unchanged, the contribution stays counted, and the round can still close."""
    async with cluster(workers=3) as running:
        await running.each(lambda kv: kv.init("w", full(5)))
        first, second, third = running.workers
        with pytest.raises(RoundTimeoutError, match=r"'w', round 1: .*rank 1 \(worker-1\), 2 \(worker-2\)") as caught:
            await first.push("w", full(1), timeout=1.0)
        assert caught.value.details == {"ranks": [1, 2], "key": "w", "round": 1}
        np.testing.assert_array_equal(await second.pull("w"), full(5))
        values = await asyncio.gather(second.pushpull("w", full(10)), third.pushpull("w", full(100)))
        np.testing.assert_array_equal(values, [full(111), full(111)])


async def test_init_that_rank_0_never_makes_names_it(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        with pytest.raises(CallTimeoutError, match=r"'w': not initialized by rank 0 \(worker-0\)"):
            await running.workers[1].init("w", full(0), timeout=1.0)


async def test_scenario_6_barrier_names_who_did_not_come_and_can_be_used_again(cluster: MakeCluster) -> None:
    """Scenarios 6 and 7."""
    async with cluster(workers=3) as running:
        late = running.workers[2]
        waits = [kv.barrier("b", timeout=1.0) for kv in (*running.workers[:2], running.workers[0])]
        for result in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(result, BarrierTimeoutError)
            assert "2 (worker-2)" in str(result)
            assert result.details["ranks"] == [2]
        released = asyncio.gather(*(kv.barrier("b") for kv in running.workers[:2]))
        await late.barrier("b")
        await released


async def test_scenario_15_a_server_that_dies_fails_the_calls_that_need_it_and_its_keys_are_named(
    cluster: MakeCluster,
) -> None:
    async with cluster(workers=2, servers=2) as running:
        await running.each(lambda kv: kv.init({"w": full(0, 100_000), "small": full(0, 3), "little": full(0, 3)}))
        push = asyncio.create_task(running.workers[0].push("w", full(1, 100_000)))
        victim = running.servers[1]
        address = victim.address
        await victim.close()
        with pytest.raises(ServerLostError, match=rf"push of 'w': server 1 \(server-1 at {address}\)"):
            await push
        with pytest.raises(ServerLostError, match=r"pull of 'w': server 1.*; with it, at least in part: 'w'") as caught:
            await running.workers[0].pull("w")
        there = {"w", *(key for key in ("small", "little") if home_of(key, 2) == 1)}
        assert set(caught.value.details["keys"]) == there
        with pytest.raises(ServerLostError):
            await running.workers[1].push("w", full(1, 100_000))


async def test_the_scheduler_may_die_and_training_goes_on(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(workers=2, heartbeat=0.1, death_timeout=0.5) as running:
        await running.each(lambda kv: kv.init("w", full(0)))
        waiting = asyncio.create_task(running.workers[0].barrier(timeout=0.5))
        await running.workers[0].pull("w")
        await running.scheduler.close()
        with pytest.raises(aiokv.AiokvError, match=f"scheduler at {running.scheduler.address} is gone"):
            await waiting
        values = await running.each(lambda kv: kv.pushpull("w", full(1)))
        np.testing.assert_array_equal(values, [full(2), full(2)])
        await running.each(lambda kv: kv.close())
        stop = await running.servers[0].wait_stopped()
    assert stop.failed
    assert "scheduler" in stop.reason
    assert "goes on without barriers" in caplog.text


async def test_broken_connections_to_the_scheduler_are_made_again(cluster: MakeCluster) -> None:
    """A worker that waits at a barrier goes on to, over its new connection; nobody is lost."""
    async with cluster(workers=2, reconnect_grace=5.0) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", full(0)))
        waiting = asyncio.create_task(first.barrier("b"))
        await first.pull("w")
        links = list(running.scheduler._links.values())
        assert len(links) == 3
        for link in links:
            link.abort()
        await asyncio.gather(waiting, second.barrier("b"))
        values = await running.each(lambda kv: kv.pushpull("w", full(1)))
        np.testing.assert_array_equal(values, [full(2), full(2)])
        assert running.workers[0].num_dead_nodes == 0


async def test_a_scheduler_that_is_started_again_takes_the_cluster_over(cluster: MakeCluster) -> None:
    """Meanwhile training goes on, and who waits at a barrier waits for it."""
    async with cluster(workers=2, servers=2) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", full(0, 100_000)))
        waiting = asyncio.create_task(first.barrier("b"))
        await first.pull("w")
        port = running.scheduler.port
        await running.scheduler.close()
        values = await running.each(lambda kv: kv.pushpull("w", full(1, 100_000)))
        np.testing.assert_array_equal(values[0], full(2, 100_000))
        settings: dict[str, Any] = {**running.settings, "num_workers": 2, "num_servers": 2, "bind_port": port}
        async with aiokv.Scheduler(**settings) as scheduler:
            running.scheduler = scheduler
            await asyncio.gather(waiting, second.barrier("b"))
            assert first.num_dead_nodes == 0
            await second.abort()
            with pytest.raises(WorkerLostError, match=r"rank 1 \(worker-1\)"):
                await first.push("w", full(1, 100_000))
            await first.close()
            stop = await scheduler.wait_stopped()
            assert stop.reason == "no worker is left; lost: worker-1"


async def test_a_scheduler_that_is_started_again_with_other_settings_says_so_once_and_another_goes_on(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    differs = "other settings than the cluster that comes back: num_workers = 3, where the cluster has 2; start it"
    async with cluster(workers=2, servers=1, heartbeat=0.05, death_timeout=0.5) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", full(0)))
        plan: dict[str, Any] = {**running.settings, "num_servers": 1, "bind_port": running.scheduler.port}
        await running.scheduler.close()
        async with aiokv.Scheduler(num_workers=3, **plan) as other:
            await asyncio.gather(*(logged(caplog, f"{name} goes on without") for name in ("worker-0", "worker-1")))
            await logged(caplog, "server-0 serves its workers until they leave")
            with pytest.raises(OtherSettingsError, match=differs):
                await first.barrier("a", timeout=1.0)
            values = await running.each(lambda kv: kv.pushpull("w", full(1)))
            np.testing.assert_array_equal(values, [full(2), full(2)])
            config = load_config(environ={}, scheduler=other.address, **running.settings)
            shown = as_facts(await ask_waiting(config, timeout=5.0))
            assert [differs in call["reason"] for call in shown["waiting"]] == [True]
            assert other.counters["not_rebuilt"] == 1
            with pytest.raises(OtherSettingsError, match=differs):
                await running.client("worker-9", call_timeout=0.6, join_timeout=0.7).start()
        said = [record for record in caplog.records if differs in record.message]
        assert [vars(record)["event"] for record in said].count("scheduler_differs") == 3
        waiting = asyncio.create_task(first.barrier("b"))
        async with aiokv.Scheduler(num_workers=2, **plan) as running.scheduler:
            await asyncio.gather(waiting, second.barrier("b"))
            await running.each(lambda kv: kv.close())


async def logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Wait until a record of the log has these words."""
    while words not in caplog.text:  # noqa: ASYNC110 - a log record is no event
        await asyncio.sleep(0.01)


async def test_joins_wait_for_a_scheduler_that_is_started_again(
    free_port: int, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A worker and a server have registered at the one before, which ends when another worker is still missing."""
    caplog.set_level(logging.INFO)
    plan: dict[str, Any] = {**settings, "num_workers": 2, "num_servers": 1, "bind_port": free_port}
    address = f"127.0.0.1:{free_port}"
    clients = [aiokv.connect(address, name=f"worker-{rank}", **settings) for rank in range(2)]
    async with aiokv.Scheduler(**plan) as before, aiokv.Server(scheduler=address, name="server-0", **settings):
        joining = [asyncio.create_task(clients[0].start())]
        await logged(caplog, "server server-0 is here")
        await logged(caplog, "worker worker-0 is here")
        await before.close()
        await logged(caplog, "worker-0 has not joined yet, and looks for it")
        async with aiokv.Scheduler(**plan):
            joining.append(asyncio.create_task(clients[1].start()))
            await asyncio.gather(*joining)
            await asyncio.gather(*(kv.init("w", full(0)) for kv in clients))
            values = await asyncio.gather(*(kv.pushpull("w", full(1)) for kv in clients))
            np.testing.assert_array_equal(values[0], full(2))
            await asyncio.gather(*(kv.close() for kv in clients))


async def test_joining_an_incomplete_cluster_says_what_is_missing(cluster: MakeCluster) -> None:
    async with cluster(workers=3, servers=1, start_workers=False) as running:
        short = {"join_timeout": 1.0, "call_timeout": 0.9, "death_timeout": 0.8, "heartbeat": 0.3}
        with pytest.raises(JoinTimeoutError, match="missing 2 of 3 workers"):
            await running.client("worker-0", **short).start()
        clients = [running.client(f"worker-{i}") for i in range(3)]
        await asyncio.gather(*(client.start() for client in clients))
        await asyncio.gather(*(client.close() for client in clients))


async def test_joining_without_a_scheduler_names_its_address_and_whom_it_waits_for(
    caplog: pytest.LogCaptureFixture, free_port: int
) -> None:
    client = aiokv.connect(
        f"127.0.0.1:{free_port}", join_timeout=0.5, call_timeout=0.4, death_timeout=0.3, heartbeat=0.1, name="early"
    )
    words = f"early could not join within 0.5 s.*127.0.0.1:{free_port} .connection refused"
    with pytest.raises(JoinTimeoutError, match=words):
        await client.start()
    assert f"early waits for the scheduler at 127.0.0.1:{free_port}" in caplog.text


async def test_scenario_40_a_worker_may_start_before_the_scheduler(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    shared: dict[str, Any] = {"token": "t", "scheduler": f"127.0.0.1:{free_port}"}
    caplog.set_level(logging.INFO)
    client = aiokv.connect(name="early", **shared)
    start = asyncio.create_task(client.start())
    await logged(caplog, "early waits for")
    async with aiokv.Scheduler(bind_port=free_port, token="t"), aiokv.Server(**shared):
        await start
        assert client.rank == 0
        await client.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"token": "wrong"}, "token"), ({"cluster": "other"}, "other")],
)
async def test_scenario_56_another_token_or_cluster_is_refused_at_once(
    cluster: MakeCluster, settings: dict[str, Any], words: str
) -> None:
    async with cluster(workers=1, start_workers=False) as running:
        with pytest.raises(HandshakeError, match=words):
            await running.client("worker-0", **settings).start()
        async with running.client("worker-0") as kv:
            await kv.barrier()
        assert running.scheduler.counters["handshakes_failed"] == 1


async def test_scenario_16_one_worker_too_many_is_told_so(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        with pytest.raises(ClusterFullError, match="all 2 places for a worker are taken"):
            await running.client("worker-2").start()
        with pytest.raises(ClusterFullError, match="'worker-1' is taken"):
            await running.client("worker-1").start()
        await running.each(lambda kv: kv.barrier())


async def test_scenario_64_one_who_dies_before_the_cluster_is_complete_is_replaced(cluster: MakeCluster) -> None:
    """One of two alive is no cluster; its place is free again when it is gone."""
    async with cluster(workers=2, start_workers=False) as running:
        gone = running.client("worker-a")
        joining = asyncio.create_task(gone.start())
        await asyncio.wait({joining}, timeout=0.2)
        assert not joining.done()
        await gone.abort()
        with pytest.raises(ClosedError):
            await joining
        running.workers = [running.client("worker-b"), running.client("worker-c")]
        await running.each(lambda kv: kv.start())
        assert [kv.rank for kv in running.workers] == [0, 1]
        await running.each(lambda kv: kv.init("w", full(0)))
        np.testing.assert_array_equal(await running.each(lambda kv: kv.pushpull("w", full(1))), [full(2)] * 2)


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    bytes.fromhex("1603010200010001fc0303") + bytes(100),
    struct.pack("<4sBBHQQII", b"AIOK", 1, 34, 0, 0, 2**60, 2**31, 0),
    bytes(range(256)) * 40,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=["http", "tls", "huge-lengths", "bytes"])
async def test_scenario_41_strangers_at_the_port_are_closed_and_counted(
    cluster: MakeCluster, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 41."""
    async with cluster(workers=1) as running:
        for node in (running.scheduler, *running.servers):
            reader, writer = await asyncio.open_connection(node.host, node.port)
            mine = format_address(*writer.get_extra_info("sockname"))
            writer.write(garbage)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            assert node.counters["handshakes_failed"] == 1
            assert f"refused a connection from {mine} before it was authenticated" in caplog.text
        await running.workers[0].init("w", full(1))
        np.testing.assert_array_equal(await running.workers[0].pull("w"), full(1))


async def test_a_cancelled_call_gives_its_arrays_back_and_the_next_one_works(cluster: MakeCluster) -> None:
    async with cluster(workers=2, chunk_bytes=4096) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", full(0, 100_000)))
        gradient, out = full(1, 100_000), full(-1, 100_000)
        call = asyncio.create_task(first.pushpull("w", gradient, out=out))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gradient[:] = 1000  # What was pushed is a copy by now: it counts as it was.
        np.testing.assert_array_equal(await second.pushpull("w", full(2, 100_000)), full(3, 100_000))
        np.testing.assert_array_equal(await first.pull("w"), full(3, 100_000))
        np.testing.assert_array_equal(out, full(-1, 100_000))
        values = await running.each(lambda kv: kv.pushpull("w", full(5, 100_000)))
        np.testing.assert_array_equal(values, [full(10, 100_000)] * 2)


async def test_a_call_that_is_cancelled_twice_gives_its_arrays_back_too(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", full(0, 8_000_000)))
        gradient = full(1, 8_000_000)
        call = asyncio.create_task(first.push("w", gradient))
        await asyncio.sleep(0)
        for _ in range(2):
            call.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await call
        gradient[2_000_000:] = 1000
        value = await second.pushpull("w", full(2, 8_000_000))
        np.testing.assert_array_equal(value[2_000_000:], full(3, 6_000_000))


async def test_a_timed_out_call_does_not_write_into_its_array_later(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", full(0, 100_000)))
        out = full(-1, 100_000)
        with pytest.raises(RoundTimeoutError):
            await first.pushpull("w", full(1, 100_000), out=out, timeout=1.0)
        await second.push("w", full(2, 100_000))
        np.testing.assert_array_equal(await first.pull("w"), full(3, 100_000))
        np.testing.assert_array_equal(out, full(-1, 100_000))


async def test_scenario_42_tables_are_empty_after_many_small_pushes(cluster: MakeCluster) -> None:
    """Scenario 42, small."""
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full(0)))
        for _ in range(300):
            await running.each(lambda kv: kv.push("w", full(1)))
        assert [worker.pending for worker in running.workers] == [0, 0]
        assert running.servers[0].store.open_slots == 0


async def test_calls_on_a_closed_client_are_refused(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        client = running.workers[0]
        await client.init("w", full(0))
        await client.close()
        await client.close()
        with pytest.raises(ClosedError):
            await client.pull("w")
        with pytest.raises(ClosedError, match="not connected"):
            await running.client("later").pull("w", full(0))


async def test_closing_fails_the_calls_that_are_pending(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", full(0)))
        push = asyncio.create_task(running.workers[0].push("w", full(1)))
        await asyncio.sleep(0)
        await running.workers[0].close()
        with pytest.raises(ClosedError, match="push of 'w'"):
            await push


async def test_leaving_by_an_exception_is_a_loss_for_the_others(cluster: MakeCluster) -> None:
    async with cluster(workers=2, start_workers=False) as running:

        async def fails() -> None:
            async with running.client("worker-1") as kv:
                await kv.init("w", full(0))
                raise ZeroDivisionError

        async def survives() -> None:
            async with running.client("worker-0") as kv:
                await kv.init("w", full(0))
                with pytest.raises(WorkerLostError, match="worker-1"):
                    await kv.push("w", full(1))

        results = await asyncio.gather(fails(), survives(), return_exceptions=True)
        assert isinstance(results[0], ZeroDivisionError)
        assert results[1] is None
        stop = await running.scheduler.wait_stopped()
        assert stop.failed
        assert "worker-1" in stop.reason
