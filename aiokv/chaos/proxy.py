"""A TCP proxy whose connections can be cut, held up, and left open without passing anything on."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

PIECE = 64 * 1024
"""Most bytes that are passed on at a time."""


@dataclass(slots=True, eq=False)
class Way:
    """One connection: what it may still carry before it is cut, and whether what it carries is lost."""

    bytes: float = math.inf
    loses: bool = False


class Proxy:
    """Passes bytes on between who connects to it and a target, which may change; an async context manager.

        async with Proxy() as proxy:
            proxy.target = ("127.0.0.1", 9091)
            print(proxy.port)

    Who connects while there is no target, or one that does not answer, is sent away.

    Args:
        cut_after: after how many bytes, of both directions together, the first, second ... connection is cut; those for
            which there is no number live on.
    """

    def __init__(self, cut_after: Iterable[float] = ()) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.target: tuple[str, int] | None = None
        """Where connections that come from now on lead to."""
        self.cuts = 0
        """How many connections were cut."""
        self._cut_after = iter(cut_after)
        self._open = asyncio.Event()
        self._open.set()
        self._passing: dict[asyncio.Task[None], Way] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, 0, limit=PIECE)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None, "it was entered"
        self._server.close()
        await self._end_all()

    async def cut(self) -> int:
        """End all connections, wherever in a frame they are; return how many there were."""
        number = await self._end_all()
        self.cuts += number
        return number

    async def hold(self, seconds: float) -> None:
        """Pass nothing on for a while; nothing is lost."""
        self._open.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._open.set()

    def lose(self) -> int:
        """Lose all that comes over the connections that there are now, and leave them open; return how many."""
        for way in self._passing.values():
            way.loses = True
        return len(self._passing)

    async def _end_all(self) -> int:
        passing = list(self._passing)
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
        return len(passing)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "the server makes a task for each connection"
        way = self._passing[task] = Way()
        try:
            # It ends as a connection does: quietly, however that came.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._connect(way, reader, writer)
        finally:
            del self._passing[task]
            writer.transport.abort()

    async def _connect(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target is None:
            return
        far_reader, far_writer = await asyncio.open_connection(*self.target, limit=PIECE)
        way.bytes = next(self._cut_after, math.inf)
        both = [
            asyncio.create_task(self._pass_on(reader, far_writer, way)),
            asyncio.create_task(self._pass_on(far_reader, writer, way)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            self.cuts += way.bytes <= 0
        finally:
            # First, because who waits here may be cancelled once more.
            far_writer.transport.abort()
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        while way.bytes > 0 and (data := await reader.read(PIECE)):
            await self._open.wait()
            if way.loses:
                continue
            if len(data) > way.bytes:
                data = data[: int(max(0, way.bytes))]
            way.bytes -= len(data)
            writer.write(data)
            await writer.drain()
