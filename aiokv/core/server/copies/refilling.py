"""What a server sends once more, because its standby hands it on to one of its own that is to have all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.server.copies.draining import Draining

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiokv.core.server.copies.subjects import Subject
    from aiokv.core.server.rounds.whole_call import WholeCall


class Refilling:
    """How far that is.

    Args:
        name: of the standby's own one; empty: there is none that has asked for it.
        left: what is to be sent.
    """

    def __init__(self, name: str = "", left: Iterable[Subject] = ()) -> None:
        self.name = name
        self.left = dict.fromkeys(left)
        """What is still to be sent. The standby has it, so no answer waits for that."""
        self.filled = 0
        """The last message of it; 0: it is not all sent yet."""
        self.draining = Draining()
        self.told = not name
        """Whether the scheduler knows that it is there."""

    def sent(self, last: int, asked_about: Sequence[WholeCall]) -> None:
        """Take note that all is sent, with the message of this number."""
        if self.name and not self.filled:
            self.filled, self.draining = last, Draining(asked_about)

    def attached(self, number: int) -> None:
        """Take note that the standby has no more than this over a new link; the rest is sent once more."""
        if self.filled > number:
            self.filled = 0
        self.draining.attached(number)
