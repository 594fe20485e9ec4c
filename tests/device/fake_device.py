"""Devices that do what they are told in any order that their streams and events allow, and check that it makes sense.

What lies in a buffer is a term that says how it was made, so a buffer that is used too early or too late shows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aiokv.device import records as r
from aiokv.errors import AiokvError

Term = Any


@dataclass
class FakeDevices:
    """All devices and the host's memory. `landed` says what lies in slots that have landed."""

    landed: dict[int, Term] = field(default_factory=dict)
    content: dict[int, Term] = field(default_factory=dict)
    on_host: set[int] = field(default_factory=set)
    queues: dict[r.Stream, deque[r.Copy | r.Launch]] = field(default_factory=dict)
    executed: dict[int, AiokvError | None] = field(default_factory=dict)
    unreported: list[int] = field(default_factory=list)
    published: list[r.Published] = field(default_factory=list)
    ready: dict[int, r.Ready] = field(default_factory=dict)

    def perform(self, effects: list[r.Effect]) -> None:
        for effect in effects:
            match effect:
                case r.Allocate(buffer):
                    assert buffer not in self.content, "numbers are used once"
                    self.content[buffer] = "anything"
                case r.Reserve(buffer):
                    self.content[buffer] = "anything"
                    self.on_host.add(buffer)
                case r.Take(buffer, slot):
                    self.content[buffer] = self.landed.pop(slot)
                    self.on_host.add(buffer)
                case r.Release(buffer) | r.Deallocate(buffer):
                    self._check_unused(buffer)
                    del self.content[buffer]
                    self.on_host.discard(buffer)
                case r.Copy() | r.Launch():
                    self.queues.setdefault(effect.stream, deque()).append(effect)
                case r.Published():
                    self.published.append(effect)
                case r.Ready(ticket):
                    assert ticket not in self.ready, "it is said once"
                    self.ready[ticket] = effect

    def _check_unused(self, buffer: int) -> None:
        for queue in self.queues.values():
            for task in queue:
                assert buffer not in _used(task), "memory is given away while something uses it"

    def free_streams(self) -> list[r.Stream]:
        """Return the streams that can go on: what their next task waits for has happened."""
        return [
            stream
            for stream, queue in self.queues.items()
            if queue and all(event in self.executed for event in queue[0].waits)
        ]

    def execute(self, stream: r.Stream, error: AiokvError | None = None) -> None:
        """Do the next task of a stream."""
        task = self.queues[stream].popleft()
        if isinstance(task, r.Copy):
            term = self.content[task.source]
            wrong = _wrong([term])
            if task.first:
                term = ("part", task.first, term)
            self.content[task.target] = ("wrong",) if error or wrong else term
            self._ended(task.event, error, wrong=wrong)
            return
        # At the same time: none of them sees what another one does.
        before = dict(self.content)
        for part in task.parts:
            wrong = _wrong([before[buffer] for buffer in part.needed])
            if error or wrong:
                self.content |= dict.fromkeys(part.lost, ("wrong",))
            else:
                made = part.work(*[before[buffer] for buffer in part.buffers])
                changed = {b: term for b, term in zip(part.buffers, made, strict=True) if term != before[b]}
                self.content |= changed
            self._ended(part.event, error, wrong=wrong)

    def _ended(self, event: int, error: AiokvError | None, *, wrong: bool) -> None:
        self.executed[event] = error or (AiokvError("what it needs is wrong") if wrong else None)
        self.unreported.append(event)


def _used(task: r.Copy | r.Launch) -> list[int]:
    if isinstance(task, r.Copy):
        return [task.target, task.source]
    return [buffer for part in task.parts for buffer in part.buffers]


def _wrong(terms: list[Term]) -> bool:
    return any(term == ("wrong",) for term in terms)
