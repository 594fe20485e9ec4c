"""The client for ordinary code, in threads against a cluster whose loop runs in another thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import ClosedError, RoundTimeoutError, UnknownKeyError

if TYPE_CHECKING:
    from tests.net.conftest import ClusterInAThread


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_blocking_workers_train(loop: str, cluster_in_a_thread: ClusterInAThread) -> None:
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


def test_errors_reach_the_caller_and_the_client_lives_on(cluster_in_a_thread: ClusterInAThread) -> None:
    with cluster_in_a_thread(2) as address, ThreadPoolExecutor(1) as pool:
        second = aiokv.blocking.connect(address, name="worker-1")
        joining = pool.submit(second.start)
        with aiokv.blocking.connect(address, name="worker-0") as kv:
            joining.result()
            kv.init("w", np.zeros(3, np.float32))
            with pytest.raises(UnknownKeyError, match="'v'"):
                kv.push("v", np.zeros(3, np.float32))
            with pytest.raises(RoundTimeoutError, match="worker-1"):
                kv.push("w", np.ones(3, np.float32), timeout=1.0)
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
