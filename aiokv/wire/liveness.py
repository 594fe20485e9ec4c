"""Whether the other side of a connection is still there. Reads no clock, sends nothing.

A machine that vanishes, or a way that loses everything, does not end a connection: the systems at its ends may keep it
for a quarter of an hour. So a side looks now and then whether anything has come since it looked last. If not it asks
with a `Ping`, which the other side answers with a `Pong`, and gives up when it has heard nothing all the same.
"""

from __future__ import annotations

from typing import Final

LOOKS: Final = 4
"""A connection is given up at this look in a row that finds that nothing was heard."""


class Liveness:
    """What is known of the other side of one connection.

    Args:
        patience: seconds of silence after which it is given up, a quarter more at most.
    """

    __slots__ = ("_patience", "_quiet", "heard")

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._quiet = 0
        self.heard = True
        """Whether there was a sign of life since the last look; set by whoever sees one."""

    @property
    def interval(self) -> float:
        """Seconds from one look to the next."""
        return self._patience / LOOKS

    @property
    def is_over(self) -> bool:
        """True when the other side is given up."""
        return self._quiet >= LOOKS

    def look(self) -> bool:
        """Look whether anything was heard; return True when the other side is to be asked.

        Looks are counted, and not the time: what was not read while this process stood still is no silence.
        """
        self._quiet = 0 if self.heard else self._quiet + 1
        self.heard = False
        return 0 < self._quiet < LOOKS

    def __str__(self) -> str:
        return f"nothing has come from the other side for {self._patience:g} s, and no answer to a ping"
