"""Where every gradient is: payloads are not simulated, but each slot knows whose gradients lie in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.types import Slot
    from sim.tokens import Token


class Ledger:
    """The slots of a server. A slot that is used twice, or was never there, is a bug of the state machine."""

    def __init__(self) -> None:
        self._slots: dict[Slot, Token | list[Token]] = {}
        """A gradient that is alone has no list: thousands may wait for one another."""
        self._next: Slot = 0

    def land(self, token: Token | None) -> Slot:
        """Return a new slot with a gradient in it, or with what others have sent: None."""
        self._next += 1
        self._slots[self._next] = [] if token is None else token
        return self._next

    def fold(self, target: Slot, source: Slot) -> None:
        """Move what lies in one slot to another."""
        held, more = self._slots[target], self._pop(source)
        if type(held) is not list:
            held = self._slots[target] = [held]  # type: ignore[list-item]
        if type(more) is list:
            held += more
        else:
            held.append(more)  # type: ignore[arg-type]

    def split(self, slot: Slot, parts: list[Slot]) -> None:
        """Cut a slot: the same gradients lie in each part, for other keys."""
        tokens = self.take(slot)
        for part in parts:
            self._slots[part] = list(tokens)

    def take(self, slot: Slot | None) -> list[Token]:
        """Return what lies in a slot and free it.

        Raises:
            AssertionError: it is free already.
        """
        return [] if slot is None else _listed(self._pop(slot))

    def _pop(self, slot: Slot) -> Token | list[Token]:
        assert slot in self._slots, f"slot {slot} is not in use"
        return self._slots.pop(slot)

    @property
    def remaining(self) -> list[Token]:
        """All gradients that lie in slots."""
        return [token for tokens in self._slots.values() for token in _listed(tokens)]


def _listed(tokens: Token | list[Token]) -> list[Token]:
    return tokens if isinstance(tokens, list) else [tokens]
