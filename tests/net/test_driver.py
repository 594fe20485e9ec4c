"""What all drivers share: the timer of the state machine, and connections that are given up."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from aiokv.config import load_config
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.net.driver import Driver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Alarms:
    """A machine that wants to be woken at given times, and keeps when it was."""

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.woken: list[float] = []
        self.done = asyncio.Event()

    def handle(self, stimulus: st.Stimulus, *, now: float) -> list[ef.Effect]:
        if isinstance(stimulus, st.Tick):
            self.woken.append(now)
            while self.times and self.times[0] <= now:
                self.times.pop(0)
            if not self.times:
                self.done.set()
        return []

    def deadline(self) -> float | None:
        return self.times[0] if self.times else None


async def test_a_machine_is_woken_at_its_deadlines_also_when_they_have_passed() -> None:
    now = asyncio.get_running_loop().time()
    machine = Alarms([now - 5.0, now + 0.01, now + 0.02])
    driver = Driver(load_config(environ={}))
    driver._start(machine)
    for _ in range(3):
        driver.feed(st.PeerLost(0, "nobody"))
    await machine.done.wait()
    assert machine.woken[-1] >= now + 0.02
    await driver._close_links()


async def test_an_earlier_deadline_takes_the_place_of_a_later_one() -> None:
    now = asyncio.get_running_loop().time()
    machine = Alarms([now + 3600.0])
    driver = Driver(load_config(environ={}))
    driver._start(machine)
    driver.feed(st.PeerLost(0, "nobody"))
    machine.times[:] = [now + 0.01]
    driver.feed(st.PeerLost(0, "nobody"))
    await machine.done.wait()
    assert now + 0.01 <= machine.woken[-1] < now + 3600.0
    await driver._close_links()


class Caller:
    """A machine that connects, and keeps what it hears of that."""

    def __init__(self) -> None:
        self.wanted: list[ef.Effect] = []
        self.heard: list[st.Stimulus] = []
        self.news = asyncio.Event()

    def handle(self, stimulus: st.Stimulus, *, now: float) -> list[ef.Effect]:
        if not isinstance(stimulus, st.Tick):
            self.heard.append(stimulus)
            self.news.set()
        wanted, self.wanted = self.wanted, []
        return wanted

    def deadline(self) -> float | None:
        return None


@pytest.fixture
async def silent() -> AsyncIterator[tuple[int, asyncio.Event]]:
    """The port of somebody who lets others connect and says nothing; the event tells that one has."""
    connected = asyncio.Event()

    class Silent(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connected.set()

    server = await asyncio.get_running_loop().create_server(Silent, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], connected
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("stage", ["before the delay is over", "during the handshake"])
async def test_connection_that_is_being_opened_is_given_up_for_another(
    silent: tuple[int, asyncio.Event], stage: str
) -> None:
    port, connected = silent
    caller = Caller()
    driver = Driver(load_config(environ={}))
    driver._start(caller)

    def do(*effects: ef.Effect) -> None:
        caller.wanted = list(effects)
        driver.feed(st.Tick())

    do(ef.Connect(0, "127.0.0.1", port, 3600.0 if stage == "before the delay is over" else 0.0))
    if stage == "during the handshake":
        await connected.wait()
    # Nobody listens there any longer.
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = unused.getsockname()[1]
    do(ef.Connect(0, "127.0.0.1", nowhere))
    await caller.news.wait()
    assert [type(one) for one in caller.heard] == [st.ConnectFailed]
    do(ef.Connect(0, "127.0.0.1", port))
    do(ef.Disconnect(0, "it is not needed"))
    while driver._others or driver._connecting:  # noqa: ASYNC110 - that nothing happens is no event
        await asyncio.sleep(0)
    assert len(caller.heard) == 1
    await driver._close_links()
