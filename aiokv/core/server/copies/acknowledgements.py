"""Up to where a standby has what it was sent, and which answers wait for it to have more."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aiokv.core.effects import LetGo

if TYPE_CHECKING:
    from aiokv.core.effects import Effect
    from aiokv.core.server.copies.subjects import Subject


class Acknowledgements:
    """Numbers of messages to a standby, and of those that it has.

    What is not sent yet has no number; so an answer may wait for None, which is known later (`all_sent`).
    """

    def __init__(self) -> None:
        self.last = 0
        """Number of the last message."""
        self.acked = 0
        """Up to which the standby has them."""
        self._sent: deque[tuple[int, Subject, bool]] = deque()
        """What the messages were about that it does not have yet, and whether they had all of a chunk."""
        self.copies = 0
        """How many of them had."""
        self._held: deque[tuple[int | None, int]] = deque()
        """For how many answers, in their order, which message is waited for."""

    # --- messages ---

    def next(self, subject: Subject, *, whole: bool = False) -> int:
        """Return the number of a message that is sent now."""
        self.last += 1
        self.copies += whole
        self._sent.append((self.last, subject, whole))
        return self.last

    def handed_on(self, number: int, subject: Subject, *, whole: bool) -> int:
        """Take note of a message that somebody else has given a number, and return that."""
        self.last = number
        self.copies += whole
        self._sent.append((number, subject, whole))
        return number

    def acknowledged(self, number: int) -> list[Effect]:
        """Take note of what the standby has, and let the answers go that have waited for it."""
        self.acked = max(self.acked, number)
        while self._sent and self._sent[0][0] <= number:
            _, _, whole = self._sent.popleft()
            self.copies -= whole
        free = 0
        while self._held:
            need, count = self._held[0]
            if need is None or need > self.acked:
                break
            free += count
            self._held.popleft()
        return [LetGo(free)] if free else []

    def take_lacking(self) -> dict[Subject, None]:
        """Return what the standby does not have of what was sent, in the order of the last messages about it.

        A key may have been deleted and made again. All of it has to be sent anew.
        """
        lacking: dict[Subject, None] = {}
        for _, subject, _ in self._sent:
            lacking.pop(subject, None)
            lacking[subject] = None
        self._sent.clear()
        self.copies = 0
        self._held = deque((None, count) for _, count in self._held)
        return lacking

    # --- answers ---

    def must_wait(self, *, unsent: bool) -> bool:
        """Tell whether an answer has to wait; `unsent` says that something is not sent yet."""
        return unsent or self.acked < self.last or bool(self._held)

    def hold(self, count: int, *, unsent: bool) -> None:
        """Let answers wait for all that was sent, and for what is not sent yet if there is something."""
        self._held.append((None if unsent else self.last, count))

    def all_sent(self) -> None:
        """Take note that nothing is left that is not sent."""
        self._held = deque((self.last if need is None else need, count) for need, count in self._held)

    def begin_anew(self) -> None:
        """Expect nothing more of what was sent, since it was sent to one that is the standby no longer."""
        self._sent.clear()
        self.copies, self.acked = 0, self.last

    def let_all_go(self) -> list[Effect]:
        """Let all answers go: there is no standby to wait for."""
        count = sum(count for _, count in self._held)
        self._held.clear()
        return [LetGo(count)] if count else []

    # --- for tests ---

    def validate(self, *, waits: bool, unsent: bool) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        needs = [need for need, _ in self._held]
        known = [need for need in needs if need is not None]
        assert known == sorted(known)
        assert needs[: len(known)] == known, "what is not sent yet comes last"
        assert all(need > self.acked for need in known), "what all is there for has gone"
        assert not self._held or waits
        assert len(known) == len(needs) or unsent
