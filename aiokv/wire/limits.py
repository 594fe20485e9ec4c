"""How much a peer may announce. No behaviour besides validating the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from aiokv.errors import ConfigError

MIN_HANDSHAKE_BYTES: Final = 256
"""Below this not even a handshake with a short cluster id fits."""

_MAX_CONTROL: Final = 2**32 - 1
_MAX_PAYLOAD: Final = 2**63 - 1


@dataclass(slots=True, frozen=True)
class Limits:
    """What a connection accepts; every length is checked against these before any memory is taken for it.

    Raises:
        ConfigError: a number is out of its range.
    """

    max_control_bytes: int = 1024 * 1024
    """Largest control part of a frame."""

    max_payload_bytes: int = 64 * 1024 * 1024
    """Largest payload of a frame."""

    max_handshake_bytes: int = 4096
    """All bytes together that a peer may send before it is authenticated."""

    handshake_seconds: float = 5.0
    """How long a peer may take until it is authenticated."""

    def __post_init__(self) -> None:
        _check_int("max_control_bytes", self.max_control_bytes, 1, _MAX_CONTROL)
        _check_int("max_payload_bytes", self.max_payload_bytes, 1, _MAX_PAYLOAD)
        _check_int("max_handshake_bytes", self.max_handshake_bytes, MIN_HANDSHAKE_BYTES, _MAX_CONTROL)
        seconds: object = self.handshake_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ConfigError(
                f"handshake_seconds must be a finite number of seconds above 0, got {seconds!r}",
                expected="0 < handshake_seconds < inf",
                got=repr(seconds),
            )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(
            f"{name} must be an int from {low} to {high}, got {value!r}",
            expected=f"{low} <= {name} <= {high}",
            got=repr(value),
        )


DEFAULT_LIMITS: Final = Limits()
