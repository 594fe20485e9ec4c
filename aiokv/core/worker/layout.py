"""How the keys of a cluster are cut, as a worker needs it: chunks, bytes of tensors, and plans of whole calls."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from aiokv.core.placement import Chunk, place, place_rows
from aiokv.core.worker.parts import Cut, Plan, Single

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.core.stimuli import KeyRecord
    from aiokv.core.worker.parts import Tensors
    from aiokv.types import Key, Peer, TensorSpec
    from aiokv.wire.messages import View

MAX_PLANS: Final = 64

MAX_SINGLES: Final = 8192
"""Of how many tensors it is remembered how they are cut."""


class Layout:
    """Where every key lies, by its name and spec, in a cluster of so many servers."""

    def __init__(self) -> None:
        self._servers = 0
        self._split_bytes = 0
        self.chunk_bytes = 0
        self._places: dict[tuple[Key, TensorSpec], list[Chunk]] = {}

    def settle(self, view: View) -> None:
        """Take over the cluster's settings, from the first view."""
        self._servers = len(view.servers)
        self.chunk_bytes, self._split_bytes = view.chunk_bytes, view.split_bytes

    def place(self, key: Key, spec: TensorSpec) -> list[Chunk]:
        """Return the chunks of a key that is not row-sparse."""
        chunks = self._places.get((key, spec))
        if chunks is None:
            chunks = self._places[key, spec] = place(
                key, spec, servers=self._servers, chunk_bytes=self.chunk_bytes, split_bytes=self._split_bytes
            )
        return chunks

    def place_rows(self, key: Key, spec: TensorSpec) -> list[Chunk]:
        """Return the chunks of a row-sparse key."""
        return place_rows(key, spec, servers=self._servers, split_bytes=self._split_bytes)

    def cuts(self, key: Key, spec: TensorSpec) -> list[tuple[int, int]]:
        """Return first element and end of each chunk of a key that is not row-sparse."""
        return [(chunk.start, chunk.stop) for chunk in self.place(key, spec)]

    def chunks(self, record: KeyRecord) -> list[Chunk]:
        """Return the chunks of a key."""
        return (self.place_rows if record.is_sparse else self.place)(record.key, record.spec)

    def parts(self, record: KeyRecord) -> list[tuple[int, int]]:
        """Return first element, or row, and the end of each chunk of a key."""
        return [(chunk.start, chunk.stop) for chunk in self.chunks(record)]

    def keys_on(self, server: Peer, records: Sequence[KeyRecord]) -> list[Key]:
        """Return the keys of which a server has a part."""
        return [record.key for record in records if any(part.server == server for part in self.chunks(record))]

    def single(self, tensor: int, key: Key, spec: TensorSpec) -> Single:
        """Return how a tensor of a call is cut that is in no bundle."""
        return _single(tensor, key, spec, self._servers, self.chunk_bytes, self._split_bytes)

    def plan(self, tensors: Tensors) -> Plan:
        """Return the plan of a call with tensors that are in no bundle."""
        return _plan_of_singles(tuple(tensors), self._servers, self.chunk_bytes, self._split_bytes)


@functools.lru_cache(maxsize=MAX_SINGLES)
def _single(tensor: int, key: Key, spec: TensorSpec, servers: int, chunk_bytes: int, split_bytes: int) -> Single:
    """Return how a tensor of a call is cut. All workers of a process have the same, where there are many."""
    size = spec.itemsize
    chunks = place(key, spec, servers=servers, chunk_bytes=chunk_bytes, split_bytes=split_bytes)
    cuts = [
        Cut(part.server, (key, spec.shape, spec.dtype, part.start, part.stop), part.start * size, part.stop * size)
        for part in chunks
    ]
    return Single(tensor, key, cuts)


@functools.lru_cache(maxsize=MAX_PLANS)
def _plan_of_singles(
    tensors: tuple[tuple[Key, TensorSpec], ...], servers: int, chunk_bytes: int, split_bytes: int
) -> Plan:
    """Return the plan of tensors that are in no bundle, which all workers of a process share, too."""
    singles = [_single(number, *tensor, servers, chunk_bytes, split_bytes) for number, tensor in enumerate(tensors)]
    return Plan(list(tensors), [], singles, [key for key, _ in tensors])
