"""Memory that two processes of one host map: made by one, opened by the other, gone with both. Linux only.

The memory has no name in any file system. The other process reaches it through /proc, where the system lets nobody but
this user in, and finds out by a nonce whether it is the right one: a process id means another process in another
container. Everything that does not work ends in `OSError`; then payloads go through the stream.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import stat
from typing import TYPE_CHECKING, Final

from aiokv.addresses import is_loopback
from aiokv.wire.messages import Share
from aiokv.wire.shared import MIN_SHARED_BYTES, NONCE_BYTES, Mapping

if TYPE_CHECKING:
    import asyncio
    from types import ModuleType

    from aiokv.net.link import Outgoing
    from aiokv.telemetry import Counters
    from aiokv.wire.connection import Connection

logger = logging.getLogger("aiokv")

HEAD_BYTES: Final = 4096
"""In front of the two rings: nonce and proof, and the rest of their page."""

_NAME: Final = "aiokv"
"""What the system's tools show of it."""


class Segments:
    """Makes and opens the shared memory of one node's connections, and counts what did not work.

    Args:
        ring_bytes: bytes of each direction; the other end's may not be more.
        counters: where it is counted.
    """

    def __init__(self, ring_bytes: int, counters: Counters) -> None:
        self._ring_bytes = ring_bytes
        self._counters = counters

    def make(self) -> tuple[Share, Mapping] | None:
        """Make memory, and return it with its name.

        The name's descriptor is to be closed when the other end has answered.
        """
        try:
            return _make(self._ring_bytes)
        except OSError as error:
            self._failed(f"can't make it: {error}")
            return None

    def open(self, share: Share) -> Mapping | None:
        """Open the memory that the other end has made."""
        try:
            mapping = _open(share, self._ring_bytes)
        except OSError as error:
            self._failed(f"can't open it: {error}")
            return None
        self._counters["shared_memory.connections"] += 1
        return mapping

    def answered(self, *, used: bool) -> None:
        """Take note of the other end's answer."""
        if used:
            self._counters["shared_memory.connections"] += 1
        else:
            self._failed("the other end can't open it, or does not want to")

    def _failed(self, reason: str) -> None:
        self._counters["shared_memory.failed"] += 1
        text, facts = "no shared memory on a connection within this host: %s", {"reason": reason}
        logger.debug(text, reason, extra={"event": "shared_memory.failed", "facts": facts})


class Sharing:
    """What one connection does with shared memory.

    Args:
        connection: the connection.
        segments: makes the memory; None where it is the other end's part to offer it, or no memory is shared.
    """

    __slots__ = ("_connection", "_descriptor", "_makers", "_segments")

    def __init__(self, connection: Connection, segments: Segments | None) -> None:
        self._connection = connection
        self._segments = segments
        self._makers: Segments | None = None
        """Who made the memory that the other end is opening."""
        self._descriptor = -1

    def offer(self, nbytes: int, transport: asyncio.Transport) -> bool:
        """Offer the other end memory, once, when a payload is large and it is on this host; say whether it was done."""
        segments = self._segments
        if segments is None or nbytes < MIN_SHARED_BYTES:
            return False
        self._segments = None
        here, there = (transport.get_extra_info(name) for name in ("sockname", "peername"))
        made = segments.make() if here and there and (here[0] == there[0] or is_loopback(there[0])) else None
        if made is None:
            return False
        share, mapping = made
        self._makers, self._descriptor = segments, share.descriptor
        self._connection.offer(share, mapping)
        return True

    def has_room(self, outgoing: Outgoing) -> bool:
        """Say whether a frame's payload can go where it is to go, through the memory or not."""
        payload = outgoing.payload
        if payload is None or not self._connection.shares(payload.nbytes):
            return True
        return self._connection.has_room(payload.nbytes)

    def leave(self, outgoing: Outgoing) -> None:
        """Copy a frame's payload into the memory, if that is where it is to go and there is room."""
        payload = outgoing.payload
        if (
            payload is not None
            and self._connection.shares(payload.nbytes)
            and self._connection.has_room(payload.nbytes)
        ):
            outgoing.leave(self._connection.refer(outgoing.head, payload))

    def received(self) -> None:
        """Take note of what the other end has answered, if it has."""
        if self._makers is None or self._connection.offered:
            return
        os.close(self._descriptor)
        self._makers.answered(used=self._connection.sharing)
        self._makers = None

    def close(self) -> None:
        """Let go of the memory: the connection is over."""
        self._segments = None
        if self._makers is not None:
            os.close(self._descriptor)
            self._makers = None
        self._connection.unshare()


def _make(ring_bytes: int) -> tuple[Share, Mapping]:
    fcntl = _seals()
    size = HEAD_BYTES + 2 * ring_bytes
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Memory that is not there when it is written kills the process: all of it is taken now, or nothing.
        os.posix_fallocate(descriptor, 0, size)
        # Nor may the other end make it smaller.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        whole = memoryview(mmap.mmap(descriptor, size))
    except OSError:
        os.close(descriptor)
        raise
    head = secrets.token_bytes(2 * NONCE_BYTES)
    whole[: len(head)] = head
    there, back = _rings(whole, ring_bytes)
    mapping = Mapping(head[:NONCE_BYTES], head[NONCE_BYTES:], there, back)
    return Share(os.getpid(), descriptor, ring_bytes, mapping.nonce), mapping


def _seals() -> ModuleType:
    """Return the module `fcntl` where it and `os` know of such memory and its seals: Linux, since 3.17."""
    try:
        import fcntl  # noqa: PLC0415 - not every system has it
    except ImportError:
        fcntl = None  # type: ignore[assignment]
    if not hasattr(fcntl, "F_ADD_SEALS") or not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has none that can be sealed")
    return fcntl


def _open(share: Share, most: int) -> Mapping:
    if not 0 < share.ring_bytes <= most:
        raise OSError(errno.EFBIG, f"{share.ring_bytes} bytes for each direction, at most {most} are wanted here")
    fcntl = _seals()
    size = HEAD_BYTES + 2 * share.ring_bytes
    # Opening a device or a pipe of a stranger might block, or do things; with O_PATH it does not.
    named = os.open(f"/proc/{share.pid}/fd/{share.descriptor}", os.O_PATH)
    try:
        about = os.fstat(named)
        if not stat.S_ISREG(about.st_mode) or about.st_size != size:
            raise OSError(errno.ENOENT, "another process has this number here")
        descriptor = os.open(f"/proc/self/fd/{named}", os.O_RDWR)
    finally:
        os.close(named)
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(errno.EPERM, "the other end could make it smaller")
        whole = memoryview(mmap.mmap(descriptor, size))
    finally:
        os.close(descriptor)
    nonce, proof = bytes(whole[:NONCE_BYTES]), bytes(whole[NONCE_BYTES : 2 * NONCE_BYTES])
    if nonce != share.nonce:
        raise OSError(errno.ENOENT, "it is not that of the other end")
    there, back = _rings(whole, share.ring_bytes)
    return Mapping(nonce, proof, back, there)


def _rings(whole: memoryview, ring_bytes: int) -> tuple[memoryview, memoryview]:
    """Return the ring that the maker writes, and the one that it reads."""
    middle = HEAD_BYTES + ring_bytes
    return whole[HEAD_BYTES:middle], whole[middle:]
