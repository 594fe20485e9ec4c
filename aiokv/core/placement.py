"""Keys -> chunks -> servers: a pure function of one key, its spec and the cluster's settings.

No table and no history: every worker finds the same place for a key, in whatever order keys are used. Arrays of at
least `split_bytes` are cut evenly over all servers, so nearly all bytes of a model are balanced; the small rest goes to
one server each, by a hash of the name. Cuts are made between rows where that is even enough.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.types import Key, TensorSpec


UNEVEN = 20
"""For the sake of whole rows a server may get one part in so many more than its even share of a key."""


@dataclass(slots=True, frozen=True)
class Chunk:
    """Elements [start, stop) of a key, on one server (a position in the list of servers)."""

    server: int
    start: int
    stop: int


def split_range(size: int, parts: int) -> list[tuple[int, int]]:
    """Cut range(size) into `parts` neighbouring ranges whose lengths differ by at most one."""
    bounds = [size * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(bounds))


def home_of(key: Key, servers: int) -> int:
    """Return the server that a small key lives on, and where the cut of a big one begins."""
    # crc32 mixes neighbouring names and ints well; the type is part of the text, so that 1 and "1" differ.
    return zlib.crc32(repr(key).encode()) % servers


def place(key: Key, spec: TensorSpec, *, servers: int, chunk_bytes: int, split_bytes: int) -> list[Chunk]:
    """Return the chunks of a key in the order of their elements; a tensor without elements has one empty chunk.

    Args:
        key: the parameter's name.
        spec: its shape and dtype.
        servers: how many servers the cluster has.
        chunk_bytes: the largest chunk; a larger element is a chunk of its own. Where a row fits into it, and the rows
            can be spread evenly enough, each chunk has whole rows.
        split_bytes: tensors of at least this many bytes are cut over all servers.
    """
    home = home_of(key, servers)
    parts = servers if spec.nbytes >= split_bytes else 1
    unit = _unit(spec, parts, chunk_bytes)
    units = spec.size // unit
    # Counted in whole units: a chunk whose last unit does not fit is one unit too long.
    longest = max(1, chunk_bytes // (unit * spec.itemsize))
    chunks: list[Chunk] = []
    for part, (low, high) in enumerate(split_range(units, max(1, min(parts, units)))):
        pieces = max(1, -(-(high - low) // longest))
        server = (home + part) % servers
        for start, stop in split_range(high - low, pieces):
            chunks.append(Chunk(server, (low + start) * unit, (low + stop) * unit))
    return chunks


def _unit(spec: TensorSpec, parts: int, chunk_bytes: int) -> int:
    """Return how many elements stay together: a row or, where rows are too long or too few for so many parts, 1."""
    rows = spec.size // spec.row_size
    fullest = -(-rows // parts)
    fits = spec.row_size * spec.itemsize <= chunk_bytes
    return spec.row_size if fits and fullest * parts * UNEVEN <= rows * (UNEVEN + 1) else 1


def place_rows(key: Key, spec: TensorSpec, *, servers: int, split_bytes: int) -> list[Chunk]:
    """Return where the rows of a row-sparse key live: one chunk of rows on each server, or on one if it is small.

    Args:
        key: the parameter's name.
        spec: its shape and dtype; it has at least one dimension.
        servers: how many servers the cluster has.
        split_bytes: tables of at least this many bytes are cut over all servers.
    """
    rows, home = spec.shape[0], home_of(key, servers)
    parts = max(1, min(servers, rows)) if spec.nbytes >= split_bytes else 1
    return [Chunk((home + part) % servers, *bounds) for part, bounds in enumerate(split_range(rows, parts))]
