"""The client for ordinary code, in threads against a cluster whose loop runs in another thread."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import ClosedError, RoundTimeoutError, UnknownKeyError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def cluster_in_a_thread(workers: int, servers: int = 1) -> Iterator[str]:
    """Run scheduler and servers in a loop of another thread; yields the scheduler's address."""
    started: Any = threading.Event()
    address: list[str] = []
    stop: list[Any] = []

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(
                aiokv.Scheduler(num_workers=workers, num_servers=servers, bind_port=0)
            )
            for _ in range(servers):
                await stack.enter_async_context(aiokv.Server(scheduler=scheduler.address))
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            address.append(scheduler.address)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    try:
        assert started.wait(20)
        yield address[0]
    finally:
        stop[0]()
        thread.join()


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_blocking_workers_train(loop: str) -> None:
    def work(address: str, rank: int) -> Any:
        with aiokv.blocking.connect(address, name=f"worker-{rank}", loop=loop) as kv:
            assert (kv.rank, kv.num_workers) == (rank, 2)
            kv.init({"w": np.zeros(3, np.float32)})
            kv.set_optimizer("sgd", learning_rate=0.5)
            kv.push("w", np.full(3, rank + 1, np.float32))
            kv.barrier()
            return kv.pull("w"), kv.pushpull("w", np.ones(3, np.float32))

    with cluster_in_a_thread(2, 2) as address, ThreadPoolExecutor(2) as pool:
        for pulled, pushed in pool.map(work, [address] * 2, range(2)):
            np.testing.assert_array_equal(pulled, np.full(3, -1.5))
            np.testing.assert_array_equal(pushed, np.full(3, -2.5))


def test_errors_reach_the_caller_and_the_client_lives_on() -> None:
    with cluster_in_a_thread(2) as address, ThreadPoolExecutor(1) as pool:
        second = aiokv.blocking.connect(address, name="worker-1")
        joining = pool.submit(second.start)
        with aiokv.blocking.connect(address, name="worker-0") as kv:
            joining.result()
            kv.init("w", np.zeros(3, np.float32))
            with pytest.raises(UnknownKeyError, match="'v'"):
                kv.push("v", np.zeros(3, np.float32))
            with pytest.raises(RoundTimeoutError, match="worker-1"):
                kv.push("w", np.ones(3, np.float32), timeout=0.2)
            np.testing.assert_array_equal(second.pull("w", np.empty(3, np.float32)), np.zeros(3))
            second.close()
        with pytest.raises(ClosedError):
            second.pull("w")
        second.close()


SCRIPT = """
    import sys, numpy, aiokv
    kv = aiokv.create("dist_sync", scheduler=sys.argv[1])
    kv.init("w", numpy.zeros(2, "float32"))
    print(kv.type, kv.rank, kv.pushpull("w", numpy.ones(2, "float32")))
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "code", "left"),
    [("", 0, "all workers have left"), ("raise ValueError", 1, "no worker is left; lost: "), ("sys.exit(0)", 0, "all")],
)
def test_a_program_that_ends_leaves_in_good_order_and_one_that_fails_does_not(
    ending: str, code: int, left: str
) -> None:
    reasons: list[str] = []

    async def main() -> None:
        async with aiokv.Scheduler(bind_port=0) as scheduler, aiokv.Server(scheduler=scheduler.address):
            script = textwrap.dedent(SCRIPT).format(ending=ending)
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", script, scheduler.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            out, err = await process.communicate()
            assert out == b"dist_sync 0 [1. 1.]\n", err
            assert process.returncode == code, err
            reasons.append((await scheduler.wait_stopped()).reason)

    asyncio.run(main())
    assert reasons[0].startswith(left)
