"""Inits of other ranks that wait for rank 0's: found by request and by what they wait for, in constant time each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.types import Key, Peer
from aiokv.wire.messages import Init, InitBundle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RequestName = tuple[Peer, int]
"""A request of a peer: the connection and its request id."""

AnyInit = Init | InitBundle
Entry = tuple[RequestName, AnyInit]
Place = tuple[Key, int]
"""A key and its first element."""


class ParkedInits:
    """A table of inits in the order of their arrival."""

    def __init__(self) -> None:
        self._entries: dict[RequestName, tuple[AnyInit, Place]] = {}
        self._by_place: dict[Place, dict[RequestName, None]] = {}

    def __iter__(self) -> Iterator[RequestName]:
        return iter(self._entries)

    def __contains__(self, name: RequestName) -> bool:
        return name in self._entries

    def add(self, name: RequestName, message: AnyInit, key: Key, start: int) -> None:
        """Put an init in that waits for this chunk, or for the key in a bundle."""
        self._entries[name] = (message, (key, start))
        self._by_place.setdefault((key, start), {})[name] = None

    def get(self, name: RequestName) -> AnyInit:
        """Return an init."""
        return self._entries[name][0]

    def take(self, name: RequestName) -> AnyInit:
        """Take one init out."""
        message, place = self._entries.pop(name)
        del self._by_place[place][name]
        if not self._by_place[place]:
            del self._by_place[place]
        return message

    def take_place(self, key: Key, start: int) -> list[Entry]:
        """Take out all inits that wait for one chunk."""
        return self._take(self._by_place.get((key, start), ()))

    def take_peer(self, peer: Peer) -> list[Entry]:
        """Take out all inits of one peer."""
        return self._take(name for name in self._entries if name[0] == peer)

    def _take(self, names: Iterable[RequestName]) -> list[Entry]:
        return [(name, self.take(name)) for name in list(names)]
