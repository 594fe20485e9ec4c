"""What processes in a run wait for."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from sim.process import Future

Awaited = simpy.Event | Future
"""What a process waits for, besides a time."""

Waiting = Generator[Awaited | float, Any, None]
"""Part of a process, see `sim.process`."""


def finish(call: Awaited) -> Waiting:
    """Wait for the end of a node's call.

    Raises:
        AiokvError: the call failed.
    """
    error = yield call
    if error is not None:
        raise error
