"""Requests that wait for a key to be made: found by request and by what they wait for, in constant time each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from aiokv.types import Key, Peer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

RequestName = tuple[Peer, int]
"""A request of a peer: the connection and its request id."""

Place = tuple[Key, int]
"""A key and its first element."""


class Parked(Generic[T]):
    """A table of requests in the order of their arrival."""

    def __init__(self) -> None:
        self._entries: dict[RequestName, tuple[T, Place]] = {}
        self._by_place: dict[Place, dict[RequestName, None]] = {}

    def __iter__(self) -> Iterator[RequestName]:
        return iter(self._entries)

    def __contains__(self, name: RequestName) -> bool:
        return name in self._entries

    def add(self, name: RequestName, item: T, key: Key, start: int) -> None:
        """Put a request in that waits for this chunk, or for the key in a bundle."""
        self._entries[name] = (item, (key, start))
        self._by_place.setdefault((key, start), {})[name] = None

    def get(self, name: RequestName) -> T:
        """Return a request."""
        return self._entries[name][0]

    def take(self, name: RequestName) -> T:
        """Take one request out."""
        item, place = self._entries.pop(name)
        del self._by_place[place][name]
        if not self._by_place[place]:
            del self._by_place[place]
        return item

    def take_place(self, key: Key, start: int) -> list[tuple[RequestName, T]]:
        """Take out all requests that wait for one chunk."""
        return self._take(self._by_place.get((key, start), ()))

    def take_peer(self, peer: Peer) -> list[tuple[RequestName, T]]:
        """Take out all requests of one peer."""
        return self._take(name for name in self._entries if name[0] == peer)

    def _take(self, names: Iterable[RequestName]) -> list[tuple[RequestName, T]]:
        return [(name, self.take(name)) for name in list(names)]
