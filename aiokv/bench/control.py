"""The parent's end of its talk with the workers: they start the timed rounds together, and say what they found."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from typing import TYPE_CHECKING, Self

import msgspec

from aiokv.addresses import format_address
from aiokv.bench.plan import MAX_LINE, Done, Message, Progress, Ready, decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_HOST = "127.0.0.1"


class Control:
    """Listens for the workers, as an async context manager.

    Args:
        workers: how many there will be.
        token: the secret that they know.
        on_start: called when all are ready, before the first of them starts. An OSError from it, or from `on_end`,
            leaves the workers waiting: a node is gone, and the launcher is about to end them.
        on_end: called when all are done, before the first of them leaves.
        on_progress: called with the number of rounds done.
    """

    def __init__(
        self,
        workers: int,
        token: str,
        *,
        on_start: Callable[[], None],
        on_end: Callable[[], None],
        on_progress: Callable[[int], None],
    ) -> None:
        self.results: dict[str, Done] = {}
        """What each worker found, by the worker's name."""
        self.address = ""
        self._token = token
        self._on_progress = on_progress
        self._start, self._end = _Gate(workers, on_start), _Gate(workers, on_end)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, _HOST, 0, limit=MAX_LINE)
        self.address = format_address(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None, "entered before left"
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams serve each connection in a task"
        self._tasks.add(task)
        try:
            # A node that fails ends its process, and the launcher says why: there is nothing to add here. Cancelling is
            # how this task ends when the job did; it has nobody to tell either.
            with contextlib.suppress(OSError, msgspec.DecodeError, ValueError, asyncio.CancelledError):
                await self._talk(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = await _read(reader)
        if not (isinstance(ready, Ready) and hmac.compare_digest(ready.token, self._token)):
            return
        await self._start.passed()
        writer.write(b"start\n")
        while True:
            message = await _read(reader)
            if isinstance(message, Progress):
                self._on_progress(message.rounds)
            elif isinstance(message, Done):
                self.results[ready.name] = message
                break
        await self._end.passed()
        writer.write(b"leave\n")
        await writer.drain()


class _Gate:
    """Opens when all have come, and first calls back, once."""

    def __init__(self, count: int, on_open: Callable[[], None]) -> None:
        self._missing, self._on_open = count, on_open
        self._is_open = asyncio.Event()

    async def passed(self) -> None:
        """Come to the gate, and wait until it is open."""
        self._missing -= 1
        if self._missing == 0:
            self._on_open()
            self._is_open.set()
        await self._is_open.wait()


async def _read(reader: asyncio.StreamReader) -> Message:
    """Read a message.

    Raises:
        ConnectionError: the worker is gone.
    """
    line = await reader.readline()
    if not line:
        raise ConnectionError("the worker is gone")
    return decode(line)
