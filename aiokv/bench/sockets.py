"""Plain blocking sockets over loopback: what both ends of a measurement of the machine share."""

from __future__ import annotations

import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
PATIENCE = 30
"""Seconds that one system call may wait for the other end."""


def connect(port: int) -> socket.socket:
    """Connect to a port of this machine.

    Raises:
        OSError: nobody listens there.
    """
    return _set_up(socket.create_connection((HOST, port), timeout=PATIENCE))


def listen() -> socket.socket:
    """Listen at any free port; accepting waits for PATIENCE seconds."""
    listener = socket.create_server((HOST, 0))
    listener.settimeout(PATIENCE)
    return listener


def accept(listener: socket.socket) -> socket.socket:
    """Accept a connection.

    Raises:
        TimeoutError: nobody came in time.
    """
    connection, _ = listener.accept()
    return _set_up(connection)


def receive_all(connection: socket.socket, memory: memoryview) -> None:
    """Fill the memory.

    Raises:
        EOFError: the other end has closed the connection.
        OSError: the connection is broken, or nothing came in time.
    """
    while memory:
        received = connection.recv_into(memory)
        if received == 0:
            raise EOFError("the other end has closed the connection")
        memory = memory[received:]


def pieces(nbytes: int, size: int) -> Iterator[slice]:
    """Cut a number of bytes into pieces of at most `size`."""
    for start in range(0, nbytes, size):
        yield slice(start, min(start + size, nbytes))


def _set_up(connection: socket.socket) -> socket.socket:
    """Send at once, and bound every call by the system: Python's own time-out would add a poll to each."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    limit = struct.pack("@L", PATIENCE * 1000) if sys.platform == "win32" else struct.pack("@ll", PATIENCE, 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
    return connection
