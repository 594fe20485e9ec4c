"""Calling something later in simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import simpy


def after(env: simpy.Environment, delay: float, action: Callable[[simpy.Event], None]) -> None:
    """Call `action` after `delay` seconds; what is due at the same time happens in the order of these calls.

    Args:
        env: the simulated time.
        delay: seconds from now.
        action: is called with the event, which says nothing.
    """
    timeout = env.timeout(delay)
    assert timeout.callbacks is not None, "a new event has not happened yet"
    timeout.callbacks.append(action)
