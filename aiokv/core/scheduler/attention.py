"""Whether a node that watches others was away itself: stopped, starved, cut off. Then their silence says nothing."""

from __future__ import annotations

import math

QUIET = 2.0
"""So many heartbeats without a word from anybody are more likely this node's own absence than the loss of all."""

CUT_OFF = 60.0
"""Seconds for which the silence of all is taken for this node's own: nobody is there who would have to be told more."""


class Attention:
    """When somebody was heard last, and until when silence and ended connections are not taken for losses.

    Args:
        heartbeat: seconds between two of each member.
        return_time: seconds that members may take to make new connections when this node can be reached again.
    """

    def __init__(self, heartbeat: float, return_time: float) -> None:
        self._quiet = QUIET * heartbeat
        self._heartbeat = heartbeat
        self._return_time = return_time
        self._heard = math.inf
        self._unsure_until = 0.0

    def heard(self, now: float) -> None:
        """Take note that somebody was heard."""
        silence, self._heard = now - self._heard, now
        if silence > self._quiet:
            # The others may have given this node up, too, and look for it.
            others = self._return_time if silence > self._return_time else self._heartbeat
            self._unsure_until = now + others

    def is_unsure(self, now: float) -> bool:
        """Tell whether this node may be away itself, or may have been until a moment ago."""
        return now < self._unsure_until or self._quiet < now - self._heard < CUT_OFF
