"""What goes wrong is one line in the log, with a name and facts for programs, and is counted under that name."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.core import effects as ef
from aiokv.errors import AlreadyInitializedError, WorkerLostError

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster


def events(caplog: pytest.LogCaptureFixture, prefix: str) -> list[dict[str, Any]]:
    """Return the facts of the lines whose event has a name that begins so."""
    found = [vars(record) for record in caplog.records if vars(record).get("event", "").startswith(prefix)]
    return [one["facts"] | {"event": one["event"]} for one in found]


async def until(node: Any, counter: str) -> None:
    """Wait until a node has counted something: nobody is told when it has."""
    while not node.counters[counter]:  # noqa: ASYNC110 - see above
        await asyncio.sleep(0)


async def test_a_stranger_is_one_line_and_one_count(cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(workers=1) as running:
        _, writer = await asyncio.open_connection(running.scheduler.host, running.scheduler.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        await until(running.scheduler, "handshakes_failed")
        writer.close()
        assert running.scheduler.counters["handshakes_failed"] == 1
    (said,) = events(caplog, "handshakes_failed")
    assert "this is HTTP" in said["reason"]


async def test_a_connection_that_breaks_a_rule_is_one_line_and_one_count(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiokv")
    async with cluster(workers=1) as running:
        (server,) = running.servers
        (link,) = (link for link in running.workers[0]._links.values() if link.peer == 0)
        link._transport.write(bytes(64))  # type: ignore[attr-defined]
        await until(server, "connections_ended.ProtocolError")
        assert server.counters["connections_ended.ProtocolError"] == 1
    assert len(events(caplog, "connections_ended.ProtocolError")) >= 1


async def test_requests_that_are_refused_for_the_same_reason_are_one_line_and_counted_one_by_one(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiokv")
    async with cluster(workers=1) as running:
        (server,) = running.servers
        errors = [WorkerLostError("rank 1 is gone", ranks=[1], level="error"), WorkerLostError("so it is for key b")]
        server.feed()
        for error in errors:
            server._perform(ef.Refuse(77, 1, error))
        server.feed()
        assert server.counters["refused.WorkerLostError"] == 2
    facts = {"event": "refused.WorkerLostError", "ranks": [1], "level": "error", "requests": 2}
    assert events(caplog, "refused.") == [facts]


async def test_a_call_that_fails_is_counted_by_its_worker(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "aiokv")
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(3, np.float32))
        with pytest.raises(AlreadyInitializedError):
            await kv.init("w", np.ones(3, np.float32))
        assert kv.counters["failed.AlreadyInitializedError"] == 1
    assert [said["key"] for said in events(caplog, "failed.AlreadyInitializedError")] == ["w"]
