"""Clients that their program lets go without closing them: they end, warn, and nobody waits for them."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import WorkerLostError
from aiokv.net.dropped import in_loop
from aiokv.net.sigterm import ASKED

if TYPE_CHECKING:
    from tests.net.conftest import Cluster, ClusterInAThread, MakeCluster

DROPPED = "client 'worker-1' of the cluster at .* was dropped before it was closed, so the others see it as lost: use"


async def drop(running: Cluster) -> dict[str, Any]:
    """Let the last worker go; return what the loop's handler of exceptions is told."""
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.put_nowait(context))

    async def dropped() -> dict[str, Any]:
        del running.workers[-1]
        return await told.get()

    with pytest.warns(ResourceWarning, match=DROPPED):
        return await dropped()


async def test_the_others_hear_of_a_loss_of_a_client_that_is_dropped(cluster: MakeCluster) -> None:
    async with cluster(workers=2, on_worker_loss="fail") as running:
        await running.each(lambda kv: kv.init("w", np.zeros(3)))
        waiting = asyncio.create_task(running.workers[0].push("w", np.ones(3)))
        context = await drop(running)
        assert re.match(DROPPED, context["message"])
        with pytest.raises(WorkerLostError, match="worker-1"):
            await waiting


async def test_the_others_go_on_without_a_client_that_is_dropped(cluster: MakeCluster) -> None:
    async with cluster(workers=2, on_worker_loss="shrink") as running:
        await running.each(lambda kv: kv.init("w", np.zeros(3)))
        waiting = asyncio.create_task(running.workers[0].pushpull("w", np.ones(3)))
        await drop(running)
        np.testing.assert_array_equal(await waiting, np.ones(3))


@pytest.mark.parametrize("extras", [{"colocate": True}, {"residual_folder": "here"}, {"leave_on_sigterm": True}])
async def test_nothing_that_a_client_has_besides_keeps_it(
    cluster: MakeCluster, extras: dict[str, Any], tmp_path: Any
) -> None:
    """What is left open would fail the test, and so would a handler of signals that is still there."""
    handler = signal.getsignal(ASKED)
    if "residual_folder" in extras:
        extras = {"residual_folder": str(tmp_path)}
    servers = 2 if "colocate" in extras else 1
    async with cluster(workers=2, servers=1, places=servers, start_workers=False, on_worker_loss="shrink") as running:
        running.workers = [running.client("worker-0"), running.client("worker-1", **extras)]
        await running.each(lambda kv: kv.start())
        await drop(running)
        assert signal.getsignal(ASKED) is handler


async def test_a_client_that_looks_for_its_scheduler_is_not_kept_by_that(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.scheduler.close()
        await drop(running)
        await running.workers.pop().abort()


async def test_any_thread_may_drop_a_client(cluster: MakeCluster) -> None:
    async with cluster(workers=2, on_worker_loss="shrink") as running:
        await running.each(lambda kv: kv.init("w", np.zeros(3)))
        waiting = asyncio.create_task(running.workers[0].pushpull("w", np.ones(3)))
        with pytest.warns(ResourceWarning, match=DROPPED):
            await asyncio.to_thread(running.workers.__delitem__, 1)
        np.testing.assert_array_equal(await waiting, np.ones(3))


async def test_who_knows_only_the_call_that_it_waits_for_is_there_until_that_has_ended(cluster: MakeCluster) -> None:
    """The loop has but weak references to tasks, so nothing else refers to this one, either."""
    ended = asyncio.Event()

    async def push(kv: aiokv.Client) -> None:
        await kv.push("w", np.ones(3))
        await kv.close()
        ended.set()

    async with cluster(workers=2, on_worker_loss="fail") as running:
        await running.each(lambda kv: kv.init("w", np.zeros(3)))
        asyncio.create_task(push(running.workers.pop()))  # noqa: RUF006 - that is what this is about
        await asyncio.sleep(0)
        gc.collect()
        await running.workers[0].push("w", np.ones(3))
        await ended.wait()


async def test_in_debug_mode_it_is_told_where_the_client_was_started(cluster: MakeCluster) -> None:
    async with cluster(workers=2, start_workers=False, on_worker_loss="shrink") as running:
        running.workers = [running.client("worker-0"), running.client("worker-1")]
        asyncio.get_running_loop().set_debug(True)
        await running.each(lambda kv: kv.start())
        asyncio.get_running_loop().set_debug(False)
        assert (await drop(running))["source_traceback"][-1].name == "start"


def test_a_program_that_ends_with_its_client_open_is_warned(cluster_in_a_thread: ClusterInAThread) -> None:
    """Its connections are closed before its loop is; `tests/conftest.py` would find them."""

    async def main() -> None:
        await aiokv.connect(address, name="worker-1").start()

    with cluster_in_a_thread(1) as address, pytest.warns(ResourceWarning, match=DROPPED):
        asyncio.run(main())


def test_in_a_loop_that_is_over_there_is_nothing_left_to_end() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    in_loop(loop, loop.stop)


def test_a_blocking_client_that_is_dropped_leaves(cluster_in_a_thread: ClusterInAThread) -> None:
    """`tests/conftest.py` looks whether its thread has ended."""
    with cluster_in_a_thread(2) as address, ThreadPoolExecutor(2) as pool:
        kv, other = (aiokv.blocking.connect(address, name=name) for name in ("worker-1", "other"))
        for call in (lambda kv: kv.start(), lambda kv: kv.init("w", np.zeros(3))):
            list(pool.map(call, [kv, other]))
        with pytest.warns(ResourceWarning, match="worker-1.* was dropped before .* it leaves the cluster: use `with`"):
            del kv
        np.testing.assert_array_equal(other.pushpull("w", np.ones(3)), np.ones(3))
        other.close()


SCRIPT = """
    import sys, numpy, aiokv

    def train():
        kv = aiokv.create("dist_sync", scheduler=sys.argv[1])
        kv.init("w", numpy.zeros(2))
        print(kv.pushpull("w", numpy.ones(2)), flush=True)

    train()
    {then}
"""


@pytest.mark.parametrize("then", ["sys.stdin.read()", "pass"], ids=["goes on", "ends"])
def test_a_program_that_lets_its_store_go_has_left_in_good_order(then: str) -> None:
    async def main() -> None:
        async with aiokv.Scheduler(bind_port=0) as scheduler, aiokv.Server(scheduler=scheduler.address):
            command = [sys.executable, "-c", textwrap.dedent(SCRIPT).format(then=then), scheduler.address]
            pipe = subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
            reason = (await scheduler.wait_stopped()).reason
            out, err = await process.communicate(b"")
            assert (process.returncode, out, reason) == (0, b"[1. 1.]\n", "all workers have left"), err
            assert b"was dropped before it was closed, so it leaves the cluster" in err

    asyncio.run(main())
