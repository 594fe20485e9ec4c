"""Inits of other ranks that wait for rank 0's: found by request and by chunk, in constant time each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.types import Key, Peer
from aiokv.wire.messages import Init

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RequestName = tuple[Peer, int]
"""A request of a peer: the connection and its request id."""

Entry = tuple[RequestName, Init]


class ParkedInits:
    """A table of inits in the order of their arrival."""

    def __init__(self) -> None:
        self._messages: dict[RequestName, Init] = {}
        self._by_chunk: dict[tuple[Key, int], dict[RequestName, None]] = {}

    def __iter__(self) -> Iterator[RequestName]:
        return iter(self._messages)

    def __contains__(self, name: RequestName) -> bool:
        return name in self._messages

    def add(self, name: RequestName, message: Init) -> None:
        """Put an init in."""
        self._messages[name] = message
        self._by_chunk.setdefault((message.key, message.start), {})[name] = None

    def take(self, name: RequestName) -> Init:
        """Take one init out."""
        message = self._messages.pop(name)
        chunk = (message.key, message.start)
        del self._by_chunk[chunk][name]
        if not self._by_chunk[chunk]:
            del self._by_chunk[chunk]
        return message

    def take_chunk(self, key: Key, start: int) -> list[Entry]:
        """Take out all inits of one chunk."""
        return self._take(self._by_chunk.get((key, start), ()))

    def take_peer(self, peer: Peer) -> list[Entry]:
        """Take out all inits of one peer."""
        return self._take(name for name in self._messages if name[0] == peer)

    def take_all(self) -> list[Entry]:
        """Take out all inits."""
        return self._take(self._messages)

    def _take(self, names: Iterable[RequestName]) -> list[Entry]:
        return [(name, self.take(name)) for name in list(names)]
