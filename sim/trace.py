"""The fingerprint of a run: SHA-256 over everything that the state machines decided, in order."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.core.effects import Send
from aiokv.errors import AiokvError

if TYPE_CHECKING:
    from aiokv.core.effects import Effect


def canonical(time: float, node: str, effect: Effect) -> bytes:
    """Return one line of text for an effect, the same in every process.

    It is JSON with sorted keys, so no object ids, no order of sets and no hash seed have a part in it.

    Args:
        time: simulated seconds.
        node: name of the node whose state machine decided it.
        effect: what it decided.

    Raises:
        TypeError: the effect holds something that has no text which is the same everywhere.
    """
    # A message is encoded as a list of its fields, so its type has to be said.
    kind = type(effect).__name__
    if isinstance(effect, Send):
        kind = f"{kind} {type(effect.message).__name__}"
    return _ENCODER.encode((time, node, kind, effect)) + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, AiokvError):
        return [type(value).__name__, value.message, value.details]
    raise TypeError(f"{type(value).__name__} has no place in a trace")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain, order="deterministic")


class Trace:
    """Collects the fingerprint of a run."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, time: float, node: str, effect: Effect) -> None:
        """Count an effect in."""
        self._hash.update(canonical(time, node, effect))

    @property
    def digest(self) -> str:
        """SHA-256 of all lines so far, in hexadecimal."""
        return self._hash.hexdigest()
