"""The token is nowhere to be seen: in no log, error, or picture of an object, whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import AiokvError
from aiokv.wire.auth import Handshake
from aiokv.wire.connection import Connection
from aiokv.wire.receiver import Landing

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster

TOKEN = "opensesame-8675309"


async def test_a_cluster_never_shows_its_token(cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(True)
    said: list[str] = []
    async with cluster(workers=2, token=TOKEN) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(3, np.float32)))
        for wrong in ({"token": "another-word-4711"}, {"cluster": "other"}, {}):
            with pytest.raises(AiokvError) as caught:
                await running.client("worker-0", **wrong).start()
            said.append(repr(caught.value) + str(caught.value.details))
        nodes = [running.scheduler, *running.servers, *running.workers]
        said += [repr(node) + repr(node.config) + repr(node.counters) for node in nodes]
        said += [repr(link) for node in nodes for link in node._links.values()]
        await running.servers[0].close()
        with pytest.raises(AiokvError) as caught:
            await running.workers[0].pull("w")
        said.append(repr(caught.value))
    shown = "".join(said) + caplog.text
    assert "refused" in shown
    assert TOKEN not in shown
    assert "another-word-4711" not in shown
    assert TOKEN.encode().hex() not in shown


def test_what_knows_the_token_does_not_show_it() -> None:
    common: dict[str, Any] = {"initiator": True, "cluster": "c", "token": TOKEN.encode(), "nonce": bytes(32)}
    handshake = Handshake(**common)
    connection = Connection(**common, land=lambda _: Landing(memoryview(b""), None), now=0.0)
    for shown in (repr(handshake), repr(connection), repr(connection.data_to_send()), repr(handshake.start())):
        assert TOKEN not in shown
