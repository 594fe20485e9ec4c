"""Standbys of servers over TCP: nodes in the process of another server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.core import stimuli as st
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

if TYPE_CHECKING:
    import pytest

    from tests.net.conftest import MakeCluster


async def test_a_sibling_that_ends_leaves_its_process_as_it_is(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with cluster(workers=1, servers=1) as running:
        (server,), (worker,) = running.servers, running.workers
        server.feed(st.Received(SCHEDULER, 0, m.HostStandby(0, "server-0/0.1")))
        await worker.init({"w": np.ones(3, "f4")})
        while list(server.siblings):
            assert (await worker.pull("w")).tolist() == [1, 1, 1]
        assert (await worker.pull("w")).tolist() == [1, 1, 1]
        assert "server-0/0.1, in the process of server-0, ends" in caplog.text


async def test_siblings_are_closed_with_the_node_that_has_started_them(cluster: MakeCluster) -> None:
    async with cluster(workers=1, servers=1) as running:
        (server,) = running.servers
        server.feed(st.Received(SCHEDULER, 0, m.HostStandby(0, "server-0/0.1")))
        assert list(server.siblings) == ["server-0/0.1"]
        sibling = server.siblings["server-0/0.1"]
    assert (await sibling.wait_stopped()).reason == "closed"
