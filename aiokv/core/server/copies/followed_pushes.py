"""What a standby keeps of pushes whose workers are answered before they are in a value, and do not send them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, freed

if TYPE_CHECKING:
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.updates import Contribution
    from aiokv.types import Key, Rank

Kept = dict[tuple["Rank", int], "Contribution"]
"""Contributions by rank and number of the push, those of a rank in their order."""


class FollowedPushes:
    """The contributions that a standby keeps, until its server says what became of them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Key, int], Kept] = {}
        """By the chunk that they are for."""

    def came(self, chunk: Chunk, part: Contribution) -> list[Effect]:
        """Keep a contribution; it may come twice."""
        kept = self._kept.setdefault((chunk.key, chunk.start), {})
        before = kept.get((part.rank, part.sequence))
        kept[part.rank, part.sequence] = part
        return [*([] if before is None else freed(before.slot)), *self.made(chunk)]

    def made(self, chunk: Chunk) -> list[Effect]:
        """Keep no longer what is in the value of a chunk now, or is dropped."""
        kept = self._kept.get((chunk.key, chunk.start), {})
        done = [place for place in kept if place[1] <= chunk.pushed.get(place[0], 0)]
        return [effect for place in done for effect in freed(kept.pop(place).slot)]

    def forget(self, key: Key) -> list[Effect]:
        """Keep nothing for a key that is no more."""
        gone = [place for place in self._kept if place[0] == key]
        return [effect for place in gone for part in self._kept.pop(place).values() for effect in freed(part.slot)]

    def take(self) -> list[tuple[tuple[Key, int], Contribution]]:
        """Return what is to go on in the place of the server, with the chunk that it is for; earlier steps first.

        Where a later step has come to some key, an earlier one is thought not to come any more.
        """
        kept = [(place, part) for place, parts in self._kept.items() for part in parts.values()]
        self._kept.clear()
        return sorted(kept, key=lambda each: each[1].clock)
