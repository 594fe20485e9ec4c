"""What a driver tells a connection of its peer: that it takes what is sent, or that nothing is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import AiokvError, HandshakeError
from aiokv.net.watch import Watch
from aiokv.wire.connection import Connection
from aiokv.wire.liveness import LOOKS
from aiokv.wire.receiver import Landing

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 1000.0
"""Seconds: no timer fires in these tests."""


@dataclass
class FakeLink:
    """What a watch sees of a link, and what it did."""

    is_reading: bool = True
    unsent_bytes: int = 0
    did: list[str] = field(default_factory=list)

    def write_link_frames(self) -> None:
        self.did.append("write")

    def refuse(self, error: AiokvError) -> None:
        assert isinstance(error, HandshakeError)
        self.did.append("refuse")

    def abort(self) -> None:
        self.did.append("abort")


def end(*, initiator: bool) -> Connection:
    """Return one end of a connection."""
    return Connection(
        initiator=initiator,
        cluster="c",
        token=b"t",
        nonce=bytes([initiator]) * 32,
        land=lambda head: Landing(memoryview(bytearray(head.payload_nbytes)), None),
        patience=PATIENCE,
        now=0.0,
    )


def joined() -> Connection:
    """Return a connection whose peer has gone silent after the handshake."""
    first, second = end(initiator=True), end(initiator=False)
    for _ in range(2):
        for this, other in ((first, second), (second, first)):
            data = this.data_to_send()
            other.get_buffer()[: len(data)] = data
            if data:
                other.buffer_updated(len(data))
    assert first.established
    return first


def look(watch: Watch, connection: Connection, times: int, before: Callable[[], None] = lambda: None) -> None:
    """Let time pass until the connection is looked at so many times."""
    for _ in range(times):
        before()
        deadline = connection.deadline()
        assert deadline is not None
        watch._passed(deadline)
    watch.end()


async def test_a_peer_from_which_nothing_comes_is_cut() -> None:
    connection, link = joined(), FakeLink()
    watch = Watch(connection, link)
    watch.established()
    look(watch, connection, 1 + LOOKS)
    assert link.did == ["write"] * LOOKS + ["abort"]


async def test_a_peer_that_takes_what_waited_for_it_is_there() -> None:
    """It may take minutes to take a large payload, and can answer nothing that waits behind it."""
    connection, link = joined(), FakeLink(unsent_bytes=10_000_000)
    watch = Watch(connection, link)
    watch.established()

    def take() -> None:
        link.unsent_bytes -= 1000

    look(watch, connection, 1, take)
    look(watch, connection, 10 * LOOKS, take)
    assert connection.gone == ""


async def test_what_left_before_the_last_bytes_of_a_payload_is_not_all_that_counts() -> None:
    """What lay in the transport has left, and as much of something else lies there now."""
    connection, link = joined(), FakeLink(unsent_bytes=1000)
    watch = Watch(connection, link)
    watch.established()
    look(watch, connection, 10 * LOOKS, lambda: setattr(watch, "emptied", True))
    assert connection.gone == ""


async def test_what_the_own_system_takes_tells_nothing_of_the_peer() -> None:
    """It takes some megabytes, whether they arrive anywhere or not."""
    connection, link = joined(), FakeLink()
    watch = Watch(connection, link)
    watch.established()
    look(watch, connection, 1 + LOOKS, lambda: setattr(watch, "emptied", True))
    assert connection.gone


@pytest.mark.parametrize("unsent", [0, 1000], ids=["nothing-waits", "something-waits"])
async def test_a_peer_that_takes_nothing_is_gone(unsent: int) -> None:
    connection, link = joined(), FakeLink(unsent_bytes=unsent)
    watch = Watch(connection, link)
    watch.established()

    def add() -> None:
        # What is asked of it waits behind the rest.
        link.unsent_bytes += 34

    look(watch, connection, 1 + LOOKS, add)
    assert connection.gone


async def test_while_nothing_is_read_nobody_is_silent() -> None:
    connection, link = joined(), FakeLink(is_reading=False)
    watch = Watch(connection, link)
    watch.established()
    look(watch, connection, 10 * LOOKS)
    assert connection.gone == ""
    link.is_reading = True
    look(watch, connection, 1 + LOOKS)
    assert connection.gone


async def test_a_stranger_that_says_nothing_is_refused() -> None:
    connection = end(initiator=False)
    link = FakeLink()
    watch = Watch(connection, link)
    watch.begin()
    look(watch, connection, 1)
    assert link.did == ["refuse"]
