"""An engine without a device: NumPy does the work, as late and in as mixed an order as streams and events allow."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import AiokvError
from aiokv.kernels import get_backend
from aiokv.store.host_work import do_on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.device.records import Part
    from aiokv.store.device import DeviceStore

Bytes = NDArray[np.uint8]


@dataclass
class LateEngine:
    """Does nothing by itself: `finish` makes it go on until all is done, in an order that depends on the seed."""

    limits: list[int] = field(default_factory=lambda: [1 << 40])
    seed: int = 0
    fails: Callable[[Any], bool] = lambda work: False
    memory: dict[int, Bytes] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    queues: dict[tuple[int, str], deque[tuple[Sequence[int], int, Callable[[], None]]]] = field(default_factory=dict)
    happened: dict[int, AiokvError | None] = field(default_factory=dict)
    reported: list[int] = field(default_factory=list)
    done: list[Any] = field(default_factory=list)
    launches: list[list[Any]] = field(default_factory=list)
    given: list[Bytes] = field(default_factory=list)

    def pinned(self, nbytes: int) -> Bytes:
        self.given.append(np.full(nbytes, 255, np.uint8))
        return self.given[-1]

    def start(self, report: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def allocate(self, buffer: int, device: int, nbytes: int) -> None:
        self.memory[buffer], self.places[buffer] = np.full(nbytes, 255, np.uint8), device

    def deallocate(self, buffer: int) -> None:
        del self.memory[buffer], self.places[buffer]

    def copy(
        self,
        stream: tuple[int, str],
        waits: Sequence[int],
        event: int,
        target: int | Bytes,
        source: int | Bytes,
        part: tuple[int, int],
    ) -> None:
        def do() -> None:
            first, nbytes = part
            to = self.memory[target] if isinstance(target, int) else target
            of = self.memory[source] if isinstance(source, int) else source
            to[:] = of[first : first + nbytes]

        self._add(stream, waits, event, do)

    def launch(self, stream: tuple[int, str], waits: Sequence[int], parts: Sequence[Part]) -> None:
        self.launches.append([part.work for part in parts])
        for part in parts:

            def do(part: Part = part) -> None:
                assert all(self.places[buffer] == stream[0] for buffer in part.buffers), "all is where it is computed"
                if self.fails(part.work):
                    raise AiokvError("the device is broken")
                self.done.append(part.work)
                do_on_host(part.work, [self.memory[buffer] for buffer in part.buffers], get_backend("reference"))

            self._add(stream, waits, part.event, do)

    def _add(self, stream: tuple[int, str], waits: Sequence[int], event: int, do: Callable[[], None]) -> None:
        self.queues.setdefault(stream, deque()).append((waits, event, do))

    def finish(self, store: DeviceStore) -> None:
        """Go on until nothing is left to do, and report it all."""
        chance = random.Random(self.seed)
        while True:
            free = [
                queue
                for queue in self.queues.values()
                if queue and all(event in self.happened for event in queue[0][0])
            ]
            if self.reported and (not free or chance.random() < 0.3):
                event = self.reported.pop(chance.randrange(len(self.reported)))
                store.completed(event, self.happened[event])
            elif free:
                _, event, do = chance.choice(free).popleft()
                self.happened[event] = None
                try:
                    do()
                except AiokvError as error:
                    self.happened[event] = error
                self.reported.append(event)
            else:
                assert not any(self.queues.values()), "a stream waits for ever"
                return
