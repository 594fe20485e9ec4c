"""Payloads through shared memory: the same results as without, and nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import LimitError
from aiokv.net import tcp
from aiokv.net.shared import HEAD_BYTES, Segments, Sharing
from aiokv.net.tcp import Link
from aiokv.wire import messages as m
from aiokv.wire.frames import by_reference, encode_frame
from aiokv.wire.shared import MIN_SHARED_BYTES
from tests.net.test_tcp import Owner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.net.conftest import MakeCluster

fcntl = pytest.importorskip("fcntl")

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"), reason="this Python knows no sealed memory"
)

RING = 1 << 20
CONNECTIONS, FAILED = "shared_memory.connections", "shared_memory.failed"


def held(pid: int | str = "self") -> list[str]:
    """Return what of such memory a process holds: descriptors, also those of mappings."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # The descriptor of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(descriptor))
    return [target for target in found if target.startswith("/memfd:aiokv")]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    named = sorted(os.listdir("/dev/shm"))
    yield
    assert held() == []
    assert sorted(os.listdir("/dev/shm")) == named


# --- whole clusters ---


@pytest.mark.parametrize("shared_memory", ["auto", "off"])
async def test_sums_are_the_same_with_and_without_shared_memory(cluster: MakeCluster, shared_memory: str) -> None:
    least = MIN_SHARED_BYTES // 4
    sizes = [1, least - 1, least, least + 1, 40_000, 131_072, 131_073, 700_001, 2_000_000]
    async with cluster(workers=2, servers=2, shared_memory=shared_memory) as running:
        names = {f"k{size}": size for size in sizes}
        await running.each(lambda kv: kv.init({name: np.zeros(size, np.float32) for name, size in names.items()}))
        for step in range(1, 4):
            results = await running.each(
                lambda kv, step=step: kv.pushpull(  # type: ignore[misc]
                    {name: np.arange(size, dtype=np.float32) * step + kv.rank for name, size in names.items()}
                )
            )
            for result in results:
                for size, value in zip(sizes, result, strict=True):
                    np.testing.assert_array_equal(value, np.arange(size, dtype=np.float32) * (2 * step) + 1)
        used = [node.counters[CONNECTIONS] for node in (*running.workers, *running.servers)]
        assert used == ([2, 2, 2, 2] if shared_memory == "auto" else [0, 0, 0, 0])
        assert all(node.counters[FAILED] == 0 for node in running.workers)


async def test_a_worker_that_only_pulls_gets_shared_memory_too(cluster: MakeCluster) -> None:
    async with cluster(workers=2, policy="asp") as running:
        first, second = running.workers
        big = np.ones(100_000, np.float32)
        await asyncio.gather(first.init("w", big), second.init("w", big))
        while not second.counters[CONNECTIONS]:
            np.testing.assert_array_equal(await second.pull("w"), big)


async def test_small_payloads_make_no_shared_memory(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros(1000, np.float32))
        await kv.pushpull("w", np.ones(1000, np.float32))
        assert held() == []


@pytest.mark.parametrize("without", ["worker", "server"])
async def test_one_side_without_shared_memory_is_enough_to_do_without(cluster: MakeCluster, without: str) -> None:
    big = np.ones(500_000, np.float32)
    setting = "off" if without == "server" else "auto"
    async with (
        cluster(workers=1, shared_memory=setting, start_workers=False) as running,
        running.client("w0", shared_memory="off" if without == "worker" else "auto") as kv,
    ):
        await kv.init("w", np.zeros_like(big))
        np.testing.assert_array_equal(await kv.pushpull("w", big), big)
        np.testing.assert_array_equal(await kv.pushpull("w", big), big)
        assert kv.counters[CONNECTIONS] == running.servers[0].counters[CONNECTIONS] == 0
        assert kv.counters[FAILED] == (without == "server")


async def test_a_server_takes_no_larger_memory_than_its_own_setting(cluster: MakeCluster) -> None:
    big = np.ones(500_000, np.float32)
    async with (
        cluster(workers=1, shared_memory_bytes=1 << 20, start_workers=False) as running,
        running.client("w0", shared_memory_bytes=2 << 20) as kv,
    ):
        await kv.init("w", np.zeros_like(big))
        np.testing.assert_array_equal(await kv.pushpull("w", big), big)
        assert (kv.counters[FAILED], running.servers[0].counters[FAILED]) == (1, 1)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def only_of_proc(path: str, *arguments: Any, open_: Callable[..., int] = os.open) -> int:
    if path.startswith("/proc/"):
        raise PermissionError(errno.EACCES, "Permission denied")
    return open_(path, *arguments)


