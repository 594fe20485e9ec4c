"""How far a standby is that gets all that there is: the one of a server, or that one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.server.copies.draining import Draining

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from aiokv.core.server.copies.acknowledgements import Acknowledgements
    from aiokv.core.server.copies.subjects import Subject
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.whole_call import WholeCall
    from aiokv.types import Key


class Filling:
    """How far that is.

    Args:
        name: of the standby; empty: there is none.
        left: what is sent once more because the standby hands it on to its own one.
    """

    def __init__(self, name: str = "", left: Iterable[Subject] = ()) -> None:
        self.name = name
        self.left = dict.fromkeys(left)
        """What is still to be sent of that. The standby has it, so no answer waits for it."""
        self.told = not name
        """Whether the scheduler knows that it is over."""
        self._last = 0
        """The last message of it; 0: it is not all sent yet."""
        self._draining = Draining()

    @property
    def is_sent(self) -> bool:
        """Whether all is sent that there was."""
        return self._last > 0

    def sent(self, last: int, asked_about: Sequence[WholeCall]) -> None:
        """Take note that all is sent, with the message of this number."""
        if self.name and not self._last:
            self._last, self._draining = last, Draining(asked_about)

    def attached(self, number: int) -> bool:
        """Take note that the standby has no more than this over a new link; tell whether some of it is sent again."""
        self._draining.attached(number)
        if self._last <= number:
            return False
        self._last = 0
        return True

    def is_over(
        self, acks: Acknowledgements, bound: Callable[[], Mapping[tuple[Key, int], Chunk]], *, unsent: bool
    ) -> bool:
        """Tell whether all of it has arrived, and the values in which all is that counts and came before it.

        Args:
            acks: what has arrived.
            bound: returns the chunks to which pushes of lost workers count, which nobody sends again.
            unsent: whether something is not sent that the standby does not have.
        """
        if not 0 < self._last <= acks.acked:
            return False
        if not self._draining.until:
            if unsent or not self._draining.is_over(bound()):
                return False
            self._draining.until = acks.last
        return self._draining.until <= acks.acked
