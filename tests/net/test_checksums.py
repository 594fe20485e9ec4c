"""Checksums over real sockets and shared memory: what is changed on its way ends a connection, and is sent again."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import HandshakeError, MissingExtraError
from aiokv.net.checksums import load_checksum
from aiokv.net.tcp import Link
from aiokv.wire.shared import SharedMemory

if TYPE_CHECKING:
    from tests.net.conftest import MakeCluster

pytest.importorskip("crc32c", reason="the extra aiokv[checksum] is not installed")

SIZE = 30_000
"""One chunk, and large enough for shared memory."""


class Damaging:
    """A transport that changes one bit of the first large payload that is written."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._intact = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | memoryview) -> None:
        if self._intact and len(data) > SIZE:
            self._intact = False
            changed = bytearray(data)
            changed[SIZE] ^= 0x10
            data = bytes(changed)
        self._transport.write(data)


def damage(link: Any) -> None:
    assert isinstance(link, Link)
    link._transport = Damaging(link._transport)  # type: ignore[assignment]


def damage_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    put = SharedMemory.put

    def damaging(self: SharedMemory, payload: memoryview) -> None:
        at = self._out.end % self._out.size
        put(self, payload)
        self._mapping.outgoing[at] ^= 1
        # What is sent again is as it was.
        monkeypatch.undo()

    monkeypatch.setattr(SharedMemory, "put", damaging)


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_training_with_checksums_gives_the_same_sums(cluster: MakeCluster, shared_memory: str) -> None:
    async with cluster(workers=2, servers=2, checksum="crc32c", shared_memory=shared_memory) as running:
        gradients = [np.random.default_rng(rank).normal(size=1_000_000).astype(np.float32) for rank in range(2)]
        await running.each(lambda kv: kv.init({"w": np.zeros(1_000_000, np.float32), "b": np.zeros(3, np.float32)}))
        small = np.ones(3, np.float32)
        for _ in range(2):
            values = await running.each(lambda kv: kv.pushpull({"w": gradients[kv.rank], "b": small}))
            for large, little in values:
                np.testing.assert_array_equal(large, gradients[0] + gradients[1])
                np.testing.assert_array_equal(little, np.full(3, 2))


async def test_a_push_that_is_changed_on_its_way_is_sent_again(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(workers=2, policy="asp", checksum="crc32c", shared_memory="off") as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", np.zeros(SIZE, np.float32)))
        damage(first._links[0])
        await first.push("w", np.ones(SIZE, np.float32))
        np.testing.assert_array_equal(await second.pull("w"), np.ones(SIZE))
        server = running.servers[0]
        assert server.counters["connections_ended.ChecksumError"] == 1
        assert server.store.open_slots == 0
        assert first.reconnects == 1
        words = r"a Push frame of key 'w' is not what was sent: .* \(from 127\.0\.0\.1:\d+\)"
        assert re.search(words, caplog.text)


async def test_a_value_that_is_changed_on_its_way_is_sent_again(cluster: MakeCluster) -> None:
    async with cluster(workers=1, checksum="crc32c", shared_memory="off") as running:
        (kv,) = running.workers
        await kv.init("w", np.ones(SIZE, np.float32))
        server = running.servers[0]
        damage(next(link for link in server._links.values() if not link.initiator))
        np.testing.assert_array_equal(await kv.pull("w"), np.ones(SIZE))
        assert kv.counters["connections_ended.ChecksumError"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the memory that is shared")
async def test_what_is_changed_in_shared_memory_is_found_too(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(workers=1, checksum="crc32c") as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(SIZE, np.float32))
        await kv.push("w", np.ones(SIZE, np.float32))
        server = running.servers[0]
        assert server.counters["shared_memory.connections"] == 1
        damage_shared_memory(monkeypatch)
        await kv.push("w", np.full(SIZE, 2, np.float32))
        np.testing.assert_array_equal(await kv.pull("w"), np.full(SIZE, 2))
        assert kv.reconnects == 1
        assert server.counters["connections_ended.ChecksumError"] == 1


@pytest.mark.parametrize(("theirs", "mine"), [("crc32c", "off"), ("off", "crc32c")])
async def test_nodes_with_different_settings_are_told_which(cluster: MakeCluster, theirs: str, mine: str) -> None:
    async with cluster(workers=1, start_workers=False, checksum=theirs) as running:
        with pytest.raises(HandshakeError, match="give every node of the cluster the same setting `checksum`"):
            await running.client("worker-0", checksum=mine).start()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "crc32c", None)
    assert load_checksum("off") is None
    with pytest.raises(MissingExtraError, match=r"pip install 'aiokv\[checksum\]'"):
        load_checksum("crc32c")
