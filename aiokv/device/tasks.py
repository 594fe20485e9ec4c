"""What is under way: which copies and launches another one has to wait for, and what still uses a buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.device.records import Buffer, Event


@dataclass(slots=True)
class _Usage:
    """What is under way on a buffer: its last writer, and its readers since."""

    writer: Event | None = None
    readers: list[Event] = field(default_factory=list)
    open: int = 0


@dataclass(slots=True)
class _Task:
    read: list[Buffer]
    written: list[Buffer]


class Tasks:
    """Orders tasks by what they read and write: who reads waits for the last who writes, and who writes for all."""

    def __init__(self) -> None:
        self._last: Event = 0
        self._open: dict[Event, _Task] = {}
        self._usage: dict[Buffer, _Usage] = {}

    def __len__(self) -> int:
        """How many are not reported as done."""
        return len(self._open)

    def begin(self, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> tuple[Event, list[Event]]:
        """Enter a task; return its event, and those that it needs."""
        self._last += 1
        event = self._last
        needs: dict[Event, None] = {}
        written = list(dict.fromkeys(writes))
        read = [buffer for buffer in dict.fromkeys(reads) if buffer not in written]
        for buffer in (*read, *written):
            usage = self._usage.setdefault(buffer, _Usage())
            usage.open += 1
            if usage.writer is not None:
                needs[usage.writer] = None
        for buffer in read:
            self._usage[buffer].readers.append(event)
        for buffer in written:
            usage = self._usage[buffer]
            needs |= dict.fromkeys(usage.readers)
            usage.writer, usage.readers = event, []
        self._open[event] = _Task(read, written)
        return event, list(needs)

    def end(self, event: Event) -> tuple[list[Buffer], list[Buffer]]:
        """Take note that a task is done; return what it wrote, and which buffers nothing under way uses any longer."""
        idle = []
        task = self._open.pop(event)
        for buffer in (*task.read, *task.written):
            usage = self._usage[buffer]
            usage.open -= 1
            if usage.writer == event:
                usage.writer = None
            if event in usage.readers:
                usage.readers.remove(event)
            if not usage.open:
                del self._usage[buffer]
                idle.append(buffer)
        return task.written, idle

    def uses(self, buffer: Buffer) -> bool:
        """Tell whether something under way reads or writes a buffer."""
        return buffer in self._usage

    def writer(self, buffer: Buffer) -> Event | None:
        """Return what writes a buffer last, if that is under way."""
        usage = self._usage.get(buffer)
        return None if usage is None else usage.writer
