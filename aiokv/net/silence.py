"""Lets the system notice that the other end of a connection is gone without a word: a machine, or a way to it."""

from __future__ import annotations

import socket
from typing import Protocol

PROBES = 3
"""So many unanswered questions of the system end a connection over which nothing is sent."""

MOST_SECONDS = 86_400.0
"""Systems know no much longer times."""


class Endpoint(Protocol):
    """A socket, or what an event loop gives for one."""

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """Set an option."""


def end_when_silent(endpoint: Endpoint, seconds: float) -> None:
    """Let a TCP connection end when the other system has not confirmed anything for so long.

    Otherwise a connection whose other end has vanished would stay open for a quarter of an hour where something was
    sent, and for ever where nothing was. Systems that lack an option do without it.
    """
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = min(seconds, MOST_SECONDS)
    between = max(1, round(seconds / (1 + PROBES)))
    wanted = {
        "TCP_KEEPIDLE": between,
        "TCP_KEEPALIVE": between,  # the same on macOS
        "TCP_KEEPINTVL": between,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": round(1000 * seconds),
    }
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            endpoint.setsockopt(socket.IPPROTO_TCP, option, value)
