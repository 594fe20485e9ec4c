"""The workers start together, and what they found arrives."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from aiokv.addresses import parse_address
from aiokv.bench.control import Control
from aiokv.bench.plan import Done, Message, Progress, Ready, encode

DONE = Done(0, [0.5], 0.1, 3, [])


class Events(list[str]):
    """What happened, in order."""

    def control(self, workers: int) -> Control:
        """Return a control that writes down what it calls back."""
        return Control(
            workers,
            "secret",
            on_start=lambda: self.append("start"),
            on_end=lambda: self.append("end"),
            on_progress=lambda rounds: self.append(f"{rounds} rounds"),
        )


class Worker:
    """The other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, control: Control) -> Worker:
        return cls(*await asyncio.open_connection(*parse_address(control.address)))

    async def ask(self, message: Message) -> bytes:
        self.tell(message)
        return await self.reader.readline()

    def tell(self, message: Message) -> None:
        self.writer.write(encode(message) + b"\n")

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionResetError):
            await self.writer.wait_closed()


@pytest.fixture
def events() -> Events:
    return Events()


async def test_worker_goes_through_start_progress_and_end(events: Events) -> None:
    async with events.control(1) as control:
        worker = await Worker.connect(control)
        assert await worker.ask(Ready("secret", "worker-0")) == b"start\n"
        worker.tell(Progress(20))
        assert await worker.ask(DONE) == b"leave\n"
        await worker.close()
    assert events == ["start", "20 rounds", "end"]
    assert control.results == {"worker-0": DONE}


async def test_nobody_starts_before_all_are_ready(events: Events) -> None:
    async with events.control(2) as control:
        workers = [await Worker.connect(control) for _ in range(2)]
        first = asyncio.create_task(workers[0].ask(Ready("secret", "worker-0")))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(first), 0.05)
        assert events == []
        assert await workers[1].ask(Ready("secret", "worker-1")) == b"start\n"
        assert await first == b"start\n"
        for worker in workers:
            await worker.close()


async def test_stranger_is_turned_away(events: Events) -> None:
    async with events.control(1) as control:
        worker = await Worker.connect(control)
        assert await worker.ask(Ready("guess", "worker-0")) == b""
        await worker.close()
    assert events == []


async def test_nonsense_is_turned_away(events: Events) -> None:
    async with events.control(1) as control:
        worker = await Worker.connect(control)
        worker.writer.write(b"GET / HTTP/1.1\n")
        assert await worker.reader.readline() == b""
        await worker.close()


async def test_worker_that_waits_is_let_go_when_the_job_has_ended(events: Events) -> None:
    async with events.control(2) as control:
        worker = await Worker.connect(control)
        waiting = asyncio.create_task(worker.ask(Ready("secret", "worker-0")))
        await asyncio.sleep(0)
    [answer] = await asyncio.gather(waiting, return_exceptions=True)
    # A connection that is closed before it was read is reset.
    assert answer == b"" or isinstance(answer, ConnectionResetError)
    await worker.close()
