"""Whether a node that watches the others was away itself: stopped, or starved. Then their silence says nothing."""

from __future__ import annotations

import math

QUIET = 2.0
"""So many heartbeats without a word from anybody are more likely this node's own absence than the loss of all."""


class Attention:
    """When somebody was heard last, and until when silence and ended connections are not taken for losses.

    Args:
        heartbeat: seconds between two of each member.
    """

    def __init__(self, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._heard = math.inf
        self._unsure_until = 0.0

    def heard(self, now: float) -> None:
        """Take note that somebody was heard."""
        self._notice(now)
        self._heard = now

    def is_unsure(self, now: float) -> bool:
        """Tell whether this node may have been away itself until a moment ago."""
        self._notice(now)
        return now < self._unsure_until

    def _notice(self, now: float) -> None:
        if now - self._heard > QUIET * self._heartbeat:
            # Only once for each silence: if all are gone indeed, that is said a heartbeat later.
            self._unsure_until = now + self._heartbeat
            self._heard = now
