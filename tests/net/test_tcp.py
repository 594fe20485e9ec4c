"""One connection: what is queued, what lies in the transport, and whose memory it is."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import ClosedError, HandshakeError, ServerLostError
from aiokv.net.tcp import WINDOW_BYTES, Link, in_words
from aiokv.wire import messages as m
from aiokv.wire.frames import encode_frame
from aiokv.wire.limits import Limits
from aiokv.wire.receiver import Frame, Head, Landing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokv.net.link import AnyLink
    from tests.net.conftest import MakeCluster

CHUNK = 512 * 1024


@dataclass
class Owner:
    """Keeps what a link reports."""

    frames: list[Frame] = field(default_factory=list)
    landed: list[bytearray] = field(default_factory=list)
    up: asyncio.Event = field(default_factory=asyncio.Event)
    down: asyncio.Event = field(default_factory=asyncio.Event)
    got_frame: asyncio.Event = field(default_factory=asyncio.Event)
    error: Any = None
    busy: bool = False

    def land(self, link: AnyLink, head: Head) -> Landing:
        self.landed.append(bytearray(head.payload_nbytes))
        return Landing(memoryview(self.landed[-1]), len(self.landed) - 1)

    def link_up(self, link: AnyLink) -> None:
        self.up.set()

    def frames_received(self, link: AnyLink, frames: list[Frame]) -> None:
        self.frames += frames
        self.got_frame.set()

    def link_down(self, link: AnyLink, reason: str, error: Any) -> None:
        self.error = error
        self.down.set()


@contextlib.asynccontextmanager
async def pair(limits: Limits | None = None) -> AsyncIterator[tuple[Link, Owner, Link, Owner]]:
    """Return both ends of a connection over loopback: link and owner of the initiator, then of the listener."""
    loop = asyncio.get_running_loop()
    near, far = Owner(), Owner()
    ends: list[Link] = []

    def make(owner: Owner, *, initiator: bool) -> Link:
        ends.append(Link(owner, initiator=initiator, cluster="c", token="t", peer=0, limits=limits))
        return ends[-1]

    server = await loop.create_server(lambda: make(far, initiator=False), "127.0.0.1", 0)
    try:
        await loop.create_connection(
            lambda: make(near, initiator=True), "127.0.0.1", server.sockets[0].getsockname()[1]
        )
        await asyncio.gather(near.up.wait(), far.up.wait())
        first, second = sorted(ends, key=lambda end: not end.initiator)
        yield first, near, second, far
    finally:
        for end in ends:
            end.abort()
        await asyncio.gather(*(end.ended for end in ends))
        server.close()
        await server.wait_closed()


def over_tcp(link: AnyLink) -> Link:
    assert isinstance(link, Link)
    return link


def value(payload: memoryview) -> bytes:
    return encode_frame(m.Value(1), 7, payload.nbytes)


async def test_many_frames_arrive_in_order_and_their_memory_is_given_back_once() -> None:
    async with pair() as (link, _, _, far):
        given_back: list[int] = []
        arrays = [np.full(size, i % 251, np.uint8) for i, size in enumerate([1, 100_000, 20_000, 16_384, 16_385] * 20)]
        for i, array in enumerate(arrays):
            link.send(value(array.data), array.data, lambda i=i: given_back.append(i))  # type: ignore[misc]
        link.flush()
        while len(far.frames) < len(arrays):
            far.got_frame.clear()
            await far.got_frame.wait()
        await link.drained()
        assert [bytes(landed) for landed in far.landed] == [array.tobytes() for array in arrays]
        assert given_back == list(range(len(arrays)))


async def test_only_a_window_lies_in_the_transport_and_the_rest_can_be_copied() -> None:
    async with pair() as (link, _, other, far):
        assert other._transport is not None
        other._transport.pause_reading()
        source = np.ones(100 * CHUNK, np.uint8)
        for i in range(100):
            link.send(value(source.data[:CHUNK]), source.data[i * CHUNK : (i + 1) * CHUNK], call=5)
        link.flush()
        assert link._transport is not None
        # Written when the queue was empty: at most the window, and the chunk that crossed it.
        assert link._transport.get_write_buffer_size() <= WINDOW_BYTES + CHUNK
        assert link.holds(5)
        assert link.detach(5, 10 * CHUNK)
        assert not link.detach(5, 100 * CHUNK)
        drained = asyncio.create_task(link.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        other._transport.resume_reading()
        await drained
        source[:] = 9
        while len(far.frames) < 100:
            far.got_frame.clear()
            await far.got_frame.wait()
        assert {byte for landed in far.landed for byte in set(landed)} == {1}
        assert not link.holds(5)


async def test_a_connection_that_ends_gives_all_memory_back_and_wakes_who_waits() -> None:
    async with pair() as (link, near, other, _):
        assert other._transport is not None
        other._transport.pause_reading()
        given_back: list[int] = []
        source = np.ones(CHUNK, np.uint8)
        for i in range(40):
            link.send(value(source.data), source.data, lambda i=i: given_back.append(i))  # type: ignore[misc]
        link.flush()
        drained = asyncio.create_task(link.drained())
        await asyncio.sleep(0)
        other.abort()
        await near.down.wait()
        await drained
        assert sorted(given_back) == list(range(40))
        link.send(value(source.data), source.data, lambda: given_back.append(99))
        assert given_back[-1] == 99


async def test_what_was_queued_is_sent_before_a_close() -> None:
    async with pair() as (link, _, _, far):
        source = np.ones(CHUNK, np.uint8)
        for _ in range(20):
            link.send(value(source.data), source.data)
        link.close()
        await far.down.wait()
        assert len(far.frames) == 20
        assert far.error is None


async def test_a_discarded_payload_is_not_received_into_its_memory() -> None:
    async with pair() as (link, _, other, far):
        source = np.ones(4 * CHUNK, np.uint8)
        assert link._transport is not None
        # The first half of a frame by hand, so that the other end is in the middle of it.
        link._transport.write(value(source.data) + bytes(source[: 2 * CHUNK]))
        while not far.landed or not any(far.landed[0]):  # noqa: ASYNC110 - received bytes are no event
            await asyncio.sleep(0)
        other.discard(7)
        far.landed[0][:] = bytes(4 * CHUNK)
        link._transport.write(bytes(source[2 * CHUNK :]))
        await far.got_frame.wait()
        assert far.frames[0].slot is None
        assert not any(far.landed[0])


async def test_a_stranger_that_says_nothing_is_cut_after_the_handshake_time() -> None:
    loop = asyncio.get_running_loop()
    owner = Owner()
    limits = Limits(handshake_seconds=0.2)
    server = await loop.create_server(
        lambda: Link(owner, initiator=False, cluster="c", token="t", peer=0, limits=limits), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
    await reader.read()
    await owner.down.wait()
    assert isinstance(owner.error, HandshakeError)
    writer.close()
    await writer.wait_closed()
    server.close()
    await server.wait_closed()


async def test_a_payload_for_the_scheduler_is_refused_and_the_cluster_goes_on(
    cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(1, np.float32)))
        link = over_tcp(running.workers[0]._links[-1])
        link.send(encode_frame(m.Value(1), 5, 4), memoryview(b"1234"))
        link.flush()
        await running.each(lambda kv: kv.barrier())
        await running.each(lambda kv: kv.push("w", np.ones(1, np.float32)))
        np.testing.assert_array_equal(await running.workers[1].pull("w"), [2.0])
        assert "a scheduler takes no payload" in caplog.text


async def test_a_worker_whose_server_has_stopped_reading_gets_its_arrays_back(cluster: MakeCluster) -> None:
    async with cluster(workers=1, death_timeout=1.0, heartbeat=0.2, shared_memory="off") as running:
        (kv,) = running.workers
        big = np.ones(8_000_000, np.float32)
        await kv.init("w", np.zeros_like(big))
        for end in running.servers[0]._links.values():
            link = over_tcp(end)
            if not link.initiator:
                assert link._transport is not None
                link._transport.pause_reading()
        call = asyncio.create_task(kv.push("w", big))
        await until_stuck(over_tcp(kv._links[0]))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # Nothing reads from the array now: the connection that held a part of it was cut, and is made again.
        big[:] = 3.0
        np.testing.assert_array_equal(np.unique(await kv.pull("w")), [1.0])
        assert kv.reconnects == 1
        np.testing.assert_array_equal(np.unique(await kv.pushpull("w", big)), [3.0])


async def until_stuck(link: Link) -> None:
    """Wait until the sockets are full: nothing has left the queue for a while."""
    quiet, before = 0, -1
    while quiet < 10:
        await asyncio.sleep(0.02)
        quiet = quiet + 1 if len(link._queue) == before else 0
        before = len(link._queue)


async def test_abort_fails_the_calls_that_are_pending(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(1, np.float32)))
        push = asyncio.create_task(running.workers[0].push("w", np.ones(1, np.float32)))
        await asyncio.sleep(0)
        await running.workers[0].abort()
        with pytest.raises(ClosedError):
            await push


async def test_a_client_that_asks_and_does_not_read_is_not_read_from(cluster: MakeCluster) -> None:
    limit = 1 << 22
    async with cluster(workers=2, policy="asp", max_queued_bytes=limit) as running:
        first, second = running.workers
        big = np.ones(CHUNK // 4, np.float32)
        await running.each(lambda kv: kv.init("w", big))
        link = over_tcp(first._links[0])
        assert link._transport is not None
        link._transport.pause_reading()
        pulls = [asyncio.create_task(first.pull("w")) for _ in range(500)]
        await asyncio.sleep(0)
        for _ in range(20):
            # The others are served as ever.
            await second.push("w", big)
            queued = [end.queued_bytes for end in running.servers[0]._links.values()]
            assert max(queued) <= limit + 17 * CHUNK
        link._transport.resume_reading()
        for value in await asyncio.gather(*pulls):
            assert value.shape == big.shape


async def test_what_a_peer_sent_before_its_connection_was_closed_here_leaves_no_slot(cluster: MakeCluster) -> None:
    async with cluster(workers=2) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", np.zeros(1, np.float32)))
        link = over_tcp(first._links[0])
        # In one write: what a server closes the connection for, and a push behind it.
        message = m.Push("w", (1,), "float32", 0, 1, 1, 0, False, 5.0)
        link.send(encode_frame(m.Value(1), 5, 4), memoryview(b"1234"))
        link.send(encode_frame(message, 6, 4), memoryview(b"1234"))
        link.flush()
        with pytest.raises(ServerLostError):
            await first.pull("w")
        np.testing.assert_array_equal(await second.pull("w"), np.zeros(1))
        assert running.servers[0].store.open_slots == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), "connection reset by peer"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "name or service not known"),
        (OSError("Multiple exceptions"), "multiple exceptions"),
        (RuntimeError("The transport is closed"), "The transport is closed"),
    ],
)
def test_why_a_connection_failed_is_said_without_numbers(error: Exception, words: str) -> None:
    assert in_words(error) == words
