"""Payloads in memory that both ends of a connection have mapped: where they lie, and when their place is free again.

    initiator                                   listener
        Share(pid, descriptor, bytes, nonce) ->              it opens the memory and finds the nonce in it
                                         <-     Shared(proof)   what stands behind the nonce; empty: it will not
        frames by reference              <->    frames by reference
        Freed(position)                  <->    Freed(position)

Each direction has a ring. Its payloads lie one behind the other, in the order of their frames, so both ends count
alike and no frame has to say where its payload is. A place is free again when the reader has copied the payload out.
Does no I/O; the memory comes from the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiokv.errors import LimitError, ProtocolError
from aiokv.wire.messages import Freed, Share

NONCE_BYTES: Final = 16
MIN_SHARED_BYTES: Final = 16 * 1024
"""Payloads below this size go through the stream, which is no slower for them."""

_ALIGNMENT: Final = 64
_PARTS: Final = 4
"""A payload takes at most one part of a ring; the reader says what is free after each. With the gap that may be left at
the end, a writer that waits for room gets it.
"""


@dataclass(slots=True)
class Mapping:
    """Memory that both ends have mapped, as one end sees it."""

    nonce: bytes
    """Stands in the memory, and is named to the other end."""
    proof: bytes
    """Stands in the memory only: who can name it has found the memory."""
    outgoing: memoryview
    """The ring that this end writes."""
    incoming: memoryview
    """The ring that the other end writes; as long as `outgoing`."""

    def release(self) -> None:
        """Let go of the memory now, whoever still refers to this object, such as an error's traceback."""
        self.outgoing.release()
        self.incoming.release()


Open = Callable[[Share], Mapping | None]
"""Opens the memory that the other end names; None if this end can't, or does not want to."""


class Ring:
    """The places of one direction's payloads. A position counts all bytes since the start and never wraps.

    Args:
        size: bytes of the ring.
    """

    __slots__ = ("end", "freed", "largest", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.largest = size // _PARTS
        """The most bytes of a payload."""
        self.end = 0
        """Position behind the last payload."""
        self.freed = 0
        """Everything before this position may be written again."""

    def has_room(self, nbytes: int) -> bool:
        """Say whether there is a place for the next payload."""
        return self._next(nbytes) + nbytes <= self.freed + self.size

    def take(self, nbytes: int) -> int:
        """Return the offset of the next payload, which is behind the last one, and in one piece."""
        start = self._next(nbytes)
        self.end = start + nbytes + -nbytes % _ALIGNMENT
        return start % self.size

    def _next(self, nbytes: int) -> int:
        left = self.size - self.end % self.size
        return self.end if nbytes <= left else self.end + left


class SharedMemory:
    """Both directions of one connection."""

    __slots__ = ("_in", "_mapping", "_out")

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._out = Ring(len(mapping.outgoing))
        self._in = Ring(len(mapping.incoming))

    def suits(self, nbytes: int) -> bool:
        """Say whether a payload of this size is to go through the memory."""
        return MIN_SHARED_BYTES <= nbytes <= self._out.largest

    def has_room(self, nbytes: int) -> bool:
        """Say whether there is a place for a payload that `suits`; if not, there will be one after a `Freed`."""
        return self._out.has_room(nbytes)

    def put(self, payload: memoryview) -> None:
        """Copy a payload for which there is room to its place."""
        offset = self._out.take(payload.nbytes)
        self._mapping.outgoing[offset : offset + payload.nbytes] = payload

    def fetch(self, nbytes: int) -> memoryview:
        """Return the next payload of the other end; it stays until `freed` is called.

        Raises:
            LimitError: it would be larger than a payload in this memory may be.
        """
        if nbytes > self._in.largest:
            raise LimitError(
                f"a frame refers to {nbytes} bytes of shared memory, but at most {self._in.largest} may lie there",
                expected=self._in.largest,
                got=nbytes,
            )
        offset = self._in.take(nbytes)
        return self._mapping.incoming[offset : offset + nbytes]

    def release(self) -> None:
        """Let go of the memory: the connection is over."""
        self._mapping.release()

    def freed(self) -> Freed | None:
        """Return what to tell the other end after all that was fetched was copied; None: not worth a frame yet."""
        ring = self._in
        if ring.end - ring.freed < ring.largest:
            return None
        ring.freed = ring.end
        return Freed(ring.end)

    def free(self, message: Freed) -> None:
        """Take note of what the other end has copied.

        Raises:
            ProtocolError: it can't have.
        """
        ring = self._out
        if not ring.freed <= message.position <= ring.end:
            raise ProtocolError(
                f"the peer frees its shared memory up to {message.position}, but it was told of {ring.freed} to "
                f"{ring.end}",
                expected=ring.end,
                got=message.position,
            )
        ring.freed = message.position