@pytest.mark.parametrize(
    ("name", "broken"),
    [("memfd_create", no_space), ("posix_fallocate", no_space), ("memfd_create", None), ("open", only_of_proc)],
)
async def test_where_memory_can_not_be_made_or_opened_payloads_go_through_the_stream(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, name: str, broken: Any
) -> None:
    if broken is None:
        monkeypatch.delattr(os, name)
    else:
        monkeypatch.setattr(os, name, broken)
    big = np.ones(500_000, np.float32)
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        await kv.init("w", np.zeros_like(big))
        for _ in range(3):
            np.testing.assert_array_equal(await kv.pushpull("w", big), big)
        assert (kv.counters[FAILED], kv.counters[CONNECTIONS]) == (1, 0)
        assert held() == []


async def test_a_cancelled_push_gives_its_array_back_and_cuts_nothing(cluster: MakeCluster) -> None:
    async with cluster(workers=1) as running:
        (kv,) = running.workers
        big = np.ones(8_000_000, np.float32)
        await kv.init("w", np.zeros_like(big))
        np.testing.assert_array_equal(await kv.pushpull("w", big), big)
        push = asyncio.create_task(kv.push("w", big))
        await asyncio.sleep(0)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        big[:] = 7
        np.testing.assert_array_equal(await kv.pull("w"), np.ones_like(big))


KILLED_WORKER = """
    import asyncio, sys, numpy, aiokv
    async def main():
        settings = {"name": "worker-1", "token": "a shared secret", "cluster": "test"}
        async with aiokv.connect(sys.argv[1], policy="asp", **settings) as kv:
            big = numpy.ones(3_000_000, "float32")
            await kv.init("w", big)
            while not kv.counters["shared_memory.connections"]:
                await kv.push("w", big)
            print("ready", flush=True)
            while True:
                await kv.pushpull("w", big)
    asyncio.run(main())
"""


async def test_nothing_is_left_of_a_process_that_is_killed(cluster: MakeCluster) -> None:
    async with cluster(workers=2, policy="asp", start_workers=False) as running:
        arguments = [sys.executable, "-c", textwrap.dedent(KILLED_WORKER), running.scheduler.address]
        process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            async with running.client("worker-0", policy="asp", shared_memory="off") as kv:
                await kv.init("w", np.ones(3_000_000, np.float32))
                assert await process.stdout.readline() == b"ready\n"
                assert len(held()) == 1
                assert len(held(process.pid)) == 1
                process.kill()
                await process.wait()
                while running.servers[0]._links.keys() and held():  # noqa: ASYNC110 - the end of a connection is no event
                    await asyncio.sleep(0)
                np.testing.assert_array_equal(await kv.pull("w"), np.ones(3_000_000, np.float32))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


# --- one connection ---


@contextlib.asynccontextmanager
async def pair(ring: int = RING, **settings: Any) -> AsyncIterator[tuple[Link, Owner, Link, Owner]]:
    """Return both ends of a connection that share memory: link and owner of the initiator, then of the listener."""
    loop = asyncio.get_running_loop()
    near, far = Owner(), Owner()
    ends: list[Link] = []

    def make(owner: Owner, *, initiator: bool) -> Link:
        mine = {} if initiator else settings
        segments = Segments(ring, Counter())
        link = Link(owner, initiator=initiator, cluster="c", token="t", peer=0, segments=segments, **mine)
        ends.append(link)
        return link

    server = await loop.create_server(lambda: make(far, initiator=False), "127.0.0.1", 0)
    try:
        await loop.create_connection(
            lambda: make(near, initiator=True), "127.0.0.1", server.sockets[0].getsockname()[1]
        )
        await asyncio.gather(near.up.wait(), far.up.wait())
        first, second = sorted(ends, key=lambda end: not end.initiator)
        await send(first, far, [b"x" * MIN_SHARED_BYTES])
        while not first._connection.sharing:  # noqa: ASYNC110 - the answer is no event
            await asyncio.sleep(0)
        far.frames.clear()
        far.landed.clear()
        yield first, near, second, far
    finally:
        for end in ends:
            end.abort()
        await asyncio.gather(*(end.ended for end in ends))
        server.close()
        await server.wait_closed()


def value(payload: bytes | memoryview) -> bytes:
    return encode_frame(m.Value(1), 7, len(payload))


