"""A memory on devices for a program that waits: events are taken in when somebody needs what comes of them."""

from __future__ import annotations

import functools
import queue
import weakref
from collections import deque
from typing import TYPE_CHECKING

from aiokv import device_storing
from aiokv.kernels import engine_for, get_backend
from aiokv.store.device import DeviceStore
from aiokv.store.host_work import do_on_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core import effects as ef
    from aiokv.errors import AiokvError


class LocalDevices:
    """All devices of this machine, and the memory on them.

    Raises:
        ConfigError: this machine has none.
        MissingExtraError: their packages are not installed.
    """

    def __init__(self) -> None:
        backend = get_backend("reference")
        engine = engine_for("cuda", functools.partial(do_on_host, backend=backend))
        self.store = DeviceStore(backend, engine)
        self._reports: queue.SimpleQueue[list[tuple[int, AiokvError | None]]] = queue.SimpleQueue()
        self._events: deque[tuple[int, AiokvError | None]] = deque()
        engine.start(self._reports.put)
        self.close = weakref.finalize(self, engine.close)
        """Ends what is under way; the devices can't be used any longer."""

    def step(self) -> bool:
        """Wait for an event and take it in; False: nothing is under way."""
        if self.store.is_idle:
            return False
        if not self._events:
            self._events.extend(self._reports.get())
        self.store.completed(*self._events.popleft())
        return True

    def read(self, payload: ef.Payload) -> tuple[memoryview, Callable[[], None]] | None:
        """Return bytes that have to come from a device, and what to call when they are not needed any longer.

        None: they need not.

        Raises:
            AiokvError: they can't be had.
        """
        found: list[tuple[memoryview, Callable[[], None]]] = []
        errors: list[AiokvError] = []
        if not device_storing.read(self.store, payload, lambda *given: found.append(given), errors.append):
            return None
        while not found and not errors:
            self.step()
        if errors:
            raise errors[0]
        return found[0]
