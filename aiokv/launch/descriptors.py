"""How many file descriptors a process may have: as many as its connections need, if the system lets it."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

SPARE = 128
"""Descriptors for what is not an incoming connection: files, links between servers, shared memory, and so on."""


def make_room(connections: int) -> int:
    """Raise this process's limit so far that it can have so many connections; return how many descriptors are missing.

    A listener that runs out of descriptors can't even refuse anybody, so those who connect would wait without a word.
    The system administrator's limit (the hard one) is not touched. Only for a process that is a node and nothing else.
    """
    if resource is None:
        return 0
    wanted = connections + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return 0
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    # macOS refuses more than its kernel has.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        return wanted - reachable
    return wanted - soft
