"""Which messages a transfer of a row-sparse key is, for a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from aiokv.core.effects import CallMemory
from aiokv.core.tables import row_bytes
from aiokv.types import ROW_ID_BYTES
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.core.placement import Chunk
    from aiokv.core.stimuli import KeyOptions, Rows
    from aiokv.types import Key, TensorSpec

SENT_BYTES = 16 * 1024 * 1024
"""Rows are sent in messages of about this size at most."""

PULLED_ROWS = 4096
"""So many rows are asked for in one message at most: the server makes them in one go."""

M = TypeVar("M", m.InitRows, m.PushRows, m.PullRows)

RowParts = list[tuple["Chunk", M, CallMemory]]
"""Where messages go, and the memory of the call that goes with each, or into which its answer comes."""


def cut_rows(count: int, spec: TensorSpec) -> list[int]:
    """Cut the rows that are sent to one chunk into those of each message; at least one, which may have none."""
    most = max(1, SENT_BYTES // (ROW_ID_BYTES + row_bytes(spec)))
    return [min(most, count - first) for first in range(0, count, most)] or [0]


def _head(key: Key, spec: TensorSpec, chunk: Chunk) -> tuple[Key, tuple[int, ...], str, int, int]:
    return key, spec.shape, spec.dtype, chunk.start, chunk.stop


def _sent(
    spec: TensorSpec, chunks: list[Chunk], counts: list[int], memory: tuple[int, int]
) -> Iterator[tuple[Chunk, tuple[int, int, int], CallMemory]]:
    """Yield, for each message, its chunk; the rows before it, in it and in all; and its bytes of the tensor."""
    offset = 0
    for chunk, total in zip(chunks, counts, strict=True):
        first = 0
        for count in cut_rows(total, spec):
            end = offset + count * (ROW_ID_BYTES + row_bytes(spec))
            yield chunk, (first, count, total), CallMemory(*memory, offset, end)
            first, offset = first + count, end


def init_rows(
    key: Key,
    spec: TensorSpec,
    chunks: list[Chunk],
    counts: list[int],
    memory: tuple[int, int],
    wait: float,
    options: KeyOptions,
    digest: bytes,
    clock: int,
) -> RowParts[m.InitRows]:
    """Return the messages that create a key.

    Args:
        key: the key.
        spec: its shape and dtype.
        chunks: where its rows live.
        counts: how many rows for each chunk are sent.
        memory: the call, and the number of the tensor in it.
        wait: seconds for the answer.
        options: `policy` is set.
        digest: of what is sent.
        clock: of the worker's last push.
    """
    parts: RowParts[m.InitRows] = []
    for chunk, counted, place in _sent(spec, chunks, counts, memory):
        head, initializer, lazy = _head(key, spec, chunk), dict(options.initializer), options.lazy
        policy, group = options.policy, options.group
        message = m.InitRows(*head, *counted, policy, wait, group, digest, lazy, initializer, clock)
        parts.append((chunk, message, place))
    return parts


def push_rows(
    key: Key,
    spec: TensorSpec,
    chunks: list[Chunk],
    rows: Rows,
    memory: tuple[int, int],
    sequence: int,
    versions: dict[int, int],
    rest: tuple[float, int, int],
) -> RowParts[m.PushRows]:
    """Return the messages of a push.

    Args:
        key: the key.
        spec: its shape and dtype.
        chunks: where its rows live.
        rows: how many are sent to each.
        memory: the call, and the number of the tensor in it.
        sequence: number of the push.
        versions: what was read last of each chunk, by its first row.
        rest: seconds for the answer, priority and clock.
    """
    return [
        (
            chunk,
            m.PushRows(*_head(key, spec, chunk), *counted, sequence, versions.get(chunk.start, 0), *rest),
            place,
        )
        for chunk, counted, place in _sent(spec, chunks, rows.counts, memory)
    ]


def pull_rows(
    key: Key,
    spec: TensorSpec,
    chunks: list[Chunk],
    rows: Rows,
    memory: tuple[int, int],
    rest: tuple[int, float, int, int, int],
    chunk_bytes: int,
) -> RowParts[m.PullRows]:
    """Return the messages of a pull; none to chunks of which no row is wanted.

    Args:
        key: the key.
        spec: its shape and dtype.
        chunks: where its rows live.
        rows: which are wanted.
        memory: the call, and the number of the tensor in it.
        rest: the push that must be in the answer, seconds for it, priority, the round that must be in it, and the
            push that must not be.
        chunk_bytes: about how long an answer may be.
    """
    width = row_bytes(spec)
    most = min(PULLED_ROWS, max(1, chunk_bytes // max(1, width)))
    parts: RowParts[m.PullRows] = []
    begin = 0
    for chunk, count in zip(chunks, rows.counts, strict=True):
        for first in range(begin, begin + count, most):
            last = min(first + most, begin + count)
            ids = rows.ids[first * ROW_ID_BYTES : last * ROW_ID_BYTES]
            message = m.PullRows(*_head(key, spec, chunk), ids, *rest)
            parts.append((chunk, message, CallMemory(*memory, first * width, last * width)))
        begin += count
    return parts
