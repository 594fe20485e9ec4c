"""What counts already on a server, and is in no value yet, when a new standby begins to get what counts from then on.

Workers that are gone push nothing again. So a standby is no successor before all of it is in values, which are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.whole_call import WholeCall
    from aiokv.types import Key, Rank


class Draining:
    """Waits until calls are ended, and then until all that was pushed is made or dropped.

    Args:
        calls: those of which was said that they are here, and whose pushes a standby does not have.
    """

    def __init__(self, calls: Sequence[WholeCall] = ()) -> None:
        self._calls = list(calls)
        self._left: dict[tuple[Key, int], dict[Rank, int]] | None = None
        """For each chunk, up to which push of each rank."""
        self.until = 0
        """The last message to the standby when it was over, which has to arrive too; 0: it is not over."""

    def attached(self, number: int) -> None:
        """Take note that the standby has no more than this over a new link; the rest is sent once more."""
        if self.until > number:
            self.until = 0

    def is_over(self, chunks: Mapping[tuple[Key, int], Chunk]) -> bool:
        """Look how far it is."""
        self._calls = [call for call in self._calls if not call.ended]
        if self._calls:
            return False
        if self._left is None:
            self._left = {place: dict(chunk.pushed) for place, chunk in chunks.items()}
        left: dict[tuple[Key, int], dict[Rank, int]] = {}
        for place, pushed in self._left.items():
            chunk = chunks.get(place)
            # Nothing is waited for of a key that is no more.
            made = pushed if chunk is None else chunk.reflected
            missing = {rank: number for rank, number in pushed.items() if made.get(rank, 0) < number}
            if missing:
                left[place] = missing
        self._left = left
        return not left
