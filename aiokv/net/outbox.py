"""What is sent later than it was wanted, because its payload has to come from a device first."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.types import Peer

    Work = Callable[[], None]


class Held:
    """Work that is done when it is known, and when it may be done."""

    def __init__(self) -> None:
        self._work: Work | None = None
        self._is_free = False

    @property
    def is_known(self) -> bool:
        """Whether it is known."""
        return self._work is not None

    def give(self, work: Work) -> None:
        """Say what is to be done."""
        self._work = work
        if self._is_free:
            work()

    def let_go(self) -> None:
        """Let it be done."""
        self._is_free = True
        if self._work is not None:
            self._work()


class Outbox:
    """Lets messages to a peer leave in the order in which they were wanted, whenever their payloads are there."""

    def __init__(self) -> None:
        self._queues: dict[Peer, deque[Held]] = {}

    def enter(self, peer: Peer) -> Callable[[Work], None]:
        """Keep a place for a message; return what is to be called with what sends it."""
        held = Held()
        self._queues.setdefault(peer, deque()).append(held)
        return functools.partial(self._give, peer, held)

    def _give(self, peer: Peer, held: Held, work: Work) -> None:
        held.give(work)
        queue = self._queues[peer]
        while queue and queue[0].is_known:
            queue.popleft().let_go()
        if not queue:
            del self._queues[peer]
