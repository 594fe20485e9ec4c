"""What is sent of a memory on devices, later than it was wanted where it has to be copied from there first."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING

from aiokv import device_storing
from aiokv.core import effects as ef
from aiokv.types import STANDBY

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.errors import AiokvError
    from aiokv.store.device import DeviceStore
    from aiokv.types import Peer

    Work = Callable[[], None]
    Made = tuple[memoryview, Callable[[], None] | None]


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


class Row:
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


class Outbox:
    """Sends payloads that lie on devices.

    Workers get answers when their payloads are there. The standby gets what it is told in its order.

    Args:
        store: the server's memory.
        send: sends an answer, with its payload if it has one, or says why there is none.
        memory: returns a payload of the host's memory.
        cut: ends the link to the standby, to which something could not be told.
    """

    def __init__(
        self,
        store: DeviceStore,
        send: Callable[[ef.Send | ef.Refuse, Made | None], None],
        memory: Callable[[ef.Payload], Made],
        cut: Callable[[Peer, AiokvError], None],
    ) -> None:
        self._store = store
        self._send = send
        self._memory = memory
        self._cut = cut
        self._row = Row()

    def takes(self, effect: ef.Send) -> bool:
        """Send a message if its payload, or one that has to leave before it, may have to come from a device."""
        if effect.peer < STANDBY:
            self._tell(effect)
            return True
        return effect.payload is not None and self._read(effect, effect.payload, lambda work: work())

    def holds(self, answer: ef.Send, waiting: deque[Work]) -> bool:
        """Let an answer wait if its value has to come from a device, with the value that it has now.

        Args:
            answer: to a worker.
            waiting: gets what lets it go.
        """
        assert answer.payload is not None, "nothing else has to come from anywhere"
        held = Held()
        waits = self._read(answer, answer.payload, held.give)
        if waits:
            waiting.append(held.let_go)
        return waits

    def _read(self, answer: ef.Send, payload: ef.Payload, give: Callable[[Work], None]) -> bool:
        """Have a payload, if it has to come from a device, and give what sends the answer; tell whether it has to."""

        def there(memory: memoryview, sent: Work) -> None:
            give(functools.partial(self._send, answer, (memory, sent)))

        def failed(error: AiokvError) -> None:
            give(functools.partial(self._send, ef.Refuse(answer.peer, answer.request, error), None))

        return device_storing.read(self._store, payload, there, failed)

    def _tell(self, effect: ef.Send) -> None:
        """Send something to the standby, behind all that was sent to it before."""
        leave, payload = self._row.enter(effect.peer), effect.payload

        def there(memory: memoryview, sent: Work | None) -> None:
            leave(functools.partial(self._send, effect, (memory, sent)))

        def failed(error: AiokvError) -> None:
            leave(functools.partial(self._cut, effect.peer, error))

        if payload is None:
            leave(functools.partial(self._send, effect, None))
        elif not device_storing.read(self._store, payload, there, failed):
            there(*self._memory(payload))
