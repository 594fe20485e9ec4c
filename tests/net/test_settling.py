"""A scheduler that is started again where processes may join later, over TCP: members come before those who wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import JoinTimeoutError

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster


async def test_the_cluster_goes_on_although_as_many_others_wait_as_would_make_one(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """They look for the scheduler more often than its members, whose pauses have become longer."""
    async with cluster(workers=1, servers=1, max_workers=2, elastic_servers=True) as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(3))
        port = running.scheduler.port
        await running.scheduler.close()
        while caplog.text.count("looks for it") < 2:  # noqa: ASYNC110 - a log record is no event
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        settings: dict[str, Any] = {**running.settings, "settle_time": 1.5, "bind_port": port}
        spare = aiokv.Server(scheduler=f"127.0.0.1:{port}", name="server-9", **running.settings)
        other = running.client("worker-9")
        async with spare:
            starting = asyncio.create_task(other.start())
            running.scheduler = scheduler = aiokv.Scheduler(**settings)
            async with scheduler:
                await starting
                assert (kv.rank, other.rank) == (0, 1)
                await kv.pushpull("w", np.ones(3))
                await other.init("w", np.zeros(3))
                np.testing.assert_array_equal(await other.pull("w"), np.ones(3))
                await other.close()
                await kv.close()
                await scheduler.wait_stopped()


async def test_a_join_that_ends_before_a_cluster_may_begin_says_so(cluster: MakeCluster) -> None:
    short = {"join_timeout": 1.0, "call_timeout": 0.9, "death_timeout": 0.8, "heartbeat": 0.3}
    async with cluster(workers=1, servers=1, max_workers=2, settle_time=60.0, start_workers=False) as running:
        with pytest.raises(JoinTimeoutError, match="no member of an earlier cluster comes back within 60 s"):
            await running.client("worker-0", **short).start()
