"""The devices of a server: a thread that tells them what to do, and says what they have done.

All calls of CUDA are made by one thread, in the order in which they were wanted, so the event loop waits neither for a
launch nor for a compiler. The same thread looks for events, in steps of 50 microseconds while something is under way.
A loop's timers are too coarse for that, a callback of CUDA's would hold up its stream until it gets the interpreter's
lock, and who waits for an event by `synchronize` keeps a core busy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda

from aiokv.device.records import Part
from aiokv.errors import AiokvError, DeviceMemoryError, UpdateRefusedError
from aiokv.kernels.cuda import launch, peers
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.work import Works
from aiokv.kernels.work import runs_on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Report = Callable[[list[tuple[int, AiokvError | None]]], None]

POLL_SECONDS = 50e-6

SHARE = 0.9
"""Of a device's memory that is free when a server begins: the rest is for kernels, their tables, and others."""

UNLIMITED = 1 << 62


class Engine:
    """Devices that do what they are told. See `aiokv.kernels.work.Engine`.

    Args:
        numbers: which devices, as CUDA counts them.
        on_host: does work for which there is no kernel.
    """

    def __init__(self, numbers: Sequence[int], on_host: Callable[[Any, list[Bytes]], None]) -> None:
        self._numbers = list(numbers)
        self._on_host = on_host
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="aiokv devices", daemon=True)
        self._report: Report = lambda _: None
        self._memory: dict[int, Any] = {}
        self._places: dict[int, tuple[int, int]] = {}
        """On which device each buffer is, and its bytes."""
        self._works = [Works(self._memory) for _ in numbers]
        self._streams: dict[tuple[int, str], Any] = {}
        self._events: dict[int, Any] = {}
        self._open: dict[tuple[int, str], deque[tuple[int, AiokvError | None]]] = {}
        self._wrong: dict[int, AiokvError] = {}
        """Buffers that do not have what they should have, and why."""

    @property
    def limits(self) -> list[int]:
        """How many bytes buffers may have on each device."""
        if SIMULATED:
            return [UNLIMITED] * len(self._numbers)
        found = []
        for number in self._numbers:
            with cuda.gpus[number]:
                context: Any = cuda.current_context()  # type: ignore[no-untyped-call]
                found.append(int(context.get_memory_info().free * SHARE))
        return found

    def pinned(self, nbytes: int) -> Bytes:
        """Return memory of the host that devices copy from and to without another copy."""
        if not nbytes:
            return np.empty(0, np.uint8)
        with self._context(0):
            memory: Bytes = cuda.pinned_array(nbytes, np.uint8)
            return memory

    def start(self, report: Report) -> None:
        """Begin; events are reported from a thread of the engine's, in lists."""
        self._report = report
        self._thread.start()

    def close(self) -> None:
        """End, when all that was wanted is done."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join()

    def allocate(self, buffer: int, device: int, nbytes: int) -> None:
        """Make a buffer."""
        self._commands.put(functools.partial(self._allocate, buffer, device, nbytes))

    def deallocate(self, buffer: int) -> None:
        """Give a buffer back."""
        self._commands.put(functools.partial(self._deallocate, buffer))

    def copy(
        self,
        stream: tuple[int, str],
        waits: Sequence[int],
        event: int,
        target: int | Bytes,
        source: int | Bytes,
        part: tuple[int, int],
    ) -> None:
        """Copy between buffers or memory of the host."""
        needed = [source] if isinstance(source, int) else []
        lost = [target] if isinstance(target, int) else []
        only = Part(event, None, [], needed, lost)
        do = functools.partial(self._copy, target, source, part)
        self._commands.put(functools.partial(self._do, stream, waits, [only], lambda _, own: do(own)))

    def launch(self, stream: tuple[int, str], waits: Sequence[int], parts: Sequence[Part]) -> None:
        """Do works."""
        self._commands.put(
            functools.partial(self._do, stream, waits, parts, functools.partial(self._launch, stream[0]))
        )

    # --- in the thread ---

    def _run(self) -> None:
        if not SIMULATED:
            for own, other in itertools.permutations(self._numbers, 2):
                peers.connect(own, other)
        while True:
            with contextlib.suppress(queue.Empty):
                command = self._commands.get(timeout=POLL_SECONDS if any(self._open.values()) else None)
                if command is None:
                    break
                command()
            self._look()
        with contextlib.suppress(Exception):
            # What a device that is broken has not done is reported all the same.
            for stream in self._streams.values():
                stream.synchronize()
        self._look()

    def _context(self, device: int) -> Any:
        return cuda.gpus[self._numbers[device]]

    def _allocate(self, buffer: int, device: int, nbytes: int) -> None:
        self._places[buffer] = device, nbytes
        self._wrong.pop(buffer, None)
        try:
            with self._context(device):
                self._memory[buffer] = cuda.device_array(nbytes, np.uint8)
        except Exception as error:  # noqa: BLE001 - the driver's errors have many classes
            number = self._numbers[device]
            text = f"CUDA device {number} has no {nbytes} bytes more for a buffer: {error}"
            self._wrong[buffer] = DeviceMemoryError(text, expected=nbytes, got=str(error))

    def _deallocate(self, buffer: int) -> None:
        del self._places[buffer]
        self._memory.pop(buffer, None)
        self._wrong.pop(buffer, None)

    def _do(
        self,
        name: tuple[int, str],
        waits: Sequence[int],
        parts: Sequence[Part],
        do: Callable[[list[Part], Any], None],
    ) -> None:
        """Do something on a stream, after other events; then record one.

        Whatever goes wrong, all events of the parts are reported: somebody waits for each.
        """
        errors: dict[int, AiokvError | None] = {}
        try:
            with self._context(name[0]):
                stream = self._stream(name)
                for other in waits:
                    if self._events.get(other) is not None:
                        self._events[other].wait(stream)
                errors = {part.event: self._missing(part.needed, part.lost) for part in parts}
                ready = [part for part in parts if errors[part.event] is None]
                errors |= self._try_all(name[0], ready, lambda some: do(some, stream))
                # What could not be done has its place in the order, too.
                mark = launch.new_event()
                mark.record(stream)
        except Exception as failed:  # noqa: BLE001 - the driver's errors have many classes
            mark, refusal = None, self._refusal(name[0], failed)
            errors = {part.event: errors.get(part.event) or refusal for part in parts}
        for part in parts:
            error = errors[part.event]
            for buffer in part.lost:
                self._wrong.pop(buffer, None)
                if error is not None:
                    self._wrong[buffer] = error
            self._events[part.event] = mark
            self._open.setdefault(name, deque()).append((part.event, error))

    def _missing(self, needed: Sequence[int], lost: Sequence[int]) -> AiokvError | None:
        """Return what is wrong with buffers that have to be right, or can't be made."""
        for buffer in lost:
            if buffer not in self._memory:
                # It could not be made before.
                self._allocate(buffer, *self._places[buffer])
        absent = [buffer for buffer in lost if buffer not in self._memory]
        return next((self._wrong[buffer] for buffer in (*needed, *absent) if buffer in self._wrong), None)

    def _try_all(
        self, device: int, parts: list[Part], do: Callable[[list[Part]], None]
    ) -> dict[int, AiokvError | None]:
        """Do parts together; if that can't be begun each by itself, so that all hear of no error but their own."""
        error = self._try(device, lambda: do(parts)) if parts else None
        if error is None or len(parts) == 1:
            return dict.fromkeys([part.event for part in parts], error)
        return {part.event: self._try(device, functools.partial(do, [part])) for part in parts}

    def _try(self, device: int, do: Callable[[], None]) -> AiokvError | None:
        try:
            do()
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
            return error if isinstance(error, AiokvError) else self._refusal(device, error)
        return None

    def _refusal(self, device: int, error: Exception) -> AiokvError:
        return UpdateRefusedError(f"CUDA device {self._numbers[device]}: {type(error).__name__}: {error}")

    def _stream(self, name: tuple[int, str]) -> Any:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = cuda.stream()
        return stream

    def _copy(self, target: int | Bytes, source: int | Bytes, part: tuple[int, int], stream: Any) -> None:
        first, nbytes = part
        if isinstance(target, int):
            given = self._memory[source] if isinstance(source, int) else source
            self._memory[target].copy_to_device(given[first : first + nbytes], stream=stream)
        else:
            assert isinstance(source, int), "the host's memory is not copied to itself"
            self._memory[source].copy_to_host(target, stream=stream)

    def _launch(self, device: int, parts: list[Part], stream: Any) -> None:
        if all(runs_on_device(part.work) for part in parts):
            self._works[device].launch([(part.work, part.buffers) for part in parts], stream)
            return
        for part in parts:
            self._do_on_host(part, stream)

    def _do_on_host(self, part: Part, stream: Any) -> None:
        stream.synchronize()
        arrays = [self._memory[buffer].copy_to_host() for buffer in part.buffers]
        before = [array.copy() for array in arrays]
        self._on_host(part.work, arrays)
        for buffer, old, new in zip(part.buffers, before, arrays, strict=True):
            if not np.array_equal(old, new):
                self._memory[buffer].copy_to_device(new, stream=stream)
        stream.synchronize()

    def _look(self) -> None:
        """Report the events that have happened."""
        happened = []
        for (device, _), waiting in self._open.items():
            while waiting:
                event, error = waiting[0]
                try:
                    if not _has_happened(self._events[event]):
                        break
                except Exception as failed:  # noqa: BLE001 - a device that is broken says so here
                    error = error or self._refusal(device, failed)
                waiting.popleft()
                del self._events[event]
                happened.append((event, error))
        if happened:
            self._report(happened)


def _has_happened(mark: Any) -> bool:
    # The simulator does everything at once, and its events can't be asked.
    return mark is None or SIMULATED or bool(mark.query())
