"""What is copied to the host's memory for those who ask: values, once for all of them, and state and results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokv.device.records import Kind, Ready, Reserve, Stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.device.flow import Flow
    from aiokv.device.records import Buffer, Event, Ticket
    from aiokv.errors import AiokvError
    from aiokv.types import Version


@dataclass(slots=True, eq=False)
class Value:
    """A version of a chunk. `host` is a copy of it in the host's memory, which `copying` makes for who is `waiting`.

    `readers` are those who have asked for it and are not done; `wanted` is set when somebody has asked. `error` says
    why it could not be copied.
    """

    version: Version
    buffer: Buffer
    host: Buffer | None = None
    copying: Event | None = None
    error: AiokvError | None = None
    waiting: list[Ticket] = field(default_factory=list)
    readers: int = 0
    retired: bool = False
    wanted: bool = False


@dataclass(slots=True)
class _Fetching:
    """Buffers of the host that are somebody's own, by name, and the copies under way to them."""

    buffers: dict[str, Buffer] = field(default_factory=dict)
    left: dict[Event, None] = field(default_factory=dict)
    error: AiokvError | None = None


class Outgoing:
    """Copies to the host's memory.

    Args:
        flow: who orders the copies.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._reading: dict[Ticket, Value] = {}
        self._copying: dict[Event, Value] = {}
        self._fetching: dict[Ticket, _Fetching] = {}
        self._fetches: dict[Event, Ticket] = {}

    def request(self, ticket: Ticket, value: Value, nbytes: int, device: int) -> None:
        """Let somebody have a value; it stays as it is until `sent`."""
        value.readers += 1
        value.wanted = True
        self._reading[ticket] = value
        if value.copying is None and (value.host is None or value.error is not None):
            self.copy(value, nbytes, device)
        if value.copying is not None:
            value.waiting.append(ticket)

    def copy(self, value: Value, nbytes: int, device: int) -> None:
        """Copy a value to the host's memory."""
        if value.host is None:
            value.host = self._flow.memory.new_number()
            self._flow.add(Reserve(value.host, nbytes))
        value.error = None
        value.copying = self._flow.copy(Stream(device, Kind.OUT), value.host, value.buffer, nbytes)
        self._copying[value.copying] = value

    def fetch(self, ticket: Ticket, sources: Mapping[str, Buffer], device: int) -> None:
        """Copy buffers, which may be changed afterwards, to memory of the host that is the ticket's own."""
        fetching = self._fetching.setdefault(ticket, _Fetching())
        for name, source in sources.items():
            nbytes = self._flow.memory.nbytes(source)
            host = fetching.buffers[name] = self._flow.memory.new_number()
            self._flow.add(Reserve(host, nbytes))
            event = self._flow.copy(Stream(device, Kind.OUT), host, source, nbytes)
            fetching.left[event] = None
            self._fetches[event] = ticket

    def deliver(self, ticket: Ticket) -> None:
        """Say that all is there that somebody has asked for, if it is."""
        buffers: dict[str, Buffer] = {}
        error = None
        value, fetching = self._reading.get(ticket), self._fetching.get(ticket)
        if value is not None:
            if value.copying is not None:
                return
            assert value.host is not None, "it was copied"
            buffers[""], error = value.host, value.error
        if fetching is not None:
            if fetching.left:
                return
            buffers |= fetching.buffers
            error = error or fetching.error
        self._flow.add(Ready(ticket, buffers, error))

    def end(self, event: Event, error: AiokvError | None) -> None:
        """Take note that a copy is done, or could not be."""
        value = self._copying.pop(event, None)
        if value is not None:
            value.copying, value.error = None, error
            waiting, value.waiting = value.waiting, []
            for ticket in waiting:
                self.deliver(ticket)
        if event in self._fetches:
            ticket = self._fetches.pop(event)
            fetching = self._fetching[ticket]
            del fetching.left[event]
            fetching.error = fetching.error or error
            self.deliver(ticket)

    def sent(self, ticket: Ticket) -> None:
        """Take note that somebody has all that was asked for."""
        fetching = self._fetching.pop(ticket, None)
        if fetching is not None:
            for buffer in fetching.buffers.values():
                self._flow.drop(buffer)
        value = self._reading.pop(ticket, None)
        if value is not None:
            value.readers -= 1
            if value.retired and not value.readers:
                self._drop(value)

    def retire(self, value: Value) -> None:
        """Forget a value when its last reader is done."""
        value.retired = True
        if not value.readers:
            self._drop(value)

    def _drop(self, value: Value) -> None:
        self._flow.drop(value.buffer)
        if value.host is not None:
            self._flow.drop(value.host)

    # --- for tests ---

    def values(self) -> list[Value]:
        """Return the values that are being read."""
        return list(dict.fromkeys(self._reading.values()))

    def buffers(self) -> list[Buffer]:
        """Return the buffers of the host that are somebody's own."""
        return [buffer for fetching in self._fetching.values() for buffer in fetching.buffers.values()]
