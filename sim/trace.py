"""The fingerprint of a run: SHA-256 over everything that the state machines decided, in order."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.core.effects import Complete, Fold, Send
from aiokv.errors import AiokvError
from aiokv.wire.messages import View

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.effects import Effect


BATCH: Final = 128
"""So many lines, at most, are made and hashed at once."""


def canonical(time: float, node: str, effect: Effect, view_digest: Callable[[View], str]) -> bytes:
    """Return one line of text for an effect, the same in every process.

    It is JSON with sorted keys, so no object ids, no order of sets and no hash seed have a part in it.

    Args:
        time: simulated seconds.
        node: name of the node whose state machine decided it.
        effect: what it decided.
        view_digest: returns what stands for a view, which is the same for all members and as long as they are many.

    Raises:
        TypeError: the effect holds something that has no text which is the same everywhere.
    """
    return _ENCODER.encode(_entry(time, node, effect, view_digest)) + b"\n"


def _entry(time: float, node: str, effect: Effect, view_digest: Callable[[View], str]) -> tuple[Any, ...]:
    kind = type(effect)
    if kind is Send:
        message = effect.message  # type: ignore[union-attr]
        # A message is encoded as a list of its fields, so its type has to be said.
        text = _SENDS[type(message)]
        if type(message) is View:
            return time, node, text, effect.peer, effect.request, view_digest(message)  # type: ignore[union-attr]
        return time, node, text, effect
    if kind is Complete and isinstance(effect.result, dict):  # type: ignore[union-attr]
        # Its keys may be numbers, which JSON has no place for.
        return time, node, "Complete", effect.call, list(effect.result.items())  # type: ignore[union-attr]
    return time, node, kind.__name__, effect


class _Sends(dict[type, str]):
    """What stands for sending a message, by the message's type."""

    def __missing__(self, kind: type) -> str:
        text = self[kind] = f"Send {kind.__name__}"
        return text


_SENDS: Final = _Sends()


def digest_of(view: View) -> str:
    """Return the SHA-256 of a view, in hexadecimal."""
    return hashlib.sha256(_ENCODER.encode(view)).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, AiokvError):
        return [type(value).__name__, value.message, value.details]
    raise TypeError(f"{type(value).__name__} has no place in a trace")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain, order="deterministic")


class Trace:
    """Collects the fingerprint of a run."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._decided: list[tuple[float, str, list[Effect]]] = []
        self._view: View | None = None
        self._view_digest = ""

    def add(self, time: float, node: str, effects: list[Effect]) -> None:
        """Count in what a node decided at a time."""
        self._decided.append((time, node, effects))
        if len(self._decided) == BATCH:
            self._take_in()

    def _take_in(self) -> None:
        lines: list[tuple[Any, ...]] = []
        for time, node, effects in self._decided:
            for effect in effects:
                kind = type(effect)
                # Most are of these; it is what `_entry` returns.
                if kind is Send and type(effect.message) is not View:  # type: ignore[union-attr]
                    lines.append((time, node, _SENDS[type(effect.message)], effect))  # type: ignore[union-attr]
                elif kind is Fold or (kind is Complete and effect.result is None):  # type: ignore[union-attr]
                    lines.append((time, node, kind.__name__, effect))
                else:
                    lines.append(_entry(time, node, effect, self._digest_of))
                if len(lines) == BATCH:
                    self._hash.update(_ENCODER.encode_lines(lines))
                    lines.clear()
        self._hash.update(_ENCODER.encode_lines(lines))
        self._decided.clear()

    def _digest_of(self, view: View) -> str:
        if view is not self._view:
            self._view, self._view_digest = view, digest_of(view)
        return self._view_digest

    @property
    def digest(self) -> str:
        """SHA-256 of all lines so far, in hexadecimal."""
        self._take_in()
        return self._hash.hexdigest()
