"""Where every gradient is: payloads are not simulated, but each slot knows whose gradients lie in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.types import Slot
    from sim.record import Token


class Ledger:
    """The slots of a server. A slot that is used twice, or was never there, is a bug of the state machine."""

    def __init__(self) -> None:
        self._slots: dict[Slot, list[Token]] = {}
        self._next: Slot = 0

    def land(self, tokens: list[Token]) -> Slot:
        """Return a new slot with these gradients in it, or with what others have sent."""
        self._next += 1
        self._slots[self._next] = tokens
        return self._next

    def fold(self, target: Slot, source: Slot) -> None:
        """Move what lies in one slot to another."""
        self._slots[target] += self.take(source)

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
        if slot is None:
            return []
        assert slot in self._slots, f"slot {slot} is not in use"
        return self._slots.pop(slot)

    @property
    def remaining(self) -> list[Token]:
        """All gradients that lie in slots."""
        return [token for tokens in self._slots.values() for token in tokens]
