"""The fingerprint of a run: SHA-256 over everything that the state machines decided, in order."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aiokv.core.effects import Apply, Complete, Fold, Send
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

_VIEW: Final = _SENDS[View]

_FREQUENT: Final = {Fold: "Fold", Apply: "Apply"}
"""Effects that come with every push, and their names."""


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
        self.decided: list[tuple[float, str, list[Effect]]] = []
        """What nodes have decided, and when, since the last `take_in`."""
        self._view: View | None = None
        self._view_digest = ""

    def take_in(self) -> None:
        """Count in what was decided; to be called as soon as there are `BATCH` decisions."""
        lines: list[tuple[Any, ...]] = []
        append = lines.append
        for time, node, effects in self.decided:
            for effect in effects:
                # Most are of these; it is what `_entry` returns.
                kind = type(effect)
                if kind is Send and (text := _SENDS[type(effect.message)]) is not _VIEW:  # type: ignore[union-attr]
                    append((time, node, text, effect))
                elif kind in _FREQUENT:
                    append((time, node, _FREQUENT[kind], effect))
                elif kind is Complete and effect.result is None:  # type: ignore[union-attr]
                    append((time, node, "Complete", effect))
                else:
                    append(_entry(time, node, effect, self._digest_of))
            if len(lines) >= BATCH:
                self._hash_lines(lines)
        self._hash_lines(lines)
        self.decided.clear()

    def _hash_lines(self, lines: list[tuple[Any, ...]]) -> None:
        for begin in range(0, len(lines), BATCH):
            self._hash.update(_ENCODER.encode_lines(lines[begin : begin + BATCH]))
        lines.clear()

    def _digest_of(self, view: View) -> str:
        if view is not self._view:
            self._view, self._view_digest = view, digest_of(view)
        return self._view_digest

    @property
    def digest(self) -> str:
        """SHA-256 of all lines so far, in hexadecimal."""
        self.take_in()
        return self._hash.hexdigest()
