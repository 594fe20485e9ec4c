"""What other servers are answered when the standby knows what it says: decisions, and totals of keys.

It waits for nothing that is in chunks. Where workers go on before their push is in a value, a chunk can't be copied
from when its round is summed up until it is made, and that may wait for what others do when they have their answers.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiokv.core.effects import Effect
    from aiokv.core.server.copies.acknowledgements import Acknowledgements


class ServerAnswers:
    """Answers in their order, each with the number of the message that the standby has to have first."""

    def __init__(self) -> None:
        self._held: deque[tuple[int | None, Effect]] = deque()
        """None: not all is sent yet that it waits for."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, answer: Effect) -> None:
        """Hold an answer until `take`."""
        self._held.append((None, answer))

    def take(self, acks: Acknowledgements, *, unsent: bool) -> list[Effect]:
        """Return the answers that may go; `unsent` says that something is not sent yet that they wait for."""
        if not unsent:
            self._held = deque((acks.last if need is None else need, answer) for need, answer in self._held)
        free: list[Effect] = []
        while self._held and (need := self._held[0][0]) is not None and need <= acks.acked:
            free.append(self._held.popleft()[1])
        return free

    def take_all(self) -> list[Effect]:
        """Return all answers: there is no standby to wait for."""
        free: list[Effect] = [answer for _, answer in self._held]
        self._held.clear()
        return free

    def attached(self) -> None:
        """Take note that what the standby does not have is sent once more."""
        self._held = deque((None, answer) for _, answer in self._held)
