"""A proxy passes on every byte, until it is told not to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aiokv.chaos.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def echo() -> AsyncIterator[tuple[str, int]]:
    """A listener that sends back all it gets."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[:2]
    server.close()
    await server.wait_closed()


async def test_every_byte_comes_back_in_its_order(echo: tuple[str, int]) -> None:
    data = bytes(range(256)) * 2000
    async with Proxy() as proxy:
        proxy.target = echo
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
        writer.close()


async def test_connections_that_are_cut_end_at_both_ends_and_new_ones_may_come(echo: tuple[str, int]) -> None:
    async with Proxy() as proxy:
        proxy.target = echo
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        assert await proxy.cut() == 1
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"two")
        assert await reader.readexactly(3) == b"two"
        writer.close()


async def test_nothing_comes_through_while_it_is_held_up_and_nothing_is_lost(echo: tuple[str, int]) -> None:
    async with Proxy() as proxy:
        proxy.target = echo
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        holding = asyncio.create_task(proxy.hold(0.2))
        await asyncio.sleep(0)
        writer.write(b"later")
        assert await reader.readexactly(5) == b"later"
        assert holding.done()
        writer.close()


async def test_connection_without_a_target_is_ended() -> None:
    async with Proxy() as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_connections_that_lose_everything_stay_open_and_new_ones_lose_nothing(echo: tuple[str, int]) -> None:
    async with Proxy() as proxy:
        proxy.target = echo
        reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        assert proxy.lose() == 1
        writer.write(b"lost")
        answer = asyncio.create_task(reader.read(1))
        other_reader, other_writer = await asyncio.open_connection(proxy.host, proxy.port)
        other_writer.write(b"after")
        assert await other_reader.readexactly(5) == b"after"
        assert not answer.done()
        assert proxy.lose() == 2
        answer.cancel()
        for each in (writer, other_writer):
            each.close()
            await each.wait_closed()


async def test_connections_are_cut_after_the_bytes_that_were_asked_for_in_their_order(echo: tuple[str, int]) -> None:
    """Each byte counts on its way there and on its way back."""
    async with Proxy(cut_after=[7, 0]) as proxy:
        proxy.target = echo
        came = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"12345")
            try:
                came.append(await reader.readexactly(5))
            except asyncio.IncompleteReadError as error:
                came.append(error.partial)
            except ConnectionError:
                came.append(b"")
            writer.close()
        assert came[1:] == [b"", b"12345"]
        assert came[0] in {b"12", b""}
        assert proxy.cuts == 2
