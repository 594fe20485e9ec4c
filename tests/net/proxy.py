"""A small TCP proxy that cuts connections: between the workers and the servers of a test's cluster."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Self

PIECE = 16 * 1024


class Proxy:
    """Passes bytes on to one address, and cuts each of its first connections after a random number of them.

    Args:
        seed: of the random numbers.
        cuts: how many connections are cut; the others live on.
        most: bytes after which a connection is cut at the latest, of both directions together.
    """

    def __init__(self, *, seed: int, cuts: int, most: int) -> None:
        self.cuts = 0
        """How many connections were cut."""
        self.target = ("", 0)
        """Host and port of the server."""
        self._random = random.Random(seed)
        self._left = cuts
        self._most = most
        self._server: asyncio.Server
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self.target)
        budget = [self._random.randrange(self._most)] if self._left else []
        self._left -= bool(budget)
        ways = [self._pass(reader, there_writer, budget), self._pass(there_reader, writer, budget)]
        tasks = [asyncio.get_running_loop().create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.cuts += bool(budget) and budget[0] <= 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for end in (writer, there_writer):
                # Without the rest, and without a farewell.
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: list[int]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE):
                if budget:
                    data, budget[0] = data[: max(0, budget[0])], budget[0] - len(data)
                writer.write(data)
                await writer.drain()
                if budget and budget[0] <= 0:
                    return
