"""How many bytes of payloads a server holds that are no part of a value yet, and for whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import OverloadedError

if TYPE_CHECKING:
    from aiokv.store.memory import ParameterStore
    from aiokv.types import Peer, Slot

HALF = 2

FEW = 1024
"""So many payloads may be remembered at least before those that are used up are forgotten."""


class Holdings:
    """Refuses what is too much, before there is memory for it.

    What is landed is added up, and what is used up is taken off when a limit seems to be reached, or when twice as many
    payloads are remembered as were there the last time: so it costs next to nothing.

    Args:
        store: the server's memory.
        most: bytes that all connections together may have in it; 0: half of the machine's memory.
        most_each: bytes that one may have; 0: as many as all.
    """

    def __init__(self, store: ParameterStore, most: int, most_each: int) -> None:
        self._store = store
        self.most = most or _machine_bytes() // HALF
        self.most_each = most_each or self.most
        self._landed: dict[Peer, dict[Slot, int]] = {}
        self._bytes: dict[Peer, int] = {}
        self._all = 0
        self._count = 0
        self._most_count = FEW

    def land(self, peer: Peer, nbytes: int) -> tuple[Slot, memoryview]:
        """Return a new slot and its memory, to be filled.

        Raises:
            OverloadedError: it would be too much.
        """
        if self._count >= self._most_count:
            self._recount()
        if self._bytes.get(peer, 0) + nbytes > self.most_each or self._all + nbytes > self.most:
            self._recount()
            self._check("max_held_bytes_each", self._bytes.get(peer, 0), nbytes, self.most_each)
            self._check("max_held_bytes", self._all, nbytes, self.most)
        slot, view = self._store.land(nbytes)
        self._landed.setdefault(peer, {})[slot] = nbytes
        self._bytes[peer] = self._bytes.get(peer, 0) + nbytes
        self._all += nbytes
        self._count += 1
        return slot, view

    def _recount(self) -> None:
        """Take off what is used up. What somebody else's slot was made of, such as a sum, is in all, and nobody's."""
        for peer, slots in list(self._landed.items()):
            left = {slot: nbytes for slot, nbytes in slots.items() if self._store.has(slot)}
            self._landed[peer], self._bytes[peer] = left, sum(left.values())
            if not left:
                del self._landed[peer], self._bytes[peer]
        self._all = self._store.landed_bytes
        self._count = sum(map(len, self._landed.values()))
        self._most_count = max(FEW, 2 * self._count)

    @staticmethod
    def _check(limit: str, held: int, nbytes: int, most: int) -> None:
        if held + nbytes > most:
            text = f"{nbytes} bytes more than the {held} that are held would be too many ({limit} = {most})"
            raise OverloadedError(text, limit=limit, expected=most, got=held + nbytes)


def _machine_bytes() -> int:
    import psutil  # noqa: PLC0415 - only servers ask

    return int(psutil.virtual_memory().total)
