"""Whatever comes in at a port, from strangers or from peers that know the token: refused, counted, training unhurt."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.errors import AiokvError
from aiokv.types import Role
from aiokv.wire import messages as m
from aiokv.wire.connection import Connection
from aiokv.wire.frames import encode_frame
from aiokv.wire.receiver import Frame, Landing
from tests.net.conftest import SETTINGS, Cluster, running_cluster
from tests.wire.test_golden_frames import GOLDEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import aiokv
    from aiokv.net.node import Node

SIZE = 3000
NONCE = bytes(range(32))


@contextlib.asynccontextmanager
async def training(*, idle: int = 0, **settings: Any) -> AsyncIterator[Cluster]:
    """Run a cluster of two workers that train all the while; at the end every sum was right, and nothing has failed.

    Of more workers, `idle` ones have finished.
    """
    failed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    shared = {"servers": 2, "connection_rate": 1e6, "split_bytes": 4096, **settings}
    async with running_cluster(workers=2 + idle, **shared) as running:
        await running.each(lambda kv: kv.init("w", np.zeros(SIZE, np.float32)))
        over = asyncio.Event()
        tasks = [asyncio.create_task(train(kv, over)) for kv in running.workers[:2]]
        for kv in running.workers[2:]:
            await kv.finish()
        yield running
        over.set()
        rounds = [await task for task in tasks]
        assert min(rounds) > 0
        # One may have begun a round that the other one did not: its push is the last one open.
        if rounds[0] != rounds[1]:
            await running.workers[int(np.argmin(rounds))].push("w", np.ones(SIZE, np.float32))
        for node in running.servers:
            assert node.store.open_slots == 0
    assert failed == []


async def train(kv: aiokv.Client, over: asyncio.Event) -> int:
    turn = 0
    while not over.is_set():
        value = await kv.pushpull("w", np.full(SIZE, turn + kv.rank, np.float32))
        assert (value == 2 * turn + 1).all()
        turn += 1
    return turn


# --- strangers: nothing is interpreted before they have proved that they know the token ---


def header(frame_type: int, payload: int = 0, control: int = 0, *, flags: int = 0, version: int = 1) -> bytes:
    return struct.pack("<4sBBHQQII", b"AIOK", version, frame_type, flags, 0, payload, control, 0)


HELLO = encode_frame(m.Hello(SETTINGS["cluster"], NONCE))
PROOF = encode_frame(m.Proof(bytes(32)))

JUNK: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + bytes(100),
    "ssh": b"SSH-2.0-OpenSSH_9.9\r\n",
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "random": random.Random("junk").randbytes(100_000),
    "huge-payload": header(34, payload=2**60, control=40) + bytes(40),
    "huge-control": header(1, control=2**32 - 1) + bytes(5000),
    "negative-payload": header(1, payload=2**64 - 1),
    "negative-control": header(1, control=2**32 - 1),
    "another-version": header(1, control=40, version=99),
    "unknown-type": header(200),
    "unknown-flags": header(1, control=40, flags=0xFFFE),
    "no-control": header(1),
    "hello-of-another-cluster": encode_frame(m.Hello("other", NONCE)),
    "hello-with-a-short-nonce": encode_frame(m.Hello(SETTINGS["cluster"], b"short")),
    "hello-that-is-too-long": encode_frame(m.Hello("c" * 5000, NONCE)),
    "two-hellos": HELLO + HELLO,
    "a-wrong-proof": HELLO + PROOF,
    "a-proof-at-once": PROOF,
    "a-challenge": encode_frame(m.Challenge(NONCE, NONCE)),
    "a-welcome-at-once": encode_frame(m.Welcome()),
    "a-welcome-after-a-hello": HELLO + encode_frame(m.Welcome()),
    "shared-memory-at-once": encode_frame(m.Share(1, 3, 1 << 20, bytes(16))),
    "half-a-header": HELLO[:20],
    "half-a-hello": HELLO[:50],
    "nothing": b"",
} | {f"hello-cut-at-{length}": HELLO[:length] for length in range(1, len(HELLO), 7)}
BEFORE = {f"before-the-handshake-{type(g.message).__name__}": g.data + bytes(g.payload_nbytes) for g in GOLDEN}
"""Every frame there is, before anything else."""


async def intrude(node: Node, data: bytes) -> bytes:
    """Send bytes and half close; return all that came back."""
    reader, writer = await asyncio.open_connection(node.host, node.port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            writer.write_eof()
            return await reader.read()
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_scenario_41_strangers_are_refused_and_each_of_them_is_counted_once() -> None:
    async with training() as running:
        for node in (running.scheduler, running.servers[0]):
            before = node.admission.open
            for number, (name, data) in enumerate([*JUNK.items(), *BEFORE.items()], 1):
                answer = await intrude(node, data)
                # A challenge is the one answer that a stranger gets, and it must have named the cluster for it.
                assert len(answer) < 1200, name
                while node.admission.handshakes:  # noqa: ASYNC110 - that a connection has ended is no event
                    await asyncio.sleep(0)
                assert node.counters["handshakes_failed"] == number, name
            assert node.admission.open == before


async def test_hellos_with_flipped_bits_are_refused() -> None:
    async with training() as running:
        node = running.servers[0]
        for bit in range(0, 8 * len(HELLO), 3):
            flipped = bytearray(HELLO)
            flipped[bit // 8] ^= 1 << bit % 8
            await intrude(node, bytes(flipped) + PROOF)
        while node.admission.handshakes:  # noqa: ASYNC110 - that a connection has ended is no event
            await asyncio.sleep(0)
        assert node.counters["handshakes_failed"] == len(range(0, 8 * len(HELLO), 3))


# --- replayed and reflected handshakes ---


async def test_scenario_56_a_recorded_handshake_is_not_accepted_again() -> None:
    """All that a good initiator has said is said again, to the same node and to another one of the cluster."""
    async with training() as running:
        server = running.servers[0]
        async with Peer.at(server) as peer:
            recorded = peer.said
        for node in (server, running.servers[1], running.scheduler):
            answer = await intrude(node, recorded)
            assert b"another token" in answer
            assert node.counters["handshakes_failed"] == 1


async def test_a_node_s_own_words_are_not_accepted_from_a_peer() -> None:
    """A challenge is answered with what the node itself, or another node, has said: none is a proof."""
    async with training() as running:
        server, other = running.servers
        for source in (server, other):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(encode_frame(m.Hello(SETTINGS["cluster"], bytes(32))))
            challenge = await reader.readexactly(32 + 0x45)
            # The nonce is sent on to a node as if it were ours, and its proof is brought back.
            nonce = challenge[36:68]
            reflected = await intrude(source, encode_frame(m.Hello(SETTINGS["cluster"], nonce)))
            writer.write(encode_frame(m.Proof(reflected[-32:])))
            assert b"another token" in await reader.read()
            writer.close()
            await writer.wait_closed()


# --- peers that know the token, and say what they may not say ---


class Peer:
    """A node by hand: a good handshake, and then whatever one likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.said = b""
        self._wire = Connection(
            initiator=True,
            cluster=SETTINGS["cluster"],
            token=SETTINGS["token"].encode(),
            nonce=NONCE,
            land=lambda head: Landing(memoryview(bytearray(head.payload_nbytes)), head.request),
            now=0.0,
        )

    @staticmethod
    @contextlib.asynccontextmanager
    async def at(node: Node) -> AsyncIterator[Peer]:
        peer = Peer(*await asyncio.open_connection(node.host, node.port))
        try:
            peer.say(peer._wire.data_to_send())
            while not peer._wire.established:
                await peer.hear()
            yield peer
        finally:
            peer._writer.close()
            with contextlib.suppress(ConnectionError):
                await peer._writer.wait_closed()

    def say(self, data: bytes) -> None:
        self.said += data
        if data:
            self._writer.write(data)

    async def hear(self) -> list[Frame] | None:
        """Return the frames that came; None: the connection is over."""
        data = await self._reader.read(4096)
        if not data:
            return None
        self._wire.get_buffer()[: len(data)] = data
        frames = self._wire.buffer_updated(len(data))
        self.say(self._wire.data_to_send())
        return frames

    async def outcome(self, data: bytes) -> list[str]:
        """Say something as the last thing; return the names of the answers up to the end of the connection."""
        names: list[str] = []
        try:
            self.say(data)
            self._writer.write_eof()
            while (frames := await self.hear()) is not None:
                names += [type(frame.message).__name__ for frame in frames]
        except AiokvError as error:
            names += [type(frame.message).__name__ for frame in self._wire.undelivered]
            names.append(f"Goodbye {type(error).__name__}")
        except ConnectionError:
            names.append("reset")
        return names