async def send(link: Link, owner: Owner, payloads: list[bytes]) -> None:
    """Send payloads and wait until the other end has them."""
    for payload in payloads:
        link.send(value(payload), memoryview(payload) if payload else None)
    link.flush()
    await received(owner, len(owner.frames) + len(payloads))


async def received(owner: Owner, count: int) -> None:
    while len(owner.frames) < count:
        owner.got_frame.clear()
        await owner.got_frame.wait()


async def test_payloads_of_all_sizes_arrive_in_order_in_both_directions() -> None:
    sizes = [1, MIN_SHARED_BYTES - 1, MIN_SHARED_BYTES, RING // 4, RING // 4 + 1, 100_000, 65_537, 3, RING] * 15
    payloads = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    async with pair() as (first, near, second, far):
        await asyncio.gather(send(first, far, payloads), send(second, near, payloads))
        assert far.landed == near.landed == payloads


async def test_memory_is_given_back_once_and_at_once_while_there_is_room() -> None:
    async with pair() as (link, _, other, far):
        assert other._transport is not None
        other._transport.pause_reading()
        given_back: list[int] = []
        source = np.ones(RING // 4, np.uint8)
        for i in range(6):
            link.send(value(source.data), source.data, lambda i=i: given_back.append(i), call=5)  # type: ignore[misc]
        link.flush()
        # The ring is full with four; the rest waits and can be copied.
        assert given_back == [0, 1, 2, 3]
        assert not link.holds(5)
        assert not link.detach(5, RING)
        source[:] = 9
        other._transport.resume_reading()
        await received(far, 6)
        assert {byte for landed in far.landed for byte in set(landed)} == {1}
        assert given_back == list(range(6))


async def test_what_waits_for_room_is_sent_before_a_close() -> None:
    async with pair() as (link, _, _, far):
        payload = memoryview(bytes(RING // 4))
        for _ in range(40):
            link.send(value(payload), payload)
        link.close()
        await far.down.wait()
        assert (len(far.frames), far.error) == (40, None)


async def test_a_side_that_has_stopped_reading_can_close() -> None:
    async with pair(max_queued_bytes=RING) as (link, near, other, far):
        assert link._transport is not None
        link._transport.pause_reading()
        answer = memoryview(bytes(RING // 4))
        for _ in range(80):
            other.send(value(answer), answer)
        other.flush()
        assert not other._reading
        other.close()
        link.send(encode_frame(m.Done(2), 8))
        link.flush()
        link._transport.resume_reading()
        await asyncio.gather(near.down.wait(), far.down.wait())
        assert (len(near.frames), far.frames) == (80, [])


async def test_a_close_does_not_wait_for_ever_for_a_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "LINGER_SECONDS", 0.01)
    async with pair() as (link, near, other, _):
        assert other._transport is not None
        other._transport.pause_reading()
        link.close()
        await near.down.wait()


async def test_urgent_frames_overtake_what_waits_for_room() -> None:
    async with pair() as (link, _, _, far):
        payload = memoryview(bytes(RING // 4))
        for _ in range(20):
            link.send(value(payload), payload)
        link.flush()
        link.send(encode_frame(m.Done(2), 8), priority=5)
        link.flush()
        await received(far, 21)
        assert [frame.request for frame in far.frames].index(8) <= 4


async def test_a_side_that_stops_reading_and_waits_for_room_goes_on() -> None:
    """The word that there is room again lies behind what is not read."""
    async with pair(max_queued_bytes=RING) as (link, near, other, far):
        answer = bytes(RING // 4)

        def frames_received(_: Any, frames: list[Any]) -> None:
            far.frames += frames
            for _frame in frames:
                for _ in range(3):
                    other.send(value(answer), memoryview(answer))
            other.flush()

        far.frames_received = frames_received  # type: ignore[method-assign,assignment]
        for _ in range(30):
            link.send(value(answer), memoryview(answer))
        link.flush()
        await received(near, 90)
        assert near.landed == [answer] * 90


async def test_a_reference_to_more_than_a_payload_may_have_is_refused() -> None:
    async with pair() as (link, _, _, far):
        assert link._transport is not None
        link._transport.write(by_reference(encode_frame(m.Value(1), 7, RING // 4 + 1)))
        await far.down.wait()
        assert isinstance(far.error, LimitError)
        assert far.landed == []


# --- the memory itself ---


def made(ring: int = RING) -> tuple[Segments, m.Share]:
    segments = Segments(ring, Counter())
    pair = segments.make()
    assert pair is not None
    return segments, pair[0]


def test_what_one_side_writes_the_other_one_reads() -> None:
    segments = Segments(RING, Counter())
    pair = segments.make()
    assert pair is not None
    share, mine = pair
    theirs = Segments(RING, Counter()).open(share)
    os.close(share.descriptor)
    assert theirs is not None
    assert theirs.proof == mine.proof
    mine.outgoing[:2], theirs.outgoing[-2:] = b"ab", b"yz"
    assert bytes(theirs.incoming[:2]) == b"ab"
    assert bytes(mine.incoming[-2:]) == b"yz"
    assert not any(mine.outgoing[2:])


@pytest.mark.parametrize(
    "wrong",
    [
        {"descriptor": 1 << 20},
        {"pid": 1 << 40},
        {"pid": -1},
        {"ring_bytes": 0},
        {"ring_bytes": -4096},
        {"ring_bytes": RING // 2},
        {"ring_bytes": RING + 4096},
        {"ring_bytes": 1 << 62},
        {"nonce": b"x" * 16},
        {"nonce": b""},
    ],
)
def test_memory_that_is_not_as_the_other_side_says_is_not_opened(wrong: dict[str, Any]) -> None:
    _, share = made()
    fields = {name: getattr(share, name) for name in share.__struct_fields__}
    counters: Counter[str] = Counter()
    assert Segments(RING, counters).open(m.Share(**{**fields, **wrong})) is None
    os.close(share.descriptor)
    assert counters == {FAILED: 1}


@pytest.mark.parametrize("kind", ["pipe", "file", "unsealed"])
def test_no_other_descriptor_is_taken_for_shared_memory(kind: str, tmp_path: Path) -> None:
    size = HEAD_BYTES + 2 * RING
    descriptors = list(os.pipe()) if kind == "pipe" else []
    if kind == "file":
        (tmp_path / "file").write_bytes(bytes(size))
        descriptors.append(os.open(tmp_path / "file", os.O_RDWR))
    if kind == "unsealed":
        descriptors.append(os.memfd_create("other"))
        os.ftruncate(descriptors[0], size)
    assert Segments(RING, Counter()).open(m.Share(os.getpid(), descriptors[0], RING, bytes(16))) is None
    for descriptor in descriptors:
        os.close(descriptor)


def test_nobody_can_make_the_memory_smaller() -> None:
    _, share = made()
    with pytest.raises(PermissionError):
        os.ftruncate(share.descriptor, 0)
    os.close(share.descriptor)


@dataclass
class Addresses:
    """The part of a transport that says who is connected."""

    sockname: tuple[str, int] | None
    peername: tuple[str, int] | None

    def get_extra_info(self, name: str) -> Any:
        return getattr(self, name)


@pytest.mark.parametrize(
    ("here", "there", "offered"),
    [
        (("10.0.0.2", 1), ("10.0.0.2", 2), True),
        (("127.0.0.1", 1), ("127.0.0.2", 2), True),
        (("::1", 1), ("::1", 2), True),
        (("10.0.0.2", 1), ("10.0.0.3", 2), False),
        (None, ("10.0.0.3", 2), False),
        (("10.0.0.2", 1), None, False),
    ],
)
def test_memory_is_offered_to_a_peer_on_this_host_only_and_once(here: Any, there: Any, offered: bool) -> None:
    counters: Counter[str] = Counter()
    connection = Offers()
    sharing = Sharing(connection, Segments(RING, counters))  # type: ignore[arg-type]
    transport: Any = Addresses(here, there)
    assert not sharing.offer(MIN_SHARED_BYTES - 1, transport)
    assert sharing.offer(MIN_SHARED_BYTES, transport) is offered
    assert not sharing.offer(MIN_SHARED_BYTES, transport)
    assert connection.offers == offered
    sharing.close()
    assert counters == {}


class Offers:
    """The part of a connection that is offered memory."""

    offers = 0

    def offer(self, share: m.Share, mapping: Any) -> None:
        self.offers += 1

    def unshare(self) -> None:
        pass


async def test_nothing_is_asked_over_a_connection_that_is_being_closed() -> None:
    async with pair() as (link, near, other, _):
        assert other._transport is not None
        other._transport.pause_reading()
        link.close()
        # The first look still finds what has come before.
        for _ in range(2):
            deadline = link._connection.deadline()
            assert deadline is not None
            link._watch._passed(deadline)
        assert not near.down.is_set()
        other._transport.resume_reading()
        await near.down.wait()
