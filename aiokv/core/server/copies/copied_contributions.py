"""Contributions on which workers go on before they are in a value: which of them the standby does not have yet.

When a round is summed up they can't be sent any longer. A round whose update waits for other servers begins when the
standby has all of it: so a chunk can be copied as it was before, while its server waits.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.core.server.copies.subjects import Subject
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.updates import Contribution, Update
    from aiokv.types import Rank


class CopiedContributions:
    """Those that are not there, and the chunks whose rounds wait for them."""

    def __init__(self) -> None:
        self._missing: dict[Subject, dict[tuple[Rank, int], None]] = {}
        """By rank and number of the push."""
        self._sent: deque[tuple[int, Subject, tuple[Rank, int]]] = deque()
        """What was sent, by the number of the message."""
        self._waiting: dict[Subject, Chunk] = {}
        self.there: list[Chunk] = []
        """Those that wait no longer, until they are taken out."""

    def has_all(self, chunk: Chunk, update: Update) -> bool:
        """Tell whether all of an update is there that was to be sent; else its chunk waits."""
        subject = (chunk.key, chunk.start)
        missing = self._missing.get(subject, ())
        if not any((part.rank, part.sequence) in missing for part in update.contributions.values()):
            return True
        self._waiting[subject] = chunk
        return False

    def add(self, subject: Subject, part: Contribution) -> None:
        """Take note of one that is not sent yet."""
        self._missing.setdefault(subject, {})[part.rank, part.sequence] = None

    def sent(self, subject: Subject, rank: Rank, sequence: int, number: int) -> None:
        """Take note of the number of the message with which one is sent."""
        self._missing.setdefault(subject, {})[rank, sequence] = None
        self._sent.append((number, subject, (rank, sequence)))

    def copied(self, subject: Subject, parts: Iterable[Contribution]) -> None:
        """Take note that a chunk is sent as a whole, of which these are in no value yet."""
        missing = self._missing.pop(subject, {})
        left = {push: None for part in parts if (push := (part.rank, part.sequence)) in missing}
        if left:
            self._missing[subject] = left
        self._look_again(subject)

    def acknowledged(self, number: int) -> None:
        """Take note of the message up to which all has arrived."""
        while self._sent and self._sent[0][0] <= number:
            _, subject, push = self._sent.popleft()
            missing = self._missing.get(subject)
            if missing is None:
                continue
            missing.pop(push, None)
            if not missing:
                del self._missing[subject]
            self._look_again(subject)

    def _look_again(self, subject: Subject) -> None:
        """Let a chunk go on, if it waits: what its round needs may be there, though more has come since."""
        if subject in self._waiting:
            self.there.append(self._waiting.pop(subject))

    def take(self) -> list[Chunk]:
        """Take out the chunks that wait no longer."""
        there, self.there = self.there, []
        return there

    def send_again(self) -> None:
        """Take note that nothing counts as sent of what is not there."""
        self._sent.clear()

    def forget(self, subject: Subject) -> None:
        """Wait for nothing of a chunk that is no more."""
        self._missing.pop(subject, None)
        self._waiting.pop(subject, None)

    def give_up(self) -> None:
        """Let all rounds go on: there is no standby to wait for."""
        self.there += self._waiting.values()
        self._waiting.clear()
        self._missing.clear()
        self._sent.clear()
