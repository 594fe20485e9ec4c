"""Buffers and what is under way on them: copies and launches in the right order, and memory that is used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.device.dispatch import Dispatch
from aiokv.device.memory import Memory
from aiokv.device.records import Copy, Effect, Kind, Part, Release, Stream, Take
from aiokv.device.tasks import Tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from aiokv.device.records import Buffer, Event
    from aiokv.errors import AiokvError
    from aiokv.types import Slot


class Flow:
    """What wants something copied or computed, says so here; `take_effects` has it all.

    Args:
        limits: for each device how many bytes all buffers together may have.
        kind_of: tells which works can be done in one launch. See `aiokv.device.dispatch.Dispatch`.
    """

    def __init__(self, limits: Sequence[int], kind_of: Callable[[object], Hashable]) -> None:
        self.memory = Memory(limits)
        self.errors: dict[Buffer, AiokvError] = {}
        """Buffers that do not have what they should have."""
        self._tasks = Tasks()
        self._leaving: dict[Buffer, None] = {}
        """Buffers that nobody refers to, but something under way still uses."""
        self._effects: list[Effect] = []
        self._dispatch = Dispatch(self.add, kind_of)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._tasks

    def take_effects(self) -> list[Effect]:
        """Return what is to be done, in its order."""
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: Effect) -> None:
        """Want something done that uses no stream."""
        self._effects.append(effect)

    def take(self, device: int, nbytes: int) -> Buffer:
        """Return a buffer with any content, for which there is room."""
        return self.memory.take(device, nbytes, self._effects)

    def bring(self, slot: Slot, nbytes: int, device: int, first: int = 0) -> tuple[Buffer, Buffer]:
        """Copy what has landed in the host's memory to a device, from byte `first` on; return both buffers."""
        host = self.memory.new_number()
        self.add(Take(host, slot))
        buffer = self.take(device, nbytes)
        self.copy(Stream(device, Kind.IN), buffer, host, nbytes, first)
        return host, buffer

    def copied(self, device: int, whole: Buffer, first: int, nbytes: int) -> Buffer:
        """Copy a part of a buffer into one of its own, on the same device."""
        buffer = self.take(device, nbytes)
        self.copy(Stream(device, Kind.COMPUTE), buffer, whole, nbytes, first)
        return buffer

    def copy(self, stream: Stream, target: Buffer, source: Buffer, nbytes: int, first: int = 0) -> Event:
        """Copy bytes of a buffer, from `first` on, to another one."""
        event, needs = self._tasks.begin([source], [target])
        self._dispatch.copy(Copy(stream, [], event, target, source, nbytes, first), needs)
        return event

    def launch(
        self,
        device: int,
        work: Any,
        buffers: list[Buffer],
        *,
        new: Sequence[Buffer] = (),
        changed: Sequence[Buffer] = (),
        spared: Sequence[Buffer] = (),
    ) -> None:
        """Compute with buffers.

        Args:
            device: where.
            work: what.
            buffers: in the order in which it takes them.
            new: those of them that are written without regard to what is in them.
            changed: those that are changed.
            spared: those that are changed, but stay as they are if it can't be done.
        """
        event, needs = self._tasks.begin(buffers, [*new, *changed, *spared])
        needed = [buffer for buffer in buffers if buffer not in new]
        part = Part(event, work, buffers, needed, [*new, *changed])
        self._dispatch.launch(Stream(device, Kind.COMPUTE), part, needs)

    def writer(self, buffer: Buffer) -> Event | None:
        """Return what writes a buffer last, if that is under way."""
        return self._tasks.writer(buffer)

    def end(self, event: Event, error: AiokvError | None) -> None:
        """Take note that a copy or a launch is done, or could not be."""
        written, idle = self._tasks.end(event)
        self._dispatch.end(event)
        if error is not None:
            self.errors |= dict.fromkeys(written, error)
        for buffer in idle:
            if buffer in self._leaving:
                del self._leaving[buffer]
                self._give(buffer)

    def drop(self, buffer: Buffer) -> None:
        """Use a buffer for something else when nothing uses it any longer."""
        if self._tasks.uses(buffer):
            self._leaving[buffer] = None
        else:
            self._give(buffer)

    def _give(self, buffer: Buffer) -> None:
        self.errors.pop(buffer, None)
        if self.memory.is_here(buffer):
            self.memory.give(buffer, self._effects)
        else:
            self.add(Release(buffer))

    # --- for tests ---

    def validate(self, held: Iterable[Buffer]) -> None:
        """Check that every buffer is held once, or leaving, or idle.

        Raises:
            AssertionError: an invariant is broken.
        """
        every = [*held, *self._leaving]
        assert len(set(every)) == len(every), "a buffer has two uses"
        self.memory.validate(every)
        assert all(self._tasks.uses(buffer) for buffer in self._leaving), "what leaves is used"
        self._dispatch.validate()
