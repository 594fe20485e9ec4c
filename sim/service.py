"""How long a server's arithmetic takes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.sections import ServerSection


class Service:
    """Draws the times of a scenario's servers.

    Args:
        section: the times, or their means.
        seed: the run's seed.
    """

    def __init__(self, section: ServerSection, seed: int = 0) -> None:
        self._section = section
        self.takes_time = max(section.fold, section.apply, section.per_message, section.per_byte) > 0
        """Whether any of the times is not 0."""
        self._stream = random.Random(f"{seed}:service") if section.law == "exponential" else None

    def fold(self) -> float:
        """Return the seconds of adding a contribution to a chunk."""
        return self._draw(self._section.fold)

    def apply(self) -> float:
        """Return the seconds of an update of a chunk."""
        return self._draw(self._section.apply)

    def receive(self, nbytes: int) -> float:
        """Return the seconds that a message with so many bytes of payload takes."""
        return self._draw(self._section.per_message + self._section.per_byte * nbytes)

    def _draw(self, mean: float) -> float:
        return mean if self._stream is None or not mean else self._stream.expovariate(1.0 / mean)
