"""The way from one node to another: how long a message is under way, and what goes wrong with it."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.sections import NetworkSection
    from sim.timeline import Disturbance

MAX_TRIES: Final = 16
"""A message gets through at the latest when it is sent for the last of so many times."""


class Way:
    """One direction between two nodes.

    Args:
        net: what is common to all ways.
        source: name of the node that sends.
        target: name of the node that receives.
        extra: seconds on top of the latency, because they stand apart.
        disturbances: what link faults do to it.
        seed: the run's seed.
    """

    def __init__(
        self,
        net: NetworkSection,
        source: str,
        target: str,
        *,
        extra: float = 0.0,
        disturbances: Sequence[Disturbance] = (),
        seed: int = 0,
    ) -> None:
        self.source = source
        self.target = target
        self.lost = 0
        """Bytes that had to be sent again."""
        self.duplicate = 0
        """Bytes that arrived once more."""
        self._net = net
        self._extra = extra
        self._disturbances = disturbances
        fixed = isinstance(net.latency, int | float) and not net.jitter and not net.loss and not disturbances
        self.fixed = net.latency + extra if fixed else None  # type: ignore[operator]
        """Seconds that every message is under way, when that is the same for all."""
        latency = net.latency
        self._law = None if isinstance(latency, int | float) else latency
        self._latency = latency if isinstance(latency, int | float) else 0.0
        self._jitter_rate = 1.0 / net.jitter if net.jitter else 0.0
        self._passing = 1.0 - net.loss
        if not fixed:
            self._stream = random.Random(f"{seed}:way:{source}>{target}")

    @property
    def is_plain(self) -> bool:
        """Whether nothing can delay a message beyond a fixed latency."""
        return self.fixed is not None

    def share(self, now: float) -> float:
        """Return the share of the bandwidth that a transfer may use which begins now."""
        return min((d.fault.bandwidth for d in self._active(now)), default=1.0)

    def refuses(self, now: float) -> bool:
        """Say whether a new connection fails."""
        return any(d.fault.cut for d in self._active(now))

    def delay(self, now: float, nbytes: int) -> float:
        """Return how long a message is under way that has left the sender; infinite if it never arrives."""
        if self.fixed is not None:
            return self.fixed
        stream = self._stream
        base = self._latency if self._law is None else self._law.sample(stream)
        if self._jitter_rate:
            # As `expovariate`, which would be another call for each message.
            base -= math.log(1.0 - stream.random()) / self._jitter_rate
        base += self._extra
        if not self._disturbances:
            passing = self._passing
            return base if passing >= 1.0 or stream.random() < passing else self._again(base, passing, nbytes)
        active = self._active(now)
        passing = self._passing
        for d in active:
            base += d.fault.latency
            passing *= 1.0 - d.fault.loss
        if passing < 1.0 and stream.random() >= passing:
            base = self._again(base, passing, nbytes)
        for d in active:
            if d.fault.duplicate and stream.random() < d.fault.duplicate:
                self.duplicate += nbytes
            if d.fault.reorder and stream.random() < d.fault.reorder:
                base *= 1.0 + stream.random()
        # What is held arrives after the last window that holds it.
        free = now
        for d in self._disturbances:
            if (d.fault.clog or d.fault.cut) and d.at <= free < d.until:
                free = d.until
        return free - now + base

    def _again(self, base: float, passing: float, nbytes: int) -> float:
        """Return how long a message is under way that is lost at least once."""
        again, tries = self._net.retransmit, 2
        base += again
        self.lost += nbytes
        while tries < MAX_TRIES and self._stream.random() >= passing:
            again *= 2.0
            base += again
            tries += 1
            self.lost += nbytes
        return base

    def _active(self, now: float) -> list[Disturbance]:
        return [d for d in self._disturbances if d.at <= now < d.until]