def whole(golden: Any) -> bytes:
    return bytes(golden.data) + bytes(golden.payload_nbytes)


@pytest.mark.parametrize("role", [Role.SCHEDULER, Role.SERVER])
async def test_a_peer_that_has_not_said_who_it_is_gets_nothing(role: Role) -> None:
    """Every frame there is, as the first one after the handshake."""
    async with training() as running:
        node = running.scheduler if role is Role.SCHEDULER else running.servers[0]
        silent: list[str] = []
        for golden in GOLDEN:
            async with Peer.at(node) as peer:
                answers = await peer.outcome(whole(golden))
            if isinstance(golden.message, m.GetWaiting):
                # Whoever has the token may ask what is waited for.
                assert answers == ["Waiting"]
                continue
            assert answers in ([], ["Error"]) or answers[0].startswith("Goodbye"), (golden.message, answers)
            if not answers:
                silent.append(type(golden.message).__name__)
        # A server may not have seen the epoch of a node that attaches, so that it waits; and this one did not.
        waiting = ["Heartbeat"] if role is Role.SCHEDULER else ["Attach", "AttachServer", "AttachStandby"]
        # A `Pong` went by unseen; that the peer wants one is no reason to refuse it.
        assert silent == ["Ping", "Pong", *waiting]
        # Memory that can't be opened is not used, and that is all.
        refused = len(GOLDEN) - len(silent) - len(["Share", "GetWaiting"])
        while refusals(node) < refused:  # noqa: ASYNC110 - that a connection has ended is no event
            await asyncio.sleep(0)
        assert (refusals(node), node.counters["shared_memory.failed"]) == (refused, 1)


