"""Who gets in at a listener's door before a byte of it is read: how many, how fast, how many strangers. Does no I/O."""

from __future__ import annotations

from typing import Final

from aiokv.errors import OverloadedError

BURST_SECONDS: Final = 10.0
"""So many seconds' worth of connections an address may open at once, after it has been quiet for as long."""

MAX_ADDRESSES: Final = 1024
"""How many addresses are remembered; the one that has been quiet for longest is forgotten first."""


class Admission:
    """Counts the connections of one listener.

    Args:
        max_connections: how many it has at a time.
        max_handshakes: how many of them may belong to peers that are not authenticated.
        rate: connections a second that it takes from one address.
    """

    __slots__ = ("_allowance", "_burst", "_max_connections", "_max_handshakes", "_rate", "handshakes", "open")

    def __init__(self, *, max_connections: int, max_handshakes: int, rate: float) -> None:
        self._max_connections = max_connections
        self._max_handshakes = max_handshakes
        self._rate = rate
        self._burst = max(1.0, rate * BURST_SECONDS)
        self._allowance: dict[str, tuple[float, float]] = {}
        """How many more connections an address might have opened, and when that was; the latest is the last."""
        self.open = 0
        """Connections that were let in and have not ended."""
        self.handshakes = 0
        """How many of them are not authenticated."""

    @property
    def addresses(self) -> int:
        """How many addresses are remembered."""
        return len(self._allowance)

    def enter(self, address: str, now: float) -> OverloadedError | None:
        """Let a connection in, or say why not; who is let in has to `leave`.

        Args:
            address: where it comes from, without its port.
            now: the current time in seconds.
        """
        error = self._refusal(address, now)
        if error is None:
            self.open += 1
            self.handshakes += 1
        return error

    def authenticated(self) -> None:
        """Take note that one that was let in is no stranger any longer."""
        self.handshakes -= 1

    def leave(self, *, authenticated: bool) -> None:
        """Take note that one that was let in has ended."""
        self.open -= 1
        self.handshakes -= not authenticated

    def _refusal(self, address: str, now: float) -> OverloadedError | None:
        if not self._is_slow_enough(address, now):
            text = f"more than {self._rate:g} connections a second from {address}: this node takes no more for now"
            return OverloadedError(text, limit="connection_rate", expected=self._rate, address=address)
        counts = (
            ("max_connections", self.open, self._max_connections, "connections"),
            ("max_handshakes", self.handshakes, self._max_handshakes, "connections that are not authenticated"),
        )
        for limit, got, most, what in counts:
            if got >= most:
                text = f"this node has {got} {what}, and takes no more ({limit} = {most})"
                return OverloadedError(text, limit=limit, expected=most, got=got, address=address)
        return None

    def _is_slow_enough(self, address: str, now: float) -> bool:
        """Take one from what the address may open, which grows with time up to the burst."""
        left, before = self._allowance.pop(address, (self._burst, now))
        left = min(self._burst, left + (now - before) * self._rate)
        enough = left >= 1.0
        self._allowance[address] = (left - enough, now)
        if len(self._allowance) > MAX_ADDRESSES:
            del self._allowance[next(iter(self._allowance))]
        return enough