async def test_a_member_that_speaks_for_another_role_is_refused_and_the_others_go_on() -> None:
    """What only a scheduler or another server may say, or only a scheduler may hear, said by a worker to a server."""
    async with training(idle=1) as running:
        server = running.servers[0]
        view = running.workers[0]._session._joiner.view
        assert view is not None
        # It takes the place of that worker's own connection.
        me = view.workers[2]
        wrong = {*WRONG_FOR_A_WORKER}
        for golden in GOLDEN:
            if type(golden.message) not in wrong:
                continue
            async with Peer.at(server) as peer:
                attach = encode_frame(m.Attach(me.rank, me.name, me.incarnation, view.epoch, 5.0), 1)
                answers = await peer.outcome(attach + whole(golden))
            assert answers[0] == "Done"
            assert answers[1:] == ["Error"] or answers[1].startswith("Goodbye"), (golden.message, answers)


WRONG_FOR_A_WORKER: tuple[type[m.Message], ...] = (
    *(m.Register, m.View, m.Heartbeat, m.Barrier, m.Leave, m.Stop, m.Finish, m.Done, m.Value, m.Error, m.Bundled),
    *(m.Sums, m.Totals, m.State, m.CommandResult, m.RulesState, m.Met, m.Arrived, m.Accepted, m.Verdict, m.Tally),
)


def refusals(node: Node) -> int:
    counted = ("connections_ended.", "disconnected", "refused.")
    return sum(count for name, count in node.counters.items() if name.startswith(counted))


async def test_frames_in_any_wrong_order_change_nothing() -> None:
    """Frames of all kinds in random orders, a few hundred of them, from peers that know the token."""
    choose = random.Random("order")
    async with training() as running:
        for turn in range(60):
            node = choose.choice([running.scheduler, *running.servers])
            async with Peer.at(node) as peer:
                await peer.outcome(b"".join(whole(choose.choice(GOLDEN)) for _ in range(1 + turn % 8)))


async def test_frames_with_flipped_bits_and_cut_frames_change_nothing() -> None:
    """From peers that know the token and are not members: whatever a flipped frame means, it is refused."""
    choose = random.Random("flips")

    def damage(data: bytes) -> bytes:
        damaged = bytearray(data)
        for _ in range(choose.randint(1, 3)):
            bit = choose.randrange(8 * len(damaged))
            damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged[: choose.choice([len(damaged), choose.randint(1, len(damaged))])])

    await _send_often(lambda: damage(whole(choose.choice(GOLDEN))), choose)


async def test_random_control_parts_change_nothing() -> None:
    choose = random.Random("controls")

    def make() -> bytes:
        control = choose.randbytes(choose.randint(0, 60))
        return header(choose.choice(sorted(m.FRAME_TYPES)), 0, len(control)) + control

    await _send_often(make, choose)


async def _send_often(make: Callable[[], bytes], choose: random.Random) -> None:
    async with training() as running:
        nodes = [running.scheduler, *running.servers]
        places = [node.admission.open for node in nodes]
        for _ in range(150):
            async with Peer.at(choose.choice(nodes)) as peer:
                await peer.outcome(make())
        while [node.admission.open for node in nodes] != places:  # noqa: ASYNC110 - that one has ended is no event
            await asyncio.sleep(0)


async def test_a_frame_that_refers_to_shared_memory_that_there_is_not_is_refused() -> None:
    async with training() as running, Peer.at(running.servers[0]) as peer:
        push = encode_frame(m.Push("w", (4,), "float32", 0, 4, 1, 0, True, 5.0), 7, 16)
        answers = await peer.outcome(push[:6] + b"\x01\x00" + push[8:])
        assert answers == ["Goodbye ProtocolError"]
        assert running.servers[0].counters["connections_ended.ProtocolError"] == 1
